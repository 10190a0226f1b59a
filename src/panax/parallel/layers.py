"""Sequential execution of a stack of layers."""

from collections.abc import Callable
from typing import Any

import jax

from ..core import current_target
from ..kernels.product import fusion_barrier
from ..spmd.overlapped_grad_reduce import current_grad_reduce


def scan_layers(
    function: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, layers: Any, *, may_unroll: bool = True
) -> tuple[jax.Array, Any]:
    """Feed `x` through `function(x, layer)` for each layer of a stack, and stack the function's second results.

    The layers share one compiled program, except for short stacks on targets that run them faster unrolled; a
    pipeline, with its layers in several programs, passes `may_unroll=False`. A barrier between unrolled
    layers, in both passes, keeps XLA from fusing the chain of residuals or of their gradients, which would
    make each layer read the contributions of all layers before it.
    """
    sums = current_grad_reduce()
    if sums is not None:
        function, layers = sums.attach_sums(function, layers)
    repeats = jax.tree.leaves(layers)[0].shape[0]
    unrolled = may_unroll and repeats <= current_target().traits.unrolled_layers

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        y, other = function(x, layer)
        return (_apart(y) if unrolled else y), other

    return jax.lax.scan(body, x, layers, unroll=repeats if unrolled else 1)


@jax.custom_vjp
def _apart(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


_apart.defvjp(
    lambda x: (_apart(x), None), lambda _, gradient: (fusion_barrier(jax.lax.optimization_barrier(gradient)),)
)
