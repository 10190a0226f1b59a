"""Lightning: a module with its `training_step`, trained by the optimizer that it configures."""

import copy

import lightning
import torch
from torch import nn

from panax.adapters.lightning import fit_arguments

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch

INPUTS, HIDDEN, CLASSES = SIZES


class Net(lightning.LightningModule):
    def __init__(self, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.drop, self.head = nn.Dropout(rate), nn.Linear(HIDDEN, CLASSES)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.drop(self.norm(self.up(batch["x"])).relu()))
        loss = nn.functional.cross_entropy(logits, batch["y"].long())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, MOMENTUM)


class Weighted(Net):
    """A mean of rows that are weighed alike: a Lightning module returns no sums."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.up(batch["x"])), batch["y"].long())


class LightningOwn(Own):
    def start(self, model):
        self.model = copy.deepcopy(model).train()
        self.optimizer = self.model.configure_optimizers()

    def loss(self, batch):
        logged = self.model.log
        self.model.log = lambda *args: None
        try:
            return self.model.training_step({name: torch.tensor(leaf) for name, leaf in batch.items()}, 0)
        finally:
            self.model.log = logged

    def gradients(self, batch, key):
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        value, gradients = self.differentiate(batch)
        self.model.load_state_dict(buffers, strict=False)
        return value, gradients

    def differentiate(self, batch):
        self.optimizer.zero_grad()
        value = self.loss(batch)
        value.backward()
        return float(value.detach()), {name: p.grad.numpy().copy() for name, p in self.model.named_parameters()}

    def step(self, batch, key):
        value, _ = self.differentiate(batch)
        self.optimizer.step()
        return value

    def evaluate(self, batch):
        with torch.no_grad():
            value = float(self.loss_in_eval(batch))
        return value

    def loss_in_eval(self, batch):
        self.model.eval()
        try:
            return self.loss(batch)
        finally:
            self.model.train()


def adapted(module):
    return fit_arguments(module, example=batch(), num_steps=1).task


CASE = Case(
    task=adapted(Net()),
    noisy=adapted(Net(0.25)),
    weighted=adapted(Weighted()),
    own=LightningOwn(),
    weights=lambda model: {name: p.detach().numpy().copy() for name, p in model.named_parameters()},
    statistics=lambda model: {name: b.numpy().copy() for name, b in model.named_buffers() if b.is_floating_point()},
)
