"""Tables on absent H100s: traffic by the formula, all of them aliased, and the other memory of a step."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from growing import AXES as KEYED_AXES
from growing import WAYS, Grower, growing_tables, keyed_batch
from planned import devices
from recommending import BATCH_AXES, Model, TinyRecommender, batch_of, tiny_tables

from panax.core.params.module import name_key
from panax.layers import TablesConfig
from panax.mesh import MeshShape, Placement
from panax.optim import Sgd
from panax.plan import StepCost, StepPlan, plan_step, summarize_collectives, traffic_totals, walk_step
from panax.plan.tables import TableCost, table_costs
from panax.train import CompiledStep, Program

TIMES = 6.0
"""Temporary bytes over those of the rows that a device may ask for. Found: 5.1 to 5.3."""


@dataclasses.dataclass(frozen=True)
class Large(TinyRecommender):
    """The tiny recommender with large tables."""

    def init(self, key: jax.Array) -> tuple[Model, None]:
        sizes = {"row_width": self.tables.tables[0].width, "class": 2}
        return Model.create(key, sizes, tables=self.tables.create(name_key(key, "tables"))), None


def large(rows: int, width: int, placement: Any) -> TablesConfig:
    """Two tables of so many rows, and the small one."""
    user, item, day = tiny_tables().tables
    wide = [dataclasses.replace(table, rows=rows, width=width, placement=placement) for table in (user, item)]
    return TablesConfig(tables=(*wide, dataclasses.replace(day, width=width)))


@functools.cache
def step_on(
    target: str, mesh: tuple[tuple[str, int], ...], examples: int, rows: int, width: int, placement: str
) -> Any:
    program = Program.create(Large(tables=large(rows, width, placement)), Sgd(), num_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = MeshShape(**{"fsdp": 1, **dict(mesh)})
        step = CompiledStep(program, Placement.create(shape, devices=devices(target)), BATCH_AXES)
    batch = {name: jax.ShapeDtypeStruct((examples, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch_of(0).items()}
    return step, batch


def of_tables(costs: list[TableCost]) -> dict[tuple[str, tuple[str, ...]], int]:
    total: dict[tuple[str, tuple[str, ...]], int] = {}
    for cost in costs:
        for key, size in cost.sent_bytes().items():
            total[key] = total.get(key, 0) + size
    return total


def assert_sent(found: Mapping[Any, int], expected: Mapping[Any, int], tolerance: float) -> None:
    """The dense part of the model is a few numbers: what is left is tables'."""
    whole = sum(expected.values())
    assert sum(found.values()) == pytest.approx(whole, rel=tolerance)
    for key in found.keys() | expected.keys():
        assert found.get(key, 0) == pytest.approx(expected.get(key, 0), rel=tolerance, abs=tolerance * whole), key


CASES = {
    "8": ("h100x8", (("fsdp", 8),), 65536, 32_000_000, 64, "rows"),
    "8, columns": ("h100x8", (("fsdp", 4), ("tensor", 2)), 65536, 32_000_000, 64, "columns"),
    "8, shared out": ("h100x8", (("fsdp", 4), ("tensor", 2)), 65536, 32_000_000, 64, "rows"),
    "64": ("h100x64", (("replica", 8), ("fsdp", 8)), 1_048_576, 200_000_000, 128, "rows"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name == "8, columns" else [])
        for name, case in CASES.items()
    ],
)
def test_a_traced_step_sends_what_the_formula_states(case):
    step, batch = step_on(*case)
    cost: StepCost = walk_step(step, batch)
    assert cost.unknown == ()
    assert_sent(traffic_totals(cost.traffic), of_tables(table_costs(step, batch)), 1e-3)
    later = [one for one in cost.traffic if one.times.expected == 0]
    assert later and all(one.times.maximum for one in later)


def growing_step(**mesh: int) -> tuple[CompiledStep, Any]:
    program = Program.create(Grower(tables=growing_tables(placement="rows", rows=2**24)), Sgd(), num_steps=10)
    step = CompiledStep(program, Placement.create(MeshShape(**mesh), devices=devices("h100x8")), KEYED_AXES)
    batch = {name: jax.ShapeDtypeStruct((65536, *leaf.shape[1:]), leaf.dtype) for name, leaf in keyed_batch(0).items()}
    return step, batch


@pytest.mark.slow
def test_rows_are_given_out_and_taken_back_in_place():
    step, batch = growing_step(fsdp=8)
    (plan,) = (plan for plan in step.program.task.tables.stacks if plan.growth is not None)
    program, shard = step.get_compiled(batch), plan.rows // 8
    made = re.findall(rf"= \w+\[(?:{shard}|{shard // WAYS},{WAYS})[,\]]\S* ([\w-]+)\(", program.as_text())
    assert "scatter" in made
    assert set(made) <= {"parameter", "get-tuple-element", "scatter", "fusion", "bitcast"}
    assert program.memory_analysis().alias_size_in_bytes >= 4 * shard * (8 + 1 + 2 + 1)  # Rows, sums, keys, steps.


def test_keys_are_gathered_on_all_devices_as_the_formula_states():
    step, batch = growing_step(fsdp=4, tensor=2)
    cost = walk_step(step, batch)
    assert cost.unknown == ()
    assert_sent(traffic_totals(cost.traffic), of_tables(table_costs(step, batch)), 1e-3)


def check_compiled(case: Any) -> StepPlan:
    step, batch = step_on(*case)
    costs = table_costs(step, batch)
    result: StepPlan = plan_step(step, batch)
    counted = {(total.kind, total.axes): total.wire_bytes for total in summarize_collectives(result.collectives)}
    assert_sent(counted, of_tables(costs), 1e-3)
    program = step.get_compiled(batch)
    memory = program.memory_analysis()
    held = sum(cost.table_bytes for cost in costs)
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes <= TIMES * sum(4 * cost.distinct_rows * (cost.width + 8) for cost in costs)
    shard = max(step.shardings.params.tables.stacks[0].table.shard_shape(x.shape)[0] for x in [table_of(step)])
    made = re.findall(rf"= f32\[{shard}(?:,\d+)?\]\S* ([\w-]+)\(", program.as_text())
    assert "scatter" in made
    assert set(made) <= {"parameter", "get-tuple-element", "scatter", "fusion", "gather", "bitcast"}
    return result


def table_of(step: CompiledStep) -> Any:
    return step.program.abstract.params.tables.stacks[0].table


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in CASES.items()],
)
def test_a_compiled_step_sends_that_and_makes_nothing_of_a_tables_size(case):
    check_compiled(case)


@pytest.mark.slow
def test_a_thousand_million_rows_compile_for_64_h100s():
    found = check_compiled(("h100x64", (("replica", 8), ("fsdp", 8)), 524_288, 500_000_000, 128, "rows"))
    assert 8.0e9 < found.memory.arguments < 8.2e9 and found.memory.total < 8.6e9
