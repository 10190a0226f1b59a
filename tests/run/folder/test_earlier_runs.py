"""A folder that holds another run: it is never taken for this one, and there is a way on that the message names."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import optax
import pytest
import tiny_recipe

from panax import fit
from panax.checkpoint import Checkpointer
from panax.core import CheckpointError, DataError, RecipeError, named_leaves
from panax.metrics.goodput import read_life
from panax.optim import Optax, Schedule, Sgd
from panax.run import EvaluateConfig
from panax.run.folder.description import serialize_config
from panax.run.folder.opaque import fingerprint_value


def quiet(line):
    pass


def with_rate(experiment, rate):
    return dataclasses.replace(experiment, optimizer=Sgd(schedule=Schedule(peak=rate, decay="constant")))


@pytest.fixture
def finished(experiment):
    """A run of four steps, and its result."""
    short = dataclasses.replace(with_rate(experiment, 0.1), num_steps=4)
    return short, fit(short, say=quiet)


def test_a_finished_run_is_not_another_ones_result(finished):
    experiment, first = finished
    for other in (
        with_rate(experiment, 0.2),
        dataclasses.replace(experiment, seed=1),
        dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, seed=5)),
    ):
        with pytest.raises(CheckpointError, match=r"other settings \(4 of 4 steps are done\)") as caught:
            fit(other, say=quiet)
        for way in ("--fresh (fresh=True)", "--name", "--accept-changes"):
            assert way in str(caught.value)
    with pytest.raises(CheckpointError, match=r"optimizer\.schedule\.peak: 0\.1 -> 0\.2"):
        fit(with_rate(experiment, 0.2), say=quiet)
    # The same one is done, and says so.
    lines = []
    again = fit(experiment, say=lines.append)
    assert again.step == 4 and any("nothing is trained" in line and "--fresh" in line for line in lines)
    with pytest.raises(CheckpointError, match="of step 4, beyond num_steps=2: nothing would be trained"):
        fit(dataclasses.replace(experiment, num_steps=2), say=quiet)

    # Anew, as told: another result, and what was there is kept beside it.
    lines.clear()
    fresh = fit(with_rate(experiment, 0.2), say=lines.append, fresh=True)
    one, two = named_leaves(first.state.params), named_leaves(fresh.state.params)
    assert any(np.any(np.asarray(one[name]) != np.asarray(two[name])) for name in one)
    folder = Path(experiment.folder)
    assert Checkpointer(folder / "checkpoints" / "before-1").steps() == [4]
    assert {path.name for path in (folder / "before-1").iterdir()} == {
        "metrics.jsonl", "log.txt", "tensorboard", "data_account.json", "goodput.jsonl", "sessions.jsonl",
    }  # fmt: skip
    *refused, last = read_life(folder / "before-1").sessions
    assert last.end.startswith("refused: CheckpointError") and not any(each.failed for each in (*refused, last))
    assert any("before-1" in line for line in lines)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_only_files_of_panax_are_moved_away(finished):
    experiment, _ = finished
    folder = Path(experiment.folder)
    strangers = [folder / "thesis.tex", folder / "checkpoints" / "notes" / "a.txt", folder / "checkpoints" / "b.txt"]
    strangers[1].parent.mkdir()
    for file in strangers:
        file.write_text("mine")
    for number in (1, 2):
        fit(experiment, say=quiet, fresh=True)
        assert [file.read_text() for file in strangers] == ["mine"] * 3
        assert (folder / f"before-{number}" / "metrics.jsonl").is_file()
    with pytest.raises(RecipeError, match="pass one of them"):
        fit(experiment, say=quiet, fresh=True, accept_changes=True)


def test_an_unfinished_run_resumes_with_other_settings_only_if_accepted(experiment):
    short = dataclasses.replace(with_rate(experiment, 0.1), num_steps=4)
    fit(short, say=quiet)
    longer = dataclasses.replace(with_rate(short, 0.2), num_steps=6)
    with pytest.raises(CheckpointError, match=r"4 of 6 steps are done"):
        fit(longer, say=quiet)
    lines = []
    assert fit(longer, say=lines.append, accept_changes=True).step == 6
    assert "changed since that checkpoint: optimizer.schedule.peak: 0.1 -> 0.2" in lines
    # What decides nothing of the training may change without a word.
    free = dataclasses.replace(longer, num_steps=7, log_every=1, name="renamed")
    assert fit(free, say=quiet).step == 7


def test_data_that_changed_has_a_way_on(experiment, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for file in Path(tiny_recipe.FOLDER).glob("*.py"):
        (texts / file.name).write_text(file.read_text())
    data = dataclasses.replace(experiment.data, corpus=dataclasses.replace(experiment.data.corpus, paths=(str(texts),)))
    short = dataclasses.replace(with_rate(experiment, 0.1), num_steps=4, data=data)
    fit(short, say=quiet)
    for change in ({"batch_size": 16}, {"sequence_length": 16}):
        other = dataclasses.replace(short, num_steps=6, data=dataclasses.replace(data, **change))
        with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
            fit(other, say=quiet)
        assert "--accept-changes (accept_changes=True)" in str(caught.value)
    # The same settings, and other text: only the saved position of the data can tell.
    (texts / "more.py").write_text("x = 1\n" * 50)
    with pytest.raises(DataError, match="another corpus") as caught:
        fit(dataclasses.replace(short, num_steps=6), say=quiet)
    assert "--accept-changes (accept_changes=True)" in str(caught.value)
    lines = []
    assert fit(other, say=lines.append, accept_changes=True).step == 6
    assert any(line.startswith("the data begins again: ") for line in lines)


def test_numbers_inside_an_optax_transformation_and_arrays_are_settings(experiment):
    def described(transformation):
        return serialize_config(dataclasses.replace(experiment, optimizer=Optax(transformation=transformation)))

    assert described(optax.sgd(0.1)) == described(optax.sgd(0.1))
    assert described(optax.sgd(0.1)) != described(optax.sgd(0.2))
    assert described(optax.adam(optax.cosine_decay_schedule(0.1, 9))) != described(
        optax.adam(optax.cosine_decay_schedule(0.1, 8))
    )
    assert described(optax.sgd(lambda step: 0.1)) != described(optax.sgd(lambda step: 0.2))
    batches = [{"tokens": np.arange(6).reshape(2, 3)}]
    assert fingerprint_value(batches) != fingerprint_value([{"tokens": np.arange(1, 7).reshape(2, 3)}])
    assert serialize_config(batches) == serialize_config([{"tokens": np.arange(6).reshape(2, 3)}])
    ring = []
    ring.append(ring)
    assert fingerprint_value(ring).startswith("<builtins.list")


def test_settings_that_did_not_exist_yet_are_no_change(finished):
    """A newer Panax has more settings; at their defaults they change nothing."""
    experiment, _ = finished
    from panax.run.folder.previous_run import fill_defaults

    before = serialize_config(experiment)
    del before["step"]["ema_decay"], before["evaluate"]
    assert fill_defaults(before, experiment) == serialize_config(
        dataclasses.replace(experiment, evaluate=EvaluateConfig())
    )
    other = dataclasses.replace(experiment, step=dataclasses.replace(experiment.step, ema_decay=0.9))
    assert fill_defaults(before, other)["step"]["ema_decay"] is None
