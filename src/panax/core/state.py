"""`TrainState`: all that a step reads and writes on the device, and all that a checkpoint holds of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .protocols import ModelState, Params


class StepGuard(eqx.Module):
    """What the step remembers to tell a spike from a large but normal gradient.

    Attributes:
        skipped: Updates that were not applied since the run began.
        skipped_in_a_row: The same since the last update that was applied.
        usual_norm: Running mean of the gradient norms of the applied updates; 0 before the first.
        scale: What the loss is multiplied with before it is differentiated; None where it is not, as in all but float16.
        scaled_well: Updates that were applied since the scale last changed; None as well.
    """

    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    usual_norm: Float[Array, ""]
    scale: Float[Array, ""] | None = None
    scaled_well: Int[Array, ""] | None = None

    @classmethod
    def create(cls, scale: float | None = None) -> "StepGuard":
        """What is remembered before the first step.

        Args:
            scale: Of the loss; None where it is not scaled.
        """
        scaling = () if scale is None else (jnp.float32(scale), jnp.int32(0))
        return cls(jnp.int32(0), jnp.int32(0), jnp.float32(0.0), *scaling)


class TrainState(eqx.Module):
    """A pytree; donated to every step, which returns the next one in its place.

    Attributes:
        step: Steps taken, those skipped by the guard included: it is the count of batches consumed.
        params: Trainable and frozen parameters, in one tree.
        model_state: What the model carries besides (see `Task`).
        optimizer_state: Exists for trainable parameters only; tables have their own in `tables`.
        key: The run's key; each step folds its number into it and leaves it as it is.
        averaged: An exponential moving average of the trainable parameters, in float32 or wider; None where none is kept.
        replicas: Where replicas take local steps, what each of them keeps for itself; `params` is then what they agreed on last.
        delayed: Where gradients are one step late, those of the last batch.
        tables: By the name of a table that trains, what its optimizer keeps of its rows; None without tables.
        owed: By parameter, what compressed sums of gradients have left out so far, on each replica; None without error feedback.
    """

    step: Int[Array, ""]
    params: Params
    model_state: ModelState
    optimizer_state: Any
    key: Key[Array, ""]
    guard: StepGuard
    averaged: Params = None
    owed: Mapping[str, Array] | None = None
    replicas: Any = None
    delayed: Any = None
    tables: Mapping[str, Mapping[str, Array]] | None = None

    def with_params(self, params: Params) -> "TrainState":
        """This state with other parameters of the same structure, such as those another step has trained meanwhile."""
        return dataclasses.replace(self, params=params)

    @property
    def judged_params(self) -> Params:
        """The parameters that an evaluation and an export take: the averaged ones, where there are any."""
        return self.params if self.averaged is None else with_averages(self.params, self.averaged)

    @property
    def step_key(self) -> jax.Array:
        """The key of the step about to be taken."""
        return jax.random.fold_in(self.key, self.step)


def wide(dtype: Any) -> Any:
    """What an average of numbers of this type is kept in: a bfloat16 would round small changes of it away."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)


def averages_of(params: Params) -> Params:
    """A first average: the parameters themselves, in arrays of their own."""
    return jax.tree.map(lambda p: jnp.array(p, wide(p.dtype), copy=True), params)


def with_averages(params: Params, averaged: Params) -> Params:
    """Parameters of which those that are averaged are replaced by their averages, in the parameters' own types."""
    return jax.tree.map(
        lambda a, p: p if a is None else a.astype(p.dtype), averaged, params, is_leaf=lambda a: a is None
    )
