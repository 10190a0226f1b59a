"""Tables on meshes: every layout trains as one device does, skew costs rounds and no id, a failed step changes nothing."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from recommending import BATCH_AXES, TinyRecommender, batch_of, tiny_tables
from suite.selection import options_of_a_run

from panax.core import TrainState
from panax.core.errors import RecipeError
from panax.layers.tables.mixed_rows import unmix_rows
from panax.mesh import COMPUTE, STORAGE, MeshShape, Placement, Rules
from panax.optim import LazyAdam, RowOptimizer, RowWiseAdagrad, Schedule, Sgd
from panax.parallel import row_exchange
from panax.testing import check_task
from panax.train import CompiledStep, Program, evaluate_all
from panax.train.debug import DebugStep
from panax.train.update import StepConfig

STEPS = 3
ADAGRAD = RowWiseAdagrad(schedule=Schedule(peak=0.1, decay="constant"), weight_decay=0.01)
ADAM = LazyAdam(schedule=Schedule(peak=0.1, decay="constant"))
COPIED = {"row": ("fsdp",), "row_of_columns": ("fsdp",)}
COPIES = Rules(storage={**STORAGE, **COPIED}, compute={**COMPUTE, **COPIED})
COLUMNS = tuple({"user": "columns", "item": "columns"}.items())
EVERYWHERE = tuple({"item": "everywhere"}.items())


def compiled(
    mesh: MeshShape | None,
    devices: int,
    placements: tuple[tuple[str, Any], ...] = (),
    rules: Rules | None = None,
    optimizer: RowOptimizer = ADAGRAD,
    **config: Any,
) -> CompiledStep:
    task = TinyRecommender(tables=tiny_tables(**dict(placements)))
    program = Program.create(
        task,
        Sgd(schedule=Schedule(peak=0.1)),
        num_steps=10,
        embedding_optimizer=optimizer,
        config=StepConfig(clip_norm=0.1, **config),
    )
    return CompiledStep(program, Placement.create(mesh, rules, devices=jax.devices()[:devices]), BATCH_AXES)


def trained(step: Any, batches: Any) -> tuple[TrainState, list[float]]:
    state, losses = step.init(0), []
    for batch in batches:
        state, scalars = step(state, step.put(batch))
        losses += [float(scalars["loss"]), float(scalars["gradient_norm"])]
    return jax.device_get(state), losses


@functools.cache
def alone(placements: tuple[tuple[str, Any], ...], adam: bool) -> tuple[TrainState, list[float]]:
    return trained(compiled(None, 1, placements, optimizer=ADAM if adam else ADAGRAD), map(batch_of, range(STEPS)))


def assert_same(state: TrainState, other: TrainState, tolerance: float = 2e-6) -> None:
    for name in ("params", "tables"):
        for one, two in zip(jax.tree.leaves(getattr(state, name)), jax.tree.leaves(getattr(other, name))):
            np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


CASES: dict[str, tuple[dict[str, int], tuple, Rules | None, bool, int]] = {
    "rows, shared out": ({"replica": 2, "fsdp": 2, "tensor": 2}, (), None, False, 2),
    "columns": ({"fsdp": 4, "tensor": 2}, COLUMNS, None, False, 1),
}
SLOW: dict[str, tuple[dict[str, int], tuple, Rules | None, bool, int]] = {
    "rows": ({"fsdp": 8}, (), None, True, 1),
    "copies": ({"replica": 2, "fsdp": 4}, (), COPIES, True, 1),
    "three axes": ({"fsdp": 2, "expert": 2, "tensor": 2}, (), None, False, 1),
    "columns, adam": ({"fsdp": 4, "tensor": 2}, COLUMNS, None, True, 1),
    "columns alone": ({"tensor": 8}, COLUMNS, None, False, 1),
    "columns, copies": ({"replica": 2, "fsdp": 2, "tensor": 2}, COLUMNS, COPIES, False, 2),
    "copies alike": ({"fsdp": 4, "tensor": 2}, (), COPIES, False, 1),
    "everywhere": ({"replica": 4, "tensor": 2}, EVERYWHERE, None, True, 1),
}


@pytest.mark.parametrize(
    ("mesh", "placements", "rules", "adam", "parts"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_a_layout_trains_as_one_device_does(mesh, placements, rules, adam, parts):
    step = compiled(MeshShape(**mesh), 8, placements, rules, ADAM if adam else ADAGRAD, micro_batches=parts)
    state, losses = trained(step, map(batch_of, range(STEPS)))
    expected, expected_losses = alone(placements, adam)
    if parts > 1:
        held_out = evaluate_all(step, jax.device_put(state, step.shardings), [batch_of(9)])["loss"]
        one = compiled(None, 1, placements, rules)
        assert held_out == pytest.approx(evaluate_all(one, expected, [batch_of(9)])["loss"], rel=1e-5)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same(state, expected, 2e-4 if adam else 2e-6)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"fsdp": 7}, id="seven"),
        pytest.param({"fsdp": 2, "tensor": 3}, id="six", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_has_lost_a_host_trains_as_one_device_does(mesh):
    """Of 8 devices, 7 or 6 are left: rows are dealt out to a multiple of these."""
    small = tiny_tables()
    tables = tuple(dataclasses.replace(each, rows=each.rows * 440) if each.rows > 7 else each for each in small.tables)
    task = TinyRecommender(tables=dataclasses.replace(small, tables=tables))
    (large, _) = task.tables.stacks
    assert large.rows % 7 == large.rows % 6 == 0
    program = Program.create(
        task,
        Sgd(schedule=Schedule(peak=0.1)),
        num_steps=10,
        embedding_optimizer=ADAGRAD,
        config=StepConfig(clip_norm=0.1),
    )

    def on(mesh: MeshShape | None, devices: int) -> CompiledStep:
        return CompiledStep(program, Placement.create(mesh, devices=jax.devices()[:devices]), BATCH_AXES)

    batches = [{name: leaf[:14] for name, leaf in batch_of(seed).items()} for seed in range(STEPS)]
    state, losses = trained(on(MeshShape(**mesh), math.prod(mesh.values())), batches)
    expected, expected_losses = trained(on(None, 1), batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same(state, expected)


def skewed(owner_rows: int, seed: int) -> dict[str, np.ndarray]:
    """All ids of a batch are rows of the first of eight devices, and no two are alike."""
    (large, _) = tiny_tables().stacks
    place = np.random.default_rng(seed).permutation(large.rows // 8)[:owner_rows]
    row = np.asarray(unmix_rows(jax.numpy.asarray(place, jax.numpy.int32), large.rows, large.blocks))
    users, items = row[row < 300], row[(row >= 300) & (row < 1300)] - 300
    batch = batch_of(seed)
    batch["user"] = np.resize(users, (16, 1)).astype(np.int32)
    batch["seen"] = np.resize(items, (16, 5)).astype(np.int32)
    batch["bought"] = np.resize(items[::-1], (16, 3)).astype(np.int32)
    return batch


def test_ids_that_all_meet_at_one_device_cost_rounds_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(row_exchange, "SPARE", 0.5)
    batches = [skewed(160, seed) for seed in range(2)]
    step = compiled(MeshShape(fsdp=8), 8)
    state, losses = trained(step, batches)
    expected, expected_losses = trained(compiled(None, 1), batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same(state, expected)
    # Each device has 18 ids of two examples, all of one owner, which takes in few of each device at a time.
    num_requested = 18
    ids = {name: batches[0][name][:2] for name in ("user", "seen", "bought")}
    distinct = sum(len(np.unique(x)) for x in (ids["user"], np.concatenate([ids["seen"], ids["bought"]], axis=1)))
    assert distinct > 4 * -(-int(0.5 * num_requested) // 8)
    tables = np.asarray(state.params.tables.stacks[0].table)
    first = np.asarray(jax.device_get(step.init(0)).params.tables.stacks[0].table)
    assert (tables[len(tables) // 8 :] == first[len(tables) // 8 :]).all()


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 8}, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_leaves_tables_bitwise_as_they_were(mesh):
    step = compiled(None if mesh is None else MeshShape(**mesh), 1 if mesh is None else 8)
    state, _ = step(step.init(0), step.put(batch_of(0)))
    before = jax.device_get((state.params, state.tables))
    bad = batch_of(1)
    full = int((bad["bought"] >= 0).sum(axis=1).argmax())
    assert (bad["bought"][full] >= 0).any()
    bad["spent"][full] = np.nan
    state, scalars = step(state, step.put(bad))
    assert int(scalars["skipped"]) == 1
    after = jax.device_get((state.params, state.tables))
    for one, two in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        assert one.tobytes() == two.tobytes()


def test_bags_that_are_all_empty_teach_nothing_of_tables():
    step = compiled(None, 1)
    state = step.init(0)
    before = jax.device_get(state.params)
    empty = batch_of(0) | {
        "user": np.full((16, 1), -1, np.int32),
        "seen": np.full((16, 5), -1, np.int32),
        "bought": np.full((16, 3), -1, np.int32),
        "day": np.full((16, 2), -1, np.int32),
    }
    state, scalars = step(state, step.put(empty))
    after = jax.device_get(state.params)
    assert int(scalars["skipped"]) == 0 and np.isfinite(float(scalars["loss"]))
    for one, two in zip(jax.tree.leaves(before.tables), jax.tree.leaves(after.tables)):
        assert one.tobytes() == two.tobytes()


ALLOWED = {"parameter", "get-tuple-element", "scatter", "gather", "bitcast", "tuple"}


def of_size(text: str, shape: str) -> set[str]:
    """Which operations of a compiled program give an array of a shape; a fusion counts as what it computes last."""
    shapes, roots, name = set(), {}, ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
        name = head.group(1) if head else name
        one = re.match(r"\s+(ROOT )?%\S+ = (\S+?)(?:\{[\d,]*\S*)? ([\w-]+)\(", line)
        if one is None or one.group(2) != shape:
            continue
        if one.group(1):
            roots[name] = one.group(3)
        called = re.search(r"calls=%([\w.-]+)", line)
        shapes.add(roots[called.group(1)] if one.group(3) == "fusion" and called else one.group(3))
    return shapes


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow)])
def test_nothing_of_a_tables_size_is_made(mesh):
    step = compiled(None if mesh is None else MeshShape(**mesh), 1 if mesh is None else 8)
    program = step.lower(step.put(batch_of(0))).compile(options_of_a_run())
    rows = step.program.abstract.params.tables.stacks[0].table.shape[0] // (1 if mesh is None else 8)
    text = program.as_text()
    operations = of_size(text, f"f32[{rows},8]") | of_size(text, f"f32[{rows}]")
    assert "scatter" in operations and operations <= ALLOWED
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes - sum(x.nbytes for x in batch_of(0).values())
    assert memory.alias_size_in_bytes > 0.99 * held - 2048


def test_what_tables_can_not_be_trained_by_is_refused():
    class WholeArrays(TinyRecommender):
        names_axes = False

    program = Program.create(WholeArrays(), Sgd(), num_steps=1)
    with pytest.raises(RecipeError, match="XLA would gather the whole table"):
        CompiledStep(program, Placement.create(MeshShape(fsdp=8)), BATCH_AXES)

    class Forgets(TinyRecommender):
        def row_ids(self, batch: Any) -> Any:
            return {"tables.stacks.0.table": self.tables.row_ids(batch)["tables.stacks.0.table"]}

    step = CompiledStep(
        Program.create(Forgets(), Sgd(), num_steps=1), Placement.create(devices=jax.devices()[:1]), BATCH_AXES
    )
    with pytest.raises(RecipeError, match=r"the table 'tables\.stacks\.1\.table' that no feature uses"):
        step.get_compiled(step.put(batch_of(0)))


@pytest.mark.slow
def test_the_debugger_takes_the_same_steps():
    program = Program.create(TinyRecommender(), Sgd(schedule=Schedule(peak=0.1)), num_steps=10)
    debugged = DebugStep(program, BATCH_AXES)
    compiled_step = CompiledStep(program, Placement.create(devices=jax.devices()[:1]), BATCH_AXES)
    (state, losses), (expected, expected_losses) = (
        trained(step, [batch_of(0, rows=4)]) for step in (debugged, compiled_step)
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same(state, expected)


@pytest.mark.slow
def test_the_contract_of_layouts_holds_for_tables():
    report = check_task(
        TinyRecommender(), batch_of(0), axes=BATCH_AXES, layouts=[{"fsdp": 2, "tensor": 2, "replica": 2}]
    )
    assert report.compared == ("fsdp=2 · tensor=2 · replica=2",)
