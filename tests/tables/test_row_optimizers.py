"""Optimizers for rows against PyTorch and against NumPy, through whole steps: duplicates, empty bags, weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Array, Float

from panax.core import Evaluation, Loss, Module, Task, logical_axes, normal, parameter
from panax.core.errors import RecipeError
from panax.layers import embedding_bag
from panax.optim import LazyAdam, RowOptimizer, RowSgd, RowWiseAdagrad, Schedule, Sgd
from panax.train import Program
from panax.train.update import StepConfig

ROWS, WIDTH, STEPS = 50, 6, 100


class OneTable(Module):
    table: Float[Array, "row row_width"] = parameter(normal(std=0.5))
    bias: Float[Array, " row_width"] = parameter(normal(std=0.0))


@dataclasses.dataclass(frozen=True)
class BagTask(Task):
    """Bags that are to equal their targets; the bias is frozen."""

    frozen_parameters = ("bias",)

    def init(self, key: jax.Array) -> tuple[OneTable, None]:
        return OneTable.create(key, {"row": ROWS, "row_width": WIDTH}), None

    def row_ids(self, batch: Any) -> Any:
        return {"table": batch["ids"]}

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool) -> Evaluation:
        bags = embedding_bag(params.table, batch["ids"], weights=batch["weights"]) + params.bias[None]
        return Evaluation({"square": Loss(0.5 * jnp.square(bags - batch["target"]).sum(), jnp.float32(1.0))}, state, {})

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    results = []
    for _ in range(STEPS):
        ids = np.minimum(rng.zipf(1.3, (8, 4)) - 1, ROWS - 1)
        length = rng.integers(0, 5, (8, 1))
        results.append(
            {
                "ids": np.where(np.arange(4) < length, ids, -1).astype(np.int32),
                "weights": rng.uniform(0.5, 1.5, (8, 4)).astype(np.float32),
                "target": rng.normal(size=(8, WIDTH)).astype(np.float32),
            }
        )
    return results


def trained(optimizer: RowOptimizer) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(the table before, after all steps, what is kept of its rows)."""
    config = StepConfig(clip_norm=None)
    program = Program.create(BagTask(), Sgd(), num_steps=STEPS, config=config, embedding_optimizer=optimizer)
    state = program.initial_state(jax.random.key(0))
    first = np.asarray(state.params.table)
    step = jax.jit(program.step)
    for batch in batches():
        state, _ = step(state, batch)
    assert int(state.guard.skipped) == 0 and state.tables is not None
    return first, np.asarray(state.params.table), {name: np.asarray(x) for name, x in state.tables["table"].items()}


def constant(rate: float) -> Schedule:
    return Schedule(peak=rate, decay="constant")


def test_lazy_adam_is_pytorchs_sparse_adam() -> None:
    first, table, _ = trained(LazyAdam(schedule=constant(0.01)))
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.tensor(first.copy()), freeze=False, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
    for batch in batches():
        there = batch["ids"] >= 0
        offsets = np.cumsum(np.concatenate([[0], there.sum(axis=1)]))[:-1]
        bags = bag(
            torch.tensor(batch["ids"][there], dtype=torch.int64),
            torch.tensor(offsets),
            per_sample_weights=torch.tensor(batch["weights"][there]),
        )
        optimizer.zero_grad()
        (0.5 * (bags - torch.tensor(batch["target"])).square().sum()).backward()
        optimizer.step()
    np.testing.assert_allclose(table, bag.weight.detach().numpy(), rtol=0, atol=1e-6)
    assert np.abs(table - first).max() > 0.1


def reference(first: np.ndarray, change: Any) -> np.ndarray:
    """Steps written out: for each row that is touched, `change(row number, row, summed gradient)`."""
    table = first.astype(np.float64)
    for batch in batches():
        sums: dict[int, np.ndarray] = {}
        for ids, weights, target in zip(batch["ids"], batch["weights"].astype(np.float64), batch["target"]):
            bag = sum((w * table[i] for i, w in zip(ids, weights) if i >= 0), np.zeros(WIDTH))
            for i, w in zip(ids, weights):
                if i >= 0:
                    sums[int(i)] = sums.get(int(i), np.zeros(WIDTH)) + w * (bag - target)
        for i, gradient in sums.items():
            table[i] = change(i, table[i], gradient)
    return table


@pytest.mark.parametrize("decay", ["none", "l2", "decoupled"])
def test_row_wise_adagrad_is_what_its_steps_say(decay: str) -> None:
    weight_decay, rate, epsilon = (0.0 if decay == "none" else 0.05), 0.1, 1e-8
    kind: Any = "l2" if decay == "none" else decay
    optimizer = RowWiseAdagrad(schedule=constant(rate), weight_decay=weight_decay, decay=kind, epsilon=epsilon)
    first, table, row_state = trained(optimizer)
    total = np.zeros(ROWS)

    def change(i: int, row: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        if kind == "l2":
            gradient = gradient + weight_decay * row
        total[i] += np.square(gradient).mean()
        shrunk = row * (1 - rate * weight_decay) if kind == "decoupled" else row
        return shrunk - rate / (np.sqrt(total[i]) + epsilon) * gradient

    np.testing.assert_allclose(table, reference(first, change), rtol=0, atol=1e-6)
    np.testing.assert_allclose(row_state["sum"], total, rtol=1e-5)
    assert (row_state["sum"] == 0).any() and (table[row_state["sum"] == 0] == first[row_state["sum"] == 0]).all()


def test_row_sgd_is_what_its_steps_say() -> None:
    first, table, kept = trained(RowSgd(schedule=constant(0.02), weight_decay=0.1))
    expected = reference(first, lambda _, row, gradient: row - 0.02 * (gradient + 0.1 * row))
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)
    assert kept == {}


def test_settings_that_have_no_effect_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"embedding_optimizer=RowSgd\(\) has no effect: all tables are frozen"):
        Program.create(BagTaskOfBias(), Sgd(), num_steps=1, frozen=("table",), embedding_optimizer=RowSgd())
    with pytest.raises(RecipeError, match=r"embedding_optimizer\.weight_decay=-1\.0"):
        RowSgd(weight_decay=-1.0)


@dataclasses.dataclass(frozen=True)
class BagTaskOfBias(BagTask):
    frozen_parameters = ()


def test_a_frozen_table_stays_and_is_read() -> None:
    program = Program.create(BagTaskOfBias(), Sgd(), num_steps=1, frozen=("table",))
    state = program.initial_state(jax.random.key(0))
    after, scalars = jax.jit(program.step)(state, batches()[0])
    assert (after.params.table == state.params.table).all() and not (after.params.bias == state.params.bias).all()
    assert after.tables == {} and float(scalars["gradient_norm"]) > 0
