"""PyTorch's DLRM as its users write it: `nn.EmbeddingBag` with sparse gradients, and an optimizer that
supports these."""

import itertools

import torch
from torch import nn
from torch.nn import functional

from ...workload.compared_work import Batch, ComparedWork
from .. import RunningColumn
from .torch_device import make_running_column


class TorchDlrm(nn.Module):
    """Bags, a perceptron over dense features, inner products of all pairs of vectors, a perceptron on top."""

    pairs: torch.Tensor

    def __init__(self, config: dict, bags: nn.Module | None = None) -> None:
        super().__init__()
        width, numeric = config["width"], config["numeric"]
        self.tables = bags or nn.ModuleDict(
            {
                f"c{number}": nn.EmbeddingBag(rows, width, mode="sum", sparse=True)
                for number, rows in enumerate(config["rows"], 1)
            }
        )
        vectors = len(config["rows"]) + 1
        self.bottom = nn.ModuleList(_layers((numeric, *config["bottom"])))
        self.top = nn.ModuleList(_layers((width + vectors * (vectors - 1) // 2, *config["top"])))
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["numeric"]
        for layer in self.bottom:
            x = functional.relu(layer(x))
        vectors = torch.stack([x, *self.bags(batch)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        y = torch.cat([x, products[:, self.pairs]], 1)
        for layer in self.top[:-1]:
            y = functional.relu(layer(y))
        return self.top[-1](y)[:, 0]

    def bags(self, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        assert isinstance(self.tables, nn.ModuleDict)
        return [table(batch[name]) for name, table in self.tables.items()]


def _layers(widths: tuple[int, ...]) -> list[nn.Linear]:
    return [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]


def load(module: nn.Module, work: ComparedWork) -> None:
    """Load the work's weights, without a second copy of them."""
    tensors = work.tensors()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(tensors.pop(name)))


def make_optimizer(work: ComparedWork, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = work.optimizer.learning_rate
    if work.optimizer.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    return torch.optim.Adagrad(parameters, lr=rate)


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step on the CPU or a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        module = TorchDlrm(work.config())
    module = module.to_empty(device=device)
    vectors = len(work.config()["rows"]) + 1
    rows, columns = torch.tril_indices(vectors, vectors, -1, device=device)
    module.pairs = rows * vectors + columns
    load(module, work)
    optimizer = make_optimizer(work, list(module.parameters()))
    return train_step(work, device, module, optimizer)


def train_step(work: ComparedWork, device: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> RunningColumn:
    """Return the step of a module for a batch: forward, backward, update."""

    def put(batch: Batch) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(leaf) for name, leaf in batch.items()}
        return {
            name: leaf.to(device, torch.int64 if name[0] == "c" else torch.float32) for name, leaf in tensors.items()
        }

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(module(batch), batch["label"])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return make_running_column(work, device, module, put, step, loss_of)
