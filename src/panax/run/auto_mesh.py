"""`--mesh auto` in a run: the mesh is chosen before anything is allocated, and reported in one line."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..core import Axes, Task
from ..plan.search.auto import DeviceGroup, choose_mesh
from ..train import Program
from .experiment import Experiment

LogFn = Callable[[str], None]


def resolve_auto_mesh(
    experiment: Experiment,
    task: Task,
    program_of: Callable[[Experiment, Task], Program],
    batch: Callable[[], Mapping[str, Any]],
    batch_axes: Mapping[str, Axes],
    devices: Callable[[], DeviceGroup] = DeviceGroup.of,
    say: LogFn = lambda line: None,
) -> tuple[Experiment, Task]:
    """Choose mesh, micro-batches and rematerialization if the mesh is `auto`; return the experiment and its
    task.

    Args:
        task: The task, with the settings that the recipe left open filled in.
        batch: Returns the shapes of a global batch; called only if there is something to choose.
        devices: Returns the devices to choose for; by default all of them. Called like `batch`.

    Raises:
        LayoutError: Nothing fits, or XLA partitions the task's program.
    """
    if not experiment.mesh.auto or experiment.debug:
        return experiment, task
    group = devices()

    def program(task: Task, micro_batches: int) -> Program:
        step = dataclasses.replace(experiment.step, micro_batches=micro_batches)
        return program_of(dataclasses.replace(experiment, step=step), task)

    choice = choose_mesh(program, task, group, batch(), batch_axes, experiment.rules)
    say(
        f"mesh auto: {choice} of {group.memory_bytes / 2**30:.0f}; of {choice.num_walks} steps that were traced, it fits, "
        f"sends about the least, and waits and repeats the least"
    )
    step = dataclasses.replace(experiment.step, micro_batches=choice.micro_batches)
    chosen = task if choice.remat is None else task.rematerialize(choice.remat)
    return dataclasses.replace(experiment, mesh=choice.mesh, step=step), chosen
