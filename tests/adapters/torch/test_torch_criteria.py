"""Criteria that leave targets out, weigh classes or add up: one, two and four micro-batches give what PyTorch gives."""

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panax
from panax.adapters.torch import task
from panax.adapters.torch.tracing.criteria import value_of
from panax.optim import Optax
from panax.train import StepConfig

ROWS, CLASSES = 16, 4
X = torch.linspace(-1, 1, ROWS * 6).reshape(ROWS, 6).sin()
# Most of what is ignored is in one half, and classes lie unevenly.
Y = torch.tensor([3, 0, 3, 1, 3, 3, 3, 2, 0, 1, 3, 0, 2, 2, 1, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])

CRITERIA = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "squares": nn.MSELoss(reduction="sum"),
    "ignored": nn.CrossEntropyLoss(ignore_index=3),
    "weighed": nn.CrossEntropyLoss(weight=WEIGHTS),
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=3, label_smoothing=0.1),
    "logarithms": nn.NLLLoss(weight=WEIGHTS, ignore_index=0),
    "function": F.cross_entropy,
}


@pytest.mark.parametrize("name", CRITERIA)
def test_micro_batches_give_the_whole_batchs_loss(name):
    criterion, targets = CRITERIA[name], X[:, :CLASSES] if name == "squares" else Y
    torch.manual_seed(0)
    module = nn.Linear(6, CLASSES)
    if name == "logarithms":
        module = nn.Sequential(module, nn.LogSoftmax(-1))
    if name == "function":
        targets = torch.where(Y == 3, -100, Y)
    expected = criterion(module(X), targets)
    weight = next(module.parameters())
    gradient = torch.autograd.grad(expected, weight)[0]
    adapted = task(module, criterion, (X, targets))
    for parts in (1, 2, 4) if name == "weighed" else (1, 4):
        step = panax.compile_step(
            adapted,
            (X, targets),
            Optax(transformation=optax.sgd(1.0)),
            config=StepConfig(clip_norm=None, micro_batches=parts),
            devices=jax.devices()[:1],
        )
        state = step.init()
        (path,) = (path for path in state.params if path.endswith("weight"))
        before = np.asarray(state.params[path])
        state, metrics = step(state, (X, targets))
        assert float(metrics["loss"]) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert float(metrics["loss/objective"]) == pytest.approx(float(expected.detach()), rel=1e-5)
        np.testing.assert_allclose(before - np.asarray(state.params[path]), gradient, rtol=1e-4, atol=1e-5)


def test_a_criterion_of_a_users_own_is_called():
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            return 2 * super().forward(outputs, targets)

    outputs = torch.randn(ROWS, CLASSES)
    assert value_of(Doubled(), outputs, Y) == 2 * F.cross_entropy(outputs, Y)
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda *args: args[-1] * 3)
    assert value_of(hooked, outputs, Y) == 3 * F.cross_entropy(outputs, Y)
    likely = torch.softmax(outputs, -1)
    assert value_of(nn.CrossEntropyLoss(), outputs, likely) == F.cross_entropy(outputs, likely)
