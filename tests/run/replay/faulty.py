"""A small net with named modules, and data in which causes of spikes and NaN are planted at a chosen step."""

import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from panax.checkpoint import CheckpointConfig
from panax.core import Evaluation, Loss, SourcedBatch, Task, scope
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment

ROWS, WIDTH, CLASSES, EXPERTS = 8, 8, 3, 4

Weak = Literal[
    "", "norm without epsilon", "exponential without maximum", "root of zero", "logarithm", "labels unchecked"
]


@dataclasses.dataclass(frozen=True)
class FaultyNet(Task):
    """Two layers of experts, chosen by a row's number, between an entrance and a head; one of them may be weak."""

    weak: Weak = ""

    def init(self, key):
        keys = jax.random.split(key, 3)
        experts = jax.random.normal(keys[1], (2, EXPERTS, WIDTH, WIDTH)) / np.sqrt(WIDTH)
        return {
            "entrance": jax.random.normal(keys[0], (4, WIDTH)) / 2,
            "experts": experts,
            "head": jax.random.normal(keys[2], (WIDTH, CLASSES)) / np.sqrt(WIDTH),
        }, {}

    def parameter_axes(self, params):
        return {"entrance": (None, None), "experts": ("layer", "expert", None, None), "head": (None, None)}

    def loss(self, params, state, batch, key, train):
        with scope("entrance"):
            hidden = batch["x"] @ params["entrance"]

        def layer(hidden, experts):
            with scope("layers.*"):
                with scope("norm"):
                    square = (hidden**2).mean(-1, keepdims=True)
                    hidden = hidden / jnp.sqrt(square + (0.0 if self.weak == "norm without epsilon" else 1e-6))
                with scope("mix"):
                    hidden = jnp.tanh(jnp.einsum("re,ref->rf", hidden, experts[batch["expert"]]))
            return hidden, None

        hidden, _ = jax.lax.scan(layer, hidden, params["experts"])
        with scope("head"):
            logits = hidden @ params["head"]
            if self.weak == "root of zero":
                logits = logits + jnp.sqrt(jnp.abs(batch["x"][:, :CLASSES] * params["head"][:1])) * 0.0
            if self.weak == "exponential without maximum":
                scores = jnp.exp(logits * jnp.abs(batch["x"]).max() * 10)
                logs = jnp.log(scores / scores.sum(-1, keepdims=True))
            else:
                logs = jax.nn.log_softmax(logits)
        with scope("objective"):
            mode = "fill" if self.weak == "labels unchecked" else "clip"
            wrong = -jnp.take_along_axis(logs, batch["label"][:, None], axis=-1, mode=mode)
            if self.weak == "logarithm":
                wrong = wrong + 0.1 * jnp.log(jnp.abs(batch["x"]).sum(-1, keepdims=True))
        return Evaluation({"wrong": Loss(wrong.sum(), jnp.float32(ROWS))}, state, {})


@dataclasses.dataclass(frozen=True)
class FaultyData:
    """Batches 1, 2, 3, ... of random rows; batch `step` has a fault in row `row`.

    Attributes:
        dead: Experts that no row is sent to, in any batch.
    """

    step: int = 0
    row: int = 3
    fault: Literal["zeros", "nan", "huge", "label", ""] = ""
    dead: tuple[int, ...] = ()
    resume = "exact"
    axes = {"x": ("batch", None), "label": ("batch",), "expert": ("batch",)}  # noqa: RUF012

    def batches(self, position=None):
        for number in itertools.count(1 if position is None else position["next"]):
            random = np.random.default_rng(number)
            x = random.normal(size=(ROWS, 4)).astype(np.float32)
            alive = [each for each in range(EXPERTS) if each not in self.dead]
            label = random.integers(0, CLASSES, ROWS).astype(np.int32)
            expert = np.array([alive[row % len(alive)] for row in range(ROWS)], np.int32)
            if number == self.step:
                x[self.row] *= {"zeros": 0.0, "nan": np.nan, "huge": 300.0}.get(self.fault, 1.0)
                label[self.row] = CLASSES + 4 if self.fault == "label" else label[self.row]
            yield SourcedBatch({"x": x, "label": label, "expert": expert}, {"next": number + 1})


def faulty_experiment(folder, weak: Weak = "", data: FaultyData | None = None, **settings) -> Experiment:
    """A run of six steps over such data, with a checkpoint after every second step."""
    values = {
        "num_steps": 6,
        "optimizer": AdamW(schedule=Schedule(peak=0.01, decay="constant")),
        "checkpoint": CheckpointConfig(every=2, keep_last=3, keep_best=0),
        "evaluate": EvaluateConfig(every=0),
        "log_every": 1,
    }
    return Experiment(
        name="faulty", task=FaultyNet(weak), data=data or FaultyData(), directory=str(folder), **(values | settings)
    )
