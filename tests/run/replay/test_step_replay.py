"""Steps of a run, taken again: equal to the record to the bit, or with what differs."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rollback_run import experiment as line_experiment
from run.replay.faulty import FaultyData, faulty_experiment

import panax
from panax.core.errors import CheckpointError, DataError, RecipeError
from panax.run.replay.record import count_ulps
from panax.run.replay.replay import describe_reach
from panax.train import StepConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps on eight devices, resumed after four."""
    experiment = faulty_experiment(tmp_path_factory.mktemp("runs") / "faulty", data=FaultyData())
    panax.fit(dataclasses.replace(experiment, num_steps=4), quiet=True)
    panax.fit(experiment, quiet=True)
    return experiment


def snapshot(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_each_step_is_that_of_the_run(trained):
    """Also across a resume, and nothing in the folder changes."""
    before = snapshot(trained.folder)
    for step in (1, 3, 5, 6):
        view = panax.at(trained, step)
        assert view.replay.is_verified and view.step == step
        assert view.tapped_ulps == 0
        assert view.replay.replayed == (step - 1) % 2 + 1
        assert {each.path for each in view.modules} >= {"entrance", "layers.0/mix", "layers.1/mix"}
    assert snapshot(trained.folder) == before


def test_gradients_and_updates_are_those_of_numpy(trained):
    view = panax.at(trained, 2)
    before, after = view.replay.before.params, view.replay.after.params
    for each in view.parameters:
        value, update = np.asarray(before[each.name], np.float64), np.asarray(after[each.name], np.float64)
        update = update - value
        assert each.value.norm == pytest.approx(np.linalg.norm(value), rel=1e-6)
        assert each.update.norm == pytest.approx(np.linalg.norm(update), rel=1e-5)
        assert each.value.high == pytest.approx(value.max(), rel=1e-6)
    total = np.sqrt(sum(each.gradient.norm**2 for each in view.parameters if each.gradient))
    assert total == pytest.approx(view.scalars["gradient_norm"], rel=1e-6)
    json.dumps(view.to_json(), allow_nan=False)
    assert "Step 2 of" in view._repr_html_()


def test_another_setting_changes_only_what_it_should(trained):
    view = panax.at(trained, 3)
    clipped = view.what_if(dataclasses.replace(trained, step=StepConfig(clip_norm=1e-3)))
    assert clipped.change == "step.clip_norm: 1.0 -> 0.001"
    assert clipped.after["loss"] == view.scalars["loss"]
    assert clipped.following and clipped.following[0][0] != clipped.following[0][1]
    for changed, reason in (
        ({"data": FaultyData(3)}, "data"),
        ({"seed": 1}, "seed"),
        ({"step": StepConfig(ema_decay=0.9)}, "averaged"),
    ):
        with pytest.raises(RecipeError, match=reason):
            view.what_if(dataclasses.replace(trained, **changed))
    with pytest.raises(RecipeError, match="no setting differs"):
        view.what_if(trained)


def test_a_changed_log_is_found(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained.folder, copy)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    row["train/loss"] = float(np.nextafter(np.float32(row["train/loss"]), np.float32(9)))
    lines[2] = json.dumps(row)
    # A line that is being written at this moment is not read.
    (copy / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 7, "train/lo')
    view = panax.at(copy, 3, recipe=trained)
    assert not view.replay.is_verified
    assert "loss of step 3" in view.verdict and "1 ulp" in view.verdict and "the log was changed" in view.verdict


def test_other_devices_are_named(trained):
    view = panax.at(trained, 2, devices=jax.devices()[:1])
    assert any(each.startswith("devices: 8 of cpu") for each in view.replay.conditions)


def test_what_is_out_of_reach_or_no_run(trained, tmp_path):
    with pytest.raises(RecipeError, match="1 to num_steps=6"):
        panax.at(trained, 7)
    with pytest.raises(CheckpointError, match="neither"):
        panax.at(tmp_path, 1)
    with pytest.raises(CheckpointError, match="does not exist"):
        panax.at(tmp_path / "absent", 1)
    with pytest.raises(CheckpointError, match=r"FaultyNet.*--recipe"):
        panax.at(trained.folder, 1)
    copy = tmp_path / "copy"
    shutil.copytree(trained.folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000002")
    with pytest.raises(CheckpointError, match=r"step 4 is out of reach.*steps 1 to 1, 5 to 5, 7 to 7"):
        panax.at(copy, 4, recipe=trained, max_steps=1)
    os.remove(copy / "metrics.jsonl")
    os.symlink("/etc/passwd", copy / "metrics.jsonl")
    with pytest.raises(CheckpointError, match="is a link"):
        panax.at(copy, 3, recipe=trained)
    os.remove(copy / "metrics.jsonl")
    (copy / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="line 1"):
        panax.at(copy, 3, recipe=trained)


def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained.folder, copy)
    file = next((copy / "checkpoints" / "step_00000002").rglob("*.bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    lines: list[str] = []
    view = panax.at(copy, 3, recipe=trained, say=lines.append)
    assert view.replay.is_verified and view.replay.replayed == 3
    assert any("step 2 is not used" in line for line in lines)


def test_a_run_that_rolled_back(tmp_path):
    """A step after a rollback skips the batches that the run skips."""
    experiment = line_experiment(tmp_path / "line", bad=(7, 8), steps=12)
    panax.fit(experiment, quiet=True)
    view = panax.at(experiment, 9)
    assert view.replay.is_verified, view.verdict
    assert view.replay.number > 9


def test_reach_and_ulps():
    assert "1 to 100, 401 to 500, 801 to 900" in describe_reach([400, 800], 300, 100, 0)
    assert count_ulps(-1.0, float(np.nextafter(np.float32(-1), np.float32(0)))) == 1
    assert count_ulps(0.1, float(np.float32(0.1))) == 1
