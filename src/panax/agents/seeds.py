"""`Seeds`: several runs of one agent side by side, in one program."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import (
    Axes,
    Batch,
    CollectingTask,
    CollectionResult,
    DataFacts,
    Evaluation,
    Gradients,
    Loss,
    Task,
    map_axes,
    merge_measures,
)
from ..core.batch_checks import LeafRange
from ..core.errors import RecipeError
from ..core.measures import Metrics
from ..core.task import MatmulPrecision
from ..core.validation import Validated
from ..spmd import compute_grads
from .agent import Agent

FORWARDED = ("hint_for", "loss_weights", "should_continue", "may_stop_early", "updates_per_step")
"""Methods not passed on because they are called on the agent itself (`gradients`), are rejected, or follow
from the others."""

NOT_FORWARDED = (
    "added_parameters", "check_mesh", "check_rollouts", "compute_dtype", "convert_axes", "convert_batch", "create_monitor",
    "exchange_requirements", "flops_per_token", "generates", "growing", "incremental_model", "layer_parameters",
    "leaf_advice", "leaf_aliases", "leaf_axes", "load_initial", "log_probability_task", "mup_base_task", "names_axes",
    "output_weights", "pipeline_requirement", "reads_pairs", "required_leaves", "reward_score_task", "rollout_needs",
    "row_ids", "row_order", "scales_loss", "splits_residual", "sums_over_rows", "teacher_temperature",
    "top_log_probability_task", "vocabulary_size", "weight_dtype", "with_compute_dtype", "with_dtypes",
)  # fmt: skip
"""Members that an agent in `Seeds` must not override: they would refer to one run, to whole parameters or to
positions."""

PER_SEED_METRICS = ("return", "episode_return")
"""Metrics that are also reported for each seed, as `return/seed0`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seeds(Validated, CollectingTask):
    """`count` independent runs of `task`: every array has one more leading axis, `seed`.

    The runs share one compiled program, and fill a device that one small network would leave idle. Reported
    metrics cover all seeds together; returns are also reported per seed. A step with a non-finite gradient in
    one of the runs is skipped in all runs.

    Attributes:
        task: The agent.
        count: Number of runs.
        clip_norm: Maximum norm of the gradient of each run; larger ones are scaled down. Replaces
            `step.clip_norm`, which would clip the gradients of all runs together and must be None.
    """

    task: CollectingTask
    count: int = 3
    clip_norm: float | None = None

    separate_runs = True

    @property
    def num_runs(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.count

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecipeError(f"Seeds.count={self.count}; expected 1 or more")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise RecipeError(f"Seeds.clip_norm={self.clip_norm}; expected a positive number, or None")
        if self.task.may_stop_early:
            raise RecipeError(
                f"{type(self.task).__name__} may end updates early, which runs in one program cannot do individually; set "
                f"target_kl to None"
            )

        if isinstance(self.task, Agent) and self.task.environment.lives_on_host:
            raise RecipeError(
                f"{type(self.task.environment).__name__} is stepped on the host, which does it for one run at a time; train "
                f"seeds one after the other, or take an environment that is written in JAX"
            )
        for name in NOT_FORWARDED:
            if _overrides(self.task, name):
                raise RecipeError(
                    f"{type(self.task).__name__}.{name} has no effect in Seeds, which does not pass it on; train it alone"
                )

    def adapt_to_data(self, facts: DataFacts) -> "Seeds":
        return self._of(self.task.adapt_to_data(facts))

    @property
    def name(self) -> str:
        return getattr(self.task, "name", type(self.task).__name__.lower())

    @property
    def mesh_axes(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.mesh_axes

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.batch_axes

    @property
    def matmul_precision(self) -> MatmulPrecision | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.matmul_precision

    @property
    def frozen_parameters(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.frozen_parameters

    @property
    def notes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.notes

    @property
    def leaf_ranges(self) -> Mapping[str, range | LeafRange]:
        return self.task.leaf_ranges

    @property
    def remat_policies(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.remat_policies

    def rematerialize(self, policy: str) -> "Seeds":
        return self._of(self.task.rematerialize(policy))

    def debug_variant(self) -> "Seeds":
        return self._of(self.task.debug_variant())

    def flops_per_example(self) -> float | None:
        """Return the FLOPs of one row, summed over the runs, which share its index."""
        one = self.task.flops_per_example()
        return None if one is None else self.count * one

    def check_rows(self, batch: Batch) -> None:
        self.task.check_rows(batch)

    def check_memory(self, shardings: Any, runs: tuple[int, ...] = ()) -> None:
        self.task.check_memory(shardings, (*runs, self.count))

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.unit

    @property
    def units_per_row(self) -> int:
        return self.count * self.task.units_per_row

    @property
    def rows(self) -> int:
        return self.task.rows

    @property
    def evaluation_rows(self) -> int:
        return self.task.evaluation_rows

    @property
    def rollouts_per_step(self) -> int:
        return self.task.rollouts_per_step

    @property
    def updates(self) -> int:
        return self.task.updates

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        return jax.vmap(self.task.init)(self._keys(key))

    def parameter_axes(self, params: Any) -> Any:
        return self._with_seed(params, self.task.parameter_axes(_first(params)))

    def semantic_axes(self, params: Any) -> Any:
        return self._with_seed(params, self.task.semantic_axes(_first(params)))

    def state_axes(self, state: Any) -> Any:
        return self._with_seed(state, self.task.state_axes(_first(state)))

    def collect(self, params: Any, state: Any, batch: Batch, key: jax.Array) -> CollectionResult:
        collected = jax.vmap(self.task.collect, (0, 0, None, 0))(params, state, batch, self._keys(key))
        return collected._replace(metrics=self._merge_metrics(collected.metrics))

    def minibatch(self, experience: Any, state: Any, index: jax.Array, key: jax.Array) -> Batch:
        """Select a minibatch, with axes (row, seed, ...)."""
        return jax.vmap(self.task.minibatch, (0, 0, None, 0), out_axes=1)(experience, state, index, self._keys(key))

    def update_state(self, params: Any, state: Any) -> Any:
        return jax.vmap(self.task.update_state)(params, state)

    def loss(self, params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        """Compute the loss of an evaluation; in training `gradients` differentiates the agent's loss."""
        one = functools.partial(self.task.loss, train=train)
        rows: Any = {name: 1 if train and name != "row" else None for name in batch}
        result = jax.vmap(one, (0, 0, rows, 0))(params, state, batch, self._keys(key))
        losses = {name: self._combine_losses(loss, train) for name, loss in result.losses.items()}
        return Evaluation(losses, result.state, self._merge_metrics(result.metrics))

    def gradients(
        self, params: Any, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any
    ) -> Gradients | None:
        def of_one(params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Gradients:
            return compute_grads(self.task, params, state, micro_batches, key, trainable)

        # Each run is differentiated separately: if weights are gathered, a gradient through `vmap` is summed
        # over it.
        rows: Any = {name: None if name == "row" else 2 for name in micro_batches}
        result = jax.vmap(of_one, (0, 0, rows, 0))(params, state, micro_batches, self._keys(key))
        losses = {name: self._combine_losses(loss, True) for name, loss in result.losses.items()}
        result = result._replace(losses=losses, metrics=self._merge_metrics(result.metrics))
        if self.clip_norm is None:
            return result
        norm = jax.vmap(optax.tree.norm)(result.gradients)
        scale = jnp.minimum(1.0, self.clip_norm / (norm + 1e-6))

        def clipped(gradient: jax.Array) -> jax.Array:
            return gradient * scale.reshape(scale.shape + (1,) * (gradient.ndim - 1)).astype(gradient.dtype)

        return result._replace(gradients=jax.tree.map(clipped, result.gradients))

    def _of(self, task: Task) -> "Seeds":
        assert isinstance(task, CollectingTask)
        return dataclasses.replace(self, task=task)

    def _keys(self, key: jax.Array) -> jax.Array:
        return jax.vmap(lambda seed: jax.random.fold_in(key, seed))(jnp.arange(self.count))

    def _with_seed(self, tree: Any, axes: Any) -> Any:
        return map_axes(lambda _, leaf_axes: ("seed", *leaf_axes), _first(tree), axes)

    def _combine_losses(self, loss: Loss, train: bool) -> Loss:
        """Combine the losses of all seeds: in training as a sum, so that each has its own gradient; else as a
        mean."""
        coefficient = loss.coefficient[0] if isinstance(loss.coefficient, jax.Array) else loss.coefficient
        return Loss(loss.sum.sum(), loss.weight[0] if train else loss.weight.sum(), coefficient)

    def _merge_metrics(self, metrics: Metrics) -> Metrics:
        """Merge the metrics of all seeds, and add each seed's `PER_SEED_METRICS`."""
        by_seed = [_nth(metrics, seed) for seed in range(self.count)]
        per_seed = {
            f"{name}/seed{seed}": metric
            for seed, seed_metrics in enumerate(by_seed)
            for name, metric in seed_metrics.items()
            if name in PER_SEED_METRICS
        }
        return {**functools.reduce(merge_measures, by_seed), **per_seed}


def _overrides(task: CollectingTask, name: str) -> bool:
    """Return True if a task overrides a member of `CollectingTask`."""
    default = inspect.getattr_static(CollectingTask, name)
    if isinstance(default, property):
        assert default.fget is not None
        return getattr(task, name) != default.fget(task)
    return getattr(type(task), name) is not default if callable(default) else getattr(task, name) != default


def _first(tree: Any) -> Any:
    """Return the first seed's part of a tree; abstract if the tree is."""

    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf[0]

    return jax.tree.map(one, tree)


def _nth(metrics: Metrics, seed: int) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf[seed], dict(metrics))
