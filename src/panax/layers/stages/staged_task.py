"""`StagedTask`: a task with a model of an input part, stacks of blocks, and a head.

A subclass that defines these three parts supports every mesh axis, pipelines included, rematerialization,
layout checks, and FLOP counts.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Evaluation, Gradients, Task, logical_axes, named_leaves
from ...core.errors import RecipeError
from ...core.layout.layout import axis_size
from ...core.layout.requirements import AllToAllRequirement, PipelineRequirement
from ...core.measures import Losses, Metrics
from ...core.protocols import AcceptedOrder
from ...core.task import MatmulPrecision
from ...kernels.compute_dtype import resolve_dtype
from ...mesh import MESH_AXES, Placement
from ...parallel import ContextAttention, Pipeline, RematPolicy
from ...spmd import accumulate_grads
from ..block import Context
from ..foreign_blocks import check_blocks
from ..stack import Stack, list_layers, run_stacks
from ..units import list_units
from . import pipeline_task

FloatType = Literal["float32", "bfloat16"]
UnscaledType = Literal["auto", "float32", "bfloat16"]
"""Compute dtypes of tasks without loss scaling, which float16 would require."""
ComputeType = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype of activations and matmuls; auto: bfloat16 if the devices have instructions for it, else float32."""

STAGE = "stage"
"""The mesh axis of a pipeline."""


class StagedTask(Task):
    """A task split into the parts that a pipeline distributes.

    Attributes:
        compute_dtype: Dtype of activations and matmuls. "auto" is bfloat16 if the devices have instructions
            for it, otherwise float32. float16 requires loss scaling (`step.loss_scale`).
        matmul_precision: Precision of float32 matmuls; None for the platform's default (bfloat16 on TPUs,
            TF32 on GPUs that support it). bfloat16 and tf32 round only the operands: activations stay in
            float32.
        parameter_dtype: Dtype of parameters, their gradients and the optimizer's moments; sums still
            accumulate in float32. bfloat16 halves the memory, but loses updates that are small relative to
            their parameter.
        remat: What a layer's backward pass recomputes.
        pipeline: How the mesh's stage axis is used.
        context_attention: Attention algorithm for rows sharded over the context axis.
    """

    compute_dtype: ComputeType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: FloatType = "float32"
    matmul_precision: MatmulPrecision | None = None
    remat: RematPolicy
    pipeline: Pipeline
    context_attention: ContextAttention = "auto"

    def with_dtypes(
        self, compute_dtype: str, parameter_dtype: str | None, matmul_precision: MatmulPrecision | None
    ) -> "StagedTask":
        changed: Any = {"compute_dtype": compute_dtype, "matmul_precision": matmul_precision}
        if parameter_dtype is not None:
            changed["parameter_dtype"] = parameter_dtype
        return dataclasses.replace(self, **changed)  # pyright: ignore[reportArgumentType]

    mesh_axes = frozenset(MESH_AXES)
    names_axes = True
    remat_policies = get_args(RematPolicy)

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(resolve_dtype(self.compute_dtype))

    @property
    def scales_loss(self) -> bool:
        return self.compute_dtype == "float16"

    def check_precision(self) -> None:
        """Check that `matmul_precision` applies; call it in `__post_init__`.

        Raises:
            RecipeError: Nothing is computed in float32.
        """
        if self.matmul_precision is not None and self.compute_dtype != "float32":
            raise RecipeError(
                f'task.matmul_precision="{self.matmul_precision}" has no effect: matmuls are in {self.compute_dtype} '
                f'(task.compute_dtype); remove it, or set task.compute_dtype to "float32"'
            )

    def check_mesh(self, placement: Placement) -> None:
        if self.names_axes:
            check_blocks(self.abstract_stacks, placement)

    def cast_to_storage(self, params: Any) -> Any:
        """Cast freshly initialized parameters to the storage dtype, for use in `init`."""
        return jax.tree.map(lambda leaf: leaf.astype(self.parameter_dtype), params)

    @abc.abstractmethod
    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        """Build the inputs that all layers share for a (micro-)batch."""

    @abc.abstractmethod
    def enter(self, params: Any, batch: Batch, context: Context) -> Float[Array, "batch residual embed"]:
        """Compute the input of the first layer."""

    def leave(self, params: Any, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch *residual embed"]:
        """Compute the head's items from the last layer's output: by default one vector per position,
        unchanged, or one per row.

        A pipeline distributes these items over its stages, so that each computes a part of the loss.
        """
        return x

    @abc.abstractmethod
    def targets(self, batch: Batch) -> Mapping[str, Array]:
        """Return the targets for `compute_metrics`: leaves with one value per item, including the item's weight,
        which is 0 for padding."""

    @abc.abstractmethod
    def compute_metrics(
        self, params: Any, items: Float[Array, "batch *residual embed"], targets: Mapping[str, Array], train: bool
    ) -> tuple[Losses, Metrics]:
        """Compute losses and metrics from the output of `leave`."""

    def layer_state(self, state: Any) -> Any:
        """Return the layers' part of the model state, each leaf with a leading axis of the reporting
        layers."""
        return None

    def layer_inputs(self, state: Any, batch: Batch) -> Any:
        """Return the inputs of the reporting layers for a (micro-)batch beside the residual stream, each leaf with a leading
        axis of these layers: by default `layer_state` alone."""
        return self.layer_state(state)

    def count_tokens(self, batch: Batch) -> Float[Array, ""]:
        """Return the weight of losses that layers report: the number of this device's positions, without
        padding.

        Raises:
            RecipeError: The task defines `layer_metrics`, but not `count_tokens`.
        """
        if type(self).layer_metrics is not StagedTask.layer_metrics:
            raise RecipeError(
                f"{type(self).__name__} has `layer_metrics` but no `count_tokens`, so the reports of its layers would "
                f"have weight 0; define `count_tokens(self, batch)`: the number of this device's positions that count"
            )
        return jnp.float32(0.0)

    def layer_metrics(self, reports: Any, count: Float[Array, ""], train: bool) -> tuple[Losses, Metrics]:
        """Compute losses and metrics from the layers' reports, which have a leading axis of the reporting
        layers."""
        return {}, {}

    def update_state(self, state: Any, metrics: Metrics) -> Any:
        """Return the model state after a step with these metrics, which are this device's sums."""
        return state

    def stacks(self, params: Any) -> tuple[Stack, ...]:
        """Return the layers of a model, abstract or not; by default its field `stacks`."""
        return params.stacks

    def with_stacks(self, params: Any, stacks: tuple[Stack, ...]) -> Any:
        """Return the model with other stacks; () leaves the parameters outside of a pipeline's stages."""
        return dataclasses.replace(params, stacks=stacks)

    def layer_parameters(self, params: Any) -> dict[int, dict[str, tuple[str, int]]]:
        names = {id(leaf): name for name, leaf in named_leaves(params).items()}
        by_layer: dict[int, dict[str, tuple[str, int]]] = {}
        for stack in self.stacks(params):
            for place, block in enumerate(stack.blocks):
                for name, leaf in named_leaves(block).items():
                    for repeat in range(stack.repeats):
                        layer = stack.first + repeat * len(stack.blocks) + place
                        by_layer.setdefault(layer, {})[name] = (names[id(leaf)], repeat)
        return by_layer

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)

    def rematerialize(self, policy: str) -> "StagedTask":
        return dataclasses.replace(self, remat=policy)  # pyright: ignore

    def debug_variant(self) -> "StagedTask":
        return self.rematerialize("none")

    def loss(self, params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        if axis_size(STAGE) > 1:
            return pipeline_task.evaluate_pipeline(self, params, state, batch, key, train)
        context, remat = self.context(batch, key, train), self.remat if train else "none"
        x = self.enter(params, batch, context)
        x, reports = run_stacks(self.stacks(params), x, context, remat, self.layer_inputs(state, batch))
        losses, metrics = self.compute_metrics(params, self.leave(params, x), self.targets(batch), train)
        of_layers, watched = self.layer_metrics(reports, self.count_tokens(batch), train)
        return Evaluation({**losses, **of_layers}, state, {**metrics, **watched})

    def gradients(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any) -> Gradients:
        run = pipeline_task.compute_pipeline_grads if axis_size(STAGE) > 1 else accumulate_grads
        gradients = run(self, params, state, micro_batches, key, trainable)
        return gradients._replace(state=self.update_state(state, gradients.metrics))

    @property
    def has_custom_leave(self) -> bool:
        """True if `leave` is overridden."""
        return type(self).leave is not StagedTask.leave

    @functools.cached_property
    def abstract_stacks(self) -> tuple[Stack, ...]:
        return self.stacks(jax.eval_shape(self.init, jax.random.key(0))[0])

    @property
    def pipeline_requirement(self) -> PipelineRequirement:
        stacks = self.abstract_stacks
        return PipelineRequirement(
            len(list_units(stacks)), self.pipeline.chunks, stacks[0].repeats if len(stacks) == 1 else 0
        )

    @property
    def row_order(self) -> AcceptedOrder:
        orders = {layer.row_order for layer in list_layers(self.abstract_stacks)}
        if {"zigzag", "contiguous"} <= orders:
            raise RecipeError(
                f"{type(self).__name__} has layers that take positions in zigzag, and contiguous ones; no row has both orders"
            )
        return "contiguous" if "contiguous" in orders else "zigzag" if "zigzag" in orders else "any"

    @property
    def exchange_requirements(self) -> tuple[AllToAllRequirement, ...]:
        layers = list_layers(self.abstract_stacks)
        return tuple(
            dict.fromkeys(one for layer in layers for one in layer.exchange_requirements(self.context_attention))
        )

    def layer_flops(self, length: int) -> float:
        """Count the FLOPs of all layers' forward matmuls per position, averaged over a row of `length`."""
        return sum(layer.flops(length) for layer in list_layers(self.abstract_stacks))
