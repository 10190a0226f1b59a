"""Log-probabilities among the tokens that a sampler kept, from those among all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention.mask import MASKED
from .row_functions import log_softmax


@jax.custom_vjp
def kept_log_softmax(log_probabilities: Float[Array, "*rest k"], count: Int[Array, "*rest"]) -> Float[Array, "*rest k"]:
    """Return the log-probability of each of the first `count` tokens when one of these is drawn; a large negative number for
    the others.

    Args:
        log_probabilities: Among all tokens.
        count: At least 1.

    >>> values = kept_log_softmax(jnp.log(jnp.array([0.5, 0.25, 0.125])), jnp.array(2))
    >>> [round(float(value), 4) for value in jnp.exp(values)]
    [0.6667, 0.3333, 0.0]
    """
    is_kept = _find_kept(log_probabilities, count)
    return jnp.where(is_kept, log_softmax(jnp.where(is_kept, log_probabilities, MASKED)), MASKED)


def _forward(log_probabilities: Array, count: Array) -> tuple[Array, tuple[Array, Array]]:
    values = kept_log_softmax(log_probabilities, count)
    return values, (values, count)


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    values, count = saved
    gradient = jnp.where(_find_kept(values, count), gradient, 0.0)
    return gradient - jnp.exp(values) * gradient.sum(axis=-1, keepdims=True), None


def _find_kept(values: Array, count: Array) -> Array:
    places = jnp.arange(values.shape[-1]).reshape(*[1] * count.ndim, -1)
    return places < count[..., None]


kept_log_softmax.defvjp(_forward, _backward)
