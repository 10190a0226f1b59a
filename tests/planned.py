"""Training steps of decoders, walked and compiled for devices that are not there, beside what the formulas say of them."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from formulas.decoder_step import DecoderStep

from panax.comms import Comms
from panax.mesh import MeshShape, Placement, Rules
from panax.models import PRESETS, DecoderConfig, DecoderTask
from panax.optim import AdamW, Optimizer
from panax.plan import StepCost, StepPlan, parse_target, plan_step, target_devices, walk_step
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


class Walked(NamedTuple):
    """A step that was traced: its cost, the formulas' view of it, and the step."""

    cost: StepCost
    formula: DecoderStep
    step: CompiledStep
    batch: dict[str, Any]


def walk(
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
    optimizer: Optimizer = AdamW(),  # noqa: B008
    comms: Comms = Comms(),  # noqa: B008
    **task: Any,
) -> Walked:
    """One step's cost, read from its trace. Traced once for all tests of a process."""
    key = repr(
        (target, mesh, rows, model, length, micro_batches, packed, rules, remat, optimizer, comms, sorted(task.items()))
    )
    if key not in _WALKS:
        _WALKS[key] = _walked(
            target, mesh, rows, model, length, micro_batches, packed, rules, remat, optimizer, comms, task
        )
    return _WALKS[key]


def plan(*args: Any, **options: Any) -> tuple[StepPlan, Walked]:
    """What one step's compiled program does, and its walk. Compiled once for all tests of a process."""
    walked = walk(*args, **options)
    if id(walked) not in _PLANS:
        _PLANS[id(walked)] = plan_step(walked.step, walked.batch)
    return _PLANS[id(walked)], walked


_WALKS: dict[str, Walked] = {}
_PLANS: dict[int, StepPlan] = {}


def _walked(
    target: str,
    mesh: Mapping[str, int],
    rows: int,
    model: DecoderConfig,
    length: int,
    micro_batches: int,
    packed: bool,
    rules: Rules | None,
    remat: Any,
    optimizer: Optimizer,
    comms: Comms,
    task: dict[str, Any],
) -> Walked:
    rules = rules or Rules()
    decoder = DecoderTask(model=model, compute_dtype="bfloat16", remat=remat, **task)
    config = StepConfig(micro_batches=micro_batches)
    program = Program.create(decoder, optimizer, num_steps=1000, config=config, comms=comms)
    batch = text(rows, length, packed=packed)
    with warnings.catch_warnings():
        # A mesh that asks much of the slow network is warned of, and meant here.
        warnings.simplefilter("ignore")
        placement = Placement.create(MeshShape(**{"fsdp": 1, **mesh}), rules, devices(target))
        step = CompiledStep(program, placement, dict.fromkeys(batch, ("batch", "seq")))
        cost = walk_step(step, batch)
    formula = DecoderStep(
        task=decoder, mesh=mesh, rows=rows, length=length, micro_batches=micro_batches, packed=packed, rules=rules
    )
    return Walked(cost, formula, step, batch)


@functools.cache
def devices(target: str) -> list[Any]:
    return target_devices(parse_target(target))


__all__ = ["WIDE", "Walked", "devices", "plan", "text", "walk"]
