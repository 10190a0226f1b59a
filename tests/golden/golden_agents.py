"""Golden runs of agents, each on two devices that share its environments."""

from pathlib import Path

import jax
import numpy as np
from rows import Row, rows_of_step

from panax.agents import Dqn, PerceptronPolicy, Ppo, Sac
from panax.environments import CartPole, GridWorld, Pendulum
from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Schedule
from panax.train import CompiledStep, Program, StepConfig

STEPS = 3
_POLICY = PerceptronPolicy(hidden=(16, 16))
_REPLAY = {"environments": 8, "steps": 1, "rollouts_per_step": 24, "batch_size": 16, "capacity": 256, "warmup": 8}
AGENTS = {
    "ppo": Ppo(
        environment=CartPole(), policy=_POLICY, environments=8, steps=16, rollouts_per_step=2, epochs=2, minibatches=2
    ),
    "dqn": Dqn(
        environment=GridWorld(), policy=_POLICY, updates=1, target_update_interval=5, epsilon_steps=200, **_REPLAY
    ),
    "sac": Sac(environment=Pendulum(), policy=_POLICY, critic_hidden=(16, 16), updates=1, **_REPLAY),
}


def batch_for(name: str) -> dict[str, np.ndarray]:
    return {"row": np.arange(AGENTS[name].rows, dtype=np.int32)}


def step_for(name: str) -> CompiledStep:
    optimizer = AdamW(schedule=Schedule(peak=1e-3, decay="constant"), weight_decay=0.0)
    program = Program.create(AGENTS[name], optimizer, num_steps=STEPS, config=StepConfig(clip_norm=0.5))
    placement = Placement.create(MeshShape(fsdp=2), devices=jax.devices()[:2])
    return CompiledStep(program, placement, {"row": ("batch",)})


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_step(step_for(name), [batch_for(name)] * STEPS)
