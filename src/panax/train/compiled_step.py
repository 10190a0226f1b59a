"""The training step compiled for a mesh: abstract state, shardings, donation, ahead-of-time compilation, one
program per shape."""

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from ..comms.fragments import OuterSync
from ..core import Axes, CollectingTask, TrainState, pair_axes
from ..core.batch_checks import check_ranges, narrow_to_32_bits
from ..core.errors import TrainingError
from ..core.layout.target import Target
from ..core.params.logical import Role, axis_for_role
from ..kernels import use_kernels
from ..mesh import Placement
from ..mesh.legality import MeshRequirements, check, fit_rules, list_remarks
from ..mesh.topology import data_parallel_size
from ..parallel.context import zigzag_order, zigzag_parts
from ..spmd.checking import check_program
from ..system.allocator import prepare_allocator
from .background_compile import BackgroundBuilder
from .batch_transfer import HeldRows, Sender, check_leaves, check_sizes, find_held_rows, global_array
from .initialization import StateInitializer
from .precision import check_precision
from .program import Program
from .update import Scalars

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


@runtime_checkable
class StepProtocol(Sender, Protocol):
    """The interface that the training loop requires of a step, compiled or not."""

    program: Program
    shardings: Any

    def init(self, seed: int, initial_values: tuple[Any, Any] | None = None) -> TrainState: ...

    def init_params(self, seed: int, mask: Any) -> Any: ...

    def storage_shardings(self, tree: Any, axes: Any) -> Any: ...

    def __call__(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]: ...

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Any: ...

    def summarize(
        self, state: TrainState, batch: Mapping[str, jax.Array], summary: Callable[[Any, Any], Any]
    ) -> Any: ...


def small_program_options(target: Target) -> dict[str, int] | None:
    """Return compiler options for a program of many small kernels: a lower optimization level, if that pays
    and the user has not set one.

    Random initialization is exact at every level.
    """
    if target.traits.optimizes_small or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_LEVEL: 1}


_LEVEL = "xla_backend_optimization_level"


class CompiledStep:
    """A program compiled for a mesh: initializes the state, takes steps, evaluates.

    The state is donated by default: after `state, scalars = step(state, batch)`, the old state is deleted. A
    batch with an unexpected shape raises an error that names the leaf with its old and new shape, instead of
    silently compiling for a minute.

    Attributes:
        compile_seconds: Total compile time of all programs so far.
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
        self.program = program = program.place_on(placement)
        self._rules = placement.rules
        self._needs = mesh_requirements(program)
        self._checked: set[Any] = set()
        self._mesh_checked = False
        check(self._needs, placement.rules, placement.sizes)
        check_precision(program.task, placement.target)
        self.batch_axes = program.task.leaf_axes(batch_axes)
        rules = fit_rules(placement.rules, self._needs, placement.sizes)
        if not any(axis_for_role(Role.POSITIONS) in axes for axes in self.batch_axes.values()):
            rules = rules.without_positions()
        self.placement = placement = dataclasses.replace(placement, rules=rules, row_order=self._needs.row_order)
        check_leaves(program.task, batch_axes)
        self.shapes_allowed = shapes_allowed
        self._donated = (0,) if donates else ()
        self.compile_seconds = 0.0
        self.kernels_used: list[str] = []
        self.when_traced: Callable[[Any], None] = lambda traced: None
        self.shardings: TrainState = placement.storage_shardings(program.abstract, program.axes)
        small = small_program_options(placement.target)
        self._options = small if isinstance(program.task, CollectingTask) else None
        self._initializer = StateInitializer(program, placement, self.shardings, small)
        self._train: dict[Signature, Any] = {}
        self._evaluate: dict[Signature, Any] = {}
        self._summaries: dict[Any, dict[Signature, Any]] = {}
        self._renewal: Any = None
        self._agreements: dict[OuterSync, Any] = {}
        self._ahead = BackgroundBuilder()
        # The last step's number and the array that holds it, so that counting does not wait for the devices.
        self._count: tuple[int, Any] = (0, None)

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

    @property
    def row_multiple(self) -> int:
        """The divisor of a batch's padded number of rows; 1 for no padding."""
        config = self.program.config
        return data_parallel_size(self.placement.sizes) * config.micro_batches if config.pad_rows else 1

    def held_rows(self, batch_size: int) -> HeldRows | None:
        """Return the rows of a global batch that this process's devices hold; None if it holds all of them.

        Raises:
            LayoutError: The rows are not divisible over their axes.
        """
        if jax.process_count() == 1:
            return None
        name = next(iter(self.batch_axes))
        row_numbers = {name: jax.ShapeDtypeStruct((batch_size,), np.int32)}
        sharding = self.placement.batch_shardings(row_numbers, {name: (axis_for_role(Role.ROWS),)})[name]
        return find_held_rows(sharding.addressable_devices, sharding, batch_size)

    def put(
        self, batch: Mapping[str, Any], held: HeldRows | None = None, *, owned: bool = False
    ) -> dict[str, jax.Array]:
        """Transfer a batch to the devices, with rows sharded over the data axes; returns before the transfer
        completes.

        On a CPU, the device's array may share the host memory, and an accelerator may read it after this
        returns. The batch is therefore copied first, and the caller may reuse its arrays.

        Args:
            held: The rows of the global batch that `batch` contains; None: all of them.
            owned: True if the arrays are not written to any more and need not be copied.

        Raises:
            DataError: A leaf has a value that the task does not allow, or the sizes of leaves do not match.
        """
        arrays = {name: np.asarray(leaf) if owned else np.array(leaf) for name, leaf in batch.items()}
        unknown = arrays.keys() ^ self.batch_axes.keys()
        if unknown:
            raise TrainingError(
                f"the batch's leaves are {sorted(arrays)}, the source declares {sorted(self.batch_axes)}; make them agree"
            )
        check_sizes({name: leaf.shape for name, leaf in arrays.items()}, self.batch_axes)
        if jax.process_count() == 1:
            check_ranges(arrays, self.program.task.leaf_ranges)
        # With several processes, raising in one would leave the others waiting, so the step checks (`prepare_batch`).
        arrays = narrow_to_32_bits(arrays, self.program.task.leaf_ranges)
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape if held is None else (held.batch_size, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in arrays.items()
        }
        self._check_batch(shapes, micro_batches=1)
        shardings = self.placement.batch_shardings(shapes, self.batch_axes)
        if self.program.task.names_axes:
            arrays = {name: self._as_held(leaf, self.batch_axes[name]) for name, leaf in arrays.items()}
        if jax.process_count() == 1:
            return jax.device_put(arrays, shardings)
        return {
            name: global_array(leaf, held or HeldRows(np.arange(len(leaf)), len(leaf)), shardings[name])
            for name, leaf in arrays.items()
        }

    def _check_batch(self, batch: Mapping[str, Any], micro_batches: int) -> None:
        """Raise a LayoutError if a batch of these shapes cannot be sharded over the mesh."""
        leaves = tuple((f"batch leaf {name!r}", self.batch_axes[name], leaf.shape) for name, leaf in batch.items())
        if (leaves, micro_batches) not in self._checked:
            needs = dataclasses.replace(self._needs, batch=leaves, micro_batches=micro_batches)
            check(needs, self._rules, self.placement.sizes)
            self._checked.add((leaves, micro_batches))

    def _as_held(self, leaf: np.ndarray, axes: Axes) -> np.ndarray:
        """Permute positions to the order of the context axis."""
        parts = zigzag_parts(self.placement)
        if parts == 1 or axis_for_role(Role.POSITIONS) not in axes:
            return leaf
        dim = axes.index(axis_for_role(Role.POSITIONS))
        return np.take(leaf, zigzag_order(leaf.shape[dim], parts), axis=dim)

    def __call__(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        """Dispatch one step on a batch from `put`; returns before the devices finish."""
        before = self._counted(state)
        state, scalars = self.get_compiled(batch)(state, batch)
        if before is not None:
            self._count = before + 1, state.step
            if self.program.renewal_due(before + 1):
                state = dataclasses.replace(state, optimizer_state=self.renewal(state.optimizer_state))
            taken_over = self.program.adopt_renewed(before + 1, state.optimizer_state)
            state = dataclasses.replace(state, optimizer_state=taken_over)
            sync = self.program.outer_sync_after(before + 1)
            if sync is not None:
                state = self.compile_outer_sync(sync)(state)
                self._count = before + 1, state.step
        return state, scalars

    def _counted(self, state: TrainState) -> int | None:
        """Return the number of steps before `state`, or None if it is not needed.

        Waits for the devices unless `state` comes from the last step.
        """
        if self.program.transformation.renewal is None and self.program.abstract.replicas is None:
            return None
        number, last = self._count
        return number if state.step is last else int(state.step)

    @property
    def renewal(self) -> Any:
        """The compiled program that renews the optimizer state, which is donated to it.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        if self._renewal is None:
            start = time.perf_counter()
            with self.placement.activate():
                self._renewal = self.trace_renewal().lower().compile()
            self.compile_seconds += time.perf_counter() - start
        return self._renewal

    def compile_outer_sync(self, sync: OuterSync) -> Any:
        """Return the compiled program that synchronizes replicas with local steps; the state is donated to
        it.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        if sync not in self._agreements:
            start = time.perf_counter()
            with self.placement.activate():
                self._agreements[sync] = self.trace_outer_sync(sync).lower().compile()
            self.compile_seconds += time.perf_counter() - start
        return self._agreements[sync]

    def trace_outer_sync(self, sync: OuterSync | None = None) -> Any:
        """Trace the program of `compile_outer_sync`; by default for the last synchronization, in which replicas agree
        on all parameters.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        if self.program.abstract.replicas is None:
            raise TrainingError("replicas take no local steps, so they have nothing to agree on; set comms.local_steps")
        sync = sync or self.program.final_outer_sync
        agree = jax.jit(partial(self.program.sync_replicas, sync=sync), donate_argnums=0, out_shardings=self.shardings)
        with self.placement.activate():
            return self._checked_program(agree.trace(self._abstract_state()))

    def trace_renewal(self) -> Any:
        """Trace the program of `renewal`.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        if self.program.transformation.renewal is None:
            raise TrainingError(f"{type(self.program.optimizer).__name__} has no state to renew between steps")
        renew = jax.jit(self.program.renew, donate_argnums=0, out_shardings=self.shardings.optimizer_state)
        with self.placement.activate():
            return self._checked_program(renew.trace(self._abstract_state().optimizer_state))

    def get_compiled(self, batch: Mapping[str, Any]) -> Any:
        """Return the compiled training step for the shapes of `batch` (abstract or concrete)."""
        return self._program_for(self._train, batch, self._compile_train)

    def compile_ahead(self, batch: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
        """Start compiling the training step, then the evaluation, for batches of these shapes in another
        thread.

        Use it while waiting for the first batch, for example while reading the state. Errors are raised when
        the program is used.
        """
        self._ahead.begin(("train", _signature(batch)), partial(self._traced_and_compiled, batch))
        if evaluation is not None:
            self._ahead.begin(("evaluate", _signature(evaluation)), partial(self._evaluation_compiled, evaluation))

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
        """Dispatch the evaluation of one batch; the state is not donated."""
        # One more shape than in training: the last batch of held-out data may be short.
        return self._program_for(self._evaluate, batch, self._compile_evaluate, self.shapes_allowed + 1)(state, batch)

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
                return jitted.lower(self._abstract_state(), self._abstract_batch(batch)).compile()

        return self._program_for(self._summaries.setdefault(summary, {}), batch, compile_)(state, batch)

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
        self._check_batch(batch, self.program.config.micro_batches)
        for remark in list_remarks(self._needs, self.placement.sizes):
            warnings.warn(remark, stacklevel=2)
        replicated = self.placement.sharding()
        function = partial(self.program.step, batch_axes=self.batch_axes)
        step = jax.jit(function, donate_argnums=self._donated, out_shardings=(self.shardings, replicated))
        with self.placement.activate(), use_kernels(self.program.kernels.names) as selections:
            traced = step.trace(self._abstract_state(), self._abstract_batch(batch))
        self.program.kernels.check_effect(selections.values())
        self.kernels_used += [line for line in selections if line not in self.kernels_used]
        return self._checked_program(traced)

    def _compile_train(self, batch: Mapping[str, Any]) -> Any:
        make = partial(self._traced_and_compiled, batch)
        traced, compiled = self._ahead.get_or_make(("train", _signature(batch)), make)
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
        return self._ahead.get_or_make(("evaluate", _signature(batch)), partial(self._evaluation_compiled, batch))

    def trace_evaluation(self, batch: Mapping[str, Any]) -> Any:
        """Trace the evaluation for the shapes of `batch` (abstract or concrete), for lowering or analysis.

        Raises:
            LayoutError: A sum over devices is missing (`StepConfig.check_sums`).
        """
        with self.placement.activate(), use_kernels(self.program.kernels.names):
            function = partial(self.program.evaluate, batch_axes=self.batch_axes)
            traced = jax.jit(function).trace(self._abstract_state(), self._abstract_batch(batch))
        return self._checked_program(traced)

    def _evaluation_compiled(self, batch: Mapping[str, Any]) -> Any:
        self._check_mesh()
        traced = self.trace_evaluation(batch)
        with self.placement.activate(), use_kernels(self.program.kernels.names):
            return traced.lower().compile(compiler_options=self._options)

    def _checked_program(self, traced: Any) -> Any:
        if self.program.config.check_sums:
            check_program(traced.jaxpr)
        return traced

    def _abstract_state(self) -> Any:
        def shaped(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(shaped, self.program.abstract, self.shardings)

    def _abstract_batch(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        shardings = self.placement.batch_shardings(batch, self.batch_axes)
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=shardings[name])
            for name, leaf in batch.items()
        }

    def _program_for(
        self,
        programs: dict[Signature, Any],
        batch: Mapping[str, Any],
        compile_: Callable[[Mapping[str, Any]], Any],
        max_shapes: int | None = None,
    ) -> Any:
        signature = _signature(batch)
        if signature in programs:
            return programs[signature]
        max_shapes = self.shapes_allowed if max_shapes is None else max_shapes
        if len(programs) >= max_shapes:
            raise TrainingError(_shape_change(next(reversed(programs)), signature, max_shapes))
        start = time.perf_counter()
        programs[signature] = compile_(batch)
        self.compile_seconds += time.perf_counter() - start
        return programs[signature]


def _signature(batch: Mapping[str, Any]) -> Signature:
    """Return the shapes and dtypes of a batch, independent of the order of its leaves."""
    # 64-bit types become 32-bit ones on the device.
    dtypes = {name: jax.dtypes.canonicalize_dtype(leaf.dtype).name for name, leaf in batch.items()}
    return tuple((name, batch[name].shape, dtypes[name]) for name in sorted(batch))


def mesh_requirements(program: Program) -> MeshRequirements:
    """Return the program's requirements on a mesh, as plain data."""
    task = program.task
    arrays = pair_axes(program.abstract, program.axes)
    # Moments have their parameters' shapes, so check each shape once.
    distinct: dict[Any, str] = {}
    for name, leaf, axes in arrays:
        distinct.setdefault((tuple(axes), leaf.shape), name)
    return MeshRequirements(
        arrays=tuple((name, axes, shape) for (axes, shape), name in distinct.items()),
        supported=task.mesh_axes,
        who=type(task).__name__,
        pipeline_requirement=task.pipeline_requirement,
        exchange_requirements=task.exchange_requirements,
        splits_residual=task.names_axes and task.splits_residual,
        row_order="zigzag" if task.row_order == "any" else task.row_order,
        micro_batches=program.config.micro_batches,
    )


def _shape_change(old: Signature, new: Signature, allowed: int) -> str:
    old_leaves = {name: (shape, dtype) for name, shape, dtype in old}
    new_leaves = {name: (shape, dtype) for name, shape, dtype in new}

    def show(value: tuple[tuple[int, ...], str] | None) -> str:
        return "absent" if value is None else f"{value[1]}{list(value[0])}"

    changes = [
        f"batch[{name!r}] was {show(old_leaves.get(name))} and is now {show(new_leaves.get(name))}"
        for name in sorted({*old_leaves, *new_leaves})
        if old_leaves.get(name) != new_leaves.get(name)
    ]
    return (
        f"{'; '.join(changes)}. Each new shape costs a compilation, and {allowed} "
        f"{'is' if allowed == 1 else 'are'} allowed. Give every batch the same shape, or pad varying lengths to a few "
        f"sizes with data.buckets"
    )
