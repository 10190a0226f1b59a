"""Steps of small agents, for the tests of each kind."""

import jax
import numpy as np

from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Schedule
from panax.train import CompiledStep, Program, StepConfig


def step_of(task, mesh=None, *, rate=1e-3, clip_norm: float | None = 0.5, b2=0.999, num_steps=100) -> CompiledStep:
    optimizer = AdamW(schedule=Schedule(peak=rate, decay="constant"), weight_decay=0.0, b2=b2)
    program = Program.create(task, optimizer, num_steps=num_steps, config=StepConfig(clip_norm=clip_norm))
    placement = Placement.create(mesh or MeshShape(), devices=None if mesh else jax.devices()[:1])
    return CompiledStep(program, placement, {"row": ("batch",)})


def taken(step: CompiledStep, count: int):
    """The state after some steps from the first one on, and the last one's scalars."""
    rows = step.program.task.rows  # pyright: ignore
    state, batch, scalars = step.init(0), step.put({"row": np.arange(rows, dtype=np.int32)}), {}
    for _ in range(count):
        state, scalars = step(state, batch)
    return state, jax.device_get(dict(scalars))
