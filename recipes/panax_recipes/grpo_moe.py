"""A first run of reinforcement learning for a mixture of experts, with router replay."""

import dataclasses

from panax.layers import MoE
from panax.models import DecoderTask, PolicyGradient
from panax.optim import AdamW, Schedule
from panax.run import Experiment

from .grpo_arithmetic import grpo_arithmetic
from .sft_arithmetic import sft_arithmetic


def sft_moe() -> Experiment:
    """Train the decoder of sft_arithmetic with a mixture of experts in each layer, as sft_arithmetic does.

    Command: panax train sft_moe
    Hardware: two CPU cores; minutes.
    Expected: few greedy answers are right, as of sft_arithmetic (not measured).
    """
    dense = sft_arithmetic()
    return dataclasses.replace(dense, name="sft_moe", task=_with_experts(dense.task, balance=0.01), num_steps=900)


def grpo_moe() -> Experiment:
    """Teach the mixture of sft_moe to add, by nothing but whether its answers are right.

    Each token trains the experts that it was drawn with (router replay), also in the second update of a rollout, when the
    routers have changed.

    Command: panax train grpo_moe (after panax train sft_moe)
    Hardware: two CPU cores; minutes.
    Expected: not measured on the present sums (benchmarks/results/2026-11-30-rollouts.md).
    """
    dense = grpo_arithmetic()
    objective = PolicyGradient(several_updates=True, replay_experts=True)
    return dataclasses.replace(
        dense,
        name="grpo_moe",
        init="checkpoint:runs/sft_moe",
        task=dataclasses.replace(_with_experts(dense.task, balance=0.0), objective=objective),
        data=dataclasses.replace(dense.data, minibatches=2),
        optimizer=AdamW(schedule=Schedule(peak=3e-4, warmup_steps=20)),
        num_steps=400,
    )


def _with_experts(task: object, *, balance: float) -> DecoderTask:
    """Return a task with as many active parameters, in two of eight experts."""
    assert isinstance(task, DecoderTask)
    experts = MoE(experts=8, active=2, ffn=task.model.ffn // 2, selection_bias=True, balance=balance)
    return dataclasses.replace(task, model=dataclasses.replace(task.model, feed_forward=experts))
