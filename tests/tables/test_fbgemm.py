"""100 steps of row-wise Adagrad against FBGEMM's: duplicates, empty bags, weights, two features of one table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_rows import BATCH, EPSILON, FILE, RATE, STEPS, batches
from jaxtyping import Array, Float

from panax.core import Evaluation, Loss, Module, Task, logical_axes, normal, parameter
from panax.layers import embedding_bag
from panax.optim import RowWiseAdagrad, Schedule, Sgd
from panax.train import Program
from panax.train.update import StepConfig

DATA = batches()


class OneTable(Module):
    table: Float[Array, "row row_width"]
    scale: Float[Array, " norm"] = parameter(normal(std=0.0))


@dataclasses.dataclass(frozen=True)
class GoldenTask(Task):
    frozen_parameters = ("scale",)

    def init(self, key: jax.Array) -> tuple[OneTable, None]:
        return OneTable.create(key, {"norm": 1}, table=jnp.array(DATA["first"])), None

    def row_ids(self, batch: Any) -> Any:
        return {"table": jnp.concatenate([batch["sum"], batch["weighted"]], axis=1)}

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool) -> Evaluation:
        bags = [
            embedding_bag(params.table, batch["weighted"], weights=batch["weights"]),
            embedding_bag(params.table, batch["sum"]),
        ]
        out = jnp.concatenate(bags, axis=1)
        loss = (out * batch["direction"]).sum() + 0.5 * jnp.square(out).sum()
        return Evaluation({"golden": Loss(loss, jnp.float32(BATCH))}, state, {})

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)


def test_weights_are_fbgemms_after_100_steps() -> None:
    golden = np.load(FILE)
    optimizer = RowWiseAdagrad(schedule=Schedule(peak=RATE, decay="constant"), epsilon=EPSILON)
    program = Program.create(
        GoldenTask(), Sgd(), num_steps=STEPS, config=StepConfig(clip_norm=None), embedding_optimizer=optimizer
    )
    state = program.initial_state(jax.random.key(0))
    step = jax.jit(program.step)
    for number in range(STEPS):
        (weighted, plain), (weights, _) = DATA["ids"][number], DATA["weights"][number]
        batch = {"weighted": weighted, "sum": plain, "weights": weights, "direction": DATA["directions"][number]}
        state, _ = step(state, batch)
    table, sums = np.asarray(state.params.table), np.asarray(state.tables["table"]["sum"])
    np.testing.assert_allclose(table, golden["weights_after"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sums, golden["state_after"], rtol=1e-5)
    # What it is about is in it: bags that are empty, duplicates in a bag and in a step, and rows that moved far.
    ids = DATA["ids"]
    assert (ids < 0).all(axis=-1).any() and ((ids[..., 0] == ids[..., 1]) & (ids[..., 0] >= 0)).any()
    assert np.abs(table - DATA["first"]).max() > 0.1
