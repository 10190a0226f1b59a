"""A process of `test_agents_of_many.py`: trains a small agent over all devices of the job, and prints the results.

python agents_worker.py ADDRESS PROCESSES INDEX AGENT FOLDER UNTIL LEFT: process 0 writes the last state into the file LEFT, npz.
"""

import dataclasses
import hashlib
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from launching import join_job

import panax
from panax.agents import Dqn, PerceptronPolicy, Ppo, Sac, Seeds
from panax.checkpoint import CheckpointConfig
from panax.core import named_leaves
from panax.environments import CartPole, Gymnasium, Pendulum
from panax.mesh import MeshShape
from panax.metrics import Tracker
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig

STEPS, RATE = 4, 1e-3
POLICY = PerceptronPolicy(hidden=(16,))
PPO = Ppo(
    environment=CartPole(), policy=POLICY, environments=8, steps=16, rollouts_per_step=2, epochs=2, minibatches=2,
    normalize_observations=True, evaluation_episodes=8, evaluation_steps=40,
)  # fmt: skip
DRAWN: dict[str, Any] = {
    "policy": POLICY,
    "environments": 8,
    "steps": 2,
    "rollouts_per_step": 4,
    "updates": 2,
    "batch_size": 32,
    "capacity": 256,
    "warmup": 4,
    "tau": 0.1,
    "evaluation_episodes": 8,
    "evaluation_steps": 40,
}
AGENTS: dict[str, Any] = {
    "ppo": PPO,
    "dqn": Dqn(environment=CartPole(), **DRAWN),
    "sac": Sac(environment=Pendulum(max_steps=10), critic_hidden=(16,), **DRAWN),
    "seeds": Seeds(task=PPO, count=2, clip_norm=0.5),
    "gymnasium": dataclasses.replace(PPO, environment=Gymnasium(name="CartPole-v1", processes=1)),
}


class Figures(Tracker):
    """Keeps what was reported of training and evaluations, in the process that reports."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def record(self, step: int, values: Any) -> None:
        kept = ("return", "episode", "loss", "updates", "transitions", "gradient_norm")
        self.found |= {f"{step} {name}": float(value) for name, value in values.items() if any(k in name for k in kept)}


class Watched(panax.hooks.Hook):
    """Ends the run after a step, in all processes; keeps digests of what it began with."""

    def __init__(self, until: int) -> None:
        self.until, self.begun = until, {}

    def before_run(self, run: Any) -> None:
        self.begun = digests(whole(run.state))

    def after_step(self, run: Any) -> None:
        if run.step == self.until:
            run.stop("half of it")


def whole(state: Any) -> dict[str, np.ndarray]:
    """Every leaf from all processes."""
    found = {}
    for name, leaf in named_leaves(state).items():
        bits = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        gathered = multihost_utils.process_allgather(bits, tiled=True) if jax.process_count() > 1 else bits
        found[name] = np.asarray(gathered)
    return found


def digests(leaves: dict[str, np.ndarray]) -> dict[str, str]:
    """Bit by bit."""
    return {name: hashlib.sha256(leaf.tobytes()).hexdigest() for name, leaf in leaves.items()}


def main() -> None:
    agent, folder, until, left = join_job()
    figures, watched = Figures(), Watched(int(until))
    experiment = Experiment(
        task=AGENTS[agent],
        optimizer=AdamW(schedule=Schedule(peak=RATE, decay="constant"), weight_decay=0.0),
        step=StepConfig(clip_norm=None if agent == "seeds" else 0.5),
        mesh=MeshShape(fsdp=-1),
        num_steps=STEPS,
        log_every=1,
        evaluate=EvaluateConfig(every=2),
        checkpoint=CheckpointConfig(every=1),
        directory=folder,
        hooks=(watched,),
        trackers=(figures,),
    )
    try:
        result = panax.fit(experiment, quiet=True)
    except panax.core.PanaxError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        sys.exit(0)
    leaves = whole(result.state)
    if jax.process_index() == 0:
        np.savez(left, **leaves)  # pyright: ignore[reportArgumentType]
    summary = {"step": result.step, "begun": watched.begun, "ended": digests(leaves), "figures": figures.found}
    print(json.dumps({**summary, "evaluation": dict(result.evaluation)}), flush=True)


if __name__ == "__main__":
    main()
