"""A whole run: it learns, logs, evaluates, saves, resumes bitwise, and ends when it should."""

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from panax import fit, load
from panax.checkpoint import Checkpointer
from panax.core import CheckpointError, DataError, LayoutError, RecipeError, TrainingError, named_leaves
from panax.mesh import MeshShape
from panax.metrics import Tracker
from panax.metrics.goodput import read_life
from panax.optim import AdamW, Schedule
from panax.run.reporting.report import RunReporter
from panax.train import StepConfig

STEADY = AdamW(schedule=Schedule(peak=3e-3, decay="constant"))


def quiet(line: str) -> None:
    pass


def assert_same_state(a, b):
    a, b = named_leaves(a), named_leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        left, right = (jax.random.key_data(x[name]) if name == "key" else x[name] for x in (a, b))
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=name)


class StopAt(Tracker):
    """A tracker that sends this process a signal when a step is reported."""

    def __init__(self, step: int, number: signal.Signals):
        self.step, self.number = step, number

    def record(self, step, values):
        if step == self.step and "train/loss" in values:
            os.kill(os.getpid(), self.number)


def test_learns(undisturbed):
    result, _ = undisturbed
    assert result.step == 30 and result.interrupted_by is None
    first = json.loads((Path(result.prepared.experiment.folder) / "metrics.jsonl").read_text().splitlines()[0])
    assert result.evaluation["loss"] < first["train/loss"] - 0.3


def test_what_came_of_it_is_at_hand_in_python(undisturbed):
    result, _ = undisturbed
    assert repr(result) == f"Result(step 30, held-out loss {result.evaluation['loss']:.4f}, {result.checkpoint})"
    assert result.history["train/loss"].notna().any() and result.history.index[-1] == 30
    text = result.generate("def ", tokens=4, temperature=0.0)
    trained = load(result.checkpoint)
    assert repr(trained) == f"LoadedModel(DecoderTask, {trained.url})"
    assert trained.generate("def ", tokens=4, temperature=0.0) == text


def test_logs_to_jsonl_and_tensorboard(undisturbed):
    result, _ = undisturbed
    folder = Path(result.prepared.experiment.folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [5, 10, 15, 20, 25, 30]
    assert [line["step"] for line in lines if "evaluation/loss" in line] == [10, 20, 30]
    for name in (
        "seconds/step",
        "seconds/data_stall",
        "seconds/dispatch",
        "seconds/device",
        "speed/tokens_per_second",
        "speed/mfu",
    ):
        assert trained[-1][name] >= 0, name
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("*/events.*"))
    # One chart for both: the same tag in two runs, in groups that TensorBoard sorts.
    assert events.count(b"1 loss/loss") >= 9 and b"2 update/learning_rate" in events and b"_hparams_" in events
    assert {path.parent.name for path in (folder / "tensorboard").glob("*/events.*")} == {"train", "evaluation"}


def test_tensorboard_values_are_the_logged_ones(undisturbed):
    result, _ = undisturbed
    folder = Path(result.prepared.experiment.folder)
    logged = {
        line["step"]: line["train/loss"]
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "train/loss" in line
    }
    shown = {}
    for path in (folder / "tensorboard" / "train").glob("events.*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                if value.tag == "1 loss/loss":
                    shown[event.step] = value.simple_value
            data = data[12 + length + 4 :]
    assert shown == pytest.approx(logged)


def test_keeps_the_last_and_the_best(undisturbed):
    result, _ = undisturbed
    steps = Checkpointer(Path(result.checkpoint).parent).steps()
    assert steps[-2:] == [25, 30]
    assert len(steps) <= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_continues_bitwise(experiment, undisturbed, number):
    first = fit(experiment, say=quiet, trackers=(StopAt(10, number),))
    assert first.interrupted_by == number.name
    assert 10 <= first.step < 30 and Path(first.checkpoint).name == f"step_{first.step:08d}"
    second = fit(experiment, say=quiet)
    assert second.step == 30
    assert_same_state(second.state, undisturbed[0].state)
    assert second.evaluation == undisturbed[0].evaluation
    life = read_life(experiment.folder)
    assert [each.end for each in life.sessions] == [f"stopped by {number.name}", "done"]
    assert (life.sessions[1].first_step, life.sessions[1].last_step) == (first.step, 30)
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds)
    assert life.seconds["lost work"] == life.seconds["restart"] == 0 < life.seconds["training"]
    lines = [json.loads(line) for line in Path(experiment.folder, "metrics.jsonl").read_text().splitlines()]
    # What is logged as the run ends lacks only the way out.
    assert lines[-1]["goodput/training_seconds"] == pytest.approx(life.seconds["training"], abs=0.01)
    assert lines[-1]["goodput/compile_seconds"] == pytest.approx(life.seconds["compile"], abs=0.01)
    facts = [json.loads(line) for line in Path(experiment.folder, "sessions.jsonl").read_text().splitlines()]
    assert [each["first_step"] for each in facts] == [0, first.step]
    assert facts[0]["run_id"] == facts[1]["run_id"] and facts[0]["devices"]["platform"] == "cpu"


def test_resumes_bitwise_from_a_periodic_checkpoint(experiment, undisturbed, monkeypatch):
    class Crash(Exception):
        pass

    def crash(report, run):
        if run.step == 20:
            raise Crash
        return after_step(report, run)

    after_step = RunReporter.after_step
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(RunReporter, "after_step", crash)
        fit(experiment, say=quiet)
    assert Checkpointer(Path(experiment.folder) / "checkpoints").latest() == 15
    assert_same_state(fit(experiment, say=quiet).state, undisturbed[0].state)
    life = read_life(experiment.folder)
    crashed, second = life.sessions
    assert crashed.end.startswith("error: Crash") and crashed.failed and second.end == "done"
    assert (crashed.lost_steps, second.first_step) == (4, 15) and 0 < crashed.lost_seconds < life.seconds["training"]
    assert 0 < crashed.restart_seconds == life.seconds["restart"]


def test_a_finished_run_trains_no_further(undisturbed):
    result, _ = undisturbed
    again = fit(result.prepared.experiment, say=quiet)
    assert again.step == 30
    assert_same_state(again.state, result.state)


def test_continues_with_another_mesh(experiment, undisturbed):
    fit(experiment, say=quiet, trackers=(StopAt(10, signal.SIGTERM),))
    result = fit(
        dataclasses.replace(experiment, mesh=MeshShape(replica=2, fsdp=2)), say=quiet, devices=jax.devices()[:4]
    )
    assert result.step == 30
    assert result.evaluation["loss"] == pytest.approx(undisturbed[0].evaluation["loss"], rel=1e-4)


def test_changed_settings_are_reported(experiment):
    fit(dataclasses.replace(experiment, num_steps=5, optimizer=STEADY), say=quiet)
    lines: list[str] = []
    fit(dataclasses.replace(experiment, num_steps=6, optimizer=STEADY), say=lines.append)
    (changed,) = [line for line in lines if line.startswith("changed since that checkpoint: ")]
    assert changed.startswith("changed since that checkpoint: num_steps: 5 -> 6; the learning rate ")


def test_two_processes_cannot_train_in_one_folder(experiment):
    errors: list[Exception] = []

    class Second(StopAt):
        def record(self, step, values):
            if step == self.step and "train/loss" in values:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()

    def other():
        try:
            fit(experiment, say=quiet)
        except CheckpointError as error:
            errors.append(error)

    fit(dataclasses.replace(experiment, num_steps=6), say=quiet, trackers=(Second(5, signal.SIGINT),))
    assert "another process is training" in str(errors[0])


def test_steps_that_diverge_are_skipped_and_then_an_error(experiment):
    wild = AdamW(schedule=Schedule(peak=1e16, decay="constant"))
    with pytest.raises(TrainingError, match="3 updates in a row were not finite"):
        fit(dataclasses.replace(experiment, optimizer=wild, step=StepConfig(max_skipped=3)), say=quiet)


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(experiment):
    experiment = dataclasses.replace(experiment, num_steps=5, optimizer=STEADY)
    fit(experiment, say=quiet)
    wider = dataclasses.replace(experiment.task, model=dataclasses.replace(experiment.task.model, ffn=128))
    with pytest.raises(
        CheckpointError, match=r"another model.*w_gate.* is float32\[2, 32, 64\] there and float32\[2, 32, 128\]"
    ):
        fit(dataclasses.replace(experiment, task=wider, num_steps=6), say=quiet, accept_changes=True)
    assert Checkpointer(Path(experiment.folder) / "checkpoints").latest() == 5


def test_a_sequence_longer_than_the_models_is_refused(experiment):
    data = dataclasses.replace(experiment.data, sequence_length=65)
    with pytest.raises(
        RecipeError, match=r"rows are 65 tokens long, the model is for at most 64; shorten data\.sequence_length"
    ):
        fit(dataclasses.replace(experiment, data=data), say=quiet)


def test_heads_that_do_not_divide_over_the_mesh_are_refused(experiment):
    with pytest.raises(LayoutError, match=r"w_q: heads=2 is not divisible by tensor=4; use tensor in \{1, 2\}"):
        fit(dataclasses.replace(experiment, mesh=MeshShape(fsdp=2, tensor=4)), say=quiet)


def test_rows_that_do_not_divide_over_the_mesh_are_refused(experiment):
    data = dataclasses.replace(experiment.data, batch_size=6)
    with pytest.raises(LayoutError, match=r"batch=6 is not divisible by fsdp=8|6 rows is not divisible by 8"):
        fit(dataclasses.replace(experiment, data=data, mesh=MeshShape(fsdp=8)), say=quiet)


def test_more_stages_than_layers_are_refused(experiment):
    with pytest.raises(
        LayoutError, match=r"mesh\.stage=8 is more than the 2 layers; use stage up to 2\. Nearest layouts"
    ):
        fit(dataclasses.replace(experiment, mesh=MeshShape(fsdp=1, stage=8)), say=quiet)


def test_plain_iterables_train_too_and_state_that_they_are_replayed(experiment):
    batches = []
    for i in range(4):
        rng = np.random.default_rng(i)
        tokens = rng.integers(0, 50, (8, 32)).astype(np.int32)
        batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((8, 31), np.float32)})
    model = dataclasses.replace(experiment.task.model, vocab_size=50)
    run = dataclasses.replace(
        experiment, task=dataclasses.replace(experiment.task, model=model), data=batches, num_steps=6
    )
    uninterrupted = fit(dataclasses.replace(run, directory=run.directory + "-whole"), say=quiet)
    fit(run, say=quiet, trackers=(StopAt(5, signal.SIGINT),))
    with pytest.warns(UserWarning, match="draw"):
        resumed = fit(run, say=quiet)
    assert_same_state(resumed.state, uninterrupted.state)


def test_data_that_ends_early_is_an_error(experiment):
    tokens = np.zeros((8, 16), np.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((8, 16), np.float32)}
    model = dataclasses.replace(experiment.task.model, vocab_size=50)
    run = dataclasses.replace(
        experiment, task=dataclasses.replace(experiment.task, model=model), data=iter([batch, batch])
    )
    with pytest.raises(DataError, match="end"):
        fit(run, say=quiet)


def test_a_profile_is_written(experiment):
    lines: list[str] = []
    fit(dataclasses.replace(experiment, num_steps=8, profile=3), say=lines.append)
    assert any("profile of 3 steps" in line for line in lines)
    assert list(Path(experiment.folder).glob("tensorboard/plugins/profile/*/*.xplane.pb"))
