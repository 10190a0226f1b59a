"""Whatever data raises, a run that has taken steps saves before it ends, and the same command resumes from there."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from rollback_run import Points, experiment

import panax
from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.run import EvaluateConfig


class Breaks:
    """Batches of points, and an error in the place of one."""

    def __init__(self, at, error):
        self.at, self.error = at, error

    def __iter__(self):
        source = Points().batches()
        for number in range(20):
            if number == self.at:
                raise self.error
            yield {name: np.asarray(leaf) for name, leaf in next(source).batch.items()}


def run(folder, data, **settings):
    config = dataclasses.replace(
        experiment(folder, steps=12),
        data=data,
        held_out=settings.pop("held_out", None),
        evaluate=settings.pop("evaluate", EvaluateConfig(every=0)),
        checkpoint=CheckpointConfig(every=0),
    )
    said: list[str] = []
    result = panax.fit(config, devices=jax.devices()[:1], say=said.append)
    return result, said


@pytest.mark.filterwarnings("ignore:this source can't resume exactly")
@pytest.mark.parametrize(
    "error", [OSError("the disk is gone"), SystemExit(3), MemoryError()], ids=lambda error: type(error).__name__
)
def test_a_loader_that_raises_is_saved_first(error, tmp_path):
    with pytest.raises(type(error)):
        run(tmp_path, Breaks(6, error))
    assert Checkpointer(tmp_path / "checkpoints").steps() == [6]
    result, said = run(tmp_path, Breaks(99, None))
    assert result.step == 12 and any("resuming from step 6" in line for line in said)


def test_held_out_data_that_raises_is_saved_first(tmp_path):
    with pytest.raises(OSError, match="held out"):
        run(tmp_path, Breaks(99, None), held_out=Breaks(1, OSError("held out")), evaluate=EvaluateConfig(every=4))
    assert Checkpointer(tmp_path / "checkpoints").steps() == [4]


def test_before_a_first_step_and_by_a_second_ctrl_c_nothing_is_saved(tmp_path):
    with pytest.raises(OSError):
        run(tmp_path / "first", Breaks(0, OSError("at once")))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "second", Breaks(5, KeyboardInterrupt()))
    for name in ("first", "second"):
        assert Checkpointer(tmp_path / name / "checkpoints").steps() == []
    assert sys.exc_info() == (None, None, None)
