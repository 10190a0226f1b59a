"""Runs with rewards by a trained reward model."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judges import train_reward_model, train_teacher
from letter_runs import journal, params, run
from letters import letters

import panax
from panax.core.errors import RecipeError, TrainingError
from panax.mesh import MeshShape
from panax.optim import Schedule, Sgd
from panax.rollouts import Reward, RewardModel
from panax.rollouts.answers import SampledAnswer
from panax.run.parts.answer_judges import AnswerJudges
from panax.run.preparation import prepare
from panax.run.reporting.history import read_history
from panax.train import StepConfig


@pytest.fixture(scope="module")
def judge(files):
    return train_reward_model(files)


def judged(files, judge, **settings):
    """By the model, and by a function that comes second with a weight."""
    (function,) = letters(files, "counts_calls").data.rewards
    rewards = (RewardModel(run=judge, weight=0.5), dataclasses.replace(function, weight=0.1))
    return letters(files, data={"rewards": rewards, "held_out": 0.0}, **settings)


@pytest.mark.full
def test_a_models_values_are_weighed_journaled_and_resumed(files, judge, tmp_path):
    (files / "mark").unlink(missing_ok=True)
    experiment = judged(files, judge, directory=str(tmp_path), num_steps=3)
    first = params(run(experiment))
    entries = journal(tmp_path)
    assert [entry.names for entry in entries] == [("reward_model", "counts_calls")] * 3
    row = read_history(tmp_path)[0]
    values = np.array(entries[0].rewards)
    assert row["rollout/reward/reward_model"] == pytest.approx(values[:, 0].mean(), rel=1e-6)
    assert row["rollout/reward"] == pytest.approx((values @ [0.5, 0.1]).mean(), rel=1e-6)
    assert values[:, 0].std() > 0.01
    for step in (2, 3):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}")
    for one, other in zip(first, params(run(experiment)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(journal(tmp_path)) == 3


def test_a_value_is_that_of_the_last_token_of_prompt_and_answer(files, judge, tmp_path):
    """Of answers of different lengths, in a batch with others."""
    prepared = prepare(judged(files, judge, directory=str(tmp_path)), devices=jax.devices()[:1])
    judges = AnswerJudges(prepared)
    judges.load(lambda line: None)
    tokenizer = prepared.data.tokenizer
    (prompt,), end = tokenizer.encode("a"), tokenizer.end_of_document
    texts = [("fe", ()), ("gfed", (end,)), ("1037", (end,)), ("h", ())] * 5
    drawn = [(*tokenizer.encode(text), *ending) for text, ending in texts]
    answers = [SampledAnswer((prompt,), 0, actions, (-1.0,) * len(actions), "", False) for actions in drawn]
    values = judges.score(answers)
    assert values.shape == (20, 1)
    loaded = panax.load(judge)
    for actions, [value] in zip(drawn[:4], values, strict=False):
        tokens = np.array([[prompt, *actions]], np.int32)
        batch = {"tokens": tokens, "segment": np.ones_like(tokens), "row": np.zeros(1, np.int32)}
        batch |= {
            "position": np.arange(tokens.size, dtype=np.int32)[None],
            "loss_mask": np.ones(tokens.shape, np.float32),
        }
        batch = jax.tree.map(jnp.asarray, batch)
        context = loaded.task.context(batch, jax.random.key(0), False)
        hidden, _ = loaded.params.decoder(batch["tokens"], context, dtype="float32")
        expected = loaded.params.head(hidden[:, -1])[0, 0]
        assert value == pytest.approx(float(expected), abs=5e-4)
    # It has learned to prefer letters.
    assert values[1, 0] > values[2, 0] + 1.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "devices"),
    [
        (MeshShape(fsdp=2, tensor=2), 4),
        (MeshShape(replica=2, fsdp=1, context=2), 4),
        (MeshShape(fsdp=1, stage=2), 2),
        (MeshShape(fsdp=2, tensor=2, context=2), 8),
    ],
)
def test_meshes_judge_alike(files, judge, tmp_path, shape, devices):
    results = []
    for number, (mesh, count) in enumerate(((MeshShape(), 1), (shape, devices))):
        experiment = judged(
            files,
            judge,
            directory=str(tmp_path / str(number)),
            num_steps=2,
            mesh=mesh,
            step=StepConfig(micro_batches=shape.stage),
            optimizer=Sgd(schedule=Schedule(peak=0.5, warmup_steps=1)),
            model={"num_layers": shape.stage},
        )
        results.append(run(experiment, count))
    one, other = (np.array([entry.rewards for entry in journal(tmp_path / str(number))]) for number in range(2))
    # On one device, other numbers of rows change the value of a rare answer by 1e-4 too: this model is ill-conditioned.
    np.testing.assert_allclose(one, other, atol=5e-4)
    for first, second in zip(*map(params, results), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-4)


def test_other_models_and_values_are_refused(files, judge, tmp_path):
    with pytest.raises(RecipeError, match="DecoderTask has no rewards of answers"):
        run(judged(files, train_teacher(files, num_steps=1), directory=str(tmp_path)))
    with pytest.raises(RecipeError, match=r"two rewards have the name 'reward_model'"):
        letters(files, data={"rewards": (RewardModel(run=judge), RewardModel(run=judge))})
    with pytest.raises(RecipeError, match=r"RewardModel\.name='a b': expected letters"):
        RewardModel(run=judge, name="a b")
    with pytest.raises(RecipeError, match=r"RewardModel\.run is empty"):
        RewardModel(run="")


@pytest.mark.full
def test_a_value_that_is_not_finite_is_a_failure(files, judge, tmp_path, monkeypatch):
    monkeypatch.setattr(AnswerJudges, "score", lambda self, answers: np.full((len(answers), 1), np.nan))
    with pytest.raises(TrainingError, match=r"an answer has no reward: reward reward_model of .* returned nan"):
        run(judged(files, judge, directory=str(tmp_path)))


def test_functions_alone_need_no_model(files):
    assert letters(files).data.reward_models == () and isinstance(letters(files).data.functions[0], Reward)
