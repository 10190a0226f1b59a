"""`Task`: the model and its objective, as the step sees them.

A built-in decoder, a PyTorch module traced to JAX, a pipeline that interleaves forward and backward passes,
and a generative adversarial pair all implement this interface, the only view of a model that the step has.
"""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .batch_checks import LeafRange
from .errors import RecipeError
from .layout.requirements import AllToAllRequirement, PipelineRequirement
from .measures import Losses, Metrics, Scalar
from .monitors import MetricMonitor
from .params.growth import GrowingVocab
from .protocols import AcceptedOrder, Axes, Batch, IncrementalModel, ModelState, Params

LOG_PROBABILITIES = "log_probabilities"
"""Name of the metric of `Task.log_probability_task`."""

VALUES = "values"
"""Name of a further metric of `Task.log_probability_task`, for a task that estimates values of actions."""

TOP_TOKENS, TOP_LOG_PROBABILITIES = "top_tokens", "top_log_probabilities"
"""Names of the metrics of `Task.top_log_probability_task`."""


REWARD_SCORES = "reward_scores"
"""Name of the metric of `Task.reward_score_task`."""


class DataFacts(NamedTuple):
    """Properties of the training data that a task may adopt.

    Attributes:
        vocab_size: Size of the tokenizer's vocabulary; None without a tokenizer.
        sequence_length: Maximum number of tokens in a row; None if rows have no length.
        num_classes: Number of label classes; None if there are no labels or it is unknown.
        num_ids: For each leaf of ids, the number of ids that it may hold, if the data states it.
    """

    vocab_size: int | None = None
    sequence_length: int | None = None
    num_classes: int | None = None
    num_ids: Mapping[str, int] = MappingProxyType({})


class RolloutNeeds(NamedTuple):
    """Requirements of a loss that learns from rollouts.

    Attributes:
        temperature: Divisor of the logits in the loss, and so of the draws.
        old: True if it reads log-probabilities by the parameters before the first update of a rollout, and so
            allows several.
        reference: True if it reads log-probabilities by the parameters before the first step.
        max_actions: Number of actions of an answer that the loss assumes; 0 for any.
        experts: Numbers of mixture layers and of experts per token, if it reads the experts that answers were drawn with.
        max_length: Maximum positions of a row.
        values: True if it trains values of actions, and so reads their returns.
        old_values: True if it reads the values before the first update of a rollout.
        teacher: True if it reads a teacher's most likely tokens in place of advantages.
        kept: True if its log-probabilities are those among the tokens that the sampler kept.
    """

    temperature: float = 1.0
    old: bool = False
    reference: bool = False
    max_actions: int = 0
    experts: tuple[int, int] | None = None
    max_length: int = 1 << 30
    values: bool = False
    old_values: bool = False
    teacher: bool = False
    kept: bool = False


class Evaluation(NamedTuple):
    """Result of one pass over a (micro-)batch."""

    losses: Losses
    state: ModelState
    metrics: Metrics


MatmulPrecision = Literal["float32", "tf32", "bfloat16"]


class Gradients(NamedTuple):
    """Result of a forward and backward pass over all micro-batches.

    Attributes:
        gradients: Gradients of the total loss, each term divided by its global weight; in the structure of
            the parameters, with None for frozen ones.
        losses: Losses merged over the micro-batches.
        rows: For each table by parameter name, the gradients of the rows that were read; tables have None in
            `gradients`. None without tables.
    """

    gradients: Params
    losses: Losses
    state: ModelState
    metrics: Metrics
    rows: Mapping[str, Any] | None = None


ADAPTERS = {
    "lightning": "lightning.fit_arguments",
    "pytorch_lightning": "lightning.fit_arguments",
    "torch": "torch.task",
    "flax.nnx": "flax_nnx.task",
    "flax": "flax_linen.task",
    "keras": "keras.task",
    "equinox": "equinox.task",
    "haiku": "haiku.task",
}
"""Model libraries, and the adapter that converts their models to a task; the first match is suggested."""


class Task(abc.ABC):
    """A model with its objective.

    `params` are differentiated and have optimizer state; `state` is everything else that the model
    carries from one step to the next (BatchNorm statistics, a router's bias, ranges for low precision): any
    pytree of arrays, empty for most models.
    """

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """Return the code to write if another library's model is passed as a task; None if unknown."""
        for kind in type(value).__mro__:
            for library, adapter in ADAPTERS.items():
                if f"{kind.__module__}.".startswith(f"{library}."):
                    return f"adapt it: panax.adapters.{adapter}(...); see docs/models/adapters.md"
        return None

    mesh_axes: frozenset[str] = frozenset({"replica", "fsdp", "expert"})
    """Mesh axes on which this task computes correctly; any other axis of size above 1 is an error."""

    reads_pairs: bool = False
    """True if each two adjacent segments of a row belong together, like the answers of `data.Preferences`; others refuse
    such data."""

    names_axes: bool = False
    """True if `loss` uses every parameter through `contract`, `gather` and the like, so that it can be traced
    for one device of a mesh. It then sees shards and its local rows and positions, and returns sums over
    these. Otherwise it sees whole arrays, and XLA partitions it: correct on any mesh, with the communication
    that XLA finds.
    """

    generates: bool = False
    """True if `incremental_model` prepares the model to continue rows of tokens."""

    splits_residual: bool = True
    """True if the positions of the residual stream are sharded over the mesh axes that shard heads and
    widths. If not, for example because a row's positions do not divide, `contract` all-reduces partial sums,
    and the residual stream is computed alike on all devices of such an axis: the loss must then be passed
    through `split_cotangent`. Only for tasks that name their axes.
    """

    batch_axes: Mapping[str, Axes] = MappingProxyType({})
    """Logical axes of a batch's leaves, if a source knows less of them: one around a loader shards rows only.
    """

    @property
    def growing(self) -> tuple[GrowingVocab, ...]:
        """Return the tables with rows that are assigned to keys in the data during training; their
        vocabularies are in the model state."""
        return ()

    @property
    def leaf_ranges(self) -> Mapping[str, range | LeafRange]:
        """Return the values that leaves of a batch may hold, such as labels and weights; any other value is
        an error before the step.

        Integers with a range are widened to int32 before `loss` sees them, other values to float32.
        """
        return {}

    required_leaves: frozenset[str] = frozenset()
    """Leaves that a batch must have for training."""

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        """Return how to get a leaf that a batch lacks, for messages; empty for leaves that any source has."""
        return {}

    leaf_aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Other libraries' names of each leaf of a batch: if one of these is found instead, an error suggests the
    leaf.
    """

    def convert_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a batch with other libraries' leaf names to this task's leaves; on the host, before it is
        sent.

        Raises:
            DataError: The names are ambiguous.
        """
        return batch

    def convert_axes(self, axes: Mapping[str, Axes]) -> Mapping[str, Axes]:
        """Return the axes of a converted batch, given those of the original batch."""
        return axes

    unit: str = "examples"
    """Name of a row without positions where throughput is reported."""

    @property
    def units_per_row(self) -> int:
        """Return the number of `unit` that a step produces per row."""
        return 1

    sums_over_rows: bool = True
    """True if its losses are sums over independent rows. A task that compares rows with each other changes if
    a batch is processed in parts, so micro-batches, local steps and islands are rejected.
    """

    num_runs: int = 1
    """Number of independent runs that its parameters hold: its losses are the sums over runs, reports show
    the mean.
    """

    separate_runs: bool = False
    """True if the parameters hold several independent runs (vmapped seeds), so a global gradient norm is
    meaningless.
    """

    @property
    def updates_per_step(self) -> int:
        """Return the number of parameter updates per step, which the optimizer's schedule counts."""
        return 1

    weight_dtype: Any = jnp.float32
    """Dtype in which weights are gathered if that is done once per step (`rules.zero`)."""

    @property
    def scales_loss(self) -> bool:
        """Return True if the task's gradients pass through float16, so that the loss is scaled before
        differentiation."""
        return False

    compute_dtype: str = "float32"
    """Dtype of activations and matmuls. "auto" leaves it to the devices; in a program it is resolved."""

    def with_compute_dtype(self, dtype: str) -> "Task":
        """Return this task with `dtype` in place of "auto"."""
        return self if self.compute_dtype != "auto" else dataclasses.replace(self, compute_dtype=dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def with_dtypes(
        self, compute_dtype: str, parameter_dtype: str | None, matmul_precision: MatmulPrecision | None
    ) -> "Task":
        """Return this task with another precision, for a model that is evaluated beside one that trains.

        Args:
            parameter_dtype: None to leave it as it is.

        Raises:
            RecipeError: The task has no settings of precision.
        """
        raise RecipeError(f"{type(self).__name__} does not read text in a dtype of choice; expected a language model")

    matmul_precision: MatmulPrecision | None = None
    """Precision of matmuls with float32 operands in training and evaluation; None for the platform's default.
    Only for tasks that compute in float32.
    """

    remat_policies: tuple[str, ...] = ()
    """Policies that `rematerialize` accepts, from the one that saves most for the backward pass to the one
    that recomputes most.
    """

    notes: tuple[str, ...] = ()
    """Notes on this task that a run prints before it begins."""

    @property
    def output_weights(self) -> tuple[str, ...]:
        """Return the names of weights that map the model's width to its output, stored with the output
        dimension leading."""
        return ()

    @property
    def mup_base_task(self) -> "Task | None":
        """Return the same task with a narrower model, from which this one transfers its learning rate and
        initial scale by muP; None if its settings are not transferred."""
        return None

    added_parameters: tuple[str, ...] = ()
    """Names of parameters beside those of the model, which are initialized if the weights that a run begins with lack them."""

    frozen_parameters: tuple[str, ...] = ()
    """Names of parameters that the model itself freezes; an experiment's `frozen` adds to them."""

    def adapt_to_data(self, facts: DataFacts) -> "Task":
        """Return this task with its open settings taken from the data.

        Raises:
            RecipeError: The task and the data do not match.
        """
        return self

    def leaf_axes(self, source_axes: Mapping[str, Axes]) -> dict[str, Axes]:
        """Return the logical axes of each leaf of a batch.

        Args:
            source_axes: Axes as given by the source.

        Raises:
            RecipeError: The task and the source differ in a leaf's number of dimensions.
        """
        for name, own in self.batch_axes.items():
            if len(source_axes.get(name, own)) != len(own):
                raise RecipeError(
                    f"{type(self).__name__} takes the batch leaf {name!r} with the axes {own}; the source gives "
                    f"{source_axes[name]}"
                )
        return {name: self.batch_axes.get(name, axes) for name, axes in source_axes.items()}

    @property
    def row_order(self) -> AcceptedOrder:
        """Return the order of a row's positions that the task accepts if a context axis shards rows; see
        `RowOrder`.

        A recurrence, a convolution and other layers that read neighboring positions need contiguous positions.
        "any" becomes zigzag order. Only for tasks that name their axes.
        """
        return "any"

    @property
    def pipeline_requirement(self) -> PipelineRequirement | None:
        """Return the task's partition into pipeline stages; None if it cannot be pipelined."""
        return None

    @property
    def exchange_requirements(self) -> tuple[AllToAllRequirement, ...]:
        """Return the requirements of all-to-alls in the task's layers."""
        return ()

    def row_ids(self, batch: Batch) -> Mapping[str, Int[Array, "batch ids"]]:
        """Return all row ids that this (micro-)batch reads of each table, by parameter name; -1 means no row.

        A table is a parameter with a first logical axis such as `row`. It is never differentiated as a whole:
        the rows named here are gathered once per step, replace the parameter (`spmd.GatheredRows`) while
        `loss` is traced, and have the gradients. Empty, the default, without tables.
        """
        return {}

    def check_mesh(self, placement: Any) -> None:
        """Check, before a step is compiled, that the task computes the same on a mesh as on one device.

        Args:
            placement: The `panax.mesh.Placement` of the step.

        Raises:
            LayoutError: The results would differ.
        """
        return

    def layer_parameters(self, params: Params) -> Mapping[int, Mapping[str, tuple[str, int]]]:
        """Return, for each layer, parameter name within the layer to (name of the stacked array, the layer's
        index in it).

        Empty, the default, if no array holds several layers.
        """
        return {}

    def create_monitor(self) -> MetricMonitor | None:
        """Return a monitor of the task's array metrics for one run; None, the default, for no monitor."""
        return None

    def flops_per_token(self, length: int) -> float | None:
        """Return the FLOPs of a forward and backward pass for one token in a row of `length`; None if
        unknown.
        """
        return None

    def flops_per_example(self) -> float | None:
        """Return the FLOPs of a forward and backward pass for one row of a batch without positions; None if
        unknown.
        """
        return None

    def rematerialize(self, policy: str) -> "Task":
        """Return this task with another of its `remat_policies`."""
        raise ValueError(
            f"{type(self).__name__} has no choice of what its backward pass computes again, and not {policy!r}"
        )

    def debug_variant(self) -> "Task":
        """Return this task as run by the debugger, with nothing between the user and the model's own Python
        code.
        """
        return self

    @abc.abstractmethod
    def init(self, key: jax.Array) -> tuple[Params, ModelState]:
        """Initialize parameters and state. Called once, inside one jitted function."""

    def load_initial(self, shardings: tuple[Any, Any]) -> tuple[Params, ModelState] | None:
        """Return the initial parameters and state of a model with existing weights, each shard placed only on
        its device.

        None if `init` creates them; otherwise only the shapes of `init` are used.

        Args:
            shardings: Shardings of the parameters and of the state, one per leaf.
        """
        return None

    @abc.abstractmethod
    def loss(self, params: Params, state: ModelState, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        """Compute losses and metrics of one (micro-)batch, as sums.

        Args:
            batch: Its leaf `row` holds each row's index in the global batch.
            key: The step's key, the same for all micro-batches: fold `row` into it for bits that differ
                between them.
            train: False in evaluation: no dropout, statistics frozen.
        """

    def incremental_model(self, params: Params, state: ModelState, dtype: str = "float32") -> IncrementalModel:
        """Prepare the model for generation, for tasks with `generates`.

        Args:
            params: Arrays on one device; or global arrays of a mesh, as XLA partitions them.
            dtype: Dtype of activations and caches.

        Raises:
            RecipeError: The task does not generate.
        """
        raise RecipeError(
            f"{type(self).__name__} does not generate; a task that does sets `generates` and has `incremental_model`"
        )

    @property
    def rollout_needs(self) -> RolloutNeeds | None:
        """Return the requirements of a task that learns from rollouts; None for other tasks."""
        return None

    def check_rollouts(self) -> None:
        """Check that the model draws answers as it is trained on them, for tasks with `rollout_needs`.

        Raises:
            RecipeError: It can't.
        """
        return

    def log_probability_task(self, rows: int, length: int, *, temperature: float = 1.0, kept: bool = False) -> "Task":
        """Return this task with each target's log-probability as the metric `LOG_PROBABILITIES` of evaluations, of shape
        (row, position), whole on every device; if it estimates values of actions, with these as the metric `VALUES`.

        Args:
            rows, length: Rows of a global batch and their positions.
            temperature: Divisor of the logits.
            kept: The log-probabilities are those among the tokens of the batch's leaf `kept_tokens`.

        Raises:
            RecipeError: The task has no targets with log-probabilities.
        """
        raise RecipeError(f"{type(self).__name__} has no log-probabilities of targets; a decoder's task has")

    def reward_score_task(self, rows: int) -> "Task":
        """Return this task with the reward of each row's text as the metric `REWARD_SCORES` of evaluations, of shape (row,),
        whole on every device.

        Args:
            rows: Rows of a global batch, with one text each, or none.

        Raises:
            RecipeError: The task does not learn rewards.
        """
        raise RecipeError(
            f"{type(self).__name__} has no rewards of answers; a reward model is trained by panax.models.RewardTask"
        )

    @property
    def vocabulary_size(self) -> int | None:
        """Return the number of tokens among which a text model predicts; None for other tasks, and if the data decides it."""
        return None

    @property
    def teacher_temperature(self) -> float | None:
        """Return the temperature of the teacher's log-probabilities that the task reads; None if it reads none."""
        return None

    def top_log_probability_task(self, rows: int, length: int, *, top_k: int, temperature: float) -> "Task":
        """Return this task with the most likely tokens of each target with loss as the metrics `TOP_TOKENS` and
        `TOP_LOG_PROBABILITIES` of evaluations, of shape (row, position, k), whole on every device; and the log-probability of
        each target as `LOG_PROBABILITIES`.

        Args:
            rows, length: Rows of a global batch and their positions.
            temperature: Divisor of the logits.

        Raises:
            RecipeError: The task does not predict tokens.
        """
        raise RecipeError(
            f"{type(self).__name__} does not predict tokens, so it can't be a teacher; a decoder's task can"
        )

    @abc.abstractmethod
    def parameter_axes(self, params: Params) -> Any:
        """Return the logical axes of each (possibly abstract) parameter, a tuple at each leaf."""

    def semantic_axes(self, params: Params) -> Any:
        """Return logical axes that describe each parameter to an optimizer: a matrix, a bias or a stack of
        them.

        By default those of `parameter_axes`, unless these can be chosen regardless of the parameter's
        meaning.
        """
        return self.parameter_axes(params)

    def state_axes(self, state: ModelState) -> Any:
        """Return the logical axes of each leaf of the model state; replicated by default."""
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, state)

    def loss_weights(
        self, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array
    ) -> Mapping[str, Scalar]:
        """Return each loss's weight summed over all micro-batches, needed before the first backward pass.

        It is derived from `loss`; the compiler drops everything that the weights do not need. Override it if
        the weights can be read from the batch more directly.
        """

        def weigh(batch: Batch) -> dict[str, Scalar]:
            return {name: loss.weight for name, loss in self.loss(params, state, batch, key, True).losses.items()}

        return jax.tree.map(lambda weights: weights.sum(), jax.lax.map(weigh, micro_batches))

    def gradients(
        self, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
    ) -> Gradients | None:
        """Return gradients of the total loss over all micro-batches; None, the default, to let the step
        differentiate `loss`.

        The task, not the step, owns the loop over micro-batches: a pipeline interleaves the passes of several
        of them, and a traced graph returns gradients itself. The step's default is
        `panax.spmd.accumulate_grads`. Code that differentiates a loss must use
        `core.loss_scale.scaled_objective`, so that the loss is scaled if the task `scales_loss`.

        Args:
            micro_batches: Batch leaves with an additional leading axis, one entry per micro-batch, in order.
            trainable: A tree of bools with the structure of `params`.
        """
        return None
