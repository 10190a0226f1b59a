"""Runs that train a mixture on the experts that its answers were drawn with."""

import dataclasses
import shutil

import numpy as np
import pytest
from letter_runs import params, run, same
from letters import letters

from panax.core.errors import RecipeError
from panax.layers import MoE
from panax.mesh import MeshShape
from panax.models import PolicyGradient
from panax.optim import Schedule, Sgd
from panax.run.reporting.history import read_history

SGD = Sgd(schedule=Schedule(peak=0.5, warmup_steps=1))
MIXTURE = MoE(experts=4, active=2, ffn=16, first_dense=1, balance=0.0)


def mixture(files, folder, *, moe=MIXTURE, objective=None, **settings):
    model = {"num_layers": 2, "feed_forward": moe}
    objective = objective or PolicyGradient(replay_experts=True)
    return letters(files, objective=objective, model=model, directory=str(folder), **settings)


def test_several_updates_replay_what_was_drawn_and_resume_exactly(files, tmp_path):
    objective = PolicyGradient(several_updates=True, kl_weight=0.1, replay_experts=True)
    experiment = mixture(
        files, tmp_path / "one", objective=objective, data={"epochs": 2, "minibatches": 2}, num_steps=8
    )
    undisturbed = run(experiment)
    rows = read_history(tmp_path / "one")
    # The gap is between the sampler and the parameters before the first update, of the same experts.
    assert max(row["train/gap/largest"] for row in rows) < 1e-4
    assert [row["train/ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows] == [True, False, False, False] * 2
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step_00000008")
    assert same(undisturbed, run(experiment))


@pytest.mark.full
def test_with_one_update_replay_changes_no_bit(files, tmp_path):
    """The router chooses as the sampler did, so that nothing is forced."""
    results = [
        run(mixture(files, tmp_path / str(replay), objective=PolicyGradient(replay_experts=replay), num_steps=3))
        for replay in (False, True)
    ]
    assert same(*results)


@pytest.mark.full
def test_meshes_replay_alike(files, tmp_path):
    shape = MeshShape(fsdp=1, expert=2, tensor=2)
    one, other = (
        # Adam would turn the rounding of a small gradient into a large update.
        run(mixture(files, tmp_path / str(count), mesh=mesh, num_steps=3, optimizer=SGD), count)
        for mesh, count in ((MeshShape(), 1), (shape, 4))
    )
    for first, second in zip(params(one), params(other), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)


def test_rollouts_of_a_mixture_that_drops_tokens_are_refused(files, tmp_path):
    drops = dataclasses.replace(MIXTURE, capacity=1.0)
    with pytest.raises(RecipeError, match=r"feed_forward\.capacity=1\.0 drops tokens in training"):
        run(mixture(files, tmp_path, moe=drops, objective=PolicyGradient()))
