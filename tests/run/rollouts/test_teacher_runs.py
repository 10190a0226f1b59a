"""Runs that learn from a teacher's ratings of their own draws."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judges import train_reward_model, train_student, train_teacher
from letter_runs import params, run
from letters import MESHES, letters
from rich.console import Console

import panax
from panax.cli.commands.inspect import _attached, print_parameters
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.models import Distill, PolicyGradient
from panax.optim import AdamW, Schedule, Sgd
from panax.rollouts import Teacher
from panax.rollouts.answers import SampledAnswer
from panax.rollouts.rows import make_rows, split_updates
from panax.run import EvaluateConfig
from panax.run.parts.answer_judges import AnswerJudges
from panax.run.preparation import prepare
from panax.run.reporting.history import read_history
from panax.train import StepConfig


@pytest.fixture(scope="module")
def teacher(files):
    return train_teacher(files)


def distilling(files, teacher, *, data=None, **settings):
    """Without rewards, by default."""
    return letters(
        files, data={"rewards": (), "teacher": Teacher(model=teacher), "samples": 2, **(data or {})}, **settings
    )


@pytest.mark.full
def test_the_divergence_from_the_teacher_falls(files, teacher, tmp_path):
    experiment = distilling(
        files,
        teacher,
        directory=str(tmp_path / "run"),
        init=f"checkpoint:{train_student(files)}",
        data={"samples": 4},
        optimizer=AdamW(schedule=Schedule(peak=1e-2, warmup_steps=1)),
        num_steps=30,
        evaluate=EvaluateConfig(every=30),
    )
    result = run(experiment)
    rows = read_history(tmp_path / "run")
    first, last = (np.mean([row["rollout/teacher/divergence"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last < 0.5 * first
    assert result.evaluation["loss"] == result.evaluation["teacher/divergence"] < first
    assert not any(name.startswith("rollout/reward") for name in rows[-1])


@pytest.mark.full
@pytest.mark.parametrize(
    "objective", [Distill(divergence="reverse_kl"), Distill(divergence="js", beta=0.3)], ids=lambda one: one.divergence
)
def test_whole_distributions_are_learned_at_the_draws(files, teacher, tmp_path, objective):
    experiment = distilling(
        files,
        teacher,
        objective=objective,
        directory=str(tmp_path),
        init=f"checkpoint:{train_student(files)}",
        data={"teacher": Teacher(model=teacher, top_k=257), "minibatches": 2},
        optimizer=AdamW(schedule=Schedule(peak=1e-2, warmup_steps=1)),
        num_steps=40,
    )
    run(experiment)
    rows = read_history(tmp_path)
    losses = [row["train/loss/distillation"] for row in rows]
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])
    assert min(row["train/teacher/coverage"] for row in rows) > 0.999
    divergences = [row["rollout/teacher/divergence"] for row in rows]
    assert np.mean(divergences[-4:]) < 0.3 * divergences[0]


def test_a_batch_has_the_teachers_likely_tokens_in_place_of_advantages(files, teacher, tmp_path):
    data = {"teacher": Teacher(model=teacher, top_k=5)}
    experiment = distilling(files, teacher, objective=Distill(), directory=str(tmp_path), data=data)
    shapes = experiment.data.batch_shapes(experiment.task)
    assert shapes.keys() == {*experiment.task.required_leaves, "segment", "position"}
    assert shapes["teacher_tokens"].shape == (8, 8, 5) and shapes["teacher_tokens"].dtype == np.int32
    assert run(dataclasses.replace(experiment, num_steps=2)).step == 2
    for objective, changed, message in (
        (Distill(), {"teacher": Teacher(model=teacher)}, "set data.teacher=Teacher"),
        (PolicyGradient(), data, "top_k is read by task.objective=Distill"),
        (Distill(), {"teacher": Teacher(model=teacher, top_k=258)}, "expected at most the vocabulary's 257"),
    ):
        with pytest.raises(RecipeError, match=message):
            run(distilling(files, teacher, objective=objective, directory=str(tmp_path / "no"), data=changed))
    with pytest.raises(RecipeError, match="has no effect with top_k"):
        Teacher(model=teacher, top_k=5, weight=2.0)


def test_an_advantage_is_the_difference_of_log_probabilities(files, teacher, tmp_path):
    """Of both models, each evaluated alone; added to the advantages of rewards."""
    seen = []
    weight = 0.5
    experiment = distilling(
        files,
        teacher,
        directory=str(tmp_path),
        num_steps=1,
        optimizer=Sgd(schedule=Schedule(peak=1e-30, warmup_steps=0, decay="constant")),
        data={"teacher": Teacher(model=teacher, weight=weight), "rewards": letters(files).data.rewards},
    )

    def keep(batch, **settings):
        seen.append({name: leaf.copy() for name, leaf in batch.items()})
        return split_updates(batch, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panax.run.parts.rollout_batches.split_updates", keep)
        run(experiment)
    [batch] = seen
    loaded = panax.load(teacher)
    task = loaded.task.log_probability_task(*batch["tokens"].shape)
    evaluated = task.loss(
        loaded.params,
        loaded.state,
        {name: jnp.asarray(batch[name]) for name in ("tokens", "targets", "segment", "position", "loss_mask")}
        | {"row": jnp.arange(len(batch["tokens"]))},
        jax.random.key(0),
        False,
    )
    by_teacher = np.asarray(evaluated.metrics["log_probabilities"].value)
    counted = batch["loss_mask"] > 0
    rated = np.where(counted, weight * (by_teacher - batch["behavior_log_probability"]), 0.0)
    of_rewards = batch["advantage"] - rated
    for row, mask in zip(of_rewards, counted, strict=True):
        np.testing.assert_allclose(row[mask], row[mask][0], atol=2e-5)
    assert np.abs(of_rewards[:, :4]).max() > 0.1 and not of_rewards[~counted].any()


@pytest.mark.full
def test_several_updates_use_the_trainers_log_probabilities_and_resume_exactly(files, teacher, tmp_path):
    experiment = distilling(
        files,
        teacher,
        directory=str(tmp_path),
        objective=PolicyGradient(several_updates=True),
        data={"epochs": 2, "rewards": letters(files).data.rewards},
        num_steps=6,
    )
    first = params(run(experiment))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}")
    for one, other in zip(first, params(run(experiment)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "devices"), MESHES)
@pytest.mark.parametrize("top_k", [0, 5])
def test_meshes_distill_alike(files, teacher, tmp_path, shape, devices, top_k):
    results, objective = [], Distill() if top_k else PolicyGradient()
    for number, (mesh, count) in enumerate(((MeshShape(), 1), (shape, devices))):
        settings = {
            "mesh": mesh,
            "step": StepConfig(micro_batches=shape.stage),
            "optimizer": Sgd(schedule=Schedule(peak=0.1, warmup_steps=1)),
            "model": {"num_layers": shape.stage},
            "objective": objective,
            "data": {"teacher": Teacher(model=teacher, top_k=top_k)},
        }
        results.append(
            run(distilling(files, teacher, directory=str(tmp_path / str(number)), num_steps=3, **settings), count)
        )
    for first, second in zip(*map(params, results), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)


def test_bfloat16_keeps_the_teachers_weights_in_bfloat16(files, teacher, tmp_path):
    experiment = distilling(files, teacher, directory=str(tmp_path))
    experiment = dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, compute_dtype="bfloat16"))
    prepared = prepare(experiment, devices=jax.devices()[:1])
    judges = AnswerJudges(prepared)
    judges.load(lambda line: None)
    [model] = judges.models.values()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model._state.params)} == {"bfloat16"}
    answers = [SampledAnswer((97,), 0, (98, 99), (-1.0, -1.0), "bc", True)] * 3
    rows = make_rows(answers, np.zeros(3, np.float32), np.ones(3, bool), 8)
    assert np.isfinite(judges.measure_divergence(rows))


def test_inspect_counts_the_teachers_memory(files, teacher, tmp_path, capsys):
    experiment = distilling(files, teacher, directory=str(tmp_path))
    subject = _attached(experiment, lambda line: None)
    print_parameters(subject, Console(width=120))
    count = sum(leaf.size for leaf in jax.tree.leaves(panax.load(teacher).params))
    assert subject.model_bytes * subject.models["data.teacher"].step.placement.mesh.size >= 4 * count
    assert f"data.teacher   checkpoint:{teacher}: " in capsys.readouterr().out.replace("\n", "")


def test_other_tokens_are_refused(files, teacher, tmp_path):
    small = train_teacher(files, "larger", num_steps=1, vocab_size=300)
    with pytest.raises(RecipeError, match=r"vocabulary of 300 tokens, and task.model one of 257"):
        run(distilling(files, small, directory=str(tmp_path)))
    with pytest.raises(RecipeError, match="RewardTask has no log-probabilities"):
        run(distilling(files, train_reward_model(files, num_steps=1), directory=str(tmp_path)))
    with pytest.raises(RecipeError, match=r"refills=1 has no effect without data\.rewards"):
        distilling(files, teacher, data={"refills": 1})
