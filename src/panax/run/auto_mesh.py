"""`--mesh auto` in a run: the mesh is chosen before anything is allocated, and reported in one line."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core import Axes, Task
from ..core.layout.target import device_target
from ..plan.search.auto import choose_mesh
from ..train import Program
from .experiment import Experiment

LogFn = Callable[[str], None]


def resolve_auto_mesh(
    experiment: Experiment,
    task: Task,
    program_of: Callable[[Experiment, Task], Program],
    batch: Callable[[], Mapping[str, Any]],
    batch_axes: Mapping[str, Axes],
    devices: Any = None,
    say: LogFn = lambda line: None,
    memory_bytes: int | None = None,
    fast_domain: int | None = None,
) -> tuple[Experiment, Task]:
    """Choose mesh, micro-batches and rematerialization if the mesh is `auto`; return the experiment and its
    task.

    Args:
        task: The task, with the settings that the recipe left open filled in.
        batch: Returns the shapes of a global batch; called only if there is something to choose.
        memory_bytes: Memory of each device, if the devices can't report it.
        fast_domain: Number of devices joined by the fast network; by default from the target's traits.

    Raises:
        LayoutError: Nothing fits, or XLA partitions the task's program.
        LayoutError: Nothing fits, or XLA partitions the task's program.
    """
    if not experiment.mesh.auto or experiment.debug:
        return experiment, task
    devices = jax.devices() if devices is None else list(devices)
    memory = _memory(devices) if memory_bytes is None else memory_bytes
    if fast_domain is None:
        fast_domain = device_target(devices[0]).traits.fast_domain or len(devices)

    def program(task: Task, micro_batches: int) -> Program:
        step = dataclasses.replace(experiment.step, micro_batches=micro_batches)
        return program_of(dataclasses.replace(experiment, step=step), task)

    choice = choose_mesh(
        program,
        task,
        devices,
        batch(),
        batch_axes,
        memory_bytes=memory,
        fast_domain=fast_domain,
        rules=experiment.rules,
    )
    say(
        f"mesh auto: {choice} of {memory / 2**30:.0f}; of {choice.num_walks} steps that were traced, it fits, sends about the "
        f"least, and waits and repeats the least"
    )
    step = dataclasses.replace(experiment.step, micro_batches=choice.micro_batches)
    chosen = task if choice.remat is None else task.rematerialize(choice.remat)
    return dataclasses.replace(experiment, mesh=choice.mesh, step=step), chosen


def _memory(devices: list[Any]) -> int:
    """Return the memory of each device, in bytes; simulated devices share the host's."""
    if device_target(devices[0]).traits.own_memory:
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if limit:
            return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
