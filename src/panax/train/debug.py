"""The training step without jit, on one device, for debugging."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..core import Axes, TrainState, use_eager_values
from ..core.batch_checks import check_ranges, narrow_to_32_bits
from ..kernels import use_kernels
from .batch_transfer import HeldRows, check_leaves, check_sizes
from .mesh_execution import split_rows
from .program import Program
from .update import Scalars, prepare_batch


class DebugStep:
    """A step with the interface of `CompiledStep` that runs eagerly: scans are loops, nothing is traced.

    Each step runs the model twice. The first pass is forward only, with concrete values: breakpoints stop,
    prints print, `float(x)` and NumPy work, and `panax.is_debugging()` is true. The second pass computes
    gradients, with values wrapped for differentiation; breakpoints are ignored there, so that one in the
    model stops once per step and layer.

    NaNs raise where they arise, and the error names the layer.
    """

    def __init__(self, program: Program, batch_axes: Mapping[str, Axes], *, shapes_allowed: int = 1):
        check_leaves(program.task, batch_axes)
        self.program = program
        self.batch_axes = program.task.leaf_axes(batch_axes)
        self.compile_seconds = 0.0
        self.shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), program.abstract)

    def init(self, seed: int, initial_values: tuple[Any, Any] | None = None) -> TrainState:
        if initial_values is None:
            initial_values = self.program.task.load_initial((self.shardings.params, self.shardings.model_state))
        return jax.jit(self.program.initial_state)(jax.random.key(seed), initial_values)

    def init_params(self, seed: int, mask: Any) -> Any:
        return jax.jit(lambda key: eqx.filter(self.program.initial_state(key).params, mask))(jax.random.key(seed))

    def storage_shardings(self, tree: Any, axes: Any) -> Any:
        return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), tree)

    @property
    def row_multiple(self) -> int:
        return self.program.config.micro_batches if self.program.config.pad_rows else 1

    def held_rows(self, batch_size: int) -> HeldRows | None:
        return None

    def put(
        self, batch: Mapping[str, Any], held: HeldRows | None = None, *, owned: bool = False
    ) -> dict[str, jax.Array]:
        arrays = {name: np.asarray(leaf) for name, leaf in batch.items()}
        check_sizes({name: leaf.shape for name, leaf in arrays.items()}, self.batch_axes)
        check_ranges(arrays, self.program.task.leaf_ranges)
        # Copy, since the caller may write to its arrays before the step reads them.
        arrays = narrow_to_32_bits(arrays, self.program.task.leaf_ranges)
        return {name: jnp.array(leaf) for name, leaf in arrays.items()}

    def __call__(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        with _eager(), use_kernels(self.program.kernels.names):
            with use_eager_values():
                before, loss_batch = self.program.first_update_inputs(state, batch)
                micro_batches = split_rows(
                    prepare_batch(self.program.task, loss_batch).batch, self.program.config.micro_batches
                )
                for i in range(self.program.config.micro_batches):
                    part = jax.tree.map(lambda leaf, i=i: leaf[i], micro_batches)
                    self.program.task.loss(before.params, before.model_state, part, before.step_key, True)
            with _without_breakpoints():
                state, scalars = self.program.step(state, batch)
                number = int(state.step)
                if self.program.renewal_due(number):
                    state = dataclasses.replace(state, optimizer_state=self.program.renew(state.optimizer_state))
                taken_over = self.program.adopt_renewed(number, state.optimizer_state)
                return dataclasses.replace(state, optimizer_state=taken_over), scalars

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
        with _eager(), use_eager_values(), use_kernels(self.program.kernels.names):
            return self.program.evaluate(state, batch)

    def summarize(self, state: TrainState, batch: Mapping[str, jax.Array], summary: Callable[[Any, Any], Any]) -> Any:
        with _eager(), use_kernels(self.program.kernels.names), _without_breakpoints():
            return summary(state.params, self.program.gradients(state, batch))


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    with jax.disable_jit(), jax.debug_nans(True):
        yield


@contextlib.contextmanager
def _without_breakpoints() -> Iterator[None]:
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *args, **kwargs: None
    try:
        yield
    finally:
        sys.breakpointhook = hook
