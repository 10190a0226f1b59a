"""The probabilities of drawing are those of training over a thousand updates, to the last bit."""

import dataclasses

import pytest
from letter_runs import run
from letters import letters, write_files

from panax.checkpoint import CheckpointConfig
from panax.kernels import Kernels
from panax.layers import MoE
from panax.run.reporting.history import read_history

STEPS = 1000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_the_gap_is_zero_in_every_step_with_one_policy(tmp_path, model, dtype):
    write_files(tmp_path)
    layers = {"feed_forward": MoE(experts=4, active=2, ffn=16, balance=0.0)} if model == "mixture" else {}
    experiment = letters(
        tmp_path,
        model=layers,
        kernels=Kernels(exact_policy=True),
        directory=str(tmp_path / "run"),
        num_steps=STEPS,
        checkpoint=CheckpointConfig(every=0),
    )
    run(dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, compute_dtype=dtype)))
    rows = read_history(tmp_path / "run")
    assert len(rows) == STEPS and {row["train/gap/largest"] for row in rows} == {0.0}
    # Parameters moved all the time: it is not the gap of a model that stands still.
    assert len({row["train/entropy"] for row in rows}) > STEPS / 2
