"""A run with a growing global batch: a program for each size, the same steps as by hand, and an exact resume within a batch."""

import dataclasses

import jax
import numpy as np
import pytest

from panax import fit, open_run
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.data import BatchRamp
from panax.run import EvaluateConfig, prepare

RAMP = BatchRamp(parts=(2,), steps=4)


@pytest.fixture
def growing(experiment):
    return dataclasses.replace(
        experiment, batch_ramp=RAMP, num_steps=6, evaluate=EvaluateConfig(every=0, batches=1), log_every=1
    )


@pytest.mark.slow
def test_a_run_resumes_within_a_batch_and_takes_the_steps_that_are_taken_by_hand(growing, tmp_path):
    lines = []
    uninterrupted = fit(
        dataclasses.replace(growing, directory=str(tmp_path / "whole")), say=lines.append, devices=jax.devices()[:1]
    )
    assert any("batch ramp: 4 steps each with a half of the batch, then all of it from step 5 on" in x for x in lines)
    assert len(uninterrupted.prepared.step._train) == 2
    cut = dataclasses.replace(growing, directory=str(tmp_path / "cut"))
    # After 3 steps, one of the two halves of the second batch is trained on.
    with open_run(cut, quiet=True, devices=jax.devices()[:1]) as run:
        for batch in run:
            run.after_step(run.take_step(batch))
            if run.step == 3:
                break
    again = fit(cut, quiet=True, devices=jax.devices()[:1])
    assert again.step == 6
    alike = zip(named_leaves(uninterrupted.state.params).items(), named_leaves(again.state.params).items(), strict=True)
    for (name, wanted), (_, actual) in alike:
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted), err_msg=name)
    # By hand: the rows of the stream, cut into 4 times 4, then 8.
    prepared = prepare(dataclasses.replace(growing, batch_ramp=BatchRamp()), devices=jax.devices()[:1])
    stream = [batch for (batch, _), _ in zip(prepared.data.train.batches(), range(4))]
    rows = {name: np.concatenate([batch[name] for batch in stream]) for name in stream[0]}
    step = type(prepared.step)(
        prepared.step.program, prepared.step.placement, prepared.data.train.axes, shapes_allowed=2
    )
    state, start = step.init(growing.seed), 0
    for size in [4] * 4 + [8] * 2:
        part = {name: leaf[start : start + size] for name, leaf in rows.items()}
        state, _ = step(state, step.put(part))
        start += size
    for name, wanted in named_leaves(state.params).items():
        np.testing.assert_array_equal(
            np.asarray(named_leaves(uninterrupted.state.params)[name]), np.asarray(wanted), err_msg=name
        )


def test_ramps_that_have_no_room_are_refused(experiment):
    with pytest.raises(RecipeError, match="batch_ramp lasts 4 steps, and the run has 4; expected fewer"):
        dataclasses.replace(experiment, batch_ramp=RAMP, num_steps=4)
    with pytest.raises(RecipeError, match="remove one of them"):
        dataclasses.replace(experiment, batch_ramp=RAMP, overfit_batches=2)
    assert dataclasses.replace(experiment, batch_ramp=RAMP).dry_run_copy("x").batch_ramp == BatchRamp()
