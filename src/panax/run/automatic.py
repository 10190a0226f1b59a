"""`--mesh auto`, in a run: the choice is made before anything is placed, and said in a line."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from ..core import Task
from ..core.errors import LayoutError
from ..core.target import target_of
from ..data import TextData
from ..models import DecoderTask
from ..plan.auto import choose_mesh
from .experiment import Experiment


def with_chosen_mesh(
    experiment: Experiment,
    task: Task,
    devices: Any = None,
    say: Callable[[str], None] = lambda line: None,
    memory_bytes: int | None = None,
    fast_domain: int | None = None,
) -> tuple[Experiment, Task]:
    """The experiment and its task with mesh, micro-batches and rematerialisation chosen, where the mesh is `auto`.

    Args:
        task: With what the recipe left open filled in.
        memory_bytes: Of each device, where it can't be asked.
        fast_domain: Devices that the fast network joins; a host's, or all TPUs.

    Raises:
        LayoutError: Nothing fits, or the task is no decoder on text.
    """
    if not experiment.mesh.auto or experiment.debug:
        return experiment, task
    data = experiment.data
    if not isinstance(task, DecoderTask) or not isinstance(data, TextData):
        raise LayoutError(
            "mesh.auto chooses for a DecoderTask on TextData; set the mesh's sizes, for example mesh.fsdp=-1"
        )
    devices = jax.devices() if devices is None else list(devices)
    memory = _memory(devices) if memory_bytes is None else memory_bytes
    if fast_domain is None:
        fast_domain = len(devices) if devices[0].platform == "tpu" else 8
    choice = choose_mesh(
        task,
        len(devices),
        rows=data.batch_size,
        length=data.sequence_length,
        memory_bytes=memory,
        fast_domain=fast_domain,
        packed=data.packing,
        rules=experiment.rules,
    )
    say(
        f"mesh auto: {choice} of {memory / 2**30:.0f}; of what fits and sends about the least, it waits and repeats the least"
    )
    step = dataclasses.replace(experiment.step, micro_batches=choice.micro_batches)
    return dataclasses.replace(experiment, mesh=choice.mesh, step=step), dataclasses.replace(task, remat=choice.remat)


def _memory(devices: list[Any]) -> int:
    """Of each device; simulated ones share the host's."""
    if target_of(devices[0]).traits.own_memory:
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if limit:
            return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
