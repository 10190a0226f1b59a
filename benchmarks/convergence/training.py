"""Trains the cells of a group, one after the other: its step is compiled once, since the rate is an argument of it."""

import dataclasses
import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from design import (
    BATCHES,
    BUDGETS,
    EVALUATIONS,
    HOPELESS,
    SEQUENCE,
    TARGET,
    Cell,
    Kind,
    Record,
    kind_named,
    made_by,
    steps_to,
)

import panax.optim
from panax.core import Axes
from panax.core.params.selection import LayerParameters
from panax.data import BytePairTokenizer, PythonLibrary, TextData
from panax.models import DecoderConfig, DecoderTask
from panax.optim import CustomSchedule, Optimizer, Transformation
from panax.run import Experiment
from panax.run.preparation import PreparedRun, prepare
from panax.train import evaluate_all

MODEL = DecoderConfig(max_length=256, embed=96, num_layers=2, heads=4, ffn=272, qk_norm=True)
HELD_OUT_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rated(Optimizer):
    """An optimizer whose rate and warm-up lie in its state, so that one program trains with all of them."""

    inner: Optimizer

    def build(
        self, axes: Mapping[str, Axes], num_steps: int, layers: LayerParameters = MappingProxyType({})
    ) -> Transformation:
        usual = self.inner.build(axes, num_steps, layers)

        def init(params: Any) -> dict[str, Any]:
            return {"inner": usual.init(params), "rate": jnp.float32(0), "warmup": jnp.float32(1)}

        def update(gradients: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
            def rate(step: Any) -> Any:
                return state["rate"] * jnp.minimum(1.0, (step + 1) / state["warmup"])

            rated = dataclasses.replace(self.inner, schedule=CustomSchedule(function=rate)).build(
                axes, num_steps, layers
            )
            changes, inner = rated.update(gradients, state["inner"], params)
            return changes, {**state, "inner": inner}

        def lies(state: dict[str, Any], params: Any) -> dict[str, Any]:
            return {"inner": usual.axes(state["inner"], params), "rate": (), "warmup": ()}

        def renewed(state: dict[str, Any], params: Any) -> dict[str, Any]:
            assert usual.renewal is not None
            return {**state, "inner": usual.renewal.renew(state["inner"], params)}

        renewal = None if usual.renewal is None else usual.renewal._replace(renew=renewed)
        return usual._replace(init=init, update=update, axes=lies, renewal=renewal)

    def reported_rate(self, num_steps: int) -> None:
        return None


def optimizer_of(kind: Kind) -> Optimizer:
    return getattr(panax.optim, kind.name)(**kind.settings)


class Group:
    """One optimizer at one batch, compiled."""

    def __init__(self, optimizer: str, batch: int):
        self.batch = batch
        self.rows, self.budget = BATCHES[batch], BUDGETS[batch]
        self._optimizer = optimizer
        self._prepared: dict[int, PreparedRun] = {}
        self._step = self._of_seed(0).step
        held_out = self._of_seed(0).data.held_out
        assert held_out is not None
        rows = []
        for found, _ in held_out.batches():
            rows.append(found)
            if len(rows) * self.rows >= HELD_OUT_ROWS:
                break
        self._held_out = {name: np.concatenate([each[name] for each in rows])[:HELD_OUT_ROWS] for name in rows[0]}

    def _of_seed(self, seed: int) -> PreparedRun:
        if seed not in self._prepared:
            experiment = Experiment(
                task=DecoderTask(model=MODEL),
                data=TextData(
                    corpus=PythonLibrary(definitions=True),
                    tokenizer=BytePairTokenizer(vocab_size=512),
                    sequence_length=SEQUENCE,
                    batch_size=self.rows,
                    seed=seed,
                ),
                optimizer=Rated(inner=optimizer_of(kind_named(self._optimizer))),
                num_steps=self.budget,
            )
            self._prepared[seed] = prepare(experiment)
        return self._prepared[seed]

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._step.program.abstract.params))

    def train(self, cell: Cell, best: float | None, target: float = TARGET) -> Record:
        """Train a cell.

        Args:
            best: The fewest updates of a cell of its grid so far; None where it is to train on to its budget.
        """
        step, state = self._step, self._begun(cell)
        every = self.budget // EVALUATIONS
        most = self.budget if best is None else min(self.budget, math.ceil(HOPELESS * best))
        curve = [(0, self._judged(state))]
        ended, taken = "budget" if most == self.budget else "hopeless", 0
        for batch, _ in self._of_seed(cell.seed).data.train.batches():
            state, _ = step(state, step.put(batch))
            taken += 1
            if taken % every == 0 or taken == most:
                curve.append((taken, self._judged(state)))
                if not math.isfinite(curve[-1][1]) or curve[-1][1] > curve[0][1] + 1.0:
                    ended = "diverged"
                    break
                if curve[-1][1] <= target:
                    ended = "reached"
                    break
            if taken == most:
                break
        return Record(cell, steps_to(curve, target), taken, tuple(curve), ended, made_by(cell.optimizer, cell.batch))

    def _begun(self, cell: Cell) -> Any:
        state = self._step.init(cell.seed)
        places = self._step.shardings.optimizer_state
        given = {"rate": np.float32(cell.rate), "warmup": np.float32(cell.warmup_steps)}
        placed = {name: jax.device_put(value, places[name]) for name, value in given.items()}
        return dataclasses.replace(state, optimizer_state={**state.optimizer_state, **placed})

    def _judged(self, state: Any) -> float:
        return evaluate_all(self._step, state, [self._held_out])["loss"]

    def milliseconds(self, steps: int) -> float:
        """The least time of an update of three rounds of so many, batches drawn before."""
        state = self._begun(Cell(self._optimizer, self.batch, 0, 0.1, 0))
        source = self._of_seed(0).data.train.batches()
        batches = [self._step.put(next(source).batch) for _ in range(4)]
        state, _ = self._step(state, batches[0])
        found = []
        for _ in range(3):
            jax.block_until_ready(state)
            began = time.perf_counter()
            for n in range(steps):
                state, _ = self._step(state, batches[n % 4])
            jax.block_until_ready(state)
            found.append((time.perf_counter() - began) / steps * 1e3)
        return min(found)
