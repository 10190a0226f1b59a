"""Operations that read gathered weights and define their own derivative.

    y = apply_weight_op(op, x, gather_weight(w, "embed ffn", x.dtype))

A `WeightOp` defines the computation, the values saved for the backward pass, and the gradients of its inputs
and of the gathered weights; `apply_weight_op` routes the latter to the parameters. Contractions, biases,
embedding look-ups, experts and the loss are `WeightOp`s.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from .weights import GatheredWeight, GatheredWeightWithGrad, GatherSpec


class WeightOp(abc.ABC):
    """Operation that reads weights. A hashable value, such as a frozen dataclass, that holds no arrays."""

    def value(self, inputs: Any, *weights: Any) -> Any:
        """Compute the result without differentiation."""
        return self.forward(inputs, *weights)[0]

    @abc.abstractmethod
    def forward(self, inputs: Any, *weights: Any) -> tuple[Any, Any]:
        """Compute (the result, the values saved for `backward`).

        Args:
            weights: `GatheredWeight`s or `GatheredWeightWithGrad`s, of which `value` is read.
        """

    @abc.abstractmethod
    def backward(self, saved: Any, gradient: Any, *dtypes: Any) -> tuple[Any, Sequence[Any]]:
        """Compute (the gradient of `inputs`, the gradients of the weights) from the gradient of the result.

        The gradient of a weight is this device's partial sum, in the compute layout and the given dtype. For
        a `GatheredWeightWithGrad` it is the result of its `reduce_grad`, called in `forward`.

        Args:
            saved: The second result of `forward`.
            dtypes: For each weight, the dtype of its gradient.
        """


def apply_weight_op(product: WeightOp, inputs: Any, *weights: GatheredWeight | GatheredWeightWithGrad) -> Any:
    """Apply an operation to inputs, any tree of arrays, and gathered weights.

    Raises:
        ValueError: In the backward pass: the number of gradients does not match the number of weights.

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
    """Static description of a weight: the dtype of its gradient and, for a `GatheredWeightWithGrad`, its
    `GatherSpec`.
    """

    dtype: Any = eqx.field(static=True)
    at_rest: GatherSpec | None = eqx.field(static=True)

    @classmethod
    def of(cls, weight: GatheredWeight | GatheredWeightWithGrad) -> "_Kind":
        if isinstance(weight, GatheredWeight):
            return cls(weight.slot.dtype, None)
        return cls(weight.weight.dtype, weight.spec)

    def cotangent(self, gradient: Any) -> Any:
        """Wrap a gradient in the weight's structure; the value is a constant and has none."""
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
    saved_values, kinds = saved
    d_inputs, d_weights = product.backward(saved_values, gradient, *(kind.dtype for kind in kinds))
    if len(d_weights) != len(kinds):
        raise ValueError(
            f"{type(product).__name__}.backward gave {len(d_weights)} gradients of weights for a product of {len(kinds)}; "
            f"return one for each, in their order"
        )
    return d_inputs, tuple(kind.cotangent(d_weight) for kind, d_weight in zip(kinds, d_weights))


_multiplied.defvjp(_forward, _backward)
