"""Resources that a run shares with the machine: a place for checkpoints, signals, full disks, data that does not come."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from panax import fit
from panax.checkpoint import Checkpointer, exclusive_writer
from panax.core import CheckpointError
from panax.optim import Schedule, Sgd


def quiet(line):
    pass


@pytest.mark.parametrize("where", ["{}/checkpoints", "s3://bucket/run"])
def test_one_job_of_a_machine_writes_to_a_place(tmp_path, where):
    where = where.format(tmp_path)
    with exclusive_writer(where):
        with (
            pytest.raises(CheckpointError, match=r"another process writes checkpoints to .*--checkpoint\.directory"),
            exclusive_writer(where),
        ):
            pass
        with exclusive_writer(where + "2"):
            pass
    with exclusive_writer(where):
        pass


def test_checkpoints_may_lie_in_the_runs_own_folder(experiment):
    from panax.run.preparation import prepare
    from panax.run.start import open_folder

    own = dataclasses.replace(experiment.checkpoint, directory=experiment.directory)
    with open_folder(prepare(dataclasses.replace(experiment, checkpoint=own)), quiet) as checkpointer:
        assert checkpointer.steps() == []


def test_two_runs_with_one_place_for_checkpoints_are_kept_apart(experiment, tmp_path):
    shared = dataclasses.replace(experiment.checkpoint, directory=str(tmp_path / "shared"))
    run = dataclasses.replace(experiment, checkpoint=shared, directory=str(tmp_path / "one"))
    with (
        exclusive_writer(str(tmp_path / "shared")),
        pytest.raises(CheckpointError, match="another process writes checkpoints"),
    ):
        fit(run, say=quiet)


def test_a_lock_does_not_follow_a_link(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".checkpoints.lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(CheckpointError, match="can't write checkpoints"), exclusive_writer(str(tmp_path / "run")):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_logs_that_can_not_be_written_end_nothing(experiment):
    """A folder in the way of each log: the run trains, saves, and warns once for each."""
    folder = Path(experiment.folder)
    (folder / "metrics.jsonl").mkdir(parents=True)
    (folder / "tensorboard").write_text("in the way")
    (folder / "data_account.json").mkdir()
    lines: list[str] = []
    steady = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    result = fit(dataclasses.replace(experiment, num_steps=6, log_every=1, optimizer=steady), say=lines.append)
    assert result.step == 6 and Checkpointer(folder / "checkpoints").latest() == 6
    warned = [line for line in lines if line.startswith("warning: ")]
    assert len(warned) == 2 and all("training continues without it" in line for line in warned)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_whose_data_does_not_come(experiment, number):
    class Stuck:
        """Three batches, and then nothing, as a network that does not answer."""

        def __iter__(self):
            tokens = np.zeros((8, 16), np.int32)
            for _ in range(3):
                yield {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((8, 16), np.float32)}
            threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
            free.wait()

    free = threading.Event()
    # Under nohup SIGHUP is ignored, and stays so.
    before = signal.signal(number, signal.SIG_DFL)
    task = dataclasses.replace(experiment.task, model=dataclasses.replace(experiment.task.model, vocab_size=50))
    try:
        result = fit(dataclasses.replace(experiment, task=task, data=Stuck(), num_steps=9), say=quiet)
    finally:
        signal.signal(number, before)
        free.set()
    assert (result.interrupted_by, result.step) == (number.name, 3)
    assert Checkpointer(Path(experiment.folder) / "checkpoints").latest() == 3
