"""Abstract arrays for tracing, in their shardings, and the check of traced programs."""

from typing import Any

import jax

from ...core import TrainState
from ...spmd.checking import check_program
from ..program import Program


def abstract_state(program: Program, shardings: TrainState) -> Any:
    """Return the shapes, dtypes and shardings of a program's state."""

    def shaped(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shaped, program.abstract, shardings)


def check_traced(program: Program, traced: Any) -> Any:
    """Return a traced program; check it for missing sums over devices if `StepConfig.check_sums` is set.

    Raises:
        LayoutError: A sum over devices is missing (`StepConfig.check_sums`).
    """
    if program.config.check_sums:
        check_program(traced.jaxpr)
    return traced
