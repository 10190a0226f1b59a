"""Programs between two steps: renewal of the optimizer's state, and outer synchronization of replicas."""

import dataclasses
from functools import partial
from typing import Any

import jax

from ...comms.fragments import OuterSync
from ...core import TrainState
from ...core.errors import TrainingError
from ...mesh import Placement
from ..program import Program
from .abstract_arrays import abstract_state, check_traced
from .shape_cache import CompileClock


class BetweenSteps:
    """The programs that run after some steps, each compiled when it is first due.

    The number of a step is counted here, so that it need not be read from the devices.
    """

    def __init__(self, program: Program, placement: Placement, shardings: TrainState, clock: CompileClock):
        self._program, self._placement, self._shardings, self._clock = program, placement, shardings, clock
        self._renewal: Any = None
        self._syncs: dict[OuterSync, Any] = {}
        # The last step's number and the array that holds it.
        self._count: tuple[int, Any] = (0, None)

    def count_before(self, state: TrainState) -> int | None:
        """Return the number of steps before `state`, or None if it is not needed.

        Waits for the devices unless `state` comes from the last step.
        """
        if self._program.transformation.renewal is None and self._program.abstract.replicas is None:
            return None
        number, last = self._count
        return number if state.step is last else int(state.step)

    def after_step(self, number: int, state: TrainState) -> TrainState:
        """Return the state for the next step, after step `number`, counted from 1."""
        self._count = number, state.step
        if self._program.renewal_due(number):
            state = dataclasses.replace(state, optimizer_state=self.renewal(state.optimizer_state))
        taken_over = self._program.adopt_renewed(number, state.optimizer_state)
        state = dataclasses.replace(state, optimizer_state=taken_over)
        sync = self._program.outer_sync_after(number)
        if sync is not None:
            state = self.compile_outer_sync(sync)(state)
            self._count = number, state.step
        return state

    @property
    def renewal(self) -> Any:
        """The compiled program that renews the optimizer state, which is donated to it.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        if self._renewal is None:
            with self._placement.activate():
                self._renewal = self._clock.measure(lambda: self.trace_renewal().lower().compile())
        return self._renewal

    def compile_outer_sync(self, sync: OuterSync) -> Any:
        """Return the compiled program that synchronizes replicas with local steps; the state is donated to
        it.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        if sync not in self._syncs:
            with self._placement.activate():
                self._syncs[sync] = self._clock.measure(lambda: self.trace_outer_sync(sync).lower().compile())
        return self._syncs[sync]

    def trace_outer_sync(self, sync: OuterSync | None = None) -> Any:
        """Trace the program of `compile_outer_sync`; by default for the last synchronization, in which replicas agree
        on all parameters.

        Raises:
            TrainingError: Replicas take no local steps.
        """
        if self._program.abstract.replicas is None:
            raise TrainingError("replicas take no local steps, so they have nothing to agree on; set comms.local_steps")
        sync = sync or self._program.final_outer_sync
        agree = jax.jit(
            partial(self._program.sync_replicas, sync=sync), donate_argnums=0, out_shardings=self._shardings
        )
        with self._placement.activate():
            return check_traced(self._program, agree.trace(abstract_state(self._program, self._shardings)))

    def trace_renewal(self) -> Any:
        """Trace the program of `renewal`.

        Raises:
            TrainingError: The optimizer has no renewal.
        """
        if self._program.transformation.renewal is None:
            raise TrainingError(f"{type(self._program.optimizer).__name__} has no state to renew between steps")
        renew = jax.jit(self._program.renew, donate_argnums=0, out_shardings=self._shardings.optimizer_state)
        with self._placement.activate():
            return check_traced(
                self._program, renew.trace(abstract_state(self._program, self._shardings).optimizer_state)
            )
