"""Requirements of a program on a mesh, and compiler options by the size of its kernels."""

import os
from typing import Any

from ...core import pair_axes
from ...core.layout.target import Target
from ...mesh.legality import MeshRequirements
from ..program import Program

_LEVEL = "xla_backend_optimization_level"


def mesh_requirements(program: Program) -> MeshRequirements:
    """Return the program's requirements on a mesh, as plain data."""
    task = program.task
    arrays = pair_axes(program.abstract, program.axes)
    # Moments have their parameters' shapes, so check each shape once.
    distinct: dict[Any, str] = {}
    for name, leaf, axes in arrays:
        distinct.setdefault((tuple(axes), leaf.shape), name)
    return MeshRequirements(
        arrays=tuple((name, axes, shape) for (axes, shape), name in distinct.items()),
        supported=task.mesh_axes,
        who=type(task).__name__,
        pipeline_requirement=task.pipeline_requirement,
        exchange_requirements=task.exchange_requirements,
        splits_residual=task.names_axes and task.splits_residual,
        row_order="zigzag" if task.row_order == "any" else task.row_order,
        micro_batches=program.config.micro_batches,
    )


def small_program_options(target: Target) -> dict[str, int] | None:
    """Return compiler options for a program of many small kernels: a lower optimization level, if that pays
    and the user has not set one.

    Random initialization is exact at every level.
    """
    if target.traits.optimizes_small or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_LEVEL: 1}
