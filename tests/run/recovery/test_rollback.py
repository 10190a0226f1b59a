"""A run goes back from updates that can't be applied, and ends bitwise as one that left their batches out from its beginning."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rollback_run import Points, experiment

import panax
from panax.checkpoint import CheckpointConfig, Checkpointer, MemoryConfig, MemoryTier
from panax.checkpoint import checkpointer as checkpointer_module
from panax.core import CheckpointError, DataError, RecipeError, SourcedBatch, TrainingError, named_leaves
from panax.data import IterableSource
from panax.hooks import Hook
from panax.metrics import Peak
from panax.metrics.goodput import read_life
from panax.metrics.report.incidents import list_incidents
from panax.metrics.report.run_files import read_run
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, RollbackConfig
from panax.run.feed import PREFETCH_BATCHES
from panax.run.recovery import rollback
from panax.run.recovery.skipped_batches import (
    FILE,
    FORMER_FILE,
    DataProgress,
    Rollback,
    read_rollbacks,
    write_rollbacks,
)
from panax.run.reporting.report import RunReporter
from panax.stores import open_store


@pytest.fixture(autouse=True)
def peak(monkeypatch):
    """No product is measured, which takes longer than all the rest."""
    monkeypatch.setattr("panax.run.reporting.report.measure_peak", lambda prepared: Peak(1e9, "a test"))


def fit(*arguments, devices=1, **settings):
    return panax.fit(*arguments, devices=jax.devices()[:devices], **settings)


def leaves(state):
    return {
        name: np.asarray(jax.random.key_data(leaf) if name == "key" else leaf)
        for name, leaf in named_leaves(state).items()
    }


def assert_same(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


class Counted(Hook):
    """Keeps the steps it has seen."""

    def __init__(self):
        self.restored = []

    def after_step(self, run):
        self.seen.append(run.step)

    def state(self):
        return list(self.seen)

    def restore(self, state):
        self.restored.append(state)
        self.seen = list(state or [])


@dataclasses.dataclass(frozen=True)
class Finite(Points):
    """Three batches."""

    def batches(self, position=None):
        return itertools.islice(super().batches(position), 3)


@dataclasses.dataclass(frozen=True)
class Counting(Points):
    """Records which batches were drawn."""

    drawn: list = dataclasses.field(default_factory=list, metadata={"saved": False})

    def batches(self, position=None):
        for found in super().batches(position):
            self.drawn.append(found.position["next"] - 1)
            yield found


@dataclasses.dataclass(frozen=True)
class Restarted(Points):
    """Data of another kind: the positions of others mean nothing to it."""

    def batches(self, position=None):
        if position is not None and "mine" not in position:
            raise DataError("this is a position of other data")
        return self._given(position)

    def _given(self, position):
        for found in super().batches(position):
            yield SourcedBatch(found.batch, {**found.position, "mine": True})


def rows(folder) -> list[dict]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "at"} for line in lines]


def rollbacks_of(folder) -> list[dict]:
    path = Path(folder) / "rollbacks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder) -> list[int]:
    return Checkpointer(Path(folder) / "checkpoints").steps()


def ran(folder, tmp_path, *, left_out, devices=1, **settings):
    """A run to its end, which is that of one that has to leave these batches out; the messages, and its rollbacks."""
    lines: list[str] = []
    result = fit(experiment(folder, **settings), say=lines.append, devices=devices)
    told = fit(experiment(tmp_path / "told", **settings, skip_batches=left_out), quiet=True, devices=devices)
    assert not rollbacks_of(tmp_path / "told")
    assert_same(result.state, told.state)
    found = rollbacks_of(folder)
    assert sorted(number for each in found for number in each["batches"]) == sorted(left_out)
    return result, lines, found


def test_a_run_goes_back_and_ends_as_if_it_had_left_the_batches_out(tmp_path):
    result, lines, (rollback,) = ran(tmp_path / "run", tmp_path, left_out=(8, 9, 10), bad=(8, 9, 10), devices=8)
    assert int(result.state.guard.skipped) == 0 and result.step == 20
    assert (rollback["step"], rollback["to"]) == (10, 5) and rollback["source"].endswith("step_00000005")
    assert any("returns to step 5" in line and "skips batches 8 to 10" in line for line in lines), lines
    assert steps_of(tmp_path / "run") == [15, 20]


@pytest.mark.parametrize(
    ("bad", "left_out", "went_back_to"),
    [
        pytest.param((1, 2), (1, 2), [0], marks=pytest.mark.slow),
        pytest.param((19, 20), (19, 20), [15], marks=pytest.mark.slow),
        pytest.param((10, 11), (10, 11), [5], marks=pytest.mark.slow),
        pytest.param((9, 10), (9, 10), [5], marks=pytest.mark.slow),
        pytest.param((4, 5, 16, 17), (4, 5, 16, 17), [0, 10], marks=pytest.mark.slow),
        pytest.param((8, 9, 12, 13), (8, 9, 12, 13), [5, 5], marks=pytest.mark.slow),
        # On the heels of the first rollback: one checkpoint further, without any batch since.
        (range(13, 18), tuple(range(6, 18)), [10, 5]),
        pytest.param(range(8, 13), tuple(range(6, 13)), [5, 5], marks=pytest.mark.slow),
        # A single one is left to the step's guard.
        pytest.param((8, 14), (), [], marks=pytest.mark.slow),
    ],
    ids=["first", "last", "at a save", "before a save", "far apart", "near", "heels", "heels of the first", "single"],
)
def test_where_the_bad_batches_are(tmp_path, bad, left_out, went_back_to):
    _, _, rollbacks = ran(tmp_path / "run", tmp_path, left_out=left_out, bad=bad)
    assert [rollback["to"] for rollback in rollbacks] == went_back_to
    assert steps_of(tmp_path / "run") == [15, 20]


def test_a_spike_and_the_hooks_and_evaluations_of_what_was_left(tmp_path):
    result, _, (rollback,) = ran(
        tmp_path / "run", tmp_path, left_out=(9, 10), huge=(9, 10), every=4,
        hooks=(Counted(),), held_out=Finite(), evaluate=EvaluateConfig(every=5),
    )  # fmt: skip
    assert rollback["to"] == 8
    (hook,) = result.prepared.experiment.hooks
    assert hook.seen == list(range(1, 21)) and hook.restored == [None, list(range(1, 9)), None]
    assert {line["step"] for line in rows(tmp_path / "run") if "evaluation/loss" in line} == {5, 10, 15, 20}


def test_everything_bad_ends_within_the_limit(tmp_path):
    source = Counting(tuple(range(1, 1000)))
    with pytest.raises(TrainingError, match=r"6 updates in a row .* rollback.max_rollbacks=2 rollbacks are used up"):
        fit(experiment(tmp_path / "run", most=2, data=source), quiet=True)
    # Three each time, one of which was under way, and six in the end; and a few more were drawn ahead each time.
    assert [each["batches"] for each in rollbacks_of(tmp_path / "run")] == [[1, 2, 3], [4, 5, 6]]
    assert max(source.drawn) <= 6 + 6 + 1 + 2 * PREFETCH_BATCHES
    with pytest.raises(TrainingError, match=r"--rollback.after 3 would go back"):
        fit(experiment(tmp_path / "never", after=0, data=source), quiet=True)


@pytest.mark.slow
def test_a_save_is_under_way(tmp_path, monkeypatch):
    def slow(*arguments, write=checkpointer_module.write_part, **more):
        time.sleep(0.2)
        return write(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, "write_part", slow)
        result = fit(experiment(tmp_path / "run", bad=(4, 5), every=1, steps=6), quiet=True)
    assert [each["to"] for each in rollbacks_of(tmp_path / "run")] == [3]
    told = fit(experiment(tmp_path / "told", bad=(4, 5), every=1, steps=6, skip_batches=(4, 5)), quiet=True)
    assert_same(result.state, told.state)
    assert steps_of(tmp_path / "run") == [5, 6]


class Killed(BaseException):
    """In place of a signal."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The state of a run that has to leave out 13 to 17, and, as rollbacks end, what is between them and step 5."""
    folder = tmp_path_factory.mktemp("told")
    return fit(experiment(folder, bad=range(13, 18), skip_batches=tuple(range(6, 18))), quiet=True).state


@pytest.mark.parametrize(
    ("where", "name", "number"),
    [
        pytest.param(rollback, "write_rollbacks", 1, marks=pytest.mark.slow),
        pytest.param(rollback, "write_rollbacks", 2, marks=pytest.mark.slow),
        (Checkpointer, "remove_abandoned", 2),
        pytest.param(checkpointer_module, "remove", 1, marks=pytest.mark.slow),
        pytest.param(RunReporter, "record_rollback", 2, marks=pytest.mark.slow),
        pytest.param(RunReporter, "record_rollback", 1, marks=pytest.mark.slow),
    ],
    ids=[
        "nothing on record",
        "nothing on record of the second",
        "on record",
        "removing",
        "removed",
        "removed the first",
    ],
)
def test_killed_while_going_back(tmp_path, monkeypatch, told, where, name, number):
    folder, calls, original = tmp_path / "run", [], getattr(where, name)

    def killed(*arguments, **more):
        calls.append(None)
        if name == "remove" or len(calls) == number:
            raise Killed
        return original(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        with pytest.raises(Killed):
            fit(experiment(folder, bad=range(13, 18)), quiet=True)
    result = fit(experiment(folder, bad=range(13, 18)), quiet=True)
    assert_same(result.state, told)
    assert [each["to"] for each in rollbacks_of(folder)][-2:] == [10, 5] and steps_of(folder) == [15, 20]


def test_stopped_in_the_middle_and_resumed(tmp_path):
    class Stops(Hook):
        def after_step(self, run):
            if run.step == 9:
                run.stop("enough")

    folder = tmp_path / "run"
    settings = {"bad": (9, 10), "checkpoint": CheckpointConfig(every=8, keep_last=1, keep_best=0)}
    assert fit(experiment(folder, **settings, hooks=(Stops(),)), quiet=True).step == 9
    # The newest one is of a step whose update was skipped; the one before is kept for it.
    assert steps_of(folder) == [8, 9]
    result = fit(experiment(folder, **settings), quiet=True)
    (rollback,) = rollbacks_of(folder)
    assert (rollback["to"], rollback["batches"]) == (8, [9, 10]) and steps_of(folder) == [20]
    assert_same(result.state, fit(experiment(tmp_path / "told", **settings, skip_batches=(9, 10)), quiet=True).state)


@pytest.mark.slow
def test_the_checkpoint_that_it_would_go_back_to_is_gone(tmp_path):
    class Stops(Hook):
        def after_step(self, run):
            if run.step == 10:
                run.stop("enough")

    folder = tmp_path / "run"
    settings = {"bad": (9, 10, 11), "checkpoint": CheckpointConfig(every=5, keep_last=1, keep_best=0)}
    fit(experiment(folder, **settings, after=0, hooks=(Stops(),)), quiet=True)
    assert steps_of(folder) == [10]
    with pytest.raises(
        TrainingError, match=r"3 updates in a row .* a checkpoint of step 8 or before, and there is none"
    ):
        fit(experiment(folder, **settings, after=3), quiet=True)
    assert steps_of(folder) == [10] and not rollbacks_of(folder)


@pytest.mark.slow
def test_copies_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("PANAX_MEMORY", str(tmp_path / "memory"))
    memory = CheckpointConfig(every=5, memory=MemoryConfig(every=2, peers=False))
    settings = {"bad": (9, 10), "checkpoint": memory}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryTier, "forget", lambda tier, after: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            fit(experiment(tmp_path / "run", **settings), quiet=True)
    result = fit(experiment(tmp_path / "run", **settings), quiet=True)
    (rollback,) = rollbacks_of(tmp_path / "run")
    assert rollback["to"] == 8 and "memory" in rollback["source"]
    assert_same(result.state, fit(experiment(tmp_path / "told", bad=(9, 10), skip_batches=(9, 10)), quiet=True).state)


@pytest.mark.slow
def test_data_that_can_not_seek(tmp_path):
    batches = [item.batch for item, _ in zip(Points((9, 10)).batches(), range(24))]
    told = fit(experiment(tmp_path / "told", bad=(9, 10), skip_batches=(9, 10)), quiet=True)
    with pytest.warns(UserWarning, match="can't resume exactly"):
        result = fit(experiment(tmp_path / "list", data=batches), quiet=True)
    assert_same(result.state, told.state)
    # An iterator is used up: the run says so, and with a new one the same command goes on.
    with pytest.raises(DataError, match="already used up"), pytest.warns(UserWarning, match="can't resume exactly"):
        fit(experiment(tmp_path / "once", data=iter(batches)), quiet=True)
    with pytest.warns(UserWarning, match="can't resume exactly"):
        result = fit(experiment(tmp_path / "once", data=iter(batches)), quiet=True)
    assert_same(result.state, told.state)
    short = pytest.raises(DataError, match="ended after 18 of 20 steps, with 2 batches skipped")
    with short, pytest.warns(UserWarning, match="can't resume exactly"):
        fit(experiment(tmp_path / "short", data=IterableSource(batches[:20], epochs=1)), quiet=True)


def test_settings(tmp_path):
    with pytest.raises(RecipeError, match=r"rollback.after=6 has no effect: step.max_skipped=6"):
        experiment(tmp_path, after=6)
    with pytest.raises(RecipeError, match=r"rollback.max_rollbacks=0"):
        RollbackConfig(max_rollbacks=0)
    with pytest.raises(RecipeError, match=r"skip_batches=\(0,\); expected numbers from 1"):
        experiment(tmp_path, skip_batches=(0,))
    fit(experiment(tmp_path / "run", steps=5), quiet=True)
    with pytest.raises(CheckpointError, match="skip_batches"):
        fit(experiment(tmp_path / "run", skip_batches=(9,)), quiet=True)
    lines: list[str] = []
    fit(experiment(tmp_path / "run", steps=6, after=4, most=9), say=lines.append)
    assert not any("changed since" in line and "rollback" in line for line in lines)


def test_what_is_reported_of_it(tmp_path):
    folder = tmp_path / "run"
    fit(experiment(folder, bad=(8, 9), optimizer=AdamW(schedule=Schedule(peak=0.05, decay="constant"))), quiet=True)
    (rollback,) = rollbacks_of(folder)
    assert rollback["seconds"] > 0 and rollback["why"].startswith("2 updates in a row were not finite or spiked")
    (told,) = [line for line in rows(folder) if "rollback/count" in line]
    assert told == {"step": 5, "rollback/count": 1.0, "rollback/batches_left_out": 2.0}
    life = read_life(folder)
    first, second = life.sessions
    assert (first.end, first.last_step, first.lost_steps, second.first_step) == ("rolled back", 10, 5, 5)
    assert life.seconds["lost work"] > 0 and life.seconds["restart"] > 0 and first.restart_seconds > 0
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds, abs=0.01)
    (mishap,) = list_incidents(read_run(folder))
    assert (mishap.cause, mishap.step, mishap.lost_steps) == ("rollback", 10, 5)
    assert "batches 8, 9" in mishap.message or "batches 8 to 9" in mishap.message
    # With other data these numbers mean other batches.
    lines: list[str] = []
    changed = experiment(folder, steps=25, data=Restarted((1, 2)))
    result = fit(changed, accept_changes=True, say=lines.append)
    assert int(result.state.guard.skipped) == 0 and any("skips batches 1 to 2" in line for line in lines)
    assert [(each["data"], each["to"], each["batches"]) for each in rollbacks_of(folder)] == [
        (0, 5, [8, 9]),
        (1, 20, [1, 2]),
    ]
    assert steps_of(folder) == [20, 25]
    # With the same data as then, what the first rollback left out is of no matter; the second one holds.
    again = fit(dataclasses.replace(changed, num_steps=26), say=lines.append)
    assert again.step == 26 and lines[-1].startswith("goodput") and any("skip batches 1 to 2" in line for line in lines)


def test_a_record_of_version_0_1_1_is_read_and_the_present_one_has_precedence(tmp_path):
    store = open_store(str(tmp_path))
    back = [
        Rollback(at=1.0, step=10, to=5, source="memory", batches=(8, 9), why="not finite", data=0, seconds=1.0),
        Rollback(at=2.0, step=20, to=15, source="memory", batches=(18,), why="not finite", data=0, seconds=1.0),
    ]
    write_rollbacks(store, back[:1])
    present = tmp_path / FILE
    former = json.loads(present.read_text())
    former["rewinds"] = former.pop("rollbacks")
    (tmp_path / FORMER_FILE).write_text(json.dumps(former))
    present.unlink()
    assert read_rollbacks(store) == tuple(back[:1])
    write_rollbacks(store, back)
    assert read_rollbacks(store) == tuple(back)


@pytest.mark.slow
def test_a_record_that_was_changed_is_an_error(tmp_path):
    folder = tmp_path / "run"
    fit(experiment(folder, bad=(3, 4), steps=6), quiet=True)
    record = folder / "checkpoints" / "run" / "rollbacks.json"
    record.write_text(record.read_text().replace("[3, 4]", "[3, 5]"))
    with pytest.raises(CheckpointError, match=r"rollbacks.json can't be used: its checksum does not match"):
        fit(experiment(folder, steps=8), quiet=True)
    # Without it, what the checkpoints say holds.
    record.unlink()
    result = fit(experiment(folder, bad=(3, 4), steps=8), quiet=True)
    told = fit(experiment(tmp_path / "told", bad=(3, 4), steps=6, skip_batches=(3, 4)), quiet=True)
    assert told.step == 6 and result.step == 8
    said = result.prepared.experiment.folder
    assert DataProgress.from_manifest(Checkpointer(Path(said) / "checkpoints").open(8).manifest).skipped_batches == {
        3,
        4,
    }
