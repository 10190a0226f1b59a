"""Running a stack of layers one after the other."""

from collections.abc import Callable
from typing import Any

import jax

from ..core import current_target
from ..kernels.product import fusion_barrier
from ..spmd.in_backward import current_grad_reduce


def scan_layers(
    function: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, layers: Any, *, may_unroll: bool = True
) -> tuple[jax.Array, Any]:
    """Feed `x` through `function(x, layer)` for each layer of a stack; what else it returns is stacked.

    One program for all layers, whatever their number; only where the target runs short stacks faster unrolled are they.
    A pipeline holds its layers in several programs, and leaves that. A barrier between the layers, in both passes, keeps XLA from
    fusing the chain of residuals, or of their gradients: each layer would read what all layers before it had added.
    """
    sums = current_grad_reduce()
    if sums is not None:
        function, layers = sums.attached(function, layers)
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
