"""Differentiable sum over a dynamic number of rounds, in the memory of one.

A loop with a length known only at run time cannot save residuals for its backward pass. The first round, the
only one in a balanced run, is differentiated as usual; later ones are recomputed in the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..core.layout.declarations import declare_trip_count

RoundFunction = Callable[[Int[Array, ""], Any, Any], jax.Array]
"""(round number, constants, variables) to the round's term of the sum. Must be hashable, and hold no
arrays."""


def sum_over_rounds(
    run: RoundFunction, rounds: Int[Array, ""], constants: Any, variables: Any, zeros_for: Any, *, max_rounds: int
) -> jax.Array:
    """Sum `run` over `rounds` rounds, at least one.

    Args:
        max_rounds: Maximum number of rounds, declared to the planner; one is expected.
        constants: Arguments that are not differentiated.
        variables: Arguments that are differentiated and saved for the backward pass.
        zeros_for: Zeros that `run` takes as the last of its variables and never reads: their gradients are
            float32 sums over all rounds. The zeros are created again where needed.
    """
    return _in_rounds(run, max_rounds, rounds, constants, variables, zeros_for)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(
    run: RoundFunction, max_rounds: int, rounds: jax.Array, constants: Any, variables: Any, zeros_for: Any
) -> jax.Array:
    first = run(jnp.int32(0), constants, (variables, zeros_for))
    return _later(run, max_rounds, rounds, constants, (variables, zeros_for), first)


def _forward(
    run: RoundFunction, max_rounds: int, rounds: jax.Array, constants: Any, variables: Any, zeros_for: Any
) -> tuple[jax.Array, Any]:
    def first(variables: Any, zeros_for: Any) -> jax.Array:
        return run(jnp.int32(0), constants, (variables, zeros_for))

    y, pull = jax.vjp(first, variables, zeros_for)
    return _later(run, max_rounds, rounds, constants, (variables, zeros_for), y), (pull, rounds, constants, variables)


def _later(
    run: RoundFunction, max_rounds: int, rounds: jax.Array, constants: Any, arguments: Any, y: jax.Array
) -> jax.Array:
    def more(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, total = carry
        return number + 1, total + run(number, constants, arguments).astype(jnp.float32)

    with declare_trip_count(0, max_rounds - 1):
        total = jax.lax.while_loop(lambda carry: carry[0] < rounds, more, (jnp.int32(1), y.astype(jnp.float32)))[1]
    return total.astype(y.dtype)


def _backward(run: RoundFunction, max_rounds: int, saved: Any, gradient: jax.Array) -> tuple[None, None, Any, Any]:
    pull, rounds, constants, variables = saved
    first = pull(gradient)
    like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first[1])

    def more(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        number, total = carry
        pull = jax.vjp(lambda v, z: run(number, constants, (v, z)), variables, like)[1]
        return number + 1, jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, pull(gradient))

    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), first)
    with declare_trip_count(0, max_rounds - 1):
        total = jax.lax.while_loop(lambda carry: carry[0] < rounds, more, (jnp.int32(1), wide))[1]
    return None, None, *jax.tree.map(lambda t, leaf: t.astype(leaf.dtype), total, first)


_in_rounds.defvjp(_forward, _backward)
