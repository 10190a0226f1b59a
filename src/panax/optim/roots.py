"""Inverse roots of symmetric matrices by products alone, which every accelerator is good at."""

import jax
import jax.numpy as jnp

ITERATIONS = 30
"""Each one brings an eigenvalue nearer to 1 by (1 + 1/p)^p, at first: 2.44 for fourth roots. 16 for a condition of 1e6, a few for
the norm, which may be the root of the size above the largest eigenvalue, and a few at the end, where errors are squared."""

CLOSE = 1e-6
"""It is done where no number of the matrix that becomes the identity is further from it."""


def inverse_root(matrices: jax.Array, power: int, ridge: float, iterations: int = ITERATIONS) -> jax.Array:
    """(A + ridge |A| I)^(-1/power) of each symmetric matrix A without negative eigenvalues; the identity for zeros.

    The coupled Newton iteration (Guo and Higham 2006, as in arXiv:2002.09018), in float32 or wider, multiplied in full.

    Args:
        matrices: (..., side, side)
        ridge: Times the Frobenius norm; eigenvalues below count as much as it.
        iterations: At most; a matrix that is close enough stays as it is.

    >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0])), 4, 0.0).diagonal().round(4).tolist()
    [0.5, 1.0]
    """
    dtype = jnp.promote_types(matrices.dtype, jnp.float32)
    matrices = matrices.astype(dtype)
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=dtype), matrices.shape)
    # By its largest number first: squares of statistics of small gradients are too small for float32.
    most = jnp.max(jnp.abs(matrices), (-2, -1), keepdims=True)
    known = most > 0
    most = jnp.where(known, most, 1)
    norm = most * jnp.where(known, jnp.linalg.norm(matrices / most, axis=(-2, -1), keepdims=True), 1)
    # In units of the norm, in which eigenvalues are between 0 and 1.
    scaled = matrices / norm + jnp.asarray(ridge, dtype) * identity
    largest = 1 + ridge
    begin = (1 + power) / (2 * largest)
    coupled = scaled * jnp.asarray(begin, dtype)
    root = identity * jnp.asarray(begin ** (1 / power), dtype)

    def iterate(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        root, coupled = carry
        away = jnp.max(jnp.abs(coupled - identity), (-2, -1), keepdims=True)
        step = (jnp.asarray(1 + 1 / power, dtype) * identity) - coupled / power
        goes_on = away > CLOSE
        root_after, coupled_after = _product(root, step), _product(_power(step, power), coupled)
        return (jnp.where(goes_on, root_after, root), jnp.where(goes_on, coupled_after, coupled)), None

    (root, _), _ = jax.lax.scan(iterate, (root, coupled), None, iterations)
    return jnp.where(known, root * norm ** (-1 / power), identity)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _power(x: jax.Array, power: int) -> jax.Array:
    found = None
    while power:
        if power & 1:
            found = x if found is None else _product(found, x)
        power >>= 1
        if power:
            x = _product(x, x)
    assert found is not None
    return found


def products_of(power: int, iterations: int = ITERATIONS) -> int:
    """How many products of two such matrices an inverse root takes.

    >>> products_of(4)
    120
    """
    return iterations * (power.bit_length() - 1 + power.bit_count() - 1 + 2)
