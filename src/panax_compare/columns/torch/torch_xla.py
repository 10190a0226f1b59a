"""PyTorch on XLA: lazy tensors, a graph that is cut by `sync` after every update."""

import torch

from ...workload.compared_work import Batch, ComparedWork
from .. import RunningColumn
from .torch_device import make_running_column, torch_dtype
from .torch_eager import build, compute_loss, make_optimizer, to_tensors


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare the eager step on an XLA device."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    device = torch_xla.device()
    module = build(work).to(device)
    optimizer = make_optimizer(work, module)

    def put(batch: Batch) -> dict[str, torch.Tensor]:
        dtype = torch_dtype(work.precision.stored)
        leaves = to_tensors(batch)
        return {name: leaf.to(device, dtype if name == "image" else leaf.dtype) for name, leaf in leaves.items()}

    def loss_in_precision(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=work.precision.is_mixed):
            return compute_loss(module, batch)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_in_precision(batch)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.detach()

    return make_running_column(work, "xla", module, put, step, loss_in_precision)
