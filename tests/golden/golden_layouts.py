"""Golden runs of one small decoder on each kind of mesh."""

import dataclasses
import math
from pathlib import Path

import jax
import tiny
from rows import STEPS, Row, rows_of_step

from panax.layers import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask
from panax.train import CompiledStep, Program, StepConfig

MESHES = {
    "one_device": {},
    "replica": {"replica": 8},
    "fsdp": {"fsdp": 8},
    "hsdp": {"replica": 2, "fsdp": 4},
    "tensor": {"tensor": 2},
    "context_ring": {"context": 2},
    "context_ulysses": {"context": 2},
    "stage": {"stage": 2},
    "expert": {"expert": 4},
    "fsdp_tensor": {"fsdp": 2, "tensor": 2},
    "stage_fsdp": {"stage": 2, "fsdp": 2},
    "expert_tensor": {"expert": 2, "tensor": 2},
}
AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
batch = tiny.batch
MODEL = dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(8,))
EXPERTS = MoE(experts=8, active=2, ffn=24, shared=16, balance=0.02, z_loss=0.01, selection_bias=True, jitter=0.1)


def task_for(name: str) -> DecoderTask:
    """A dense decoder; a mixture of experts on meshes with the axis `expert`."""
    model = dataclasses.replace(MODEL, feed_forward=EXPERTS) if name.startswith("expert") else MODEL
    return DecoderTask(model=model, context_attention="ring" if name == "context_ring" else "ulysses")


def step_for(name: str) -> CompiledStep:
    sizes = MESHES[name]
    program = Program.create(
        task_for(name), tiny.ADAMW, num_steps=STEPS, config=StepConfig(micro_batches=2 if "stage" in sizes else 1)
    )
    devices = jax.devices()[: math.prod(sizes.values())]
    placement = Placement.create(MeshShape(**(dict.fromkeys(AXES, 1) | sizes)), devices=devices)
    return CompiledStep(program, placement, tiny.AXES)


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_step(step_for(name), map(batch, range(STEPS)))
