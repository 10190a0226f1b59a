"""The one product of the language: a function of activations and of opened weights that brings its own derivative.

    y = multiplied(product, x, open_weight(w, "embed ffn", x.dtype))

A product says what it computes, what it keeps, and the gradients of its inputs and of the weights' values. Where the latter go is
decided here. Contractions, biases, look-ups, experts and the loss are products.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from .weights import GatheredWeight, GatheredWeightWithGrad, GatherSpec


class WeightOp(abc.ABC):
    """What reads weights. A hashable value, such as a frozen dataclass, that holds no array."""

    def value(self, inputs: Any, *weights: Any) -> Any:
        """The result, where nothing is differentiated."""
        return self.forward(inputs, *weights)[0]

    @abc.abstractmethod
    def forward(self, inputs: Any, *weights: Any) -> tuple[Any, Any]:
        """(the result, what `backward` needs).

        Args:
            weights: Each an `GatheredWeight` or an `GatheredWeightWithGrad`, of which the `value` is read.
        """

    @abc.abstractmethod
    def backward(self, saved: Any, gradient: Any, *dtypes: Any) -> tuple[Any, Sequence[Any]]:
        """(the gradient of `inputs`, those of the weights), from the gradient of the result.

        A weight's gradient is this device's share, in the compute layout and in the dtype given for it; of a weight opened at
        rest, what its `returned` gave in `forward`.
        """


def apply_weight_op(product: WeightOp, inputs: Any, *weights: GatheredWeight | GatheredWeightWithGrad) -> Any:
    """A product of inputs, any tree of arrays, and opened weights.

    Raises:
        ValueError: In the backward pass: the product gave more or fewer gradients than there are weights.

    >>> from jax import numpy as jnp
    >>> from panax.spmd import gather_weight
    >>> class Matmul(WeightOp):
    ...     def forward(self, inputs, *weights):
    ...         return inputs @ weights[0].value, (inputs, weights[0].value)
    ...
    ...     def backward(self, saved, gradient, *dtypes):
    ...         x, w = saved
    ...         return gradient @ w.T, [(x.T @ gradient).astype(dtypes[0])]
    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 1))
    >>> jax.grad(lambda w: apply_weight_op(Matmul(), x, gather_weight(w, "embed ffn", x.dtype)).sum())(w).tolist()
    [[2.0], [2.0], [2.0]]
    """
    return _multiplied(product, inputs, weights)


class _Kind(eqx.Module):
    """What an opened weight's gradient is formed in and, of one opened at rest, how it was opened."""

    dtype: Any = eqx.field(static=True)
    at_rest: GatherSpec | None = eqx.field(static=True)

    @classmethod
    def of(cls, weight: GatheredWeight | GatheredWeightWithGrad) -> "_Kind":
        if isinstance(weight, GatheredWeight):
            return cls(weight.slot.dtype, None)
        return cls(weight.weight.dtype, weight.to)

    def cotangent(self, gradient: Any) -> Any:
        """Nothing of the value, a constant."""
        if self.at_rest is None:
            return GatheredWeight(None, gradient)  # pyright: ignore[reportArgumentType]
        return GatheredWeightWithGrad(None, gradient, None, self.at_rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(product: WeightOp, inputs: Any, weights: tuple[Any, ...]) -> Any:
    return product.value(inputs, *weights)


def _forward(product: WeightOp, inputs: Any, weights: tuple[Any, ...]) -> tuple[Any, Any]:
    result, saved = product.forward(inputs, *weights)
    return result, (saved, tuple(map(_Kind.of, weights)))


def _backward(product: WeightOp, saved: Any, gradient: Any) -> tuple[Any, Any]:
    kept, kinds = saved
    d_inputs, d_weights = product.backward(kept, gradient, *(kind.dtype for kind in kinds))
    if len(d_weights) != len(kinds):
        raise ValueError(
            f"{type(product).__name__}.backward gave {len(d_weights)} gradients of weights for a product of {len(kinds)}; "
            f"return one for each, in their order"
        )
    return d_inputs, tuple(kind.cotangent(d_weight) for kind, d_weight in zip(kinds, d_weights))


_multiplied.defvjp(_forward, _backward)
