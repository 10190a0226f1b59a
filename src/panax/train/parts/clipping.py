"""Clipping of gradients: of the whole, of each layer's array, and relative to the weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ...core import Task, pair_axes
from ...optim.clipping import clip_by_layer
from .step_part import DenseUpdate, StepFacts, StepPart


@dataclasses.dataclass(frozen=True)
class ClipNorm(StepPart):
    """Scale the gradient down to the norm `limit` if its norm is larger; `TableRows` scales gradients of tables."""

    limit: float

    name: ClassVar[str] = "clip_norm"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        scale = clip_factor(facts.norm, self.limit)
        return update._replace(gradients=jax.tree.map(lambda g: g * scale.astype(g.dtype), update.gradients))


@dataclasses.dataclass(frozen=True)
class ClipLayers(StepPart):
    """Scale down the gradient of each layer's array: to a norm, and to a part of the norm of each output's weights."""

    task: Task
    norm: float | None
    ratio: float | None

    name: ClassVar[str] = "clip_layers"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        params = facts.state.params
        axes, meanings = (
            {name: axes for name, _, axes in pair_axes(params, each)}
            for each in (self.task.parameter_axes(params), self.task.semantic_axes(params))
        )
        clipped = clip_by_layer(update.gradients, update.params, axes, self.norm, self.ratio, meanings)
        return update._replace(gradients=clipped)


def clip_factor(norm: jax.Array, limit: float) -> jax.Array:
    """Return the factor that brings a gradient of this norm to at most `limit`."""
    return jnp.minimum(1.0, limit / (norm + 1e-6))
