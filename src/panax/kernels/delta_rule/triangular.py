"""Inverse of small unit lower triangular matrices, by matmuls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def invert_unit_lower(lower: Float[Array, "*batch row column"]) -> Float[Array, "*batch row column"]:
    """Return the inverse of `1 + lower`, for matrices that are zero on and above the diagonal.

    The diagonal blocks' inverses, of width 1, 2, 4, ..., are merged pairwise:

        inverse of [[A, 0], [C, B]]  =  [[A', 0], [-B' C A', B']]    with A' and B' those of A and B

    In terms of whole matrices, with `inverse` so far and C the blocks between two of a pair, this subtracts
    `inverse C inverse`. Unlike a product of powers (the Neumann series doubled), it subtracts no large numbers
    from each other: with `lower` all ones, powers of 32 rows reach 3e8, and the inverse has no entry above 1.

    >>> invert_unit_lower(jnp.tril(jnp.ones((3, 3)), -1)).tolist()
    [[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]]
    """
    size = lower.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    ones = (1,) * (lower.ndim - 2)

    def between_pairs(width: int) -> Array:
        """Return the blocks between the two of each pair of adjacent blocks of a width."""
        pair = (row // width == column // width + 1) & (row // (2 * width) == column // (2 * width))
        return jnp.where(pair.reshape(*ones, size, size), lower, 0.0)

    inverse = jnp.eye(size, dtype=lower.dtype).reshape(*ones, size, size) - between_pairs(1)
    width = 2
    while width < size:
        inverse = inverse - _product(_product(inverse, between_pairs(width)), inverse)
        width *= 2
    return inverse


def _product(a: Array, b: Array) -> Array:
    """Multiply in the matrices' own precision: every block merged from these inherits their errors."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = invert_unit_lower(lower)
    return inverse, inverse


def _backward(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_product(_product(transposed, gradient), transposed), -1),)


invert_unit_lower.defvjp(_forward, _backward)
