"""Policy gradients on layouts and in micro-batches: those of one device, with answers of uneven lengths."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import sampled_answers

from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, PolicyGradient
from panax.optim import Optax
from panax.testing import check_task
from panax.train import CompiledStep, Program, StepConfig

EXPERTS = dataclasses.replace(pairs.MODEL, feed_forward=MoE(experts=4, active=2, ffn=16, balance=0.1))
OBJECTIVES = {
    "token": PolicyGradient(several_updates=True, kl_weight=0.1, correction="token_truncate", correction_cap=1.2),
    "sequence": PolicyGradient(
        loss="grpo",
        ratio="sequence",
        several_updates=True,
        correction="sequence_mask",
        correction_cap=1.5,
        temperature=0.7,
    ),
}
TASKS = {
    **{name: DecoderTask(model=pairs.MODEL, objective=objective) for name, objective in OBJECTIVES.items()},
    "experts": DecoderTask(model=EXPERTS, objective=OBJECTIVES["sequence"]),
    "kept": DecoderTask(
        model=pairs.MODEL, objective=PolicyGradient(several_updates=True, temperature=0.7, replay_sampling=True)
    ),
    "replay": DecoderTask(
        model=EXPERTS, objective=PolicyGradient(several_updates=True, temperature=0.7, replay_experts=True)
    ),
}
LAYOUTS = (
    {"fsdp": 2}, {"tensor": 4}, {"context": 4}, {"stage": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "context": 2},
    {"context": 2, "tensor": 2, "fsdp": 2}, {"stage": 2, "tensor": 2, "fsdp": 2}, {"replica": 2, "expert": 2},
)  # fmt: skip


def batch_of(name: str) -> dict[str, np.ndarray]:
    batch = sampled_answers.batch_for(TASKS[name].objective)
    if name == "replay":
        # Any two of four, where the routers would choose others.
        draws = np.random.default_rng(5).random((*batch["tokens"].shape, EXPERTS.num_layers, 4))
        batch["experts"] = np.argsort(draws, axis=-1)[..., :2].astype(np.int32)
        batch["experts"][batch["segment"] == 0] = -1
    return batch


def test_trains_like_one_device_where_rows_and_words_are_split() -> None:
    report = check_task(TASKS["sequence"], batch_of("sequence"), layouts=[{"context": 2, "tensor": 2}])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("token", {"stage": 2, "context": 2}),
        ("token", {"context": 2, "tensor": 2, "fsdp": 2}),
        ("sequence", {"stage": 2, "context": 2}),
        ("experts", {"expert": 2, "context": 2}),
        ("kept", {"context": 2, "tensor": 2}),
        ("kept", {"stage": 2, "fsdp": 2}),
        ("replay", {"expert": 2, "context": 2}),
        ("replay", {"tensor": 2, "fsdp": 2}),
        ("replay", {"stage": 2, "context": 2}),
    ],
)
def test_trains_like_one_device(name: str, sizes: dict[str, int]) -> None:
    report = check_task(TASKS[name], batch_of(name), layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_trains_like_one_device_on_every_layout(name: str) -> None:
    report = check_task(TASKS[name], batch_of(name), layouts=LAYOUTS)
    assert len(report.compared) == len(LAYOUTS), report.left_out


@functools.cache
def gradient(
    name: str, micro_batches: int, sizes: tuple[tuple[str, Any], ...] = ()
) -> tuple[list[np.ndarray], dict[str, float]]:
    import optax

    def keep(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"gradient": updates}

    keeping = optax.GradientTransformation(lambda params: {"gradient": jax.tree.map(jnp.zeros_like, params)}, keep)
    config = StepConfig(clip_norm=None, micro_batches=micro_batches)
    program = Program.create(TASKS[name], Optax(transformation=keeping), num_steps=1, config=config)
    count = int(np.prod([size for _, size in sizes]))
    batch = batch_of(name)
    axes = dict.fromkeys(batch, ("batch", "seq"))
    step = CompiledStep(program, Placement.create(MeshShape(**dict(sizes)), devices=jax.devices()[:count]), axes)
    state, scalars = step(step.init(0), step.put(batch))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer_state["gradient"])]
    return leaves, {
        name: float(value) for name, value in scalars.items() if np.ndim(value) == 0 and hasattr(value, "dtype")
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, ()), (4, ()), (8, ()), (2, (("context", 2), ("replica", 2))), (2, (("stage", 2), ("tensor", 2)))],
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_of_uneven_answers_give_the_gradient_and_metrics_of_the_whole_batch(
    name: str, count: int, sizes: tuple[tuple[str, int], ...]
) -> None:
    """One of the rows is empty, so that a micro-batch of one row has no answer at all."""
    (whole, all_scalars), (parts, scalars) = gradient(name, 1), gradient(name, count, sizes)
    distance = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(parts, whole, strict=True)))
    assert distance <= 5e-6 * np.sqrt(sum(np.sum(leaf**2) for leaf in whole))
    assert scalars["answers"] == 19.0 and scalars["tokens"] == all_scalars["tokens"]
    names = ("loss", "loss/policy", "ratio", "entropy", "clipped/low", "clipped/high", "correction", "answer_tokens")
    for metric in (*names, "gap/token", "gap/largest", "gap/sequence"):
        assert scalars[metric] == pytest.approx(all_scalars[metric], rel=1e-5), metric
    assert 0.0 < all_scalars["clipped/low"] < 1.0 and all_scalars["clipped/high"] > 0.0
