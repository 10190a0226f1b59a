"""`Task`: what is trained, as the step sees it.

A built-in decoder, a PyTorch module traced to JAX, a pipeline that interleaves forwards with backwards and a pair of
adversaries all stand behind this one line. The step knows nothing else of a model.
"""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .errors import RecipeError
from .growing import Growing
from .leaf_ranges import LeafRange
from .measures import Losses, Metrics, Scalar
from .needs import AllToAllRequirement, Pipelined
from .protocols import AcceptedOrder, Axes, Batch, ModelState, Params
from .watching import MetricMonitor


class DataFacts(NamedTuple):
    """What a task may take from the data it is trained on.

    Attributes:
        vocab_size: Of the tokenizer; None where there is none.
        sequence_length: The most tokens in a row; None where rows have no length.
        num_classes: Of the labels; None where there are none, or it is not known.
        num_ids: How many ids each leaf of ids may hold, where the data says.
    """

    vocab_size: int | None = None
    sequence_length: int | None = None
    num_classes: int | None = None
    num_ids: Mapping[str, int] = MappingProxyType({})


class Evaluation(NamedTuple):
    """What one pass over a (micro-)batch yields."""

    losses: Losses
    state: ModelState
    metrics: Metrics


MatmulPrecision = Literal["float32", "tf32", "bfloat16"]


class Gradients(NamedTuple):
    """What one pass forward and backward over all micro-batches yields.

    Attributes:
        gradients: Of the total loss, each term divided by its global weight; the structure of the parameters with None
            where one is frozen.
        losses: Merged over the micro-batches.
        rows: Of tables, by parameter name, the gradients of the rows that were read; these have None in `gradients`. None
            without tables.
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
"""Libraries of models, and what makes a task of one; whichever is named first."""


class Task(abc.ABC):
    """A model with its objective.

    `params` is what gradients and optimizer moments exist for; `state` is whatever else the model carries from one step
    to the next (BatchNorm statistics, a router's bias, ranges of low-precision numbers): any pytree of arrays, empty for most.
    """

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """What to write where a model of another library is given in a task's place; None where that is not known."""
        for kind in type(value).__mro__:
            for library, adapter in ADAPTERS.items():
                if f"{kind.__module__}.".startswith(f"{library}."):
                    return f"adapt it: panax.adapters.{adapter}(...); see docs/adapters.md"
        return None

    mesh_axes: frozenset[str] = frozenset({"replica", "fsdp", "expert"})
    """The mesh axes on which this task computes correctly; another one of size above 1 is an error."""

    names_axes: bool = False
    """True where `loss` uses every parameter by `contract`, `gather` and the like, so that on a mesh it can be traced for one
    device: it then sees shards, its own rows and positions, and returns sums over these. Otherwise it sees whole arrays, and XLA
    partitions it: right on any mesh, with the communication that XLA finds."""

    generates: bool = False
    """Whether `generate` continues rows of tokens."""

    splits_residual: bool = True
    """Whether the residual stream's positions are split over the mesh axes that split heads and widths. Where they are not, as
    where a row's positions don't divide, `contract` adds partial sums up whole, and what lies in the residual stream is computed
    alike on all devices of such an axis: `split_cotangent` then stands before the loss. Of tasks that name their axes."""

    batch_axes: Mapping[str, Axes] = MappingProxyType({})
    """The logical axes of a batch's leaves, where a source knows less of them: one around a loader splits rows alone."""

    @property
    def growing(self) -> tuple[Growing, ...]:
        """Tables whose rows are given out to keys in the data while it is trained; their vocabularies are in the model state."""
        return ()

    @property
    def leaf_ranges(self) -> Mapping[str, range | LeafRange]:
        """The values that leaves of a batch may hold, such as labels and weights; another one is an error before the step.

        Integers with a range are widened to int32 before `loss` sees them, other numbers to float32.
        """
        return {}

    required_leaves: frozenset[str] = frozenset()
    """The leaves without which a batch can't be trained on."""

    other_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """What other libraries call each leaf of a batch: where one of these names is found instead, an error suggests the leaf."""

    def convert_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch that comes with other libraries' names as this task's own leaves; on the host, before it is sent.

        Raises:
            DataError: The names are ambiguous.
        """
        return batch

    def convert_axes(self, axes: Mapping[str, Axes]) -> Mapping[str, Axes]:
        """The axes of a converted batch, from those of the batch as it comes."""
        return axes

    unit: str = "examples"
    """What a row of a batch without positions is called where speed is reported."""

    @property
    def units_per_row(self) -> int:
        """How many of them a step makes of one row."""
        return 1

    sums_over_rows: bool = True
    """Whether its losses are sums of what each row gives by itself. One that compares rows with each other changes if a batch is
    worked on in parts: then micro-batches, local steps and islands are refused."""

    num_runs: int = 1
    """How many runs its parameters are of, side by side: its losses are their sums, and what is reported is their mean."""

    separate_runs: bool = False
    """Whether its parameters are of several runs side by side, so that the norm of all of them means nothing."""

    @property
    def updates_per_step(self) -> int:
        """How many updates of the parameters a step makes: what the optimizer's schedule counts."""
        return 1

    weight_dtype: Any = jnp.float32
    """What weights are gathered in where that is done once a step (`rules.zero`)."""

    @property
    def scales_loss(self) -> bool:
        """Whether its gradients pass through float16, so that the loss is scaled before it is differentiated."""
        return False

    compute_dtype: str = "float32"
    """What activations and products are in. "auto" leaves it to the devices; a program has it filled in."""

    def with_compute_dtype(self, dtype: str) -> "Task":
        """This task, computing in `dtype` if it left that to the devices."""
        return self if self.compute_dtype != "auto" else dataclasses.replace(self, compute_dtype=dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]

    matmul_precision: MatmulPrecision | None = None
    """What float32 operands are multiplied in while it is trained and evaluated; None for what the platform does by default. Of
    tasks that compute in float32."""

    remat_policies: tuple[str, ...] = ()
    """What `rematerialize` takes: from the policy that keeps most for the backward pass to the one that computes most again."""

    notes: tuple[str, ...] = ()
    """What a run should say of this task before it begins."""

    @property
    def read_outs(self) -> tuple[str, ...]:
        """Names of weights that read the model's output out of its width, stored with what comes out first."""
        return ()

    @property
    def narrower(self) -> "Task | None":
        """The same task with a narrower model, whose learning rate and first numbers this one takes over by muP; None where its
        settings are its own."""
        return None

    frozen_parameters: tuple[str, ...] = ()
    """Names of parameters that the model itself holds fixed; an experiment's `frozen` adds to them."""

    def adapted(self, facts: DataFacts) -> "Task":
        """This task with what it left open taken from the data.

        Raises:
            RecipeError: The two don't fit.
        """
        return self

    def axes_of(self, source_axes: Mapping[str, Axes]) -> dict[str, Axes]:
        """The logical axes of each leaf of a batch.

        Args:
            source_axes: What the source says of them.

        Raises:
            RecipeError: The two differ in how many dimensions a leaf has.
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
        """Which positions of a row a device may hold where a context axis splits rows; see `RowOrder`.

        A recurrence, a convolution and all else that reads its neighbours takes contiguous ones. "any" is laid out in zigzag. Of
        tasks that name their axes."""
        return "any"

    @property
    def pipelined(self) -> Pipelined | None:
        """What a pipeline divides; None where the task has none."""
        return None

    @property
    def exchanges(self) -> tuple[AllToAllRequirement, ...]:
        """What its layers exchange whole over a mesh axis."""
        return ()

    def row_ids(self, batch: Batch) -> Mapping[str, Int[Array, "batch ids"]]:
        """For each table by its parameter's name, all row numbers that this (micro-)batch asks it for; -1 where there is none.

        A table is a parameter whose first logical axis says so, as `row` does. It is never differentiated whole: the rows
        named here are gathered once per step, take the parameter's place (`spmd.GatheredRows`) while `loss` is traced, and
        are what gradients exist for. Empty, the default, where there is no table.
        """
        return {}

    def check_mesh(self, placement: Any) -> None:
        """Check, before a step is compiled, that the task computes on a mesh what it computes on one device.

        Args:
            placement: The `panax.mesh.Placement` of the step.

        Raises:
            LayoutError: It does not.
        """
        return

    def layer_parameters(self, params: Params) -> Mapping[int, Mapping[str, tuple[str, int]]]:
        """For each layer its parameters by their names in it: the name of the stacked array, and the layer's index there.

        Empty, the default, where no array holds several layers.
        """
        return {}

    def watch(self) -> MetricMonitor | None:
        """What follows those of its metrics that are arrays, for one run; None, the default, where nothing reads them."""
        return None

    def flops_per_token(self, length: int) -> float | None:
        """FLOPs of a forward and backward pass for one token in a row of `length`; None if not known."""
        return None

    def flops_per_example(self) -> float | None:
        """FLOPs of a forward and backward pass for one row of a batch without positions; None if not known."""
        return None

    def rematerialize(self, policy: str) -> "Task":
        """This task with another of its `remat_policies`."""
        raise ValueError(
            f"{type(self).__name__} has no choice of what its backward pass computes again, and not {policy!r}"
        )

    def for_debugging(self) -> "Task":
        """This task as the debugger runs it: nothing between the user and the model's own Python code."""
        return self

    @abc.abstractmethod
    def init(self, key: jax.Array) -> tuple[Params, ModelState]:
        """Draw parameters and initial state. Called once, inside one jitted function."""

    def given(self, shardings: tuple[Any, Any]) -> tuple[Params, ModelState] | None:
        """The first parameters and state of a model whose weights exist already, each shard placed on its device alone.

        None where `init` draws them. Where they are given, `init` says only their shapes.

        Args:
            shardings: Of the parameters and of the state, one for each leaf.
        """
        return None

    @abc.abstractmethod
    def loss(self, params: Params, state: ModelState, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        """Losses and metrics of one (micro-)batch, as sums.

        Args:
            batch: Its leaf `row` holds each row's index in the global batch.
            key: The step's key, the same for all micro-batches: fold `row` into it for bits that differ between them.
            train: False in evaluation: no dropout, statistics frozen.
        """

    def generate(
        self,
        params: Params,
        state: ModelState,
        prompt: Int[Array, "batch prompt"],
        count: int,
        key: jax.Array,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> Int[Array, "batch generated"]:
        """Continue each row by `count` tokens; of a task that generates.

        Args:
            prompt: Without padding; at least one token.
            temperature: 0 always takes the likeliest token.
            top_k: Draw among the likeliest so many; 0 among all.

        Raises:
            RecipeError: The task does not generate, or the rows would be too long for its model.
        """
        raise RecipeError(f"{type(self).__name__} does not generate; a task that does says so, and has `generate`")

    @abc.abstractmethod
    def parameter_axes(self, params: Params) -> Any:
        """The logical axes of each (possibly abstract) parameter, a tuple at each leaf."""

    def meaning_axes(self, params: Params) -> Any:
        """The logical axes that say what each parameter is, a matrix, a bias or a stack of them: what an optimizer reads.

        Those of its placement, the default, unless these can be chosen without regard to what it is.
        """
        return self.parameter_axes(params)

    def state_axes(self, state: ModelState) -> Any:
        """The logical axes of each leaf of the model state; replicated unless told."""
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, state)

    def loss_weights(
        self, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array
    ) -> Mapping[str, Scalar]:
        """Each loss's weight summed over all micro-batches, needed before the first backward pass.

        Derived from `loss`, of which the compiler drops all that the weights don't need. Override it where the weights are
        read from the batch more plainly.
        """

        def weigh(batch: Batch) -> dict[str, Scalar]:
            return {name: loss.weight for name, loss in self.loss(params, state, batch, key, True).losses.items()}

        return jax.tree.map(lambda weights: weights.sum(), jax.lax.map(weigh, micro_batches))

    def gradients(
        self, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
    ) -> Gradients | None:
        """Gradients of the total loss over all micro-batches; None, the default, where the step is to differentiate `loss`.

        The task owns the loop over micro-batches, not the step: a pipeline interleaves forwards and backwards of several of
        them, and a traced graph returns gradients itself. What the step does by default is `panax.spmd.accumulate_grads`. What
        differentiates a loss takes `core.loss_scale.objective_of`, so that it is scaled where the task `scales_loss`.

        Args:
            micro_batches: Every leaf with one more leading axis, the micro-batches in order.
            trainable: A tree of bools like `params`.
        """
        return None
