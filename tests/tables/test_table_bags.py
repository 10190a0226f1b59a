"""Bags against PyTorch's, and what may be wrong with tables and their batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from recommending import BATCH_AXES, TinyRecommender, batch_of, tiny_tables

from panax.core.errors import DataError, RecipeError
from panax.layers import FeatureConfig, TableConfig, TablesConfig, embedding_bag
from panax.layers.tables.mixed_rows import (
    DIGIT,
    MAX_PARTS,
    _times,
    choose_num_parts,
    mix_rows,
    pad_rows_to_parts,
    unmix_rows,
)
from panax.layers.tables.table_config import MAX_ROWS
from panax.mesh import Placement
from panax.optim import Sgd
from panax.spmd import GatheredRows
from panax.spmd.rows import unique_rows
from panax.train import CompiledStep, Program


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("as_rows", [False, True])
def test_bags_are_pytorchs(pooling: Any, as_rows: bool) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(20, 5)).astype(np.float32)
    length = np.array([3, 0, 1, 4, 2])[:, None]
    ids = np.where(np.arange(4) < length, rng.integers(0, 20, (5, 4)), -1).astype(np.int32)
    weights = rng.uniform(0.5, 2, (5, 4)).astype(np.float32) if pooling == "sum" else None

    def bags(values: jax.Array) -> jax.Array:
        source: Any = values
        if as_rows:
            numbers = unique_rows(jnp.asarray(ids).reshape(-1), 20, 20)
            source = GatheredRows(numbers, values.at[numbers].get(mode="clip"), 20)
        factors = None if weights is None else jnp.asarray(weights)
        return embedding_bag(source, jnp.asarray(ids), pooling=pooling, weights=factors)

    there = ids >= 0
    torch_table = torch.tensor(table, requires_grad=True)
    theirs = torch.nn.functional.embedding_bag(
        torch.tensor(ids[there], dtype=torch.int64),
        torch_table,
        torch.tensor(np.cumsum([0, *there.sum(axis=1)])[:-1]),
        mode=pooling,
        per_sample_weights=None if weights is None else torch.tensor(weights[there]),
    )
    actual, pull = jax.vjp(bags, jnp.asarray(table))
    np.testing.assert_allclose(actual, theirs.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert (actual[1] == 0).all()
    gradient = rng.normal(size=actual.shape).astype(np.float32)
    theirs.backward(torch.tensor(gradient))
    assert torch_table.grad is not None
    np.testing.assert_allclose(pull(jnp.asarray(gradient))[0], torch_table.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_row_that_the_task_did_not_name_is_not_a_number() -> None:
    rows = GatheredRows(jnp.array([2, 5, 9]), jnp.ones((3, 2)), 9)
    found = rows.read(jnp.array([5, 3, -1]))
    assert found[0].tolist() == [1, 1] and np.isnan(found[1]).all() and found[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "devices"), [(3_000, 8), (12_288, 6), (70_000, 5), (440_000, 7), (440_000, 56), (7_000_000, 96)]
)
def test_rows_are_mixed_over_any_number_of_devices(rows: int, devices: int) -> None:
    parts = choose_num_parts(rows)
    count = pad_rows_to_parts(rows, parts)
    assert count % devices == 0 and count - rows <= rows / 16
    places = np.asarray(mix_rows(jnp.arange(count), count, parts))
    assert (np.bincount(places, minlength=count) == 1).all()
    assert (np.asarray(unmix_rows(jnp.asarray(places), count, parts)) == np.arange(count)).all()
    # The most frequent ids, and ids with a stride, are spread over the devices.
    for stride in (1, 7, 16, 100, 128):
        chosen = np.arange(0, count, stride)[: 8 * devices]
        owners = np.bincount(places[chosen] // (count // devices), minlength=devices)
        assert owners.max() <= 3 * len(chosen) / devices, (stride, owners)


def test_the_most_rows_that_a_table_may_have_are_numbered_by_int32_when_filled_up() -> None:
    parts = choose_num_parts(MAX_ROWS)
    count = pad_rows_to_parts(MAX_ROWS, parts)
    assert parts == MAX_PARTS and count < 2**31
    rows = np.r_[0, np.random.default_rng(0).integers(0, count, 1000), count - 1].astype(np.int32)
    places = np.asarray(mix_rows(jnp.asarray(rows), count, parts))
    assert (np.asarray(unmix_rows(jnp.asarray(places), count, parts)) == rows).all()


@pytest.mark.parametrize("factor", [0, 1, DIGIT, MAX_PARTS // 2 + 1, MAX_PARTS - 1])
def test_products_of_digits_are_products(factor: int) -> None:
    numbers = [*range(0, MAX_PARTS, 4097), MAX_PARTS - 1]
    found = _times(jnp.asarray(numbers, jnp.int32), factor, MAX_PARTS)
    assert found.tolist() == [number * factor % MAX_PARTS for number in numbers]


def feature(leaf: str, **settings: Any) -> FeatureConfig:
    return FeatureConfig(leaf=leaf, **settings)


def table(name: str, rows: int = 10, width: int = 4, **settings: Any) -> TableConfig:
    return TableConfig(name=name, rows=rows, width=width, **{"features": (feature(name),), **settings})


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: table("item", features=()), "no feature uses the table 'item'"),
        (
            lambda: TablesConfig(tables=(table("item"), table("item", width=8, features=(feature("other"),)))),
            "two tables are named 'item' of width 4 and of width 8",
        ),
        (
            lambda: TablesConfig(tables=(table("a"), table("b", features=(feature("a"),)))),
            "'a' is a feature of the tables 'a' and 'b'",
        ),
        (lambda: table("item", rows=2**31), "ids are int32, so at most 2,146,959,360"),
        (lambda: table("item", rows=-1), "rows=-1"),
        (lambda: feature("item", capacity=0), "capacity=0"),
        (lambda: feature("item", pooling="max", weights_leaf="w"), "weights_leaf='w', which has no effect"),
        (lambda: TablesConfig(tables=()), "tables is empty"),
    ],
)
def test_tables_that_can_not_be_meant_are_refused(made: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        made()


def test_all_tables_together_may_have_more_rows_than_int32_has() -> None:
    config = TablesConfig(tables=tuple(table(f"t{n}", rows=MAX_ROWS // 2, width=4) for n in range(5)))
    assert [len(plan.parts) for plan in config.stacks] == [2, 2, 1]
    assert sum(plan.rows for plan in config.stacks) > 2**32 and all(plan.rows < 2**31 for plan in config.stacks)


def test_widths_and_placements_are_stacked_apart() -> None:
    config = tiny_tables(user="columns")
    assert [(plan.placement, [part.table.name for part in plan.parts]) for plan in config.stacks] == [
        ("columns", ["user"]),
        ("rows", ["item"]),
        ("everywhere", ["day"]),
    ]


def test_batches_that_do_not_fit_are_refused() -> None:
    program = Program.create(TinyRecommender(), Sgd(), num_steps=1)
    step = CompiledStep(program, Placement.create(devices=jax.devices()[:1]), BATCH_AXES)
    outside = batch_of(0)
    outside["seen"][2, 1] = 1000
    with pytest.raises(DataError, match=r"seen.*1000"):
        step.put(outside)
    long = batch_of(0)
    long["seen"] = np.zeros((16, 6), np.int32)
    with pytest.raises(RecipeError, match=r"'seen' has the shape \[16, 6\], and its feature capacity=5"):
        step.get_compiled(step.put(long))
    config = tiny_tables()
    with pytest.raises(RecipeError, match="read by the batch leaf 'day'"):
        config.row_ids({name: leaf for name, leaf in batch_of(0).items() if name != "day"})
