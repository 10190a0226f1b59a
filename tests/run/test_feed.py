"""Batches are drawn and sent while the step before runs, in their order, with their own positions and errors."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import threading
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_recipe

from panax import fit
from panax.core import SourcedBatch
from panax.core.errors import DataError
from panax.data import Mixture, MixtureComponent, TextFiles
from panax.metrics import Tracker
from panax.run.feed import PREFETCH_BATCHES, prefetch_to_device
from panax.train.batch_transfer import HeldRows

SECONDS = 20
"""Far more than anything here takes: it passes only where something waits for what never comes."""


def quiet(line: str) -> None:
    pass


class Numbers:
    """Batches 0, 1, 2, ...; `drawn` is called with each before it is given."""

    resume = "exact"

    def __init__(self, drawn=lambda number: None) -> None:
        self._drawn = drawn
        self.axes = {"x": ("batch",)}

    def batches(self, position=None):
        for number in itertools.count(0 if position is None else position["next"]):
            self._drawn(number)
            yield SourcedBatch({"x": np.full(4, number)}, {"next": number + 1})


class NumbersByRow(Numbers):
    batch_size = 4

    def batches_of(self, rows, position=None):
        return (SourcedBatch({"x": batch["x"][rows]}, after) for batch, after in self.batches(position))


class Recorded:
    """A step that sends nothing anywhere, and records the thread and the order of its batches."""

    def __init__(self, held: HeldRows | None = None) -> None:
        self.held = held
        self.put_events = [threading.Event() for _ in range(40)]
        self.threads: set[str] = set()
        self.parts: list[tuple[np.ndarray, HeldRows | None]] = []

    row_multiple = 1

    def held_rows(self, batch_size):
        return self.held

    def put(self, batch, held=None):
        self.threads.add(threading.current_thread().name)
        self.parts.append((batch["x"], held))
        self.put_events[int(batch["x"][0])].set()
        return dict(batch)


def test_batches_are_sent_while_a_step_runs_and_so_the_loop_never_waits():
    step = Recorded()
    with contextlib.closing(prefetch_to_device(Numbers(), step)) as batches:
        next(batches)
        for number in range(1, 20):
            # "Step number - 1" runs here, and does not end before the next two batches have been sent.
            for ahead in range(PREFETCH_BATCHES):
                assert step.put_events[number + ahead].wait(SECONDS)
            waited = batches.seconds_waited
            batch, position, _ = next(batches)
            assert batches.seconds_waited - waited < 1  # it was there
            assert batch["x"][0] == number and position == {"next": number + 1}
    assert step.threads == {"panax-prefetch"}


def test_no_more_than_two_batches_lie_ahead_of_the_one_in_use():
    drawn = []
    step = Recorded()
    with contextlib.closing(prefetch_to_device(Numbers(drawn.append), step)) as batches:
        for number in range(10):
            next(batches)
            assert step.put_events[number + PREFETCH_BATCHES].wait(SECONDS)
            assert max(drawn) <= number + PREFETCH_BATCHES


def test_a_slow_source_is_waited_for_and_the_wait_is_reported():
    may_draw = threading.Semaphore(0)
    with contextlib.closing(
        prefetch_to_device(Numbers(lambda number: may_draw.acquire(timeout=SECONDS)), Recorded())
    ) as batches:
        threading.Timer(0.1, may_draw.release, (50,)).start()
        next(batches)
        assert batches.seconds_waited > 0.05


def test_going_on_from_a_position_and_drawing_only_some():
    with contextlib.closing(prefetch_to_device(Numbers(), Recorded(), {"next": 7}, max_batches=3)) as batches:
        assert [(int(batch["x"][0]), number) for batch, _, number in batches] == [(7, 1), (8, 2), (9, 3)]


@pytest.mark.parametrize("source", [Numbers(), NumbersByRow()])
def test_batches_that_are_left_out_are_drawn_and_not_sent(source):
    step = Recorded(HeldRows(np.arange(4), 4) if isinstance(source, NumbersByRow) else None)
    with contextlib.closing(
        prefetch_to_device(source, step, {"next": 7}, max_batches=5, num_drawn=7, skipped={3, 8, 10, 12})
    ) as batches:
        found = [(int(batch["x"][0]), position["next"], number) for batch, position, number in batches]
    assert found == [(8, 9, 9), (10, 11, 11)] and not step.put_events[7].is_set()


@pytest.mark.parametrize("where", ["drawing", "sending"])
def test_an_error_comes_at_its_step_with_the_traceback_of_the_thread(where):
    def fail_at_third(number):
        if number == 3:
            raise DataError("line 3 is torn")

    step = Recorded()
    if where == "sending":
        step.put = lambda batch, held=None: fail_at_third(int(batch["x"][0])) or dict(batch)
    source = Numbers(fail_at_third) if where == "drawing" else Numbers()
    batches = prefetch_to_device(source, step)
    assert [int(next(batches).batch["x"][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="line 3 is torn") as caught:
        next(batches)
    assert "fail_at_third" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not batches._thread.is_alive()


def test_a_process_asks_for_the_rows_it_holds_where_the_source_can_make_them():
    held = HeldRows(np.array([1, 3]), 4)
    for source, rows, told in ((NumbersByRow(), 2, held), (Numbers(), 4, None)):
        step = Recorded(held)
        with contextlib.closing(prefetch_to_device(source, step, max_batches=2)) as batches:
            assert len(list(batches)) == 2
        assert [(len(part), with_) for part, with_ in step.parts] == [(rows, told)] * 2


class StopAt(Tracker):
    """Ends the run as Ctrl-C does, when a step is reported."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, step, values):
        if step == self.step and "train/loss" in values:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_on_a_mixture_continues_bitwise(experiment):
    def part(name, pattern, **settings):
        corpus = TextFiles(paths=(tiny_recipe.FOLDER,), pattern=pattern)
        return MixtureComponent(name=name, corpus=corpus, **settings)

    mixture = Mixture(parts=(part("all", "*.py"), part("scanner", "*c*.py", weight=((0, 0.1), (20, 1.0)), epochs=4.0)))
    mixed = dataclasses.replace(
        experiment, num_steps=12, data=dataclasses.replace(experiment.data, corpus=mixture, held_out=0.1)
    )
    uninterrupted = fit(dataclasses.replace(mixed, directory=f"{mixed.directory}-whole"), say=quiet)
    first = fit(mixed, say=quiet, trackers=(StopAt(5),))
    assert 5 <= first.step < 12
    second = fit(mixed, say=quiet)
    assert second.step == 12 and second.evaluation == uninterrupted.evaluation
    for ours, theirs in zip(
        jax.tree.leaves(second.state.params), jax.tree.leaves(uninterrupted.state.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    account = [
        json.loads((Path(run) / "data_account.json").read_text()) for run in (mixed.folder, f"{mixed.folder}-whole")
    ]
    assert account[0] == account[1] and set(account[0]["parts"]) == {"all", "scanner"}
    lines = [json.loads(line) for line in (Path(mixed.folder) / "metrics.jsonl").read_text().splitlines()]
    (last,) = (line for line in lines if line["step"] == 12 and "train/loss" in line)
    assert last["data/epochs/scanner"] == account[0]["parts"]["scanner"]["epochs"] > 0


def test_a_run_reports_its_stall_its_epochs_and_its_account(undisturbed):
    result, lines = undisturbed
    folder = Path(result.prepared.experiment.folder)
    trained = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in trained if "train/loss" in line]
    rows = result.prepared.data.train.rows
    assert [line["data/epochs"] for line in trained] == [8 * line["step"] / rows.num_rows for line in trained]
    assert all(line["seconds/data_stall"] <= line["seconds/step"] for line in trained[1:])
    account = json.loads((folder / "data_account.json").read_text())
    part = account["parts"][""]
    assert account["step"] == 30 and part["epochs"] == trained[-1]["data/epochs"]
    assert sum(part["documents_by_times_seen"].values()) == part["documents"] == len(rows.starts)
    (said,) = [line for line in lines if line.startswith("data: ")]
    which = "each" if part["times_seen"]["most"] else "none"
    assert f"{part['epochs']:.2f} epochs; {which} of the {part['documents']} documents was seen to its end" in said
