"""A small task, and data of which chosen batches can't be trained on, for the tests of rollbacks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from panax.checkpoint import CheckpointConfig
from panax.core import Evaluation, Loss, SourcedBatch, Task
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment, RollbackConfig
from panax.train import StepConfig


@dataclasses.dataclass(frozen=True)
class Line(Task):
    """A line through noisy points; the noise comes from the step's key, so that a step of another number is another step."""

    def init(self, key):
        return {"w": jax.random.normal(key, (8,)), "b": jnp.zeros(())}, {}

    def parameter_axes(self, params):
        return {"w": ("embed",), "b": ()}

    def loss(self, params, state, batch, key, train):
        guess = batch["x"] @ params["w"] + params["b"]
        guess = guess + (0.01 * jax.random.normal(key, guess.shape) if train else 0.0)
        error = ((guess - batch["y"]) ** 2).sum()
        return Evaluation({"error": Loss(error, jnp.float32(guess.shape[0]))}, state, {})


@dataclasses.dataclass(frozen=True)
class Points:
    """Batches 1, 2, 3, ...: random points; those in `bad` are not numbers, those in `huge` make a spike."""

    bad: tuple[int, ...] = ()
    huge: tuple[int, ...] = ()
    resume = "exact"
    axes = {"x": ("batch", None), "y": ("batch",)}  # noqa: RUF012

    def batches(self, position=None):
        for number in itertools.count(1 if position is None else position["next"]):
            random = np.random.default_rng(number)
            x = random.normal(size=(8, 8)).astype(np.float32)
            y = x.sum(1) + (np.nan if number in self.bad else 1e4 if number in self.huge else 0)
            yield SourcedBatch({"x": x, "y": y.astype(np.float32)}, {"next": number + 1})


def experiment(folder, *, bad=(), huge=(), steps=20, every=5, after=2, most=3, **settings) -> Experiment:
    """A run over such data."""
    values = {
        "data": Points(tuple(bad), tuple(huge)),
        "checkpoint": CheckpointConfig(every=every, keep_last=2, keep_best=0),
        "evaluate": EvaluateConfig(every=0),
        "rollback": RollbackConfig(after=after, max_rollbacks=most),
        "step": StepConfig(max_skipped=6, spike_factor=5.0, ema_decay=0.9),
        "optimizer": AdamW(schedule=Schedule(peak=0.05, warmup_steps=3)),
        "log_every": 1,
        "task": Line(),
    }
    return Experiment(name="line", num_steps=steps, directory=str(folder), **(values | settings))
