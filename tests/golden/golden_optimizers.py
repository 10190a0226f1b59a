"""Golden runs of every optimizer, on two devices that share the parameters."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rows import Row, rows_of_step

from panax.core import Evaluation, Loss, Task
from panax.mesh import MeshShape, Placement
from panax.optim import (
    Adafactor,
    AdamW,
    Chained,
    Lamb,
    Lars,
    Lion,
    Muon,
    Schedule,
    ScheduleFreeAdamW,
    Sgd,
    Shampoo,
    Soap,
)
from panax.train import CompiledStep, Program, StepConfig

LAYERS, WIDTH, WIDER, STEPS = 2, 8, 16, 5
SCHEDULE = Schedule(peak=0.1, warmup_steps=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Novograd(Chained):
    """An optimizer of optax that Panax doesn't have."""

    scope = "layer"

    def chain(self, learning_rate, decay):
        return optax.novograd(learning_rate)


OPTIMIZERS = {
    "adamw": AdamW(schedule=SCHEDULE, weight_decay=0.3),
    "schedule_free": ScheduleFreeAdamW(schedule=dataclasses.replace(SCHEDULE, decay="constant"), weight_decay=0.1),
    "lamb": Lamb(schedule=SCHEDULE, weight_decay=0.1),
    "lars": Lars(schedule=SCHEDULE, weight_decay=0.1, trust=0.01),
    "muon": Muon(schedule=SCHEDULE, dtype="float32"),
    "soap": Soap(schedule=SCHEDULE, precondition_frequency=2, largest=12),
    "shampoo": Shampoo(schedule=SCHEDULE, block=16, precondition_frequency=2, ridge=0.01),
    "lion": Lion(schedule=SCHEDULE, weight_decay=0.3),
    "adafactor": Adafactor(schedule=SCHEDULE, minimum_factored=4, weight_decay=0.01),
    "sgd": Sgd(schedule=SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "optax": Novograd(schedule=SCHEDULE),
}


@dataclasses.dataclass(frozen=True)
class Stacked(Task):
    """Two layers of a small network in a stack, with a norm and a bias."""

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LAYERS, WIDTH, WIDER)),
            "down": jax.random.normal(down, (LAYERS, WIDER, WIDTH)),
            "scale": jnp.ones((LAYERS, WIDTH)),
            "bias": jnp.zeros((WIDTH,)),
        }, {}

    def parameter_axes(self, params):
        return {
            "up": ("layer", "embed", "ffn"), "down": ("layer", "ffn", "embed"), "scale": ("layer", "norm"), "bias": ("norm",),
        }  # fmt: skip

    def loss(self, params, state, batch, key, train):
        x = batch["x"]
        for layer in range(LAYERS):
            x = x + jnp.tanh((x * params["scale"][layer]) @ params["up"][layer]) @ params["down"][layer]
        error = ((x + params["bias"] - batch["y"]) ** 2).sum()
        return Evaluation({"error": Loss(error, jnp.float32(x.size))}, state, {})


def batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((8, WIDTH)).astype(np.float32) for name in ("x", "y")}


def step_for(name: str) -> CompiledStep:
    program = Program.create(Stacked(), OPTIMIZERS[name], num_steps=STEPS, config=StepConfig(clip_norm=1.0))
    placement = Placement.create(MeshShape(fsdp=2), devices=jax.devices()[:2])
    axes = {"x": ("batch", None), "y": ("batch", None)}
    return CompiledStep(program, placement, axes)


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_step(step_for(name), map(batch, range(STEPS)))
