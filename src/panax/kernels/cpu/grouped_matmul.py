"""Grouped matmuls on CPU by `csrc/grouped.c`: kernels for "grouped matmul"."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from panax.core.layout.target import Target
from panax.kernels.cpu.choice import DTYPES
from panax.kernels.cpu.native import KERNELS, call_native, unavailable_reason
from panax.kernels.grouped.grouped_matmul import GroupedCase, GroupedMatmul
from panax.kernels.grouped.rows import Groups
from panax.kernels.registry import Kernel, register


def native_grouped_product(
    name: str,
    x: Float[Array, "row k"],
    w: Float[Array, "group _ _"],
    groups: Groups,
    *,
    transposed: bool,
    out_dtype: DTypeLike,
) -> Float[Array, "row n"]:
    """Compute `grouped_product`."""
    shape = (x.shape[0], w.shape[1 if transposed else 2])
    call = call_native("panax_grouped_product", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(x, w, *_places(groups), kernel=_place(name), transposed=np.int32(transposed)).astype(out_dtype)


def native_grouped_outer(
    name: str, x: Float[Array, "row k"], y: Float[Array, "row n"], groups: Groups, *, out_dtype: DTypeLike
) -> Float[Array, "group k n"]:
    """Compute `grouped_outer`."""
    shape = (groups.sizes.shape[0], x.shape[1], y.shape[1])
    call = call_native("panax_grouped_outer", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(x, y, *_places(groups), kernel=_place(name)).astype(out_dtype)


def _places(groups: Groups) -> tuple[jax.Array, jax.Array]:
    return groups.sizes.astype(jnp.int32), groups.starts.astype(jnp.int32)


def _place(name: str) -> np.int32:
    return np.int32(KERNELS.index(name))


def _limit(name: str, case: GroupedCase, target: Target) -> str | None:
    if case.dtype not in DTYPES:
        return f"operands must be {' or '.join(DTYPES)}"
    if not case.local:
        return "it is a custom call, which XLA can't split over devices"
    return unavailable_reason(name, case.dtype)


for _name in KERNELS:
    _run = GroupedMatmul(
        functools.partial(native_grouped_product, _name), functools.partial(native_grouped_outer, _name)
    )
    register(
        Kernel(
            work="grouped matmul",
            name=_name,
            run=_run,
            platforms=("cpu",),
            limit=functools.partial(_limit, _name),
        )
    )
