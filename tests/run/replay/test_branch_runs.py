"""Branches of runs: equal to their parent to the bit unless a setting differs, on the parent's own files."""

import dataclasses

import jax
import pytest
from run.replay.faulty import FaultyData, faulty_experiment

import panax
from panax.checkpoint import CheckpointConfig
from panax.core.errors import CheckpointError, RecipeError
from panax.optim import AdamW, Schedule
from panax.run.reporting.history import read_history


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    experiment = faulty_experiment(tmp_path_factory.mktemp("branches") / "parent", data=FaultyData())
    panax.fit(experiment, quiet=True, devices=jax.devices()[:1])
    return experiment


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def losses(folder):
    return {row["step"]: row["train/loss"] for row in read_history(folder) if "train/loss" in row}


def test_an_unchanged_branch_is_its_parent(parent, tmp_path):
    experiment = panax.branch(parent, 4, "same", directory=str(tmp_path / "same"))
    # Nothing is copied: some hundred bytes beside a checkpoint.
    assert size(tmp_path / "same") < 400
    result = panax.fit(experiment, quiet=True, devices=jax.devices()[:1])
    assert result.step == 6
    assert losses(tmp_path / "same") == {step: loss for step, loss in losses(parent.folder).items() if step > 4}
    view = panax.at(experiment, 5, devices=jax.devices()[:1])
    assert view.replay.is_verified and "parent" in view.replay.source
    with pytest.raises(CheckpointError, match="out of reach"):
        panax.at(experiment, 3)
    # The same call finds the branch; another step is another branch.
    assert panax.branch(parent, 4, "same", directory=str(tmp_path / "same")) == experiment
    with pytest.raises(CheckpointError, match="not of"):
        panax.branch(parent, 2, "same", directory=str(tmp_path / "same"))


def test_a_changed_setting(parent, tmp_path):
    slower = AdamW(schedule=Schedule(peak=0.001, decay="constant"))
    changed = dataclasses.replace(parent, optimizer=slower, checkpoint=CheckpointConfig(every=1, keep_last=1))
    experiment = panax.branch(parent, 4, "slower", recipe=changed, directory=str(tmp_path / "slower"))
    panax.fit(experiment, quiet=True, devices=jax.devices()[:1])
    before, after = losses(parent.folder), losses(tmp_path / "slower")
    # The first loss is of the parent's state on the parent's batch, with the parent's random bits.
    assert after[5] == before[5] and after[6] != before[6]


def test_refused_settings(parent, tmp_path):
    for changes, reason in (
        ({"seed": 1}, "random bits"),
        ({"data": FaultyData(3)}, "data and its order"),
        ({"frozen": ("head",)}, "have moments"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            panax.branch(
                parent, 4, "other", recipe=dataclasses.replace(parent, **changes), directory=str(tmp_path / "other")
            )
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3.*2, 4, 6"):
        panax.branch(parent, 3, "other")
    with pytest.raises(RecipeError, match="not the parent's"):
        panax.branch(parent, 4, parent.name)
    with pytest.raises(CheckpointError, match="beginning of"):
        panax.branch(parent, 4, "kept", directory=str(tmp_path / "kept"))
        panax.fit(parent, fresh=True, quiet=True, devices=jax.devices()[:1])
