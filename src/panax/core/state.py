"""`TrainState`: the values that a step reads and writes on the devices, and that a checkpoint stores."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .protocols import ModelState, Params


class StepGuard(eqx.Module):
    """State of the step guard, which distinguishes a gradient spike from a large but normal gradient.

    Attributes:
        skipped: Updates skipped since the run began.
        skipped_in_a_row: Updates skipped since the last applied update.
        usual_norm: Running mean of the gradient norms of applied updates; 0 before the first.
        scale: Loss scale; None if the loss is not scaled, as in all dtypes but float16.
        scaled_well: Updates applied since the scale last changed; None if the loss is not scaled.
    """

    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    usual_norm: Float[Array, ""]
    scale: Float[Array, ""] | None = None
    scaled_well: Int[Array, ""] | None = None

    @classmethod
    def create(cls, scale: float | None = None) -> "StepGuard":
        """Return the state before the first step.

        Args:
            scale: Initial loss scale; None if the loss is not scaled.
        """
        scaling = () if scale is None else (jnp.float32(scale), jnp.int32(0))
        return cls(jnp.int32(0), jnp.int32(0), jnp.float32(0.0), *scaling)


class TrainState(eqx.Module):
    """Training state, a pytree that is donated to every step, which returns its successor.

    Attributes:
        step: Steps taken, including those skipped by the guard: the number of batches consumed.
        params: Trainable and frozen parameters in one tree.
        model_state: Other state of the model (see `Task`).
        optimizer_state: State for trainable parameters only; that of tables is in `tables`.
        key: The run's key; each step folds its number into it and does not change it.
        guard: State of the step guard.
        averaged: Exponential moving average of the trainable parameters, in float32 or wider; None if
            disabled.
        replicas: If replicas take local steps, their separate state; `params` is then the result of the last
            synchronization.
        delayed: If gradients are applied one step late, those of the last batch.
        tables: Name of each trainable table to its per-row optimizer state; None without tables.
        owed: Residual of each parameter's compressed gradient reduction (error feedback), per replica; None
            without error feedback.
        parts: State of the user's own parts of the step, by name; None if none has any.
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
    parts: Mapping[str, Any] | None = None

    def with_params(self, params: Params) -> "TrainState":
        """Return this state with other parameters of the same structure, such as those trained meanwhile by
        another step.
        """
        return dataclasses.replace(self, params=params)

    @property
    def eval_params(self) -> Params:
        """Return the parameters for evaluation and export: the averaged ones, if any."""
        return self.params if self.averaged is None else replace_averaged(self.params, self.averaged)

    @property
    def step_key(self) -> jax.Array:
        """Return the key of the step about to be taken."""
        return jax.random.fold_in(self.key, self.step)


def average_dtype(dtype: Any) -> Any:
    """Return the dtype in which values of `dtype` are averaged: bfloat16 would round small changes away."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)


def init_averages(params: Params) -> Params:
    """Return initial averages: copies of the parameters."""
    return jax.tree.map(lambda p: jnp.array(p, average_dtype(p.dtype), copy=True), params)


def replace_averaged(params: Params, averaged: Params) -> Params:
    """Replace parameters by their averages where these exist, in the parameters' dtypes."""
    return jax.tree.map(
        lambda a, p: p if a is None else a.astype(p.dtype), averaged, params, is_leaf=lambda a: a is None
    )
