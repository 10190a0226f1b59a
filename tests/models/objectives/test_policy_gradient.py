"""Policy gradients: the definition answer by answer in float64, what doesn't reach the gradient, and errors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import sampled_answers
import torch

from panax.core import DataError, RecipeError
from panax.core.batch_checks import KEPT_COUNT_LEAF, KEPT_LEAF, check_ranges
from panax.models import DecoderTask, PolicyGradient
from panax.models.objectives.policy_gradient import ADVANTAGE_LEAF, BEHAVIOR_LEAF, OLD_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF

CLIPPED: dict[str, Any] = {"several_updates": True, "clip_low": 0.15, "clip_high": 0.3}
OBJECTIVES: dict[str, PolicyGradient] = {
    "grpo": PolicyGradient(loss="grpo", kl_weight=0.3, **CLIPPED),
    "bnpo": PolicyGradient(loss="bnpo", two_sided_clip=1.4, **CLIPPED),
    "dr_grpo": PolicyGradient(loss="dr_grpo", max_answer=7, correction="token_mask", correction_cap=1.1, **CLIPPED),
    "dapo": PolicyGradient(correction="token_truncate", correction_cap=1.1, kl_weight=0.1, **CLIPPED),
    "cispo": PolicyGradient(loss="cispo", several_updates=True, clip_high=1.1),
    "sapo": PolicyGradient(loss="sapo", several_updates=True, positive_temperature=2.0, negative_temperature=3.0),
    "luspo": PolicyGradient(loss="luspo", ratio="sequence", correction="sequence_mask", **CLIPPED),
    "gspo": PolicyGradient(
        loss="grpo", ratio="sequence", correction="sequence_truncate", correction_cap=1.1, kl_weight=0.2, **CLIPPED
    ),
    "one update": PolicyGradient(loss="grpo", kl_weight=0.1),
    "warm": PolicyGradient(temperature=0.7, **CLIPPED),
    "kept": PolicyGradient(temperature=0.7, kl_weight=0.1, replay_sampling=True, **CLIPPED),
}


def weigh_sampling(objective: PolicyGradient, log_weight: Any) -> Any:
    """Weights of actions by their own ratio, or by that of their answer."""
    kind, _, rule = objective.correction.partition("_")
    weight = (log_weight.sum() if kind == "sequence" else log_weight).exp()
    if rule == "truncate":
        return weight.clamp(max=objective.correction_cap)
    return torch.where(weight > objective.correction_cap, 0.0, weight) if rule else 1.0


def action_loss(objective: PolicyGradient, r: Any, a: Any, log: Any) -> Any:
    if objective.loss == "cispo":
        return -r.clamp(max=objective.clip_high).detach() * a * log
    if objective.loss == "sapo":
        t = torch.where(a > 0, objective.positive_temperature, objective.negative_temperature)
        return -4.0 / (t * (1.0 + torch.exp(-t * (r - 1.0)))) * a
    clipped = r.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high) * a
    return -torch.minimum(
        (r if objective.two_sided_clip is None else r.clamp(max=objective.two_sided_clip)) * a, clipped
    )


def mask_others(logits: Any, leaf: dict[str, Any]) -> Any:
    """The logits of the kept tokens of each action, and -inf for others."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for place, (ids, count) in enumerate(zip(leaf[KEPT_LEAF].long(), leaf[KEPT_COUNT_LEAF].long(), strict=True)):
        kept[place, ids[:count]] = True
    return torch.where(kept, logits, -torch.inf)


def defined(
    objective: PolicyGradient, host: dict[str, np.ndarray], logits: np.ndarray, soft_cap: float | None = None
) -> tuple[float, np.ndarray]:
    """The loss and its gradient by the logits, from one answer at a time."""
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    bounded = z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)
    all_log = torch.log_softmax(bounded / objective.temperature, dim=-1)
    total: Any = 0.0
    answers = sampled_answers.find_answers(host)
    for row, places in answers:
        leaf = {name: torch.tensor(host[name][row, places], dtype=torch.float64) for name in objective.leaf_axes}
        of_answer = all_log[row, places]
        if objective.replay_sampling:
            of_answer = torch.log_softmax(mask_others(bounded[row, places] / objective.temperature, leaf), dim=-1)
        log = of_answer.gather(-1, torch.tensor(host["targets"][row, places]).long()[:, None])[:, 0]
        old = leaf.get(OLD_LEAF, log.detach())
        r = (log - old).exp() if objective.ratio == "token" else (log - old).mean().exp().expand(len(places))
        terms = action_loss(objective, r, leaf[ADVANTAGE_LEAF], log) * weigh_sampling(
            objective, old - leaf[BEHAVIOR_LEAF]
        )
        if objective.kl_weight:
            terms = terms + objective.kl_weight * (
                (leaf[REFERENCE_LEAF] - log).exp() - 1.0 - (leaf[REFERENCE_LEAF] - log)
            )
        total = total + (terms.mean() if objective.loss in ("grpo", "sapo") else terms.sum())
    tokens = sum(len(places) for _, places in answers)
    divisor = {"bnpo": tokens, "dapo": tokens, "cispo": tokens, "dr_grpo": len(answers) * objective.max_answer}
    loss = total / divisor.get(objective.loss, len(answers))
    loss.backward()
    assert z.grad is not None
    return float(loss.detach()), z.grad.numpy()


QUICK = ("dapo", "cispo", "gspo", "warm")
"""Those of the default suite, which cover each kind of ratio, loss, denominator and correction; TRL's test has the others too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in OBJECTIVES]
)
def test_equals_the_definition_of_each_answer(name: str) -> None:
    """With answers of uneven lengths, one of them excluded and one of a single action."""
    objective = OBJECTIVES[name]
    host = sampled_answers.batch_for(objective)
    assert min(len(places) for _, places in sampled_answers.find_answers(host)) == 1
    logits, soft_cap = sampled_answers.draw_logits(host), 0.8 if name == "warm" else None
    expected, wanted = defined(objective, host, logits, soft_cap)
    found, gradient, metrics = sampled_answers.evaluate(objective, host, logits, soft_cap=soft_cap)
    assert found == pytest.approx(expected, rel=1e-5)
    assert np.linalg.norm(gradient - wanted) <= 1e-5 * np.linalg.norm(wanted)
    metrics["answer_faults"].raise_if_failed("the batch")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in OBJECTIVES]
)
def test_equals_the_definition_of_answers_with_tokens_of_an_environment(name: str) -> None:
    """An answer of several turns has targets without loss between its actions."""
    objective = OBJECTIVES[name]
    host = sampled_answers.batch_for(objective)
    for row, places in sampled_answers.find_answers(host):
        if len(places) >= 4:
            host["loss_mask"][row, places[1:-1][:2]] = 0.0
    assert any(np.diff(places).max(initial=1) > 1 for _, places in sampled_answers.find_answers(host))
    logits = sampled_answers.draw_logits(host)
    expected, wanted = defined(objective, host, logits)
    found, gradient, metrics = sampled_answers.evaluate(objective, host, logits)
    assert found == pytest.approx(expected, rel=1e-5)
    assert np.linalg.norm(gradient - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert not gradient[host["loss_mask"] == 0.0].any()
    metrics["answer_faults"].raise_if_failed("the batch")
    assert float(metrics["answers"].value) == len(sampled_answers.find_answers(host))


def test_metrics_are_those_of_each_answer() -> None:
    """And no metric counts the excluded answer."""
    objective = OBJECTIVES["gspo"]
    host = sampled_answers.batch_for(objective)
    logits = sampled_answers.draw_logits(host)
    _, _, metrics = sampled_answers.evaluate(objective, host, logits)
    log = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
    log = np.take_along_axis(log, host["targets"][..., None], axis=-1)[..., 0]
    answers = sampled_answers.find_answers(host)
    gaps = [host[OLD_LEAF][row, places] - host[BEHAVIOR_LEAF][row, places] for row, places in answers]
    ratios = np.array([np.exp((log - host[OLD_LEAF])[row, places].mean()) for row, places in answers])
    advantages = np.array([host[ADVANTAGE_LEAF][row, places[0]] for row, places in answers])
    entropy = -np.concatenate([log[row, places] for row, places in answers])
    expected = {
        "gap/token": np.abs(np.concatenate(gaps)).mean(),
        "gap/largest": np.abs(np.concatenate(gaps)).max(),
        "gap/sequence": np.mean([abs(gap.sum()) for gap in gaps]),
        "correction": np.mean([min(np.exp(gap.sum()), 1.1) for gap in gaps]),
        "ratio": ratios.mean(),
        "clipped/low": np.mean((ratios < 0.85) & (advantages < 0)),
        "clipped/high": np.mean((ratios > 1.3) & (advantages > 0)),
        "entropy": entropy.mean(),
        "answer_tokens": np.mean([len(gap) for gap in gaps]),
        "answers": len(answers),
        "tokens": entropy.size,
    }
    assert {name: float(metrics[name].value) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["clipped/low"].value > 0.0


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_behavior_does_not_reach_the_gradient_without_a_correction(name: str) -> None:
    """Bit for bit; with the correction it does."""
    host = sampled_answers.batch_for(OBJECTIVES[name])
    logits = sampled_answers.draw_logits(host)
    other = {**host, BEHAVIOR_LEAF: host[BEHAVIOR_LEAF] - 0.5}
    changes: dict[str, Any] = {"correction": "none", "correction_cap": 3.0}
    for objective, equal in ((OBJECTIVES[name], False), (dataclasses.replace(OBJECTIVES[name], **changes), True)):
        (_, one, metrics), (_, two, others) = (
            sampled_answers.evaluate(objective, each, logits) for each in (host, other)
        )
        assert np.array_equal(one, two) is equal
        assert float(metrics["gap/token"].value) != float(others["gap/token"].value)


def test_an_answer_without_actions_counts_nowhere_and_one_without_signal_counts() -> None:
    """A group without signal adds to denominators alone; a batch of excluded answers has no loss and no gradient."""
    objective = PolicyGradient(loss="grpo")
    host = sampled_answers.batch_for(objective)
    logits = sampled_answers.draw_logits(host)
    value, _, metrics = sampled_answers.evaluate(objective, host, logits)
    answers = float(metrics["answers"].value)
    assert answers == len(sampled_answers.find_answers(host)) == 19.0
    assert not host[ADVANTAGE_LEAF][0].any() and host["loss_mask"][0].any()
    masked = {
        **host,
        "loss_mask": np.where(np.arange(pairs.ROWS)[:, None] == 0, 0.0, host["loss_mask"]).astype(np.float32),
    }
    fewer, _, metrics = sampled_answers.evaluate(objective, masked, logits)
    assert fewer * float(metrics["answers"].value) == pytest.approx(value * answers, rel=1e-6)
    assert float(metrics["answers"].value) == answers - 2.0
    none, gradient, metrics = sampled_answers.evaluate(
        objective, {**host, "loss_mask": np.zeros_like(host["loss_mask"])}, logits
    )
    assert none == 0.0 and not gradient.any() and np.isfinite(float(metrics["gap/largest"].value))
    metrics["answer_faults"].raise_if_failed("the batch")


def test_ratios_beyond_float32_leave_a_finite_gradient() -> None:
    objective = PolicyGradient(several_updates=True, kl_weight=0.1)
    host = sampled_answers.batch_for(objective)
    host[OLD_LEAF] = np.where(host["loss_mask"] > 0, -200.0, 0.0).astype(np.float32)
    host[ADVANTAGE_LEAF] = np.abs(host[ADVANTAGE_LEAF])
    value, gradient, _ = sampled_answers.evaluate(objective, host, sampled_answers.draw_logits(host))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_broken_answers_are_errors() -> None:
    objective = PolicyGradient(several_updates=True, kl_weight=0.1)
    task = DecoderTask(model=pairs.MODEL, objective=objective)
    right = sampled_answers.batch_for(objective)
    check_ranges(right, task.leaf_ranges)
    assert {ADVANTAGE_LEAF, BEHAVIOR_LEAF, OLD_LEAF, REFERENCE_LEAF, "segment", "position"} <= task.required_leaves
    assert not {OLD_LEAF, REFERENCE_LEAF} & DecoderTask(model=pairs.MODEL, objective=PolicyGradient()).required_leaves
    assert set(task.leaf_advice) == set(objective.leaf_axes)
    row, position = np.argwhere(right["loss_mask"] > 0)[0]
    for leaf, value, message in (
        (ADVANTAGE_LEAF, np.nan, r"'advantage' holds nan .*give each action a finite advantage"),
        (BEHAVIOR_LEAF, 0.1, r"'behavior_log_probability' holds 0.1 at .*0 or less"),
        (OLD_LEAF, -np.inf, r"'old_log_probability' holds -inf"),
        (REFERENCE_LEAF, np.nan, r"'reference_log_probability' holds nan"),
    ):
        broken = {name: array.copy() for name, array in right.items()}
        broken[leaf][row, position] = value
        with pytest.raises(DataError, match=message):
            check_ranges(broken, task.leaf_ranges)
    segment, logits = right["segment"], sampled_answers.draw_logits(right)
    for change, message in (
        ({"loss_mask": right["loss_mask"] * 0.5}, "loss_mask of an action is neither 0 nor 1"),
        ({"segment": np.where(segment == 2, 0, segment)}, "an action is outside of all segments"),
        ({"position": right["position"] + 3}, "position does not begin at 0 and count up"),
        ({"segment": np.where(segment == 2, 40, segment)}, "an action is outside of all segments"),
    ):
        batch = {**right, **{name: leaf.astype(right[name].dtype) for name, leaf in change.items()}}
        _, _, metrics = sampled_answers.evaluate(objective, batch, logits)
        with pytest.raises(DataError, match=message):
            metrics["answer_faults"].raise_if_failed("the batch")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "objective.temperature=0.0; expected a positive number"),
        ({"clip_high": 0.0}, "objective.clip_high=0.0; expected a positive number"),
        ({"clip_low": 1.5}, "objective.clip_low=1.5; expected a number above 0 and at most 1"),
        ({"loss": "sapo", "clip_low": 0.1}, "objective.clip_low=0.1 has no effect on the loss sapo; remove it"),
        (
            {"loss": "cispo", "clip_high": 5.0, "two_sided_clip": 9.0},
            "two_sided_clip=9.0 has no effect on the loss cispo",
        ),
        ({"positive_temperature": 2.0}, "objective.positive_temperature=2.0 has no effect on the loss dapo"),
        ({"max_answer": 64}, "objective.max_answer=64 has no effect on the loss dapo"),
        ({"two_sided_clip": 1.1}, r"objective.two_sided_clip=1.1; expected a ratio above 1 \+ clip_high, 1.2"),
        ({"loss": "cispo"}, "objective.clip_high=0.2 is the largest ratio of the loss cispo; set 1 or more, such as 5"),
        ({"loss": "luspo"}, 'objective.loss="luspo" has one ratio for each answer; set ratio="sequence"'),
        ({"loss": "dr_grpo"}, "objective.max_answer=0; the loss dr_grpo divides by it"),
        ({"kl_weight": -0.1}, "objective.kl_weight=-0.1; expected 0 or more"),
        ({"correction_cap": 2.0}, 'objective.correction_cap=2.0 has no effect with correction="none"'),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PolicyGradient(**settings)
