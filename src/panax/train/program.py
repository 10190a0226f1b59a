"""`Program`: all that a step is made of, as values."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..comms import Comms
from ..comms.fragments import OuterSync, last_meeting, outer_sync_after
from ..core import Axes, CollectingTask, StepGuard, Task, TrainState, current_layout, pair_axes
from ..core.errors import RecipeError
from ..core.layout import Layout
from ..core.logical import axes_of_rows
from ..core.state import averages_of
from ..kernels import Kernels
from ..kernels.compute_dtype import resolve
from ..optim import Optimizer, RowOptimizer, Transformation
from .collecting import check_plain, collecting_step, first_batch
from .freezing import Rows, freeze, mask_frozen_layers
from .growing import GrowingTables
from .loss_scaling import FIRST, check_effect
from .replicated import average_params, initial_replicas, place_program, take_local_step
from .tables import TableUpdates
from .update import Scalars, StepConfig, evaluation_step, gradient_step, train_step
from .width import WidthFactors, width_factors


@dataclasses.dataclass(frozen=True)
class Program:
    """All that the step is made of, as values: what a planner, an inspector and the compiler read.

    Attributes:
        abstract: The state's shapes and dtypes; nothing is allocated.
        axes: The state's logical axes, a tuple at each leaf.
        trainable: Like the parameters, true where gradients and moments exist.
        transformation: The optimizer for these parameters.
        kernels: Those that the recipe names.
        resting: Of stacked parameters that train, the layers that are frozen.
        widths: What changes of the settings of a narrower model; None where they are the task's own.
        comms: How gradients are added up over the slow network.
        tables: Those among the parameters; None where there are none.
        growing: Those of them whose rows are given out in a step's beginning.
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
    resting: Rows | None = None
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
        table_optimizer: RowOptimizer | None = None,
    ) -> "Program":
        """Derive everything from the task's abstract parameters.

        Args:
            num_steps: Length of the run, which the learning rate's decay ends with. Where a task makes several updates in a step,
                its schedule counts these.
            frozen: Prefixes of parameter names that are not trained, or single layers; see `freeze`.
            table_optimizer: Of tables; None for `RowWiseAdagrad()` where there are any.

        Raises:
            RecipeError: A prefix in `frozen` matches no parameter, two averages of the parameters are asked for, or there is no
                table for `table_optimizer`.
        """
        task = task.with_compute_dtype(resolve(task.compute_dtype))
        params, model_state = jax.eval_shape(task.init, jax.random.key(0))
        parameter_axes = task.parameter_axes(params)
        layers = task.layer_parameters(params)
        trainable, resting = freeze(params, frozen, task.frozen_parameters, layers)
        num_updates = num_steps * task.updates_per_step
        check_count(num_steps, task.updates_per_step)
        tables = TableUpdates.of(task, params, trainable, table_optimizer, num_updates)
        dense = trainable if tables is None else tables.without(trainable)
        free = {
            name: (leaf.shape, axes)
            for (name, leaf, axes), keep in zip(pair_axes(params, parameter_axes), jax.tree.leaves(dense))
            if keep
        }
        widths = width_factors(task)
        if widths is not None:
            optimizer = widths.of_optimizer(optimizer, free)
        placed_by = {name: axes for name, (_, axes) in free.items()}
        meanings = {name: tuple(axes) for name, _, axes in pair_axes(params, task.meaning_axes(params)) if name in free}
        if meanings == {name: tuple(axes) for name, axes in placed_by.items()}:
            transformation = optimizer.build(placed_by, num_updates, layers)
        else:
            transformation = optimizer.build(placed_by, num_updates, layers, meanings)
        config = config or StepConfig()
        check_rows_together(task, config, comms)
        if config.ema_decay is not None and transformation.averaged is not None:
            raise RecipeError(
                f"step.ema_decay={config.ema_decay}: {type(optimizer).__name__} averages the parameters itself; set "
                f"step.ema_decay to None"
            )
        averages = config.ema_decay is not None or transformation.averaged is not None
        check_effect(task.scales_loss, type(task).__name__, config.loss_scale, config.loss_scale_steps)
        if task.separate_runs and (config.clip_norm is not None or config.spike_factor is not None):
            raise RecipeError(
                f"step.clip_norm={config.clip_norm} and step.spike_factor={config.spike_factor} look at the gradients of all "
                f"runs of {type(task).__name__} as one; set both to None, and clip by task.clip_norm"
            )
        guard = partial(StepGuard.create, (config.loss_scale or FIRST) if task.scales_loss else None)
        create = partial(_initial_state, task, transformation, dense, averages, guard, widths, tables)
        abstract = jax.eval_shape(create, jax.random.key(0))
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

    def on(self, layout: Layout) -> "Program":
        """This program for a mesh, with the state of what is kept on each of its replicas.

        Raises:
            RecipeError: Gradients can't be compressed there; says what to set.
        """
        return place_program(self, layout)

    def initial_state(self, key: jax.Array, given: tuple[Any, Any] | None = None) -> TrainState:
        """Draw the whole state, or what there is besides `given` parameters and model state.

        To be jitted, since eager drawing rounds differently.
        """
        scale = None if self.abstract.guard.scale is None else self.config.loss_scale or FIRST
        guard = partial(StepGuard.create, scale)
        state = _initial_state(
            self.task, self.transformation, self.dense, self.averages, guard, self.widths, self.tables, key, given
        )
        return initial_replicas(self, state)

    @property
    def dense(self) -> Any:
        """Like the parameters, true where the optimizer of dense parameters has moments: what trains and is not a table."""
        return self.trainable if self.tables is None else self.tables.without(self.trainable)

    @property
    def averages(self) -> bool:
        """Whether an average of the parameters is kept, and judged in their place."""
        return self.abstract.averaged is not None

    def step(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> tuple[TrainState, Scalars]:
        """One training step; see `train_step`."""
        if self.abstract.replicas is not None:
            return take_local_step(self, state, batch, batch_axes)
        if isinstance(self.task, CollectingTask):
            return collecting_step(self, state, batch, batch_axes)
        return self.one_step(state, batch, batch_axes)

    def one_step(
        self,
        state: TrainState,
        batch: Mapping[str, Any],
        batch_axes: Mapping[str, Axes] | None = None,
        *,
        measures: bool = False,
    ) -> tuple[TrainState, Scalars]:
        """One step of parameters that all devices share; `measures` as of `train_step`."""
        given = None
        if self.growing is not None:
            given = self.growing.given(state, batch, batch_axes or axes_of_rows(batch))
            state, batch, batch_axes = given.state, given.batch, given.axes
        after, scalars = train_step(
            state,
            batch,
            task=self.task,
            trainable=self.trainable,
            transformation=self.transformation,
            learning_rate=self.optimizer.reported_rate(self.num_steps * self.task.updates_per_step),
            config=self.config,
            batch_axes=batch_axes,
            resting=self.resting,
            comms=self.comms if self.sums_otherwise and current_layout() else None,
            tables=self.tables,
            measures=measures,
        )
        if self.growing is None or given is None:
            return after, scalars
        skipped = after.guard.skipped > state.guard.skipped
        counts = {name: jnp.where(skipped, 0, count) for name, count in given.counts.items()}
        return self.growing.undone(after, given.before, skipped), {**scalars, **counts}

    @property
    def sums_otherwise(self) -> bool:
        """Whether a step adds gradients up in another way than at once and in float32."""
        return not self.comms.is_plain and self.comms.local_steps == 1

    def meeting_after(self, number: int) -> OuterSync | None:
        """What replicas that take local steps do together after the step with this number, the first being 1."""
        return None if self.abstract.replicas is None else outer_sync_after(number, self.num_steps, self.comms)

    @property
    def last_meeting(self) -> OuterSync:
        """After the last step, in which replicas agree on everything."""
        return last_meeting(self.comms)

    def agreed(self, state: TrainState, meeting: OuterSync) -> TrainState:
        """The state as the next step is to see it, after a step with this meeting."""
        return average_params(self, state, meeting)

    def renewal_due(self, number: int) -> bool:
        """Whether the optimizer's state is to be `renewed` after the step with this number, the first being 1."""
        return self.transformation.renewal is not None and self.transformation.renewal.due(number)

    def renewed(self, optimizer_state: Any) -> Any:
        """The optimizer's state as the next step is to see it, after a step of which `renewal_due` says so."""
        assert self.transformation.renewal is not None
        return self.transformation.renewal.renewed(optimizer_state, eqx.filter(self.abstract.params, self.dense))

    def taken_over(self, number: int, optimizer_state: Any) -> Any:
        """The optimizer's state after the step with this number, with what was renewed some steps ago where steps read it."""
        renewal = self.transformation.renewal
        return optimizer_state if renewal is None else renewal.taken_over(number, optimizer_state)

    def gradients(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> Any:
        """The gradients of one batch, as a tree like the parameters with None where one is frozen.

        Where a task collects its own, they are those of the step's first update.
        """
        if isinstance(self.task, CollectingTask):
            state, batch = first_batch(self, state, batch)
            batch_axes = None
        batch, batch_axes = self._with_rows(state, batch, batch_axes)
        found, *_ = gradient_step(
            state,
            batch,
            task=self.task,
            trainable=self.trainable,
            config=self.config,
            batch_axes=batch_axes,
            tables=self.tables,
        )
        return mask_frozen_layers(found.gradients, self.resting)

    def evaluate(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None = None
    ) -> Any:
        """Unmerged losses and metrics of one batch."""
        batch, batch_axes = self._with_rows(state, batch, batch_axes)
        return evaluation_step(state, batch, task=self.task, batch_axes=batch_axes, tables=self.tables)

    def first_seen(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Mapping[str, Any]]:
        """The state and the batch as the loss sees them in the first update of a step: of a task that collects its own, what it
        has collected; with row numbers where the batch has keys of tables that grow."""
        if isinstance(self.task, CollectingTask):
            return first_batch(self, state, batch)
        if self.growing is not None:
            given = self.growing.given(state, batch, axes_of_rows(batch))
            return given.state, given.batch
        return state, batch

    def _with_rows(
        self, state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None
    ) -> tuple[Mapping[str, Any], Mapping[str, Axes] | None]:
        """A batch as a loss sees it: with row numbers where it has keys of tables that grow; and its axes."""
        if self.growing is None:
            return batch, batch_axes
        return self.growing.found(state, batch, batch_axes or axes_of_rows(batch))


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
        kept = [
            axes
            for (_, _, axes), keep in zip(pair_axes(abstract.params, parameter_axes), jax.tree.leaves(dense))
            if keep
        ]
        averaged = jax.tree.structure(abstract.averaged).unflatten(kept)
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
        "tables": None if tables is None else tables.kept_axes(),
    }
    leaves = [
        axes
        for field in dataclasses.fields(abstract)
        for axes in jax.tree.structure(getattr(abstract, field.name)).flatten_up_to(parts[field.name])
    ]
    # Unflattened, not constructed: these leaves are no arrays.
    return jax.tree.structure(abstract).unflatten(leaves)


def _initial_state(
    task: Task,
    transformation: Transformation,
    dense: Any,
    averages: bool,
    guard: Callable[[], StepGuard],
    widths: WidthFactors | None,
    tables: TableUpdates | None,
    key: jax.Array,
    given: tuple[Any, Any] | None = None,
) -> TrainState:
    init_key, run_key = jax.random.split(key)
    params, model_state = task.init(init_key) if given is None else given
    if widths is not None and given is None:
        params = widths.scaled(params)
    free = jax.tree.map(lambda p, keep: p if keep else None, params, dense)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        model_state=model_state,
        optimizer_state=transformation.init(free),
        key=run_key,
        guard=guard(),
        averaged=averages_of(free) if averages else None,
        tables=None if tables is None else tables.keeps(params),
    )


def check_count(num_steps: int, updates_per_step: int) -> None:
    """Refuse a run whose updates can't be counted.

    Raises:
        RecipeError: Says how many steps can be.
    """
    updates = num_steps * updates_per_step
    if updates >= 2**31:
        raise RecipeError(
            f"num_steps={num_steps:,} of {updates_per_step:,} updates each are {updates:,} updates, which are counted in 32 "
            f"bits; take at most {(2**31 - 1) // updates_per_step:,} steps"
        )


def check_rows_together(task: Task, config: StepConfig, comms: Comms | None) -> None:
    """Refuse settings that split a batch of a task whose loss compares its rows with each other.

    Raises:
        RecipeError: Names the setting.
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
