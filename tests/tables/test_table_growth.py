"""Tables with rows that are assigned to keys: as by a written-out vocabulary, on every layout, and kept by checkpoints."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import growing_worker
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import OPTIMIZER, ROWS, WAYS, Grower, growing_tables, key_of, keyed_batch, step_of
from launching import run_job
from recommending import batch_of
from suite.selection import options_of_a_run

from panax.checkpoint import Checkpointer, restore
from panax.core import TrainState, named_leaves
from panax.core.errors import RecipeError
from panax.layers import FeatureConfig, Growth, TableConfig, TablesConfig
from panax.mesh import Placement
from panax.models import TwoTowerConfig, TwoTowerTask, item_vectors
from panax.optim import Schedule, Sgd
from panax.parallel.vocabulary import assign_blocks
from panax.train import CompiledStep, Program, evaluate_all
from panax.train.debug import DebugStep
from panax.train.table_growth import init_rows

STEPS = 6
NO_PASS = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion"}
"""Instructions that name a whole table and go over none: those of gathers are named by what they give, which is smaller."""


def trained(step: CompiledStep, first: int = 0, last: int = STEPS, state: Any = None) -> tuple[TrainState, list[Any]]:
    state, found = step.init(0) if state is None else state, []
    for seed in range(first, last):
        state, scalars = step(state, step.put(keyed_batch(seed)))
        found.append({name: float(value) for name, value in scalars.items() if name.startswith("vocabulary/")})
        assert int(scalars["skipped"]) == 0
    return jax.device_get(state), found


def written_out(growth: Growth, batches: list[dict[str, np.ndarray]]) -> tuple[dict[int, int], list[dict[str, int]]]:
    """Row of each key at the end, and each step's counts, by a dictionary for each block."""
    blocks: list[list[tuple[int, int]]] = [[(0, -1)] * growth.ways for _ in range(ROWS // growth.ways)]
    counts = []
    for step, batch in enumerate(batches):
        words = np.concatenate([batch[leaf].reshape(-1, 2) for leaf in ("seen", "bought")])
        words = np.unique(words[(words != 0).any(1)], axis=0)
        where = np.asarray(assign_blocks(jnp.asarray(words), len(blocks)))
        keys = [(int(low) | int(high) << 32) for low, high in words]
        for key, block in zip(keys, where):
            blocks[block] = [
                (key, step) if key == owner else (owner, last_request) for owner, last_request in blocks[block]
            ]
        assigned = evicted = crowded = 0
        for key, block in sorted(zip(keys, where)):
            rows = blocks[block]
            if any(owner == key for owner, _ in rows):
                continue
            idle = [
                way
                for way, (_, last_request) in enumerate(rows)
                if last_request < 0 or step - last_request > growth.idle_steps
            ]
            if not idle:
                crowded += 1
                continue
            way = min(idle, key=lambda way: rows[way][1])
            evicted += rows[way][1] >= 0
            assigned += 1
            rows[way] = key, step
        counts.append({"given": assigned, "taken": evicted, "crowded": crowded})
    places = {key: b * growth.ways + way for b, rows in enumerate(blocks) for way, (key, _) in enumerate(rows) if key}
    return places, counts


def vocabulary(state: TrainState) -> dict[str, np.ndarray]:
    return state.model_state["item"]


@pytest.fixture(scope="module")
def alone() -> tuple[TrainState, list[Any]]:
    return trained(step_of(None, 1))


def test_rows_are_given_out_as_a_written_out_vocabulary_states(alone):
    state, actual = alone
    places, counts = written_out(Growth(ways=WAYS), [keyed_batch(seed) for seed in range(STEPS)])
    for told, expected in zip(actual, counts):
        assert told == {f"vocabulary/item/{name}": value for name, value in expected.items()}
    # The data reach every case.
    assert all(sum(each[name] for each in counts) > 0 for name in ("given", "taken", "crowded"))
    keys = vocabulary(state)["keys"].astype(np.uint64)
    owned = keys[:, 0] | keys[:, 1] << np.uint64(32)
    assert {int(key): row for row, key in enumerate(owned) if key} == places


@pytest.mark.parametrize(
    ("mesh", "micro"),
    [
        ({"replica": 2, "fsdp": 2, "tensor": 2}, 2),
        pytest.param({"fsdp": 8}, 1, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
    ],
)
def test_layouts_give_out_the_same_rows_and_train_like_one_device(alone, mesh, micro):
    state, found = trained(step_of(mesh, 8, micro=micro))
    assert found == alone[1]
    for name in ("keys", "asked"):
        np.testing.assert_array_equal(vocabulary(state)[name], vocabulary(alone[0])[name])
    for one, two in zip(
        jax.tree.leaves((state.params, state.tables)), jax.tree.leaves((alone[0].params, alone[0].tables))
    ):
        np.testing.assert_allclose(one, two, rtol=0, atol=2e-6)


def test_a_row_that_is_taken_begins_again_and_no_other_changes(alone):
    step = step_of(None, 1)
    (each,), batch = step.program.task.growing, step.put(keyed_batch(STEPS))
    before = jax.device_put(alone[0], step.shardings)
    assert step.program.growing is not None
    after, numbers, _, counts, _ = step.program.growing.assign_rows(before, batch, step.batch_axes)
    assigned = np.asarray(after.model_state["item"]["asked"]) == STEPS
    assigned &= (np.asarray(after.model_state["item"]["keys"]) != vocabulary(before)["keys"]).any(axis=1)
    assert assigned.sum() == int(counts["vocabulary/item/given"]) > int(counts["vocabulary/item/taken"]) - 1 > 4
    first = init_rows(after.model_state["item"]["keys"], 8, jax.random.bits(before.key, (), np.uint32), each.scale)
    tables = [np.asarray(named_leaves(state.params)[each.table]) for state in (before, after)]
    np.testing.assert_array_equal(tables[1], np.where(assigned[:, None], first, tables[0]))
    sums = [np.asarray((state.tables or {})[each.table]["sum"]) for state in (before, after)]
    np.testing.assert_array_equal(sums[1], np.where(assigned, 0, sums[0]))
    assert (sums[0][assigned] > 0).any() and 0.5 < np.abs(first).max() / each.scale < 1
    assert (numbers["seen"] >= 0).sum() == (batch["seen"] != 0).any(axis=-1).sum()


@pytest.mark.parametrize(
    ("mesh", "micro"), [(None, 1), pytest.param({"replica": 2, "fsdp": 2, "tensor": 2}, 2, marks=pytest.mark.slow)]
)
def test_a_step_that_is_skipped_gives_out_nothing(alone, mesh, micro):
    step = step_of(mesh, 8 if mesh else 1, micro=micro)
    bad = keyed_batch(STEPS)
    bad["spent"] = np.full_like(bad["spent"], np.nan)
    # Without it the batch brings keys that take others' rows, and asks for keys that have one.
    assert alone[1][-1]["vocabulary/item/taken"] > 4
    # A copy: a step writes into what it is given.
    before = jax.tree.map(jnp.array, jax.device_put(alone[0], step.shardings))
    snapshot = jax.device_get(jax.tree.map(jnp.array, before))
    after, scalars = step(before, step.put(bad))
    assert int(scalars["skipped"]) == 1
    assert [int(scalars[f"vocabulary/item/{name}"]) for name in ("given", "taken", "crowded")] == [0, 0, 0]
    for name in ("params", "tables", "model_state", "optimizer_state"):
        for one, two in zip(
            jax.tree.leaves(getattr(snapshot, name)), jax.tree.leaves(getattr(after, name)), strict=True
        ):
            np.testing.assert_array_equal(one, two, err_msg=name)
    # The next one gives rows out as if that batch had not been.
    after, scalars = step(after, step.put(keyed_batch(STEPS)))
    assert int(scalars["skipped_in_a_row"]) == 0
    assert int(scalars["vocabulary/item/given"]) >= int(scalars["vocabulary/item/taken"]) > 4
    wanted, _ = step(jax.device_put(snapshot, step.shardings), step.put(keyed_batch(STEPS)))
    np.testing.assert_array_equal(vocabulary(after)["keys"], vocabulary(wanted)["keys"])


def test_a_checkpoint_keeps_the_vocabulary_and_any_mesh_takes_it(tmp_path, alone):
    step = step_of({"fsdp": 4}, 4)
    half, _ = trained(step, 0, 3)
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(jax.device_put(half, step.shardings), 3, {"data": None})
    checkpointer.finish()
    other = step_of({"fsdp": 2, "tensor": 2}, 4)
    restored = restore(next(Checkpointer(str(tmp_path)).newest_first()), other.program.abstract, other.shardings)
    state, _ = trained(other, 3, STEPS, restored)
    for name in ("keys", "asked"):
        np.testing.assert_array_equal(vocabulary(state)[name], vocabulary(alone[0])[name])


def test_evaluations_give_no_rows_and_read_zeros_for_strangers(alone):
    step = step_of(None, 1)
    state = jax.device_put(alone[0], step.shardings)
    strangers = {
        **keyed_batch(0),
        **{leaf: key_of(np.full((16, n), 12345)) for leaf, n in (("seen", 5), ("bought", 3))},
    }
    nobody = {**strangers, **{leaf: np.zeros_like(strangers[leaf]) for leaf in ("seen", "bought")}}
    results = [evaluate_all(step, state, [step.put(batch)]) for batch in (strangers, nobody)]
    assert results[0] == results[1]
    known = evaluate_all(step, state, [step.put({**strangers, "seen": keyed_batch(STEPS - 1)["seen"]})])
    assert known != results[0]
    np.testing.assert_array_equal(vocabulary(state)["asked"], vocabulary(alone[0])["asked"])


def test_who_is_not_idle_keeps_its_row():
    task = Grower(tables=growing_tables(Growth(ways=WAYS, idle_steps=2), placement="rows"))
    _, found = trained(step_of(None, 1, task))
    _, counts = written_out(Growth(ways=WAYS, idle_steps=2), [keyed_batch(seed) for seed in range(STEPS)])
    assert found == [{f"vocabulary/item/{name}": n for name, n in each.items()} for each in counts]


@pytest.mark.slow
def test_a_small_table_lies_on_every_device(alone):
    task = Grower(tables=growing_tables(placement="everywhere"))
    state, found = trained(step_of({"fsdp": 8}, 8, task))
    assert found == alone[1]
    np.testing.assert_array_equal(vocabulary(state)["keys"], vocabulary(alone[0])["keys"])


def test_no_instruction_is_of_the_tables_size_but_gathers_and_scatters():
    big = dataclasses.replace(growing_tables(placement="rows").tables[1], rows=2**20)
    tables = growing_tables()
    task = Grower(tables=dataclasses.replace(tables, tables=(tables.tables[0], big, tables.tables[2])))
    (rows,) = (plan.rows for plan in task.tables.stacks if plan.rows >= 2**20)
    step = step_of(None, 1, task, micro=2)
    text = step.lower(keyed_batch(0)).compile(options_of_a_run()).as_text()
    # Also as blocks of ways.
    kinds = re.findall(rf"= \w+\[(?:{rows}|{rows // WAYS},{WAYS})[,\]]\S* ([\w-]+)\(", text)
    assert "scatter" in kinds and not set(kinds) - NO_PASS, set(kinds)


def test_mistakes_are_reported():
    feature = (FeatureConfig(leaf="item"),)
    with pytest.raises(RecipeError, match=r"ways=6; expected a power of two"):
        Growth(ways=6)
    with pytest.raises(
        RecipeError, match=r"the table 'item' grows, and has rows=0; expected the most rows that it may have"
    ):
        TableConfig(name="item", rows=0, width=8, features=feature, growth=Growth())
    with pytest.raises(RecipeError, match=r"the table 'item' grows, and has placement=\"columns\""):
        TableConfig(name="item", rows=64, width=8, features=feature, growth=Growth(), placement="columns")
    step = step_of(None, 1)
    with pytest.raises(
        RecipeError, match=r"the batch leaf 'seen' is int32 .*; expected keys for the vocabulary 'item'"
    ):
        step(step.init(0), step.put({**keyed_batch(0), "seen": batch_of(0)["seen"][..., None]}))


@pytest.mark.slow
def test_two_processes_give_out_the_same_rows_bit_by_bit(tmp_path: Path):
    found = run_job(
        tmp_path, growing_worker.__file__, [json.dumps({"fsdp": 8}), "4"], processes=2, devices=4, seconds=180
    )
    assert found[0] == found[1] == growing_worker.digests({"fsdp": 8}, 4)


def test_two_towers_grow_and_report_the_vectors_of_a_catalogue():
    def tower(name: str) -> TablesConfig:
        feature = FeatureConfig(leaf=name)
        return TablesConfig(tables=(TableConfig(name=name, rows=64, width=4, features=(feature,), growth=Growth()),))

    task = TwoTowerTask(model=TwoTowerConfig(query=tower("user"), item=tower("film"), hidden=(8,), width=4))
    program = Program.create(task, Sgd(schedule=Schedule(peak=0.1)), num_steps=10, embedding_optimizer=OPTIMIZER)
    step = CompiledStep(program, Placement.create(None, devices=jax.devices()[:1]), task.batch_axes)
    batch = {leaf: key_of(np.arange(8)[:, None]) for leaf in ("user", "film")} | {"loss_mask": np.ones(8, np.float32)}
    state, scalars = step(step.init(0), step.put(batch))
    assert float(scalars["vocabulary/film/given"]) == float(scalars["vocabulary/user/given"]) == 8
    twice = TwoTowerConfig(query=tower("user"), item=dataclasses.replace(tower("film"), tables=(
        dataclasses.replace(tower("film").tables[0], name="user"),
    )), hidden=(8,), width=4)  # fmt: skip
    with pytest.raises(RecipeError, match="two tables of TwoTowerTask have the vocabulary 'user'"):
        Program.create(TwoTowerTask(model=twice), Sgd(), num_steps=10)
    catalog = [{"film": key_of(np.arange(9)[:, None])}]
    vectors = item_vectors(task, state.params, catalog, state.model_state)
    nobody = item_vectors(task, state.params, [{"film": np.zeros((1, 1, 2), np.uint32)}], state.model_state)
    assert len({tuple(each) for each in vectors.tolist()}) == 9
    # Of nine rows and of one row products add up in other orders: five units in the last place of vectors of length 1.
    np.testing.assert_allclose(vectors[8], nobody[0], atol=5 * 2.0**-24)
    with pytest.raises(RecipeError, match="the table 'film' grows, but its vocabulary is missing"):
        item_vectors(task, state.params, catalog)


@pytest.mark.slow
def test_the_debugger_gives_out_the_same_rows():
    step = step_of(None, 1)
    debugged = DebugStep(step.program, step.batch_axes)
    state, other = debugged.init(0), step.init(0)
    for seed in range(2):
        batch = keyed_batch(seed)
        state, scalars = debugged(state, debugged.put(batch))
        other, expected = step(other, step.put(batch))
        assert float(scalars["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    np.testing.assert_array_equal(vocabulary(state)["keys"], vocabulary(other)["keys"])
