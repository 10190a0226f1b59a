"""Gathers of weights into their compute layout, in the compute dtype or as quantized codes.

    rules.weight_gather_dtype = "int8"

Codes and scales are gathered, and decoded after the gather. The stored parameter and the optimizer's update
keep their full precision; the weight's gradient is taken with respect to the rounded value.

Source: arXiv:2306.10209 (quantized weight communication). Differs: quantization blocks do not depend on the
mesh.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.jax_primitives import define_primitive
from ..core.layout.layout import Layout, MeshAxes, current_layout
from ..core.layout.quant_blocks import LEAST, quant_blocks
from ..core.params.logical import lookup_axis
from ..core.protocols import Axes
from ..core.task import Task
from ..kernels.quantized import FLOAT8, INT8, Format, QuantizedArray, quantize
from .collectives import gather_dims
from .sharding_marks import assert_split

FORMATS: dict[str, Format] = {"int8": INT8, "float8": FLOAT8}


def gather_weight_as(x: jax.Array, axes: Axes, gathers: Sequence[MeshAxes], dtype: Any) -> jax.Array:
    """Gather a weight along `gathers`, in `dtype`.

    Args:
        x: This device's shard, in the storage layout.
        axes: Logical axes of the weight.
        gathers: For each dimension, the mesh axes to gather over.
    """
    layout = current_layout()
    coded = None if layout is None else weight_code_format(x.shape, axes, gathers, layout)
    if layout is None or coded is None:
        return gather_dims(x.astype(dtype), gathers)
    format, box = coded
    places = layout.storage(axes)
    codes = jax.tree.map(lambda part: assert_split(part, places), quantize(x.astype(jnp.float32), format, box))
    return _decoded(jax.tree.map(lambda part: gather_dims(part, gathers), codes), dtype)


def _decoded(codes: QuantizedArray, dtype: Any) -> jax.Array:
    return DECODED.bind(codes.codes, codes.scales, format=codes.format, block=codes.block, dtype=jnp.dtype(dtype))


def _decode(codes: jax.Array, scales: jax.Array, *, format: Format, block: tuple[int, ...], dtype: Any) -> jax.Array:
    return QuantizedArray(codes, scales, format, block, dtype).dequantize()


def _in_front(arrays: Any, dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    # Quantization blocks cover only the last dimensions, so a batch dimension moves to the front.
    return DECODED.bind(*(jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims)), **params), 0


DECODED = define_primitive(
    "decode_gathered",
    compute=_decode,
    infer=lambda codes, _, *, format, dtype, **__: codes.update(
        shape=(*codes.shape[:-1], codes.shape[-1] * format.packed), dtype=dtype
    ),
    batch=_in_front,
)
"""Decodes a gathered weight. A single primitive, so that a rematerialization policy saves no intermediate
result.
"""


def check_effect(layout: Layout, parameters: Mapping[str, tuple[tuple[int, ...], Axes]], task: Task) -> None:
    """Check that quantized gathers, if requested, apply to at least one weight.

    Args:
        parameters: Name to (shape, logical axes).

    Raises:
        RecipeError: No weight is gathered as codes; the message names the setting to change.
    """
    if layout.weight_gather_dtype == "same":
        return
    setting = f'rules.weight_gather_dtype="{layout.weight_gather_dtype}"'
    if not task.names_axes:
        raise RecipeError(
            f'{setting}: {type(task).__name__} names no axes, so XLA gathers its weights; leave rules.weight_gather_dtype "same"'
        )
    for shape, axes in parameters.values():
        places, used = layout.storage(axes), layout.compute(axes)
        gathers = tuple(tuple(axis for axis in dim if axis not in computed) for dim, computed in zip(places, used))
        shard = [size // math.prod(layout.sizes[axis] for axis in dim) for size, dim in zip(shape, places)]
        if weight_code_format(shard, axes, gathers, layout) is not None:
            return
    raise RecipeError(
        f"{setting} has no effect: on this mesh no weight of at least {LEAST:,} numbers is gathered; set mesh.fsdp above 1, or "
        f'leave rules.weight_gather_dtype "same"'
    )


def weight_code_format(
    shape: Sequence[int], axes: Axes, gathers: Sequence[MeshAxes], layout: Layout
) -> tuple[Format, tuple[int, ...]] | None:
    """Return how a weight is gathered as codes: (format, block shape); None if it is gathered uncoded.

    Args:
        shape: Shape of a device's shard.
    """
    if layout.weight_gather_dtype == "same" or not any(gathers):
        return None
    # A router makes discrete choices, so its weights are gathered in float32.
    if any(lookup_axis(axis).in_float32 for axis in axes):
        return None
    boxes = quant_blocks(shape, axes, layout)
    return None if boxes is None else (FORMATS[layout.weight_gather_dtype], boxes.local_block_shape)
