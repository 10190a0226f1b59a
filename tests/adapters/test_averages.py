"""`task.trained` gives back the parameters that evaluations take: the averages, if a run keeps any."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import panax
from panax.adapters import equinox
from panax.adapters.torch import task as torch_task
from panax.optim import AdamW, Schedule, ScheduleFreeAdamW
from panax.train import StepConfig

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
BATCH = {"x": np.sin(3 * X), "y": X.sum(1, keepdims=True)}

SETTINGS = {
    "ema": {
        "config": StepConfig(ema_decay=0.99),
        "optimizer": AdamW(schedule=Schedule(peak=0.2, decay="constant", warmup_steps=0)),
    },
    "schedule-free": {"optimizer": ScheduleFreeAdamW(schedule=Schedule(peak=0.2, decay="constant", warmup_steps=0))},
}


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.offset = nn.Linear(4, 1), nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x):
        return self.linear(x) + self.offset


def of_torch():
    adapted = torch_task(Frozen(), lambda m, b: (m(b["x"]) - b["y"]).square().mean(), BATCH)

    def loss(module):
        return float((module(torch.from_numpy(BATCH["x"])) - torch.from_numpy(BATCH["y"])).square().mean().detach())

    return adapted, loss


def of_equinox():
    def loss(model, batch):
        return jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]).mean()

    return equinox.task(lambda key: eqx.nn.Linear(4, 1, key=key), loss), lambda model: float(loss(model, BATCH))


@pytest.mark.parametrize("average", SETTINGS)
@pytest.mark.parametrize("make", [of_torch, of_equinox])
def test_what_was_evaluated_is_given_back(make, average):
    task, loss = make()
    step = panax.compile_step(task, BATCH, devices=jax.devices()[:1], num_steps=9, **SETTINGS[average])
    state = step.init()
    for _ in range(6):
        state, _ = step(state, BATCH)
    evaluated = step.evaluate(state, [BATCH])["loss"]
    assert loss(task.trained(state)) == pytest.approx(evaluated, rel=1e-5)
    last = task.model.rebuild(*jax.device_get((state.params, state.model_state)))
    assert loss(last) != pytest.approx(evaluated, rel=1e-3)
