"""Runs that draw among the likeliest tokens, and learn by the probabilities among these."""

import dataclasses
import shutil

import numpy as np
import pytest
from letter_runs import params, run, same
from letters import MESHES, letters

from panax.core.errors import RecipeError
from panax.kernels import Kernels
from panax.mesh import MeshShape
from panax.models import Distill, PolicyGradient
from panax.optim import Schedule, Sgd
from panax.rollouts import Teacher
from panax.run.reporting.history import read_history
from panax.train import StepConfig

KEPT = {"top_k": 12, "top_p": 0.4}
REPLAY = PolicyGradient(replay_sampling=True)


def kept(files, folder, *, objective=REPLAY, data=None, **settings):
    return letters(files, objective=objective, data=KEPT | (data or {}), directory=str(folder), **settings)


def test_the_loss_is_of_the_probabilities_that_answers_are_drawn_with_and_a_run_resumes_exactly(files, tmp_path):
    objective = PolicyGradient(several_updates=True, kl_weight=0.1, replay_sampling=True)
    experiment = kept(files, tmp_path / "one", objective=objective, data={"epochs": 2, "minibatches": 2}, num_steps=8)
    undisturbed = run(experiment)
    rows = read_history(tmp_path / "one")
    assert max(row["train/gap/largest"] for row in rows) < 1e-4
    # Of at most twelve tokens, where the model is near to uniform over 257 of them at first.
    assert rows[0]["train/entropy"] < np.log(12.5) < np.log(257) - 1.0
    assert [row["train/ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows] == [True, False, False, False] * 2
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step_00000008")
    assert same(undisturbed, run(experiment))


def test_the_gap_is_zero_with_exact_kernels(files, tmp_path):
    run(kept(files, tmp_path, kernels=Kernels(exact_policy=True), num_steps=4))
    assert [row["train/gap/largest"] for row in read_history(tmp_path)] == [0.0] * 4


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "count"), MESHES[1:])
def test_meshes_learn_alike(files, tmp_path, mesh, count):
    settings = {
        "num_steps": 3,
        "optimizer": Sgd(schedule=Schedule(peak=0.5, warmup_steps=1)),
        "step": StepConfig(micro_batches=mesh.stage),
        "model": {"num_layers": mesh.stage},
    }
    one, other = (
        run(kept(files, tmp_path / str(number), mesh=shape, **settings), number)
        for shape, number in ((MeshShape(), 1), (mesh, count))
    )
    for first, second in zip(params(one), params(other), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)


@pytest.mark.full
def test_answers_that_are_drawn_ahead_keep_their_tokens_in_checkpoints(files, tmp_path):
    experiment = kept(files, tmp_path, data={"asynchronous": True}, num_steps=5)
    undisturbed = run(experiment)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000005")
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    assert same(undisturbed, run(experiment))


def test_settings_that_do_not_fit_are_refused(files, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.top_p=0\.4 needs data\.top_k"):
        kept(files, tmp_path, data={"top_k": 0})
    with pytest.raises(RecipeError, match=r"data\.top_k=12 draws among some tokens.*replay_sampling=True"):
        run(kept(files, tmp_path, objective=PolicyGradient()))
    with pytest.raises(RecipeError, match=r"replay_sampling=True is of draws among some tokens: set data\.top_k"):
        run(letters(files, objective=REPLAY, directory=str(tmp_path)))
    with pytest.raises(RecipeError, match=r"data\.top_k=300; expected at most the vocabulary's 257"):
        run(kept(files, tmp_path, data={"top_k": 300}))


def test_distilling_from_a_teacher_records_nothing(files):
    experiment = kept(files, files, objective=Distill(), data={"teacher": Teacher(model="runs/teacher", top_k=4)})
    assert experiment.data.kept == 0 and dataclasses.replace(experiment.data, teacher=None).kept == 12
