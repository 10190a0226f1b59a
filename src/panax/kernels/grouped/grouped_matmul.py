"""Grouped matmuls: every row times its group's matrix, for dropless mixtures of experts.

The implementation is chosen by the target and the static case. They are not differentiable: a layer calls
`grouped_product` forward, and backward `grouped_product(transposed=True)` and `grouped_outer`. If the target
has the trait `experts_in_one_loop`, a float32 layer is faster as one `map_groups`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from panax.core.layout.target import Target
from panax.kernels.cpu.choice import timed_kernel
from panax.kernels.grouped.gpu import gpu_outer, gpu_product
from panax.kernels.grouped.reference import reference_outer, reference_product
from panax.kernels.grouped.rows import Groups, aligned_row_count, choose_tile
from panax.kernels.grouped.tpu import tpu_outer, tpu_product
from panax.kernels.grouped.xla_loops import blocked_outer, blocked_product, map_groups
from panax.kernels.product import is_local
from panax.kernels.registry import Kernel, KernelChoice, choose, log_choice, register

__all__ = [
    "GroupedCase", "GroupedMatmul", "Groups", "aligned_row_count", "choose_tile", "grouped_outer", "grouped_product",
    "is_blocked", "map_groups",
]  # fmt: skip


def grouped_product(
    x: Float[Array, "row k"],
    w: Float[Array, "group _ _"],
    groups: Groups,
    *,
    target: Target,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str = "auto",
) -> Float[Array, "row n"]:
    """Multiply every row of `x` by its group's matrix, accumulating in float32; time is proportional to the
    used tiles.

    Args:
        x: Rows in gaps must be zeros, and are zeros in the result. Rows of unused tiles may hold anything;
            they are unspecified in the result.
        w: [group, k, n], or with `transposed` [group, n, k].
        target: Hardware for which the program is compiled, not the attached hardware.
        out_dtype: By default that of `x`.
        implementation: A kernel's name; "auto" selects the recipe's choice, else the fastest that supports
            the case.

    Raises:
        ValueError: The shapes don't match, or the requested implementation does not support the case; the
            message names the limit.

    >>> groups = Groups(sizes=jnp.array([1, 2]), rows=4, tile=2)
    >>> x = jnp.array([[1.0], [0.0], [1.0], [2.0]])
    >>> grouped_product(x, jnp.array([[[10.0]], [[20.0]]]), groups, target=Target("cpu")).ravel().tolist()
    [10.0, 0.0, 20.0, 40.0]
    """
    if x.shape[0] != groups.rows:
        raise ValueError(f"x has {x.shape[0]} rows, and groups.rows={groups.rows}")
    k = w.shape[2 if transposed else 1]
    if w.shape[0] != groups.sizes.shape[0] or x.shape[1] != k:
        raise ValueError(
            f"x {x.shape} and w {w.shape} don't fit: w needs {groups.sizes.shape[0]} groups and k={x.shape[1]}, "
            f"its dimension {2 if transposed else 1} with {transposed=}"
        )
    run = _kernel_for(x, w, groups, target, implementation).product
    return run(x, w, groups, transposed=transposed, out_dtype=out_dtype or x.dtype)


def grouped_outer(
    x: Float[Array, "row k"],
    y: Float[Array, "row n"],
    groups: Groups,
    *,
    target: Target,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Float[Array, "group k n"]:
    """Multiply the rows of `x`, transposed, by those of `y`, group by group: the gradient of the groups'
    matrices.

    Args:
        x: Rows in gaps must be zeros, also in `y`. Rows of unused tiles may hold anything.

    Returns:
        Zeros for a group without rows. Other arguments and errors: as `grouped_product`.
    """
    if not x.shape[0] == y.shape[0] == groups.rows:
        raise ValueError(f"x and y must have {groups.rows=} rows, not {x.shape[0]} and {y.shape[0]}")
    return _kernel_for(x, y, groups, target, implementation).outer(x, y, groups, out_dtype=out_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCase:
    """Static properties of a grouped matmul that the choice of a kernel depends on.

    Attributes:
        tile: Rows that no two groups share.
        dtype: The name of the operands' dtype.
        local: True if each array is on one device, as in `MatmulCase`.
    """

    tile: int
    dtype: str
    local: bool = True


class GroupedMatmul(NamedTuple):
    """Functions of a kernel for "grouped matmul".

    Attributes:
        product: `product(x, w, groups, transposed=..., out_dtype=...)`, as `grouped_product`.
        outer: `outer(x, y, groups, out_dtype=...)`, as `grouped_outer`.
    """

    product: Callable[..., Array]
    outer: Callable[..., Array]


def is_blocked(dtype: DTypeLike, groups: Groups, target: Target) -> bool:
    """Return True if these matmuls are loops over chunks, so that code between them can be fused into the
    same loop."""
    return _choice(dtype, groups, target).name == "blocked"


def _choice(dtype: DTypeLike, groups: Groups, target: Target, implementation: str = "auto") -> KernelChoice:
    name = jnp.dtype(dtype).name
    case = GroupedCase(tile=groups.tile, dtype=name, local=is_local(groups.sizes))
    return log_choice(
        choose("grouped matmul", case, target, named=implementation, timed=timed_kernel("grouped matmul", name)), target
    )


def _kernel_for(x: Array, other: Array, groups: Groups, target: Target, implementation: str) -> GroupedMatmul:
    if x.dtype != other.dtype:
        raise ValueError(f"both operands must have one dtype, not {x.dtype} and {other.dtype}")
    return _choice(x.dtype, groups, target, implementation).kernel.run


def _takes(dtypes: tuple[str, ...], tile: int) -> Callable[[GroupedCase, Target], str | None]:
    """Return the limit function of a kernel for these dtypes and for tiles of a multiple of `tile` rows."""

    def limit(case: GroupedCase, target: Target) -> str | None:
        if case.dtype not in dtypes:
            return f"operands must be {' or '.join(dtypes)}, not {case.dtype}"
        return f"tile={case.tile} must be a multiple of {tile}; choose_tile gives one" if case.tile % tile else None

    return limit


_kernel = functools.partial(Kernel, work="grouped matmul")
_triton = _takes(("bfloat16", "float16", "float32"), 16)
_megablox = _takes(("bfloat16", "float32"), 128)

register(_kernel(name="triton", run=GroupedMatmul(gpu_product, gpu_outer), platforms=("gpu",), rank=20, limit=_triton))
register(
    _kernel(name="megablox", run=GroupedMatmul(tpu_product, tpu_outer), platforms=("tpu",), rank=20, limit=_megablox)
)
register(_kernel(name="blocked", run=GroupedMatmul(blocked_product, blocked_outer), rank=10))
register(_kernel(name="reference", run=GroupedMatmul(reference_product, reference_outer)))
