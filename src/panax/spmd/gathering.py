"""Weights on their way to where they are used: in the type that they are computed in, or as codes.

    rules.gathered_as = "int8"

Codes and scales are gathered, and decoded where they arrive. What rests, and what an optimizer changes, stays as it is; a
weight's gradient is that of its rounded value.

Source: arXiv:2306.10209 (quantised weight communication), with boxes that no mesh changes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.boxes import LEAST, quant_blocks
from ..core.errors import RecipeError
from ..core.jax_primitives import define_primitive
from ..core.layout import Layout, MeshAxes, current_layout
from ..core.logical import traits_of
from ..core.protocols import Axes
from ..core.task import Task
from ..kernels.quantised import FLOAT8, INT8, Format, QuantizedArray, quantize
from .collectives import gather_dims
from .marks import split_over

FORMATS: dict[str, Format] = {"int8": INT8, "float8": FLOAT8}


def gather_weight_as(x: jax.Array, axes: Axes, gathers: Sequence[MeshAxes], dtype: Any) -> jax.Array:
    """A weight in `dtype`, whole along `gathers`.

    Args:
        x: This device's shard, as it rests.
        axes: Its logical axes.
        gathers: For each dimension, the mesh axes to gather over.
    """
    layout = current_layout()
    coded = None if layout is None else codes_of(x.shape, axes, gathers, layout)
    if layout is None or coded is None:
        return gather_dims(x.astype(dtype), gathers)
    format, box = coded
    places = layout.storage(axes)
    codes = jax.tree.map(lambda part: split_over(part, places), quantize(x.astype(jnp.float32), format, box))
    return _decoded(jax.tree.map(lambda part: gather_dims(part, gathers), codes), dtype)


def _decoded(codes: QuantizedArray, dtype: Any) -> jax.Array:
    return DECODED.bind(codes.codes, codes.scales, format=codes.format, block=codes.block, dtype=jnp.dtype(dtype))


def _decode(codes: jax.Array, scales: jax.Array, *, format: Format, block: tuple[int, ...], dtype: Any) -> jax.Array:
    return QuantizedArray(codes, scales, format, block, dtype).dequantize()


def _in_front(arrays: Any, dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    # Blocks are held for the last dimensions alone.
    return DECODED.bind(*(jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims)), **params), 0


DECODED = define_primitive(
    "decode_gathered",
    compute=_decode,
    infer=lambda codes, _, *, format, dtype, **__: codes.update(
        shape=(*codes.shape[:-1], codes.shape[-1] * format.packed), dtype=dtype
    ),
    batch=_in_front,
)
"""Decodes a gathered weight: one operation, so that a rematerialisation policy keeps none of what lies between."""


def check_effect(layout: Layout, parameters: Mapping[str, tuple[tuple[int, ...], Axes]], task: Task) -> None:
    """Refuse codes where no weight would travel as such.

    Args:
        parameters: Name to (shape, logical axes).

    Raises:
        RecipeError: Says what to set.
    """
    if layout.gathered_as == "same":
        return
    asked = f'rules.gathered_as="{layout.gathered_as}"'
    if not task.names_axes:
        raise RecipeError(
            f'{asked}: {type(task).__name__} names no axes, so XLA gathers its weights; leave rules.gathered_as "same"'
        )
    for shape, axes in parameters.values():
        places, used = layout.storage(axes), layout.compute(axes)
        gathers = tuple(tuple(axis for axis in dim if axis not in kept) for dim, kept in zip(places, used))
        shard = [size // math.prod(layout.sizes[axis] for axis in dim) for size, dim in zip(shape, places)]
        if codes_of(shard, axes, gathers, layout) is not None:
            return
    raise RecipeError(
        f"{asked} has no effect: on this mesh no weight of at least {LEAST:,} numbers is gathered; set mesh.fsdp above 1, or "
        f'leave rules.gathered_as "same"'
    )


def codes_of(
    shape: Sequence[int], axes: Axes, gathers: Sequence[MeshAxes], layout: Layout
) -> tuple[Format, tuple[int, ...]] | None:
    """How a weight travels: (format, sides of a box); None where it travels as it is.

    Args:
        shape: Of a device's shard.
    """
    if layout.gathered_as == "same" or not any(gathers):
        return None
    # A router chooses: what it reads is gathered in float32.
    if any(traits_of(axis).in_float32 for axis in axes):
        return None
    boxes = quant_blocks(shape, axes, layout)
    return None if boxes is None else (FORMATS[layout.gathered_as], boxes.sides)
