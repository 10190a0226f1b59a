"""Multilayer perceptrons over a row's features, and two kinds of feature interaction for ranking models."""

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..core import Module, constant, normal, parameter
from ..spmd import add_bias, contract
from .feed_forward import ACTIVATIONS


class Dense(Module):
    """A replicated weight and bias, applied by each device to its rows."""

    w: Float[Array, "inputs hidden"] = parameter(normal("inputs", gain=math.sqrt(2.0)))
    b: Float[Array, " hidden"] = parameter(constant(0.0))

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch hidden"]:
        return add_bias(contract("batch inputs, inputs hidden -> batch hidden", x, self.w), self.b, "hidden")


class Perceptron(Module):
    """Dense layers, each followed by a ReLU, optionally except the last."""

    layers: tuple[Dense, ...]
    last_linear: bool = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, inputs: int, widths: Sequence[int], *, last_linear: bool = False) -> "Perceptron":
        """Initialize layers of the given widths; () gives the identity."""
        keys = jax.random.split(key, max(1, len(widths)))
        sizes = zip([inputs, *widths[:-1]], widths)
        layers = tuple(Dense.create(k, {"inputs": size, "hidden": out}) for k, (size, out) in zip(keys, sizes))
        return cls(layers=layers, last_linear=last_linear)

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch hidden"]:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if not (self.last_linear and number == len(self.layers) - 1):
                x = ACTIVATIONS["relu"](x)
        return x


class CrossLayer(Module):
    """`x0 * (U (V x) + b) + x`: raises the degree of feature interactions by one.

    Source: DCN V2 (arXiv:2008.13535), section 3.2, the low-rank form.
    """

    v: Float[Array, "inputs hidden"] = parameter(normal("inputs"))
    u: Float[Array, "hidden inputs"] = parameter(normal("hidden"))
    b: Float[Array, " norm"] = parameter(constant(0.0))

    def __call__(
        self, x0: Float[Array, "batch inputs"], x: Float[Array, "batch inputs"]
    ) -> Float[Array, "batch inputs"]:
        low = contract("batch inputs, inputs hidden -> batch hidden", x, self.v)
        product = contract("batch hidden, hidden inputs -> batch inputs", low, self.u)
        return x0 * add_bias(product, self.b, "norm") + x

    @classmethod
    def build(cls, key: jax.Array, width: int, rank: int) -> "CrossLayer":
        return cls.create(key, {"inputs": width, "hidden": rank, "norm": width})


def dot_interaction(vectors: Float[Array, "batch feature width"]) -> Float[Array, "batch pair"]:
    """Compute the inner products of all pairs of different features: (1, 0), (2, 0), (2, 1), (3, 0), ...

    >>> dot_interaction(jnp.array([[[1.0], [2.0], [5.0]]])).tolist()
    [[2.0, 5.0, 10.0]]
    """
    products = jnp.einsum("bfd,bgd->bfg", vectors, vectors, preferred_element_type=jnp.float32)
    return _below_diagonal(products.astype(vectors.dtype))


@jax.custom_vjp
def _below_diagonal(products: Float[Array, "batch feature feature"]) -> Float[Array, "batch pair"]:
    features = products.shape[-1]
    places, _ = _places(features)
    return products.reshape(products.shape[0], -1)[:, places]


def _below_diagonal_backward(features: int, gradient: jax.Array) -> tuple[jax.Array]:
    # Gather instead of scatter: an extra column holds the zero for entries on and above the diagonal.
    _, sources = _places(features)
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    return (padded[:, sources].reshape(-1, features, features),)


_below_diagonal.defvjp(lambda products: (_below_diagonal(products), products.shape[-1]), _below_diagonal_backward)


@functools.cache
def _places(features: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat indices below the diagonal of a square, and for each flat index its rank among them."""
    rows, columns = np.tril_indices(features, -1)
    places = rows * features + columns
    sources = np.full(features * features, len(places))
    sources[places] = np.arange(len(places))
    return places, sources
