"""Gradients that are one step late: replicas add up those of the last batch while they work on the next one.

    step t     sum over replicas of the gradients of batch t - 1  ->  update
               gradients of batch t                                ->  kept until step t + 1

Neither line waits for the other, so what travels over the slow network has a whole step's work to hide behind. The price is that
a gradient is taken at parameters that are one update older than those it changes. The correction takes it where these will
probably be: at the parameters and once more their last update.

Source: arXiv:1809.02839 (prediction of weights).
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..core.axes import named_leaves
from ..core.layout import Layout
from ..core.protocols import Axes
from .owed import each
from .settings import Comms

Terms = Mapping[str, jax.Array]
"""By parameter each replica's term of a gradient, with replicas' dimensions in front."""

Lying = dict[str, tuple[jax.ShapeDtypeStruct, Axes]]


class Delayed(eqx.Module):
    """The gradient of the last batch, and what is known of that batch.

    Attributes:
        terms: Summed over the fast axes, not yet over the slow ones.
        begun: Whether there was a last batch.
        teaches: Whether it may change anything: something counted in it, and its loss was finite.
        moved: By parameter the last update, with `delay_correction` only.
    """

    terms: Terms
    begun: Bool[Array, ""]
    teaches: Bool[Array, ""]
    moved: Mapping[str, jax.Array] | None

    @classmethod
    def of_none(cls, comms: Comms, parameters: Mapping[str, jax.ShapeDtypeStruct], layout: Layout) -> "Delayed":
        """What there is before the first step; parameters are the trainable ones."""
        terms = delayed_state_spec(comms, {name: (leaf, ()) for name, leaf in parameters.items()}, layout)
        moved = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in parameters.items()}
        return cls(
            {name: jnp.zeros(leaf.shape, leaf.dtype) for name, (leaf, _) in terms.items()},
            jnp.bool_(False),
            jnp.bool_(False),
            moved if comms.delay_correction else None,
        )

    def ahead(self, params: Any, trainable: Any) -> Any:
        """The parameters that gradients are taken at."""
        if self.moved is None:
            return params
        moved = self.moved
        leaves = [
            w + moved[name] if keep else w
            for (name, w), keep in zip(named_leaves(params).items(), jax.tree.leaves(trainable))
        ]
        return jax.tree.structure(params).unflatten(leaves)

    def after(self, terms: Terms, teaches: jax.Array, before: Any, params: Any) -> "Delayed":
        """What the next step is to see.

        Args:
            before: The trainable parameters as they were.
            params: As they are now.
        """
        moved = None
        if self.moved is not None:
            now = named_leaves(params)
            moved = {name: now[name] - w for name, w in named_leaves(before).items()}
        return Delayed(terms, jnp.bool_(True), teaches, moved)


def delayed_state_spec(
    comms: Comms, parameters: Mapping[str, tuple[jax.ShapeDtypeStruct, Axes]], layout: Layout
) -> Lying:
    """What is kept of each gradient until the next step, by name: shape and logical axes.

    Args:
        parameters: Trainable ones, name to (array, logical axes).
    """
    front = tuple(layout.sizes[axis] for axis in comms.over)
    return {
        name: (jax.ShapeDtypeStruct((*front, *leaf.shape), leaf.dtype), (*map(each, comms.over), *axes))
        for name, (leaf, axes) in parameters.items()
    }
