"""The first rows of a table on every device, the others split: trained as the table in one piece is, on every layout."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from recommending import BATCH_AXES, TinyRecommender, batch_of, tiny_tables

from panax.core.errors import RecipeError
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.layers.tables.mixed_rows import unmix_rows
from panax.mesh import MeshShape, Placement
from panax.optim import RowWiseAdagrad, Schedule, Sgd
from panax.train import CompiledStep, Program

HOT = 40


def tables_with(**settings: Any) -> TablesConfig:
    user, item, day = tiny_tables().tables
    return TablesConfig(tables=(user, dataclasses.replace(item, placement="rows", **settings), day), small_bytes=1024)


def step_of(tables: TablesConfig, mesh: dict[str, int] | None = None, devices: int = 1) -> CompiledStep:
    program = Program.create(
        TinyRecommender(tables=tables),
        Sgd(schedule=Schedule(peak=0.1)),
        num_steps=10,
        embedding_optimizer=RowWiseAdagrad(schedule=Schedule(peak=0.1, decay="constant")),
    )
    shape = None if mesh is None else MeshShape(**mesh)
    return CompiledStep(program, Placement.create(shape, devices=jax.devices()[:devices]), BATCH_AXES)


def rows_of(state: Any, tables: TablesConfig, name: str = "item") -> np.ndarray:
    """A table by id, and the optimizer state of each row, from all placements."""
    (table,) = (table for table in tables.tables if table.name == name)
    result = np.full((table.rows, table.width + 1), np.nan, np.float32)
    for n, (plan, stack) in enumerate(zip(tables.stacks, state.params.tables.stacks)):
        row = np.asarray(unmix_rows(jax.numpy.arange(plan.rows), plan.rows, plan.blocks))
        sums = np.asarray(state.tables[f"tables.stacks.{n}.table"]["sum"])
        for part, offset in zip(plan.parts, plan.offsets):
            mine = (row >= offset) & (row < offset + part.rows)
            if part.table.name == name:
                result[row[mine] - offset + part.first] = np.c_[np.asarray(stack.table)[mine], sums[mine]]
    assert not np.isnan(result).any()
    return result


def with_rows(state: Any, tables: TablesConfig, rows: dict[str, np.ndarray]) -> Any:
    """A state with other tables."""
    stacks = []
    for plan, stack in zip(tables.stacks, state.params.tables.stacks):
        full_table = np.zeros(stack.table.shape, np.float32)
        row = np.asarray(unmix_rows(jax.numpy.arange(plan.rows), plan.rows, plan.blocks))
        for part, offset in zip(plan.parts, plan.offsets):
            mine = (row >= offset) & (row < offset + part.rows)
            full_table[mine] = rows[part.table.name][row[mine] - offset + part.first, :-1]
        stacks.append(dataclasses.replace(stack, table=jax.device_put(full_table, stack.table.sharding)))
    held = dataclasses.replace(state.params.tables, stacks=tuple(stacks))
    return dataclasses.replace(state, params=dataclasses.replace(state.params, tables=held))


def trained(step: CompiledStep, tables: TablesConfig, rows: dict[str, np.ndarray]) -> tuple[list[float], np.ndarray]:
    state, losses = with_rows(step.init(0), tables, rows), []
    for seed in range(3):
        state, scalars = step(state, step.put(batch_of(seed)))
        losses += [float(scalars["loss"]), float(scalars["gradient_norm"])]
    return losses, rows_of(jax.device_get(state), tables)


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        (None, 1),
        ({"fsdp": 4, "tensor": 2}, 8),
        pytest.param({"replica": 2, "fsdp": 4}, 8, marks=pytest.mark.slow),
    ],
)
def test_a_table_in_two_parts_trains_as_one(mesh, devices):
    full_table, parted = tables_with(), tables_with(hot_rows=HOT)
    step = step_of(full_table)
    first = jax.device_get(step.init(0))
    rows = {table.name: rows_of(first, full_table, table.name) for table in full_table.tables}
    expected, actual = trained(step, full_table, rows), trained(step_of(parted, mesh, devices), parted, rows)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=2e-6)
    # Both parts were trained.
    moved = (expected[1] != rows["item"]).any(axis=1)
    assert moved[:HOT].any() and moved[HOT:].any()


def test_hot_rows_lie_beside_the_small_tables():
    stacks = tables_with(hot_rows=HOT).stacks
    placed = {(part.table.name, part.first): (plan.placement, part.rows) for plan in stacks for part in plan.parts}
    assert placed["item", 0] == ("everywhere", HOT) and placed["item", HOT] == ("rows", 1000 - HOT)
    # The first numbers are as large as those of the table in one piece.
    state = step_of(tables_with(hot_rows=HOT)).init(0)
    drawn = rows_of(jax.device_get(state), tables_with(hot_rows=HOT))[:, :-1]
    for part in (drawn[:HOT], drawn[HOT:]):
        assert 0.9 < np.abs(part).max() * 1000**0.5 < 1


def test_mistakes_are_reported():
    feature = (FeatureConfig(leaf="item"),)
    for rows, hot, more, message in (
        (9, 9, {}, "has hot_rows=9 of rows=9; expected fewer"),
        (9, -1, {}, "has hot_rows=-1 of rows=9"),
        (9, 3, {"placement": "everywhere"}, "has hot_rows=3, and is replicated on every device"),
    ):
        with pytest.raises(RecipeError, match=message):
            TableConfig(name="item", rows=rows, width=8, features=feature, hot_rows=hot, **more)
    small = TablesConfig(tables=(TableConfig(name="item", rows=90, width=8, features=feature, hot_rows=5),))
    with pytest.raises(RecipeError, match="has hot_rows=5, and is replicated on every device, since its 2,880 bytes"):
        _ = small.stacks
    open_ = TablesConfig(tables=(TableConfig(name="item", rows=0, width=8, features=feature, hot_rows=50),))
    with pytest.raises(RecipeError, match="has hot_rows=50, and the data 40 ids; expected fewer"):
        open_.adapt_to_data({"item": 40})
