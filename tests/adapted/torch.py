"""PyTorch: a module trained by a loop as PyTorch's manual writes it, with the random bits that the traced program draws."""

import copy

import torch
from torch import nn

from panax.adapters.torch import task
from panax.adapters.torch.state.random_ops import ReplayDrawsMode

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch

INPUTS, HIDDEN, CLASSES = SIZES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.up(x)).relu_()))


class Plain(Net):
    def forward(self, x):
        return self.head(self.up(x))


def loss(module, batch):
    return nn.functional.cross_entropy(module(batch["x"]), batch["y"].long())


def weighted_loss(module, batch):
    each = nn.functional.cross_entropy(module(batch["x"]), batch["y"].long(), reduction="none")
    return (each * batch["weight"]).sum(), batch["weight"].sum()


class TorchOwn(Own):
    def start(self, model):
        self.model = copy.deepcopy(model).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def differentiate(self, batch, key):
        self.optimizer.zero_grad()
        with ReplayDrawsMode(key):
            value = loss(self.model, tensors(batch))
        value.backward()
        return float(value.detach()), {name: p.grad.numpy().copy() for name, p in self.model.named_parameters()}

    def gradients(self, batch, key):
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        found = self.differentiate(batch, key)
        self.model.load_state_dict(buffers, strict=False)
        return found

    def step(self, batch, key):
        value, _ = self.differentiate(batch, key)
        self.optimizer.step()
        return value

    def evaluate(self, batch):
        self.model.eval()
        with torch.no_grad():
            value = float(loss(self.model, tensors(batch)))
        self.model.train()
        return value


def tensors(batch):
    return {name: torch.tensor(leaf) for name, leaf in batch.items()}


adapted = task(Net(), loss, batch())
CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(Plain(), weighted_loss, batch()),
    own=TorchOwn(),
    weights=lambda model: {name: p.detach().numpy().copy() for name, p in model.named_parameters()},
    statistics=lambda model: {name: b.numpy().copy() for name, b in model.named_buffers()},
)
