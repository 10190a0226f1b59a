"""Divergences of a model from a teacher, of which the most likely tokens and their probabilities are known.

With the teacher's k best tokens as events, and all other tokens together as one more, p the teacher's and q the model's
probabilities:

    forward_kl   sum p log(p / q)
    reverse_kl   sum q log(q / p)
    js           beta * forward_kl(p, m) + (1 - beta) * forward_kl(q, m),   m = beta p + (1 - beta) q

These are the divergences of both distributions over the k + 1 events, not estimates of them: no more than those of the whole
vocabulary, and equal to them with k the vocabulary. Sources: GKD (arXiv:2306.13649), equation 1, for `js`, and its limits;
distillation (arXiv:1503.02531) for `forward_kl` at a temperature; MiniLLM (arXiv:2306.08543) for `reverse_kl`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TeacherDivergence = Literal["forward_kl", "reverse_kl", "js"]

LEAST_TAIL = 2.0**-23
"""Least probability of a teacher's tail: the resolution of float32 near a sum of 1."""


class EventLogProbabilities(NamedTuple):
    """Log-probabilities of the events of each position, by the teacher or by the model.

    Attributes:
        top: Of the teacher's k most likely tokens.
        tail: Of all others; -inf if there are none.
    """

    top: Float[Array, "batch seq k"]
    tail: Float[Array, "batch seq"]


def teacher_events(top: Float[Array, "batch seq k"], *, vocab_size: int) -> EventLogProbabilities:
    """Return the teacher's log-probabilities with those of the tail, which is the remaining probability."""
    if top.shape[-1] >= vocab_size:
        return EventLogProbabilities(top, jnp.full(top.shape[:-1], -jnp.inf, top.dtype))
    remaining = 1.0 - jnp.exp(top).sum(axis=-1)
    return EventLogProbabilities(top, jnp.log(jnp.maximum(remaining, LEAST_TAIL)))


def teacher_divergence(
    teacher: EventLogProbabilities, model: EventLogProbabilities, divergence: TeacherDivergence, beta: float
) -> Float[Array, "batch seq"]:
    """Compute the divergence of each position; differentiable by the model's log-probabilities.

    Args:
        beta: Weight of the teacher in the mixture of `js`, between 0 and 1.
    """
    # Without a tail, its logarithms are replaced by numbers at which the derivative is finite, and then not counted.
    has_tail = ~(jnp.isneginf(teacher.tail) | jnp.isneginf(model.tail))
    tails = [jnp.where(has_tail, each.tail, -1.0) for each in (teacher, model)]
    log_p, log_q = (
        jnp.concatenate([each.top, tail[..., None]], axis=-1)
        for each, tail in zip((teacher, model), tails, strict=True)
    )
    terms = _terms(log_p, log_q, divergence, beta)
    return terms[..., :-1].sum(axis=-1) + jnp.where(has_tail, terms[..., -1], 0.0)


def _terms(log_p: jax.Array, log_q: jax.Array, divergence: TeacherDivergence, beta: float) -> jax.Array:
    match divergence:
        case "forward_kl":
            return jnp.exp(log_p) * (log_p - log_q)
        case "reverse_kl":
            return jnp.exp(log_q) * (log_q - log_p)
        case "js":
            log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
            return beta * jnp.exp(log_p) * (log_p - log_m) + (1.0 - beta) * jnp.exp(log_q) * (log_q - log_m)
