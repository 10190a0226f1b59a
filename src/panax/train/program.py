"""`Program`: all components of a training step, as values."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from ..comms import Comms
from ..comms.fragments import OuterSync, final_outer_sync, outer_sync_after
from ..core import Axes, CollectingTask, Task, TrainState, current_layout
from ..core.layout.layout import Layout
from ..core.params.logical import batch_row_axes
from ..kernels import Kernels
from ..kernels.compute_dtype import resolve_dtype
from ..optim import Optimizer, RowOptimizer, Transformation
from .assembly.first_state import FirstState
from .assembly.setting_checks import check_step_settings, check_update_count
from .assembly.trained_params import TrainedParams
from .collecting_step import check_plain, first_batch, take_collecting_step
from .frozen_params import Rows, mask_frozen_layers
from .loss_scaling import FIRST
from .mesh_execution import GradientRule
from .mup import WidthFactors, width_factors
from .parts.assembly import check_own_parts, step_parts
from .parts.step_part import StepInputs, StepPart
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
        first: What determines the state in which training begins.
        kernels: The kernels that the recipe names.
        comms: How gradients are summed over the slow network.
        growing: The tables with rows that are assigned at the beginning of a step.
    """

    task: Task
    optimizer: Optimizer
    config: StepConfig
    num_steps: int
    abstract: TrainState
    axes: TrainState
    first: FirstState
    kernels: Kernels = Kernels()  # noqa: RUF009
    comms: Comms = Comms()  # noqa: RUF009
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
        parts: tuple[StepPart, ...] = (),
    ) -> "Program":
        """Derive everything from the task's abstract parameters.

        Args:
            num_steps: Length of the run, at which the learning-rate decay ends. If a task makes several
                updates per step, its schedule counts updates.
            frozen: Prefixes of parameter names that are not trained, or single layers; see `freeze`.
            embedding_optimizer: Optimizer for tables; None for `RowWiseAdagrad()` if there are any.
            parts: The user's own parts of the step.

        Raises:
            RecipeError: A prefix in `frozen` matches no parameter, two averages of the parameters are
                requested, or there is no table for `embedding_optimizer`.
        """
        task = task.with_compute_dtype(resolve_dtype(task.compute_dtype))
        config, comms, num_updates = config or StepConfig(), comms or Comms(), num_steps * task.updates_per_step
        check_update_count(num_steps, task.updates_per_step)
        check_own_parts(parts)
        trained = TrainedParams.of(task, frozen, embedding_optimizer, num_updates)
        widths = width_factors(task)
        if widths is not None:
            optimizer = widths.scale_optimizer(optimizer, trained.shapes)
        transformation = trained.build_optimizer(optimizer, num_updates)
        check_step_settings(task, optimizer, transformation, config, comms)
        has_average = config.ema_decay is not None or transformation.average is not None
        scale = (config.loss_scale or FIRST) if task.scales_loss else None
        first = FirstState(trained, transformation, has_average, scale, widths, parts)
        abstract = jax.eval_shape(first.create, jax.random.key(0))
        program = cls(
            task=task,
            optimizer=optimizer,
            config=config,
            num_steps=num_steps,
            abstract=abstract,
            axes=first.axes(abstract),
            first=first,
            kernels=kernels or Kernels(),
            comms=comms,
            growing=GrowingTables.of(task, trained.tables),
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
        return initial_replicas(self, self.first.create(key, initial_values))

    @property
    def trainable(self) -> Any:
        """Tree with the structure of the parameters, True where gradients and moments exist."""
        return self.first.trained.trainable

    @property
    def dense(self) -> Any:
        """Tree of bools with the structure of the parameters: True for trained parameters that are not
        tables."""
        return self.first.trained.dense

    @property
    def frozen_rows(self) -> Rows | None:
        """For stacked parameters that train, the frozen layers."""
        return self.first.trained.frozen_rows

    @property
    def tables(self) -> TableUpdates | None:
        """The tables among the parameters; None if there are none."""
        return self.first.trained.tables

    @property
    def transformation(self) -> Transformation:
        """The optimizer for the trained parameters that are not tables."""
        return self.first.transformation

    @property
    def widths(self) -> WidthFactors | None:
        """Changes to the settings of a narrower model; None if the settings are the task's own."""
        return self.first.widths

    @property
    def own_parts(self) -> tuple[StepPart, ...]:
        """The user's own parts of the step."""
        return self.first.own_parts

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
        comms = self.comms if self.has_custom_reduction and current_layout() else None
        rule = UpdateRule(
            gradients=self._gradient_rule(comms), parts=self.parts, loss_scale_steps=self.config.loss_scale_steps
        )
        return train_step(state, batch, rule, batch_axes, measures=measures)

    @functools.cached_property
    def parts(self) -> tuple[StepPart, ...]:
        """The optional operations of a step, in their order."""
        return step_parts(self)

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
        inputs = StepInputs(state, batch, batch_axes, state.params, {})
        result, *_ = gradient_step(inputs, self._gradient_rule(None))
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
