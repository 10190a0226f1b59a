"""Delayed gradients: replicas reduce the gradients of the last batch while they compute those of the next.

    step t     sum over replicas of the gradients of batch t - 1  ->  update
               gradients of batch t                                ->  kept until step t + 1

Neither line waits for the other, so communication over the slow network overlaps with the work of a whole
step. The price is that gradients are computed at parameters one update older than those that they change. The
correction computes them where the parameters are predicted to be: at the parameters plus their last update.

Source: arXiv:1809.02839 (weight prediction).
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..core.layout.layout import Layout
from ..core.params.axes import named_leaves
from ..core.protocols import Axes
from .residuals import per_device_axis
from .settings import Comms

Terms = Mapping[str, jax.Array]
"""Parameter name to each replica's partial gradient, with the replicas' dimensions leading."""

GradientSpecs = dict[str, tuple[jax.ShapeDtypeStruct, Axes]]


class DelayedGradient(eqx.Module):
    """The gradient of the last batch, and facts about that batch.

    Attributes:
        terms: Gradients summed over the fast axes, but not yet over the slow ones.
        begun: True if there was a last batch.
        teaches: True if it may update the parameters: its loss was finite and at least one target carried loss.
        moved: Parameter name to its last update, only with `delay_correction`.
    """

    terms: Terms
    begun: Bool[Array, ""]
    teaches: Bool[Array, ""]
    moved: Mapping[str, jax.Array] | None

    @classmethod
    def initial(cls, comms: Comms, parameters: Mapping[str, jax.ShapeDtypeStruct], layout: Layout) -> "DelayedGradient":
        """Return the state before the first step.

        Args:
            parameters: Trainable parameters.
        """
        terms = delayed_state_spec(comms, {name: (leaf, ()) for name, leaf in parameters.items()}, layout)
        moved = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in parameters.items()}
        return cls(
            {name: jnp.zeros(leaf.shape, leaf.dtype) for name, (leaf, _) in terms.items()},
            jnp.bool_(False),
            jnp.bool_(False),
            moved if comms.delay_correction else None,
        )

    def extrapolate(self, params: Any, trainable: Any) -> Any:
        """Return the parameters at which to compute gradients."""
        if self.moved is None:
            return params
        moved = self.moved
        leaves = [
            w + moved[name] if keep else w
            for (name, w), keep in zip(named_leaves(params).items(), jax.tree.leaves(trainable))
        ]
        return jax.tree.structure(params).unflatten(leaves)

    def next_state(self, terms: Terms, teaches: jax.Array, before: Any, params: Any) -> "DelayedGradient":
        """Return the state for the next step.

        Args:
            terms: This step's gradients.
            teaches: True if this step's batch may change the parameters.
            before: Trainable parameters before the update.
            params: Parameters after it.
        """
        moved = None
        if self.moved is not None:
            now = named_leaves(params)
            moved = {name: now[name] - w for name, w in named_leaves(before).items()}
        return DelayedGradient(terms, jnp.bool_(True), teaches, moved)


def delayed_state_spec(
    comms: Comms, parameters: Mapping[str, tuple[jax.ShapeDtypeStruct, Axes]], layout: Layout
) -> GradientSpecs:
    """Return, by parameter name, the shape and logical axes of the gradient kept until the next step.

    Args:
        parameters: Trainable parameters, name to (array, logical axes).
    """
    front = tuple(layout.sizes[axis] for axis in comms.over)
    return {
        name: (jax.ShapeDtypeStruct((*front, *leaf.shape), leaf.dtype), (*map(per_device_axis, comms.over), *axes))
        for name, (leaf, axes) in parameters.items()
    }
