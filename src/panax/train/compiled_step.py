"""The training step compiled for a mesh: abstract state, shardings, donation, ahead-of-time compilation, one
program per shape."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..comms.fragments import OuterSync
from ..core import Axes, CollectingTask, TrainState
from ..kernels import use_kernels
from ..mesh import Placement
from ..mesh.legality import list_remarks
from ..system.allocator import prepare_allocator
from .compilation.abstract_arrays import abstract_state, check_traced
from .compilation.background_compile import BackgroundBuilder
from .compilation.between_steps import BetweenSteps
from .compilation.mesh_requirements import small_program_options
from .compilation.mesh_sender import MeshSender
from .compilation.shape_cache import CompileClock, ShapeCache, batch_signature
from .initialization import StateInitializer
from .precision import check_precision
from .program import Program
from .update import Scalars


class CompiledStep(MeshSender):
    """A program compiled for a mesh: initializes the state, takes steps, evaluates.

    The state is donated by default: after `state, scalars = step(state, batch)`, the old state is deleted. A
    batch with an unexpected shape raises an error that names the leaf with its old and new shape, instead of
    silently compiling for a minute.

    Attributes:
        kernels_used: The kernel that training programs use for each kind of work, and why, one line each.
        when_traced: Callback that receives the trace of each training program.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        batch_axes: Mapping[str, Axes],
        *,
        shapes_allowed: int = 1,
        donates: bool = True,
    ):
        """Prepare the step for a mesh; programs are compiled on first use.

        Args:
            batch_axes: The logical axes of each leaf of a batch; the task's own take precedence.
            shapes_allowed: Maximum number of batch shapes, and so of compiled programs: the number of
                buckets.
            donates: False keeps the input state of a step alive, which needs memory for a second one.

        Raises:
            LayoutError: The task does not support the mesh, or a parameter is not divisible over it.
            RecipeError: The devices do not support the task's matmul precision.
            DataError: The batch lacks a leaf that the task needs.
        """
        super().__init__(program.place_on(placement), placement, batch_axes)
        program, placement = self.program, self.placement
        check_precision(program.task, placement.target)
        self._mesh_checked = False
        self.shapes_allowed = shapes_allowed
        self._donated = (0,) if donates else ()
        self.kernels_used: list[str] = []
        self.when_traced: Callable[[Any], None] = lambda traced: None
        self.shardings: TrainState = placement.storage_shardings(program.abstract, program.axes)
        small = small_program_options(placement.target)
        self._options = small if isinstance(program.task, CollectingTask) else None
        self._initializer = StateInitializer(program, placement, self.shardings, small)
        self._clock = CompileClock()
        self._train = ShapeCache(self._clock, shapes_allowed)
        # One more shape than in training: the last batch of held-out data may be short.
        self._evaluate = ShapeCache(self._clock, shapes_allowed + 1)
        self._summaries: dict[Any, ShapeCache] = {}
        self._between = BetweenSteps(program, placement, self.shardings, self._clock)
        self._ahead = BackgroundBuilder()

    @property
    def compile_seconds(self) -> float:
        """Total compile time of all programs so far."""
        return self._clock.seconds

    def add_compile_seconds(self, seconds: float) -> None:
        """Count the compile time of another program as this step's."""
        self._clock.seconds += seconds

    def init(self, seed: int, initial_values: tuple[Any, Any] | None = None) -> TrainState:
        """Initialize the state by one jitted function, directly into its shards; bitwise the same on every
        mesh.

        Args:
            initial_values: Parameters and model state to begin with, in their shards; donated.

        Raises:
            RecipeError: The state does not fit in the memory of the devices.
        """
        return self._initializer.init(seed, initial_values)

    def init_params(self, seed: int, mask: Any) -> Any:
        """Initialize the parameters that `mask` selects as `init` does, without memory for the others.

        Args:
            mask: Bools with the structure of the parameters; the result has None in place of False.

        Raises:
            RecipeError: The whole state does not fit in the memory of the devices.
        """
        return self._initializer.init_params(seed, mask)

    def trace_init(self, seed: int = 0) -> Any:
        """Trace the program of `init`, for analysis."""
        return self._initializer.trace(seed)

    def storage_shardings(self, tree: Any, axes: Any) -> Any:
        """Return the sharding in which each array of a tree is stored, given its logical axes."""
        return self.placement.storage_shardings(tree, axes)

    def __call__(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        """Dispatch one step on a batch from `put`; returns before the devices finish."""
        before = self._between.count_before(state)
        state, scalars = self.get_compiled(batch)(state, batch)
        if before is not None:
            state = self._between.after_step(before + 1, state)
        return state, scalars

    @property
    def renewal(self) -> Any:
        """The compiled program that renews the optimizer state, which is donated to it.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        return self._between.renewal

    def compile_outer_sync(self, sync: OuterSync) -> Any:
        """Return the compiled program that synchronizes replicas with local steps; the state is donated to
        it.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        return self._between.compile_outer_sync(sync)

    def trace_outer_sync(self, sync: OuterSync | None = None) -> Any:
        """Trace the program of `compile_outer_sync`; by default for the last synchronization, in which replicas agree
        on all parameters.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        return self._between.trace_outer_sync(sync)

    def trace_renewal(self) -> Any:
        """Trace the program of `renewal`.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        return self._between.trace_renewal()

    def get_compiled(self, batch: Mapping[str, Any]) -> Any:
        """Return the compiled training step for the shapes of `batch` (abstract or concrete)."""
        return self._train.get(batch, self._compile_train)

    def compile_ahead(self, batch: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
        """Start compiling the training step, then the evaluation, for batches of these shapes in another
        thread.

        Use it while waiting for the first batch, for example while reading the state. Errors are raised when
        the program is used.
        """
        self._ahead.begin(("train", batch_signature(batch)), partial(self._traced_and_compiled, batch))
        if evaluation is not None:
            self._ahead.begin(("evaluate", batch_signature(evaluation)), partial(self._evaluation_compiled, evaluation))

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
        """Dispatch the evaluation of one batch; the state is not donated."""
        return self._evaluate.get(batch, self._compile_evaluate)(state, batch)

    def summarize(self, state: TrainState, batch: Mapping[str, jax.Array], summary: Callable[[Any, Any], Any]) -> Any:
        """Compute `summary` of the parameters and this batch's gradients, in one program; the state is not
        donated.

        Args:
            summary: Takes both trees, the gradients with None for frozen parameters; each function is
                compiled once.
        """

        def compile_(batch: Mapping[str, Any]) -> Any:
            def summarize(state: TrainState, batch: Mapping[str, Any]) -> Any:
                return summary(state.params, self.program.gradients(state, batch, self.batch_axes))

            with self.placement.activate(), use_kernels(self.program.kernels.names):
                jitted = jax.jit(summarize, out_shardings=self.placement.sharding())
                return jitted.lower(abstract_state(self.program, self.shardings), self.abstract_batch(batch)).compile()

        cache = self._summaries.setdefault(summary, ShapeCache(self._clock, self.shapes_allowed))
        return cache.get(batch, compile_)(state, batch)

    def lower(self, batch: Mapping[str, Any]) -> Any:
        """Lower the training step for the shapes of `batch` (abstract or concrete), for compilation or
        inspection.

        Raises:
            LayoutError: The batch cannot be sharded over the mesh, or a sum over devices is missing
                (`StepConfig.check_sums`).
        """
        traced = self.trace(batch)
        with self.placement.activate():
            return traced.lower()

    def trace(self, batch: Mapping[str, Any]) -> Any:
        """Trace the training step for the shapes of `batch` (abstract or concrete), for lowering or analysis.

        Raises:
            LayoutError: As in `lower`.
        """
        self.check_batch(batch, self.program.config.micro_batches)
        for remark in list_remarks(self._needs, self.placement.sizes):
            warnings.warn(remark, stacklevel=2)
        replicated = self.placement.sharding()
        function = partial(self.program.step, batch_axes=self.batch_axes)
        step = jax.jit(function, donate_argnums=self._donated, out_shardings=(self.shardings, replicated))
        with self.placement.activate(), use_kernels(self.program.kernels.names) as selections:
            traced = step.trace(abstract_state(self.program, self.shardings), self.abstract_batch(batch))
        self.program.kernels.check_effect(selections.values())
        self.kernels_used += [line for line in selections if line not in self.kernels_used]
        return check_traced(self.program, traced)

    def _compile_train(self, batch: Mapping[str, Any]) -> Any:
        make = partial(self._traced_and_compiled, batch)
        traced, compiled = self._ahead.get_or_make(("train", batch_signature(batch)), make)
        self.when_traced(traced)
        if not self.placement.target.traits.own_memory:
            found = compiled.memory_analysis()
            prepare_allocator(0 if found is None else found.temp_size_in_bytes)
        return compiled

    def _check_mesh(self) -> None:
        if not self._mesh_checked:
            self.program.task.check_mesh(self.placement)
            self._mesh_checked = True

    def _traced_and_compiled(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        self._check_mesh()
        traced = self.trace(batch)
        with self.placement.activate():
            lowered = traced.lower()
        return traced, lowered.compile(compiler_options=self._options)

    def _compile_evaluate(self, batch: Mapping[str, Any]) -> Any:
        return self._ahead.get_or_make(("evaluate", batch_signature(batch)), partial(self._evaluation_compiled, batch))

    def trace_evaluation(self, batch: Mapping[str, Any]) -> Any:
        """Trace the evaluation for the shapes of `batch` (abstract or concrete), for lowering or analysis.

        Raises:
            LayoutError: A sum over devices is missing (`StepConfig.check_sums`).
        """
        with self.placement.activate(), use_kernels(self.program.kernels.names):
            function = partial(self.program.evaluate, batch_axes=self.batch_axes)
            traced = jax.jit(function).trace(abstract_state(self.program, self.shardings), self.abstract_batch(batch))
        return check_traced(self.program, traced)

    def _evaluation_compiled(self, batch: Mapping[str, Any]) -> Any:
        self._check_mesh()
        traced = self.trace_evaluation(batch)
        with self.placement.activate(), use_kernels(self.program.kernels.names):
            return traced.lower().compile(compiler_options=self._options)

    def abstract_batch(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        shardings = self.placement.batch_shardings(batch, self.batch_axes)
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=shardings[name])
            for name, leaf in batch.items()
        }
