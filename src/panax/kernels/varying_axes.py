"""Device-variation of local arrays: the requirements of `jax.shard_map(check_vma=True)` for a kernel.

Inside a checked `shard_map` every array carries the mesh axes over which its value differs between devices. A
loop carry must start with the variation it ends with, a hand-written derivative must return that of its
primal, and a Pallas call must state that of its outputs. All three hold once the inputs of a kernel vary over
the same axes, so each kernel calls `vary_alike` first. Outside of `shard_map` these functions do nothing.
"""

from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike


def vary_alike(*arrays: Array | None) -> tuple[Any, ...]:
    """Cast every array (None stays None) to vary over the union of the mesh axes that any of them varies
    over.

    The cast is differentiable: its transpose sums the cotangent over the added axes, so the gradient of an
    array that was equal on all devices is again equal on all devices.
    """
    union = frozenset[str]().union(*(_axes(array) for array in arrays if array is not None))
    return tuple(None if array is None else _cast(array, union) for array in arrays)


def vary_like(array: Array, *references: Array) -> Array:
    """Cast `array`, usually a constant that a loop starts from, to vary as the references do together."""
    return _cast(array, frozenset[str]().union(*(_axes(reference) for reference in references)))


def output_struct(shape: tuple[int, ...], dtype: DTypeLike, like: Array) -> jax.ShapeDtypeStruct:
    """Return the abstract output of a Pallas call with inputs that vary like `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def _axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def _cast(array: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
