"""Values of actions: the loss against a definition in float64, layouts, adapters, and what else the head is in the way of."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import sampled_answers
import torch

from panax.core import RecipeError, named_leaves
from panax.core.batch_checks import OLD_VALUE_LEAF, RETURN_LEAF
from panax.core.measures import total_loss
from panax.kernels import CrossEntropySettings
from panax.layers.moe.moe_config import MoE
from panax.models import DecoderTask, LoRA, PolicyGradient
from panax.models.objectives.objective import VocabularyHead
from panax.models.value_head import ValueHead
from panax.spmd.composite.low_rank import is_low_rank
from panax.testing import check_task

OBJECTIVE = PolicyGradient(several_updates=True, value_weight=0.5, value_clip=0.3)
LAYOUTS = (
    {"fsdp": 2}, {"tensor": 4}, {"context": 4}, {"stage": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "context": 2},
    {"context": 2, "tensor": 2, "fsdp": 2}, {"stage": 2, "tensor": 2, "fsdp": 2},
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun(DecoderTask):
    """With a head, and corrections by adapters, that are not 0, so that all weights have gradients from the first step on."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        params, state = super().init(key)
        w = 0.3 * jax.random.normal(key, params.value_head.w.shape)
        params = dataclasses.replace(params, value_head=ValueHead(w=w, b=jnp.full((1,), 0.1)))

        def begin(node: Any) -> Any:
            if not is_low_rank(node):
                return node
            return dataclasses.replace(node, b=0.1 * jax.random.normal(jax.random.fold_in(key, 1), node.b.shape))

        return jax.tree.map(begin, params, is_leaf=is_low_rank), state


TASKS: dict[str, DecoderTask] = {
    "plain": Begun(model=pairs.MODEL, objective=OBJECTIVE),
    "adapters": Begun(model=pairs.MODEL, objective=OBJECTIVE, adapter=LoRA(rank=2)),
    "experts": Begun(
        model=dataclasses.replace(pairs.MODEL, feed_forward=MoE(experts=4, active=2, ffn=16, balance=0.1)),
        objective=OBJECTIVE,
    ),
}

TOLERANCES = {"adapters": 5e-5}
"""Adam turns the rounding of some adapters' small gradients into updates of its own size: only the first gradient is close."""


def evaluate(objective: PolicyGradient, batch: Any, hidden: np.ndarray, head: ValueHead) -> Any:
    """The total loss with its gradients by hidden states and the head, and metrics; logits are the hidden states."""
    vocab = pairs.MODEL.vocab_size
    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items()}

    def loss(hidden: jax.Array, head: ValueHead) -> Any:
        given = VocabularyHead(hidden, jnp.eye(vocab), CrossEntropySettings(), vocab, head)
        losses, metrics = objective.compute(given, objective.targets(rows), True)
        weights = {name: float(weight) for name, weight in objective.loss_weights(rows).items()}
        assert weights.keys() == losses.keys()
        return total_loss({"value": losses["value"]}), metrics

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(hidden), head)


@pytest.mark.parametrize("clip", [0.3, None])
def test_the_value_loss_equals_the_definition(clip: float | None) -> None:
    objective = dataclasses.replace(OBJECTIVE, value_clip=clip)
    batch = sampled_answers.batch_for(objective)
    assert (OLD_VALUE_LEAF in batch) == (clip is not None)
    hidden = sampled_answers.draw_logits(batch)
    w = np.random.default_rng(7).normal(size=(hidden.shape[-1], 1)).astype(np.float32) * 0.3
    (found, metrics), (by_hidden, by_head) = evaluate(
        objective, batch, hidden, ValueHead(w=jnp.asarray(w), b=jnp.full((1,), 0.2))
    )
    h = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    values = (h @ weights)[..., 0] + 0.2
    counted = torch.tensor(batch["loss_mask"] > 0)
    returns = torch.tensor(batch[RETURN_LEAF], dtype=torch.float64)
    error = (values - returns) ** 2
    if clip is not None:
        old = torch.tensor(batch[OLD_VALUE_LEAF], dtype=torch.float64)
        bounded = (old + (values - old).clamp(-clip, clip) - returns) ** 2
        share = float((bounded > error).detach()[counted].double().mean())
        assert 0.0 < share == pytest.approx(float(metrics["clipped/value"].value), rel=1e-6)
        error = torch.maximum(error, bounded)
    expected = 0.5 * 0.5 * error[counted].mean()
    expected.backward()
    assert h.grad is not None and weights.grad is not None
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    for one, other in ((by_hidden, h.grad), (by_head.w, weights.grad)):
        assert np.linalg.norm(one - other.numpy()) <= 1e-5 * np.linalg.norm(other.numpy())
    assert float(metrics["value"].value) == pytest.approx(float(values[counted].mean().detach()), rel=1e-5)


@pytest.mark.full
def test_trains_like_one_device_where_rows_and_words_are_split() -> None:
    task = TASKS["plain"]
    report = check_task(task, sampled_answers.batch_for(OBJECTIVE), layouts=[{"context": 2, "tensor": 2}])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("plain", {"stage": 2, "context": 2}),
        ("plain", {"fsdp": 2, "tensor": 2}),
        ("plain", {"stage": 2, "tensor": 2, "fsdp": 2}),
        ("adapters", {"fsdp": 2, "tensor": 2}),
        ("experts", {"expert": 2, "context": 2}),
    ],
)
def test_trains_like_one_device(name: str, sizes: dict[str, int]) -> None:
    report = check_task(
        TASKS[name], sampled_answers.batch_for(OBJECTIVE), layouts=[sizes], tolerance=TOLERANCES.get(name)
    )
    assert len(report.compared) == 1, report.left_out


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_trains_like_one_device_on_every_layout(name: str) -> None:
    report = check_task(
        TASKS[name], sampled_answers.batch_for(OBJECTIVE), layouts=LAYOUTS, tolerance=TOLERANCES.get(name)
    )
    assert len(report.compared) == len(LAYOUTS), report.left_out


def test_adapters_train_with_the_head_and_nothing_else() -> None:
    task = DecoderTask(model=pairs.MODEL, objective=OBJECTIVE, adapter=LoRA(rank=2))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    trained = named_leaves(params).keys() - set(task.frozen_parameters)
    assert {"value_head.w", "value_head.b"} < trained
    assert all(name.startswith("value_head.") or name.endswith((".a", ".b")) for name in trained)


def test_other_objectives_have_no_head() -> None:
    plain = DecoderTask(model=pairs.MODEL, objective=PolicyGradient())
    params, _ = jax.eval_shape(plain.init, jax.random.key(0))
    assert params.value_head is None and plain.added_parameters == ()
    assert not plain.rollout_needs.values and RETURN_LEAF not in plain.required_leaves


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_weight": -1.0}, "value_weight=-1.0; expected 0 or more"),
        ({"value_weight": 1.0, "value_clip": 0.0}, "value_clip=0.0; expected a positive number"),
        ({"value_clip": 0.5}, "has no effect with value_weight=0"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PolicyGradient(**settings)
