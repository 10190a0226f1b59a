"""Grouped matrix products: every row times its own group's matrix. For mixtures of experts that drop no token.

The implementation is chosen by the target and the static case. None is differentiated: a layer calls
`grouped_product` forward, and backward `grouped_product(transposed=True)` and `grouped_outer`. Where `choose_grouped`
says "blocked", a layer in float32 gains from running whole inside one `map_groups`.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from panax.core.target import Target
from panax.kernels.grouped_blocked import blocked_outer, blocked_product, map_groups
from panax.kernels.grouped_choice import (
    GroupedCase,
    Implementation,
    choose_grouped,
    limit_of_grouped,
    say_grouped_once,
)
from panax.kernels.grouped_gpu import gpu_outer, gpu_product
from panax.kernels.grouped_reference import reference_outer, reference_product
from panax.kernels.grouped_rows import Groups, aligned_rows, choose_tile
from panax.kernels.grouped_tpu import tpu_outer, tpu_product

__all__ = [
    "GroupedCase",
    "Groups",
    "aligned_rows",
    "choose_grouped",
    "choose_tile",
    "grouped_outer",
    "grouped_product",
    "map_groups",
]


def grouped_product(
    x: Float[Array, "row k"],
    w: Float[Array, "group _ _"],
    groups: Groups,
    *,
    target: Target,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "row n"]:
    """Every row of `x` times the matrix of its group, summed in float32; time follows the tiles that are used.

    Args:
        x: The rows in gaps are zeros, as those of the result are. The rows of unused tiles may hold anything; those of
            the result are unspecified.
        w: [group, k, n], or with `transposed` [group, n, k].
        target: What the program is compiled for, not what is attached.
        out_dtype: By default that of `x`.
        implementation: "auto" takes what `choose_grouped` says.

    Raises:
        ValueError: The shapes don't fit each other, or the asked-for implementation can't do the case; the message says
            which limit.

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
    name = _implementation(x, w, groups, target, implementation)
    options = {"transposed": transposed, "out_dtype": out_dtype or x.dtype}
    if name == "triton":
        return gpu_product(x, w, groups, **options)
    if name == "megablox":
        return tpu_product(x, w, groups, **options)
    return (reference_product if name == "reference" else blocked_product)(x, w, groups, **options)


def grouped_outer(
    x: Float[Array, "row k"],
    y: Float[Array, "row n"],
    groups: Groups,
    *,
    target: Target,
    out_dtype: DTypeLike = jnp.float32,
    implementation: Implementation = "auto",
) -> Float[Array, "group k n"]:
    """The rows of `x` transposed times those of `y`, group by group: the gradient by a product's matrices.

    Args:
        x: The rows in gaps are zeros, in `y` too. The rows of unused tiles may hold anything.

    Returns:
        Zeros for a group without rows. Other arguments and errors: as `grouped_product`.
    """
    if not x.shape[0] == y.shape[0] == groups.rows:
        raise ValueError(f"x and y must have {groups.rows=} rows, not {x.shape[0]} and {y.shape[0]}")
    name = _implementation(x, y, groups, target, implementation)
    if name == "triton":
        return gpu_outer(x, y, groups, out_dtype=out_dtype)
    if name == "megablox":
        return tpu_outer(x, y, groups, out_dtype=out_dtype)
    return (reference_outer if name == "reference" else blocked_outer)(x, y, groups, out_dtype=out_dtype)


def _implementation(x: Array, other: Array, groups: Groups, target: Target, implementation: Implementation) -> str:
    if x.dtype != other.dtype:
        raise ValueError(f"both operands must have one dtype, not {x.dtype} and {other.dtype}")
    case = GroupedCase(tile=groups.tile, dtype=str(x.dtype))
    if implementation == "auto":
        choice = choose_grouped(case, target)
        say_grouped_once(target, choice)
        return choice.name
    limit = limit_of_grouped(implementation, case, target)
    if limit is not None:
        raise ValueError(f"implementation={implementation!r} can't do this product: {limit}; got {case}")
    return implementation
