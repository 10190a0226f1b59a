"""Rewards of answers: the definition, TRL's trainer on the same weights, layouts, and errors."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest

from panax.core import DataError, RecipeError
from panax.core.measures import total_loss
from panax.layers import Context
from panax.layers.moe.moe_config import MoE
from panax.models import RewardTask
from panax.models.objectives.preference import REFERENCE_LEAF
from panax.testing import check_task

TASK = RewardTask(model=dataclasses.replace(pairs.MODEL, logit_soft_cap=None), centering=0.1)
BATCH = {name: leaf for name, leaf in pairs.batch().items() if name != REFERENCE_LEAF}


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()} | {"row": jnp.arange(len(batch["tokens"]))}


@pytest.mark.full
def test_a_reward_is_of_the_last_token() -> None:
    params, state = jax.jit(TASK.init)(jax.random.key(0))
    batch = on_device(BATCH)
    found = jax.jit(lambda params: TASK.loss(params, state, batch, jax.random.key(0), True))(params)
    context = Context(batch["position"], batch["segment"])
    hidden, _ = jax.jit(lambda params: params.decoder(batch["tokens"], context, dtype=jnp.float32))(params)
    scores = np.asarray(hidden) @ np.asarray(params.head.w)[:, 0] + np.asarray(params.head.b)[0]
    rewards = []
    for row, segment in enumerate(BATCH["segment"]):
        for number in range(1, segment.max() + 1):
            rewards.append(scores[row, np.flatnonzero(segment == number)[-1]])
    chosen, rejected = np.array(rewards[::2]), np.array(rewards[1::2])
    assert len(chosen) == 10
    expected = np.log(1 + np.exp(rejected - chosen)).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    assert float(total_loss(found.losses)) == pytest.approx(expected, rel=1e-5)
    assert float(found.metrics["rewards/accuracies"].value) == pytest.approx((chosen > rejected).mean())
    assert float(found.metrics["rewards/margins"].value) == pytest.approx((chosen - rejected).mean(), rel=1e-4)
    segment = np.where(BATCH["segment"] == 2, 0, BATCH["segment"])
    broken = jax.jit(lambda batch: TASK.loss(params, state, batch, jax.random.key(0), True).metrics)
    with pytest.raises(DataError, match="a preference pair lacks an answer"):
        broken(on_device({**BATCH, "segment": segment}))["pair_faults"].raise_if_failed("the batch")


EXPERTS = dataclasses.replace(TASK.model, feed_forward=MoE(experts=4, active=2, ffn=16, balance=0.1))


@pytest.mark.parametrize(
    ("task", "layouts"),
    [
        pytest.param(TASK, ({"fsdp": 2, "tensor": 2},), marks=pytest.mark.full),
        pytest.param(TASK, ({"replica": 2, "expert": 2},), marks=pytest.mark.slow),
        pytest.param(RewardTask(model=EXPERTS), ({"replica": 2, "expert": 2},), marks=pytest.mark.slow),
    ],
    ids=["dense", "rows", "experts"],
)
def test_trains_like_one_device(task: RewardTask, layouts: Any) -> None:
    report = check_task(task, BATCH, layouts=layouts)
    assert len(report.compared) == len(layouts), report.left_out
    assert not task.mesh_axes & {"context", "stage"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_equals_trl(tmp_path: Path) -> None:
    import torch
    import transformers
    from trl import RewardTrainer

    from panax.adapters.huggingface import config_from, load

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    task = RewardTask(model=config_from(tmp_path), centering=0.1)
    params, state = load(tmp_path, task, *jax.eval_shape(task.init, jax.random.key(0)))
    answers = pairs.random_answers(seed=3, rows=6)
    batch = on_device(pairs.lay(answers))

    def loss(params: Any) -> Any:
        result = task.loss(params, state, batch, jax.random.key(0), True)
        return total_loss(result.losses), result.metrics

    (found, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    texts = [[*prompt, *answer] for row in answers for prompt, answer in row]
    ids = torch.zeros((len(texts), 16), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate([*texts[::2], *texts[1::2]]):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    trainer: Any = object.__new__(RewardTrainer)
    same = types.SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    recorded: dict[str, list[float]] = {
        name: [] for name in ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")
    }
    trainer.__dict__.update(
        model=model, accelerator=same, _metrics={"eval": recorded}, _total_train_tokens=0,
        args=types.SimpleNamespace(center_rewards_coefficient=0.1),
    )  # fmt: skip
    theirs = trainer.compute_loss(model, {"input_ids": ids, "attention_mask": mask})
    theirs.backward()
    assert float(found) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert float(metrics["rewards/margins"].value) == pytest.approx(recorded["margin"][-1], rel=1e-5)
    assert float(metrics["rewards/accuracies"].value) == pytest.approx(recorded["accuracy"][-1])
    for ours, other in (
        (gradients.head.w[:, 0], model.score.weight.grad[0]),
        (gradients.decoder.embedding.table[:96], model.model.embed_tokens.weight.grad),
    ):
        assert np.linalg.norm(ours - other.numpy()) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(TASK, centering=-1.0), "task.centering=-1.0; expected 0 or more"),
        (lambda: dataclasses.replace(TASK, pooling="mean"), 'task.pooling="mean" has no effect'),
    ],
)
def test_settings_without_meaning_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()
