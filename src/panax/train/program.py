"""`Program`: all components of a training step, as values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..comms import Comms
from ..comms.fragments import OuterSync, final_outer_sync, outer_sync_after
from ..core import Axes, CollectingTask, StepGuard, Task, TrainState, current_layout, pair_axes
from ..core.errors import RecipeError
from ..core.layout.layout import Layout
from ..core.params.logical import batch_row_axes
from ..core.state import init_averages
from ..kernels import Kernels
from ..kernels.compute_dtype import resolve_dtype
from ..optim import Optimizer, RowOptimizer, Transformation
from .collecting_step import check_plain, first_batch, take_collecting_step
from .frozen_params import Rows, freeze, mask_frozen_layers
from .loss_scaling import FIRST, check_effect
from .mesh_execution import GradientRule
from .mup import WidthFactors, width_factors
from .replicas import average_params, initial_replicas, place_program, take_local_step
from .table_growth import GrowingTables
from .tables import TableUpdates
from .update import Scalars, StepConfig, UpdateRule, evaluation_step, gradient_step, train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """All components of a training step, as values that planners, inspectors and the compiler read.

    Attributes:
        abstract: Shapes and dtypes of the state; nothing is allocated.
        axes: Logical axes of the state, a tuple at each leaf.
        trainable: A tree with the structure of the parameters, True where gradients and moments exist.
        transformation: The optimizer for these parameters.
        kernels: The kernels that the recipe names.
        frozen_rows: For stacked parameters that train, the frozen layers.
        widths: Changes to the settings of a narrower model; None if the settings are the task's own.
        comms: How gradients are summed over the slow network.
        tables: The tables among the parameters; None if there are none.
        growing: The tables with rows that are assigned at the beginning of a step.
    """

    task: Task
    optimizer: Optimizer
    config: StepConfig
    num_steps: int
    abstract: TrainState
    axes: TrainState
    trainable: Any
    transformation: Transformation
    kernels: Kernels = Kernels()  # noqa: RUF009
    frozen_rows: Rows | None = None
    widths: WidthFactors | None = None
    comms: Comms = Comms()  # noqa: RUF009
    tables: TableUpdates | None = None
    growing: GrowingTables | None = None

    @classmethod
    def create(
        cls,
        task: Task,
        optimizer: Optimizer,
        *,
        num_steps: int,
        config: StepConfig | None = None,
        frozen: tuple[str, ...] = (),
        kernels: Kernels | None = None,
        comms: Comms | None = None,
        embedding_optimizer: RowOptimizer | None = None,
    ) -> "Program":
        """Derive everything from the task's abstract parameters.

        Args:
            num_steps: Length of the run, at which the learning-rate decay ends. If a task makes several
                updates per step, its schedule counts updates.
            frozen: Prefixes of parameter names that are not trained, or single layers; see `freeze`.
            embedding_optimizer: Optimizer for tables; None for `RowWiseAdagrad()` if there are any.

        Raises:
            RecipeError: A prefix in `frozen` matches no parameter, two averages of the parameters are
                requested, or there is no table for `embedding_optimizer`.
        """
        task = task.with_compute_dtype(resolve_dtype(task.compute_dtype))
        # 1. The trainable parameters: dense ones (`free`) and tables, without frozen ones.
        params, model_state = jax.eval_shape(task.init, jax.random.key(0))
        parameter_axes = task.parameter_axes(params)
        layers = task.layer_parameters(params)
        trainable, resting = freeze(params, frozen, task.frozen_parameters, layers)
        num_updates = num_steps * task.updates_per_step
        check_update_count(num_steps, task.updates_per_step)
        tables = TableUpdates.of(task, params, trainable, embedding_optimizer, num_updates)
        dense = trainable if tables is None else tables.dense_mask(trainable)
        free = {
            name: (leaf.shape, axes)
            for (name, leaf, axes), keep in zip(pair_axes(params, parameter_axes), jax.tree.leaves(dense))
            if keep
        }
        # 2. The optimizer for these parameters.
        widths = width_factors(task)
        if widths is not None:
            optimizer = widths.scale_optimizer(optimizer, free)
        placed_by = {name: axes for name, (_, axes) in free.items()}
        meanings = {
            name: tuple(axes) for name, _, axes in pair_axes(params, task.semantic_axes(params)) if name in free
        }
        if meanings == {name: tuple(axes) for name, axes in placed_by.items()}:
            transformation = optimizer.build(placed_by, num_updates, layers)
        else:
            transformation = optimizer.build(placed_by, num_updates, layers, meanings)
        config = config or StepConfig()
        check_rows_together(task, config, comms)
        if config.ema_decay is not None and transformation.average is not None:
            raise RecipeError(
                f"step.ema_decay={config.ema_decay}: {type(optimizer).__name__} averages the parameters itself; set "
                f"step.ema_decay to None"
            )
        averages = config.ema_decay is not None or transformation.average is not None
        check_effect(task.scales_loss, type(task).__name__, config.loss_scale, config.loss_scale_steps)
        if task.separate_runs and (config.clip_norm is not None or config.spike_factor is not None):
            raise RecipeError(
                f"step.clip_norm={config.clip_norm} and step.spike_factor={config.spike_factor} look at the gradients of all "
                f"runs of {type(task).__name__} as one; set both to None, and clip by task.clip_norm"
            )
        # 3. The abstract state and its logical axes.
        scale = (config.loss_scale or FIRST) if task.scales_loss else None
        initializer = _StateInitializer(task, transformation, dense, averages, scale, widths, tables)
        abstract = jax.eval_shape(initializer.create, jax.random.key(0))
        lies = transformation.axes(abstract.optimizer_state, free)
        axes = _state_axes(abstract, parameter_axes, task.state_axes(model_state), lies, dense, tables)
        program = cls(
            task,
            optimizer,
            config,
            num_steps,
            abstract,
            axes,
            trainable,
            transformation,
            kernels or Kernels(),
            resting,
            widths,
            comms or Comms(),
            tables,
            GrowingTables.of(task, tables),
        )
        if isinstance(task, CollectingTask):
            check_plain(program)
        return program

    def place_on(self, layout: Layout) -> "Program":
        """Adapt this program to a mesh, adding the state that each replica holds separately.

        Raises:
            RecipeError: The communication settings do not fit the mesh; the message names the fix.
        """
        return place_program(self, layout)

    def initial_state(self, key: jax.Array, initial_values: tuple[Any, Any] | None = None) -> TrainState:
        """Initialize the whole state, or the rest of it for the parameters and model state in
        `initial_values`.

        Must be jitted, since eager initialization rounds differently.
        """
        scale = None if self.abstract.guard.scale is None else self.config.loss_scale or FIRST
        initializer = _StateInitializer(
            self.task, self.transformation, self.dense, self.has_average, scale, self.widths, self.tables
        )
        state = initializer.create(key, initial_values)
        return initial_replicas(self, state)

    @property
    def dense(self) -> Any:
        """Tree of bools with the structure of the parameters: True for trained parameters that are not
        tables."""
        return self.trainable if self.tables is None else self.tables.dense_mask(self.trainable)

    @property
    def has_average(self) -> bool:
        """True if an average of the parameters is computed, and evaluated in their place."""
        return self.abstract.averaged is not None

    def step(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> tuple[TrainState, Scalars]:
        """Take one training step; see `train_step`."""
        if self.abstract.replicas is not None:
            return take_local_step(self, state, batch, batch_axes)
        if isinstance(self.task, CollectingTask):
            return take_collecting_step(self, state, batch, batch_axes)
        return self.one_step(state, batch, batch_axes)

    def one_step(
        self,
        state: TrainState,
        batch: Mapping[str, Any],
        batch_axes: Mapping[str, Axes] | None = None,
        *,
        measures: bool = False,
    ) -> tuple[TrainState, Scalars]:
        """Take one step with parameters shared by all devices; `measures` as in `train_step`."""
        assignment = None
        if self.growing is not None:
            assignment = self.growing.assign_rows(state, batch, batch_axes or batch_row_axes(batch))
            state, batch, batch_axes = assignment.state, assignment.batch, assignment.axes
        rule = UpdateRule(
            gradients=self._gradient_rule(self.comms if self.has_custom_reduction and current_layout() else None),
            transformation=self.transformation,
            learning_rate=self.optimizer.reported_rate(self.num_steps * self.task.updates_per_step),
            config=self.config,
            frozen_rows=self.frozen_rows,
        )
        after, scalars = train_step(state, batch, rule, batch_axes, measures=measures)
        if self.growing is None or assignment is None:
            return after, scalars
        skipped = after.guard.skipped > state.guard.skipped
        counts = {name: jnp.where(skipped, 0, count) for name, count in assignment.counts.items()}
        return self.growing.roll_back(after, assignment.before, skipped), {**scalars, **counts}

    def _gradient_rule(self, comms: Comms | None) -> GradientRule:
        """Return how gradients are computed, summed according to `comms`; None for plain sums."""
        return GradientRule(
            task=self.task,
            trainable=self.trainable,
            micro_batches=self.config.micro_batches,
            comms=comms,
            tables=self.tables,
        )

    @property
    def has_custom_reduction(self) -> bool:
        """True if gradients are compressed, delayed or otherwise not plainly summed in float32."""
        return not self.comms.is_plain and self.comms.local_steps == 1

    def outer_sync_after(self, number: int) -> OuterSync | None:
        """Return the outer synchronization of replicas with local steps after step `number`, counted from 1;
        None if there is none."""
        return None if self.abstract.replicas is None else outer_sync_after(number, self.num_steps, self.comms)

    @property
    def final_outer_sync(self) -> OuterSync:
        """The synchronization after the last step, in which replicas agree on all parameters."""
        return final_outer_sync(self.comms)

    def sync_replicas(self, state: TrainState, sync: OuterSync) -> TrainState:
        """Return the state for the next step, after a step followed by this synchronization."""
        return average_params(self, state, sync)

    def renewal_due(self, number: int) -> bool:
        """Return True if the optimizer renews part of its state after step `number`, counted from 1."""
        return self.transformation.renewal is not None and self.transformation.renewal.due(number)

    def renew(self, optimizer_state: Any) -> Any:
        """Return the optimizer state for the next step, after a step with a due renewal."""
        assert self.transformation.renewal is not None
        return self.transformation.renewal.renew(optimizer_state, eqx.filter(self.abstract.params, self.dense))

    def adopt_renewed(self, number: int, optimizer_state: Any) -> Any:
        """Return the optimizer state after step `number`, with arrays renewed earlier moved to where steps
        read them."""
        renewal = self.transformation.renewal
        return optimizer_state if renewal is None else renewal.adopt_renewed(number, optimizer_state)

    def gradients(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> Any:
        """Compute the gradients of one batch, as a tree with the structure of the parameters and None for
        frozen ones.

        For a task that collects its own data, they are those of the step's first update.
        """
        if isinstance(self.task, CollectingTask):
            state, batch = first_batch(self, state, batch)
            batch_axes = None
        batch, batch_axes = self._with_rows(state, batch, batch_axes)
        result, *_ = gradient_step(state, batch, self._gradient_rule(None), batch_axes)
        return mask_frozen_layers(result.gradients, self.frozen_rows)

    def evaluate(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> Any:
        """Compute the losses and metrics of one batch as sums."""
        batch, batch_axes = self._with_rows(state, batch, batch_axes)
        return evaluation_step(state, batch, task=self.task, batch_axes=batch_axes, tables=self.tables)

    def first_update_inputs(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Mapping[str, Any]]:
        """Return the state and the batch as the loss sees them in the first update of a step.

        For a collecting task the batch is the collected data; keys of growing tables are replaced by row
        indices.
        """
        if isinstance(self.task, CollectingTask):
            return first_batch(self, state, batch)
        if self.growing is not None:
            assigned = self.growing.assign_rows(state, batch, batch_row_axes(batch))
            return assigned.state, assigned.batch
        return state, batch

    def _with_rows(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None
    ) -> tuple[Mapping[str, Any], Mapping[str, Axes] | None]:
        """Replace keys of growing tables by row indices in a batch and its axes."""
        if self.growing is None:
            return batch, batch_axes
        return self.growing.lookup_rows(state, batch, batch_axes or batch_row_axes(batch))


def _state_axes(
    abstract: TrainState,
    parameter_axes: Any,
    model_axes: Any,
    optimizer_axes: Any,
    dense: Any,
    tables: TableUpdates | None,
) -> TrainState:
    averaged = None
    if abstract.averaged is not None:
        averaged_axes = [
            axes
            for (_, _, axes), keep in zip(pair_axes(abstract.params, parameter_axes), jax.tree.leaves(dense))
            if keep
        ]
        averaged = jax.tree.structure(abstract.averaged).unflatten(averaged_axes)
    parts = {
        "step": (),
        "params": parameter_axes,
        "model_state": model_axes,
        "optimizer_state": optimizer_axes,
        "key": (),
        "guard": jax.tree.map(lambda _: (), abstract.guard),
        "averaged": averaged,
        "owed": None,
        "replicas": None,
        "delayed": None,
        "tables": None if tables is None else tables.state_axes(),
    }
    leaves = [
        axes
        for field in dataclasses.fields(abstract)
        for axes in jax.tree.structure(getattr(abstract, field.name)).flatten_up_to(parts[field.name])
    ]
    # Unflatten instead of constructing, since these leaves are not arrays.
    return jax.tree.structure(abstract).unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class _StateInitializer:
    """Creates the state in which training begins.

    Attributes:
        dense: Tree of bools with the structure of the parameters: True for trained parameters that are not
            tables.
        averages: True if an average of the parameters is computed.
        loss_scale: The first loss scale; None for a task that does not scale its loss.
    """

    task: Task
    transformation: Transformation
    dense: Any
    averages: bool
    loss_scale: float | None
    widths: WidthFactors | None
    tables: TableUpdates | None

    def create(self, key: jax.Array, initial_values: tuple[Any, Any] | None = None) -> TrainState:
        """Create the state, with the parameters and model state in `initial_values` if there are any."""
        init_key, run_key = jax.random.split(key)
        params, model_state = self.task.init(init_key) if initial_values is None else initial_values
        if self.widths is not None and initial_values is None:
            params = self.widths.scale_params(params)
        free = jax.tree.map(lambda p, keep: p if keep else None, params, self.dense)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            model_state=model_state,
            optimizer_state=self.transformation.init(free),
            key=run_key,
            guard=StepGuard.create(self.loss_scale),
            averaged=init_averages(free) if self.averages else None,
            tables=None if self.tables is None else self.tables.init_state(params),
        )


def check_update_count(num_steps: int, updates_per_step: int) -> None:
    """Check that the number of updates fits 32 bits.

    Raises:
        RecipeError: The number does not fit; the message gives the maximum number of steps.
    """
    updates = num_steps * updates_per_step
    if updates >= 2**31:
        raise RecipeError(
            f"num_steps={num_steps:,} of {updates_per_step:,} updates each are {updates:,} updates, which are counted in 32 "
            f"bits; set at most {(2**31 - 1) // updates_per_step:,} steps"
        )


def check_rows_together(task: Task, config: StepConfig, comms: Comms | None) -> None:
    """Check that no setting splits the batch of a task with a loss that compares its rows.

    Raises:
        RecipeError: A setting splits the batch; the message names it.
    """
    if task.sums_over_rows:
        return
    settings = {"step.micro_batches": config.micro_batches}
    if comms is not None:
        settings |= {"comms.local_steps": comms.local_steps, "comms.islands.count": comms.islands.count}
    for name, value in settings.items():
        if value > 1:
            raise RecipeError(
                f"{name}={value}: the loss of {type(task).__name__} compares each row with all others of the batch, and a part "
                f"of it would give another loss; set {name} to 1, and more devices or a smaller batch for memory"
            )
