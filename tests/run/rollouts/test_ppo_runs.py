"""Runs with a value head: they learn, resume exactly, agree on every mesh, and generate like other decoders."""

import dataclasses
import shutil

import numpy as np
import pytest
from judges import train_student
from letter_runs import params, run
from letters import MESHES, letters

import panax
from panax.cli.commands.export import export
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.models import LoRA, PolicyGradient
from panax.optim import AdamW, Schedule, Sgd
from panax.rollouts import Gae
from panax.rollouts.rows import split_updates
from panax.run.reporting.history import read_history
from panax.train import StepConfig

OBJECTIVE = PolicyGradient(several_updates=True, value_weight=0.5)
UPDATES = {"epochs": 2, "minibatches": 2}


def ppo(files, *, data=None, gae=None, objective=OBJECTIVE, adapter=None, **settings):
    experiment = letters(files, objective=objective, data={"gae": gae or Gae(), **(data or {})}, **settings)
    return dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, adapter=adapter))


@pytest.mark.full
def test_the_reward_rises_and_values_explain_it(files, tmp_path):
    experiment = ppo(
        files,
        data=UPDATES | {"samples": 8},
        directory=str(tmp_path / "run"),
        num_steps=80,
        optimizer=AdamW(schedule=Schedule(peak=1e-2, warmup_steps=1)),
    )
    run(experiment)
    rows = [row for row in read_history(tmp_path / "run") if "rollout/reward" in row]
    first, last = (np.mean([row["rollout/reward"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last > 2.0 * first
    assert {"train/loss/value", "train/value", "train/clipped/value", "rollout/explained_variance"} <= rows[-1].keys()
    assert rows[0]["train/value"] == 0.0 and rows[-1]["train/value"] > 0.3
    assert np.mean([row["rollout/explained_variance"] for row in rows[-5:]]) > 0.0


def test_advantages_and_values_are_those_before_the_first_update_and_the_run_resumes_exactly(
    files, tmp_path, monkeypatch
):
    seen = []

    def keep(batch, **settings):
        seen.append({name: leaf.copy() for name, leaf in batch.items()})
        return split_updates(batch, **settings)

    monkeypatch.setattr("panax.run.parts.rollout_batches.split_updates", keep)
    gae = Gae(gamma=0.9, lam=0.8, kl_in_reward=0.2, whiten=False)
    experiment = ppo(files, data=UPDATES, gae=gae, directory=str(tmp_path), num_steps=8)
    first = params(run(experiment))
    assert len(seen) == 2
    for batch in seen:
        assert batch.keys() == experiment.task.required_leaves
        counted = batch["loss_mask"] > 0
        np.testing.assert_allclose(
            (batch["advantage"] + batch["old_value"])[counted], batch["return"][counted], atol=1e-6
        )
    # At first all values are 0 and the model is the reference: what is left is the reward, which comes with the last action.
    counted = seen[0]["loss_mask"] > 0
    for row, mask in zip(seen[0]["advantage"], counted, strict=True):
        np.testing.assert_allclose(row[mask], row[mask][-1] * 0.72 ** np.arange(mask.sum())[::-1], atol=1e-6)
    assert np.abs(seen[1]["old_value"]).max() > 0.0
    rows = read_history(tmp_path)
    assert rows[0]["train/ratio"] == pytest.approx(1.0, abs=1e-6) and rows[4]["rollout/kl"] != 0.0
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000008")
    for one, other in zip(first, params(run(experiment)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "devices"), MESHES)
def test_meshes_learn_alike(files, tmp_path, shape, devices):
    results = []
    for number, (mesh, count) in enumerate(((MeshShape(), 1), (shape, devices))):
        experiment = ppo(
            files,
            data={"epochs": 2},
            gae=Gae(kl_in_reward=0.1),
            directory=str(tmp_path / str(number)),
            num_steps=4,
            mesh=mesh,
            step=StepConfig(micro_batches=shape.stage),
            optimizer=Sgd(schedule=Schedule(peak=0.5, warmup_steps=1)),
            model={"num_layers": shape.stage},
        )
        results.append(run(experiment, count))
    for first, second in zip(*map(params, results), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)])
def test_a_run_begins_without_a_head_and_generates_and_exports_without_it(files, tmp_path, adapter):
    begun = train_student(files, num_steps=2)
    experiment = ppo(files, init=f"checkpoint:{begun}", adapter=adapter, directory=str(tmp_path / "run"), data=UPDATES)
    result = run(dataclasses.replace(experiment, num_steps=4))
    assert np.abs(result.state.params.value_head.w).max() > 0.0
    loaded = panax.load(str(tmp_path / "run"))
    assert len(loaded.generate("ab", tokens=4, temperature=0.0)) > 0
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    released = panax.load(f"hf:{tmp_path / 'out'}")
    assert released.params.value_head is None
    assert released.generate("ab", tokens=4, temperature=0.0) == loaded.generate("ab", tokens=4, temperature=0.0)
    # And a run from the release begins with a head of zeros.
    folder = str(tmp_path / "again")
    again = ppo(files, init=f"hf:{tmp_path / 'out'}", directory=folder, data=UPDATES, adapter=adapter)
    again = dataclasses.replace(again, task=dataclasses.replace(again.task, model=released.task.model))
    again = run(dataclasses.replace(again, num_steps=4))
    loaded = panax.load(folder)
    np.testing.assert_array_equal(loaded.params.value_head.w, again.state.params.value_head.w)
    assert np.abs(loaded.params.value_head.w).max() > 0.0 and len(loaded.generate("ab", tokens=4)) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": PolicyGradient()}, "has no values, from which data.gae computes"),
        (
            {"data": {"gae": None}, "objective": PolicyGradient(value_weight=0.5)},
            "estimates values, and data.gae is not set",
        ),
        ({"data": {"baseline": "others"}}, "baseline='others' compares the answers"),
        ({"data": {"refills": 1}}, "refills=1 compares the answers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(files, tmp_path, settings, message):
    with pytest.raises(RecipeError, match=message):
        run(ppo(files, directory=str(tmp_path), **settings))
