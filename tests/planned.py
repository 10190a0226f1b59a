"""Training steps of decoders, compiled for devices that are not there, beside what the formulas say of them."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from panax.mesh import MeshShape, Placement, Rules
from panax.models import PRESETS, DecoderConfig, DecoderTask
from panax.optim import AdamW
from panax.plan import StepPlan, parse_target, plan_step, target_devices
from panax.plan.communication import DecoderStep
from panax.train import CompiledStep, Program, StepConfig

PACKED = ("tokens", "targets", "loss_mask", "segment", "position")

WIDE = dataclasses.replace(PRESETS["llama3_8b"], num_layers=4)
"""The widths of Llama 3 8B: the shares of layers, tables and activations are those of a real model."""


def text(rows: int, length: int, *, packed: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch."""
    names = PACKED if packed else PACKED[:3]
    return {
        name: jax.ShapeDtypeStruct((rows, length), jnp.float32 if name == "loss_mask" else jnp.int32) for name in names
    }


def plan(
    target: str,
    mesh: Mapping[str, int],
    rows: int,
    *,
    model: DecoderConfig = WIDE,
    length: int = 8192,
    micro_batches: int = 1,
    packed: bool = True,
    rules: Rules | None = None,
    remat: Any = "full",
    **task: Any,
) -> tuple[StepPlan, DecoderStep]:
    """What one step's program does, and the step as the formulas take it. Compiled once for all tests of a process."""
    key = repr((target, mesh, rows, model, length, micro_batches, packed, rules, remat, sorted(task.items())))
    if key not in _PLANS:
        _PLANS[key] = _planned(target, mesh, rows, model, length, micro_batches, packed, rules, remat, task)
    return _PLANS[key]


_PLANS: dict[str, tuple[StepPlan, DecoderStep]] = {}


def _planned(
    target: str,
    mesh: Mapping[str, int],
    rows: int,
    model: DecoderConfig,
    length: int,
    micro_batches: int,
    packed: bool,
    rules: Rules | None,
    remat: Any,
    task: dict[str, Any],
) -> tuple[StepPlan, DecoderStep]:
    rules = rules or Rules()
    decoder = DecoderTask(model=model, compute_dtype="bfloat16", remat=remat, **task)
    config = StepConfig(micro_batches=micro_batches)
    program = Program.create(decoder, AdamW(), num_steps=1000, config=config)
    batch = text(rows, length, packed=packed)
    with warnings.catch_warnings():
        # A mesh that asks much of the slow network is warned of, and meant here.
        warnings.simplefilter("ignore")
        placement = Placement.create(MeshShape(**{"fsdp": 1, **mesh}), rules, devices(target))
    step = CompiledStep(program, placement, dict.fromkeys(batch, ("batch", "seq")))
    formula = DecoderStep(
        task=decoder, mesh=mesh, rows=rows, length=length, micro_batches=micro_batches, packed=packed, rules=rules
    )
    return plan_step(step, batch), formula


@functools.cache
def devices(target: str) -> list[Any]:
    return target_devices(parse_target(target))


__all__ = ["WIDE", "devices", "plan", "text"]
