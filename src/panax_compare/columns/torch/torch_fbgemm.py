"""TorchRec's tables on a CPU: FBGEMM's table-batched embeddings, with the optimizer in the backward pass."""

import numpy as np
import torch

from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from . import torch_dlrm

OPTIMIZERS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD"}


class FbgemmTables(torch.nn.Module):
    """All tables in one operator."""

    def __init__(self, work: ComparedWork) -> None:
        # From a separate environment: each of its builds fits one version of PyTorch.
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # pyright: ignore[reportMissingImports]
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # pyright: ignore[reportMissingImports]
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # pyright: ignore[reportMissingImports]
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__()
        config = work.config()
        self.names = [f"c{number}" for number in range(1, len(config["rows"]) + 1)]
        self.width = config["width"]
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, self.width, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in config["rows"]],
            optimizer=EmbOptimType[OPTIMIZERS[work.optimizer.name]],
            learning_rate=work.optimizer.learning_rate,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
        )
        tensors = work.tensors()
        for name, table in zip(self.names, self.bags.split_embedding_weights(), strict=True):
            table.copy_(torch.from_numpy(tensors[f"tables.{name}.weight"]))

    def forward(self, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        ids = [batch[name] for name in self.names]
        lengths = np.repeat([part.shape[1] for part in ids], [len(part) for part in ids])
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        out = self.bags(torch.cat([part.flatten() for part in ids]), offsets)
        return list(out.split(self.width, dim=1))


class FbgemmDlrm(torch_dlrm.TorchDlrm):
    def bags(self, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return self.tables(batch)


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step on the CPU."""
    module = FbgemmDlrm(work.config(), FbgemmTables(work))
    dense = {name: p for name, p in module.named_parameters() if not name.startswith("tables.")}
    tensors = work.tensors()
    with torch.no_grad():
        for name, parameter in dense.items():
            parameter.copy_(torch.from_numpy(tensors[name]))
    optimizer = torch_dlrm.make_optimizer(work, list(dense.values()))
    return torch_dlrm.train_step(work, "cpu", module, optimizer)
