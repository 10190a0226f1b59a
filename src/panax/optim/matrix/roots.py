"""Inverse roots of symmetric matrices by matmuls only, which are fast on every accelerator."""

import jax
import jax.numpy as jnp

ITERATIONS = 30
"""Maximum number of Newton iterations. Each initially scales an eigenvalue toward 1 by (1 + 1/p)^p: 2.44 for
fourth roots. A condition number of 1e6 takes 16; the Frobenius norm, which may exceed the largest eigenvalue
by the square root of the size, takes a few more, as does the final phase, where errors are squared."""

CLOSE = 1e-6
"""Convergence tolerance: the largest elementwise deviation from the identity."""


def inverse_root(matrices: jax.Array, power: int, ridge: float, iterations: int = ITERATIONS) -> jax.Array:
    """Compute (A + ridge |A| I)^(-1/power) for each symmetric positive semi-definite matrix A; the identity
    for zeros.

    Uses the coupled Newton iteration (Guo and Higham 2006, as in arXiv:2002.09018), in float32 or wider, with
    matmuls at full precision.

    Args:
        matrices: (..., side, side)
        ridge: Relative to the Frobenius norm; acts as a floor for eigenvalues.
        iterations: Maximum number of iterations; a converged matrix is not changed further.

    >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0])), 4, 0.0).diagonal().round(4).tolist()
    [0.5, 1.0]
    """
    dtype = jnp.promote_types(matrices.dtype, jnp.float32)
    matrices = matrices.astype(dtype)
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=dtype), matrices.shape)
    # Divide by the largest element first: squared statistics of small gradients underflow in float32.
    scale = jnp.max(jnp.abs(matrices), (-2, -1), keepdims=True)
    known = scale > 0
    scale = jnp.where(known, scale, 1)
    norm = scale * jnp.where(known, jnp.linalg.norm(matrices / scale, axis=(-2, -1), keepdims=True), 1)
    # Relative to the norm, eigenvalues are between 0 and 1.
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
    result = None
    while power:
        if power & 1:
            result = x if result is None else _product(result, x)
        power >>= 1
        if power:
            x = _product(x, x)
    assert result is not None
    return result


def count_products(power: int, iterations: int = ITERATIONS) -> int:
    """Count the matmuls of one inverse root.

    >>> count_products(4)
    120
    """
    return iterations * (power.bit_length() - 1 + power.bit_count() - 1 + 2)
