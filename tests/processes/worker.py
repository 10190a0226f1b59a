"""One of the processes of `test_two_processes.py`: trains the tiny decoder on a mesh over all of them, and prints what it saw.

python worker.py ADDRESS PROCESSES INDEX '{"fsdp": 8}' ...: the first mesh trains, the others are laid out alone.
"""

import dataclasses
import json
import os
import threading
from typing import Any

import jax
import tiny
from launching import join_job

from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask
from panax.train import CompiledStep, Program, StepConfig

ONE = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1)
STEPS = 3
TASK = DecoderTask(model=dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(8,)))


def main() -> None:
    first, *others = (json.loads(sizes) for sizes in join_job())
    spans = [processes_along_axes(Placement.create(MeshShape(**(ONE | sizes)))) for sizes in others]
    found = {"trained": trained(first), "processes": spans}
    if hasattr(os, "SCHED_BATCH"):
        found["watches_cores"] = any(thread.name == "panax-cores" for thread in threading.enumerate())
    print(json.dumps({"local": jax.local_device_count(), "all": jax.device_count(), **found}), flush=True)


def trained(sizes: dict[str, int], devices: Any = None) -> dict[str, Any]:
    """Losses of a few steps, and the loss on a held-out batch."""
    config = StepConfig(micro_batches=2 if sizes.get("stage", 1) > 1 else 1)
    program = Program.create(TASK, tiny.ADAMW, num_steps=STEPS, config=config)
    step = CompiledStep(program, Placement.create(MeshShape(**(ONE | sizes)), devices=devices), tiny.AXES)
    state, losses = step.init(0), []
    for number in range(STEPS):
        state, scalars = step(state, step.put(tiny.batch(number)))
        losses.append(float(scalars["loss"]))
    held_out = step.evaluate(state, step.put(tiny.batch(STEPS)))["losses"]["cross_entropy"].mean
    return {"losses": losses, "gradient_norm": float(scalars["gradient_norm"]), "held_out": float(held_out)}


def processes_along_axes(placement: Placement) -> dict[str, int]:
    """Mesh axis to how many processes a line of devices along it lies in, at most."""
    grid, axes = placement.devices.devices, list(placement.sizes)
    lines = {axis: grid.swapaxes(i, -1).reshape(-1, grid.shape[i]) for i, axis in enumerate(axes)}
    return {axis: max(len({d.process_index for d in line}) for line in found) for axis, found in lines.items()}


if __name__ == "__main__":
    main()
