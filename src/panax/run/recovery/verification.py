"""Checked steps: repeated on other devices, to find a device that computes wrong values without any other
sign.

A checked step is taken on the devices in another order first, then in the usual order, by the same program,
which leaves the old state as it is. Checksums of each shard are compared in every process. If they differ, a
third execution in yet another order shows by majority which was wrong, shard by shard, and so on which
device; and the run rolls back to the newest checkpoint at or before the last step that was found good. No
batch is skipped: the data are not at fault.

The first step after a start, or after a rollback, is always checked: a faulty device is found at once, and a
lack of memory shows then and not hours later.
"""

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ...core import TrainState
from ...core.errors import LayoutError, RecipeError, TrainingError, describe_type
from ...job.agreement import any_process, broadcast_text, gather_texts
from ...job.heartbeat import heartbeat
from ...system.cpu_info import describe_processor
from ...train import CompiledStep, Scalars
from ...train.sdc_check import RolledReplay, ShardSums, leaf_names
from ..degraded_features import effective_verify_every
from ..opened_data import LogFn
from ..parts.run_part import is_step_due
from ..preparation import PreparedRun
from ..reporting.report import RunReporter
from .rollback import RollbackController

MAX_NAMED = 8
"""Maximum number of devices or leaves that are named in a message."""


def check_verifiable(prepared: PreparedRun) -> None:
    """Check that steps can be repeated on other devices, if the experiment requests it. Every process of the
    job calls it.

    Raises:
        LayoutError: There is one device only, or the devices are of different models.
        RecipeError: The step is not compiled.
    """
    step = prepared.step
    every = effective_verify_every(prepared.experiment.verify.every, step)
    if not every:
        return
    if not isinstance(step, CompiledStep):
        raise RecipeError(
            f"verify.every={every} repeats a compiled step, and this is {describe_type(step)}; set it to 0"
        )
    devices = list(step.placement.devices.devices.flat)
    if len(devices) < 2:
        raise LayoutError(
            f"verify.every={every} repeats steps on other devices, and this run has one; use 2 or more, or set "
            f"verify.every to 0"
        )
    kinds = [f"{device.device_kind} of process {device.process_index}" for device in devices]
    models = {device.device_kind for device in devices}
    if step.placement.target.platform == "cpu":
        # Programs differ by a processor's features, not only by its name.
        processors = gather_texts(describe_processor())
        kinds = [
            f"process {process}: {text.partition(';')[0]} ({len(text.split()):,} features)"
            for process, text in enumerate(processors)
        ]
        models = set(processors)
    if len(models) > 1:
        raise LayoutError(
            f"verify.every={every} compares steps bit by bit, and the devices are of different models: "
            f"{'; '.join(dict.fromkeys(kinds))}; use devices of one model, or set verify.every to 0"
        )


@dataclasses.dataclass(frozen=True)
class ReplayComparison:
    """Conclusion from several executions of one step.

    Attributes:
        odd_devices: The devices that computed values unlike most executions, by their indices in the mesh.
        is_conclusive: True if a majority of executions agrees.
        shards: The logical shards that differ.
        leaves: The indices of the leaves that differ.
    """

    odd_devices: tuple[int, ...]
    is_conclusive: bool
    shards: tuple[int, ...]
    leaves: tuple[int, ...]


def compare_replays(sums: Sequence[np.ndarray], places: Sequence[int]) -> ReplayComparison:
    """Compare two or three executions shard by shard.

    Args:
        sums: Checksums of each execution, (shard, leaf, 2).
        places: The number of positions by which each execution's devices were rolled.

    >>> good, bad = np.zeros((4, 1, 2)), np.zeros((4, 1, 2))
    >>> bad[2] = 1
    >>> compare_replays([good, bad, good], [0, 1, 2])
    ReplayComparison(odd_devices=(3,), is_conclusive=True, shards=(2,), leaves=(0,))
    """
    count = len(sums[0])
    differs = np.any([one != sums[0] for one in sums], axis=(0, 3))
    shards, leaves = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    suspects: list[set[int]] = [set() for _ in sums]
    unexplained = False
    for shard in map(int, shards):
        alike = [sum(np.array_equal(one[shard], other[shard]) for other in sums) for one in sums]
        odd_positions = [i for i, number in enumerate(alike) if number == 1]
        unexplained |= len(odd_positions) != 1
        for i in odd_positions:
            suspects[i].add((shard + places[i]) % count)
    named = [each for each in suspects if each]
    # One device that errs again and again is odd in every execution, at another shard each time.
    odd = (set.intersection(*named) or set.union(*named)) if named and len(sums) > 2 else set().union(*suspects)
    return ReplayComparison(tuple(sorted(odd)), not unexplained, tuple(map(int, shards)), tuple(map(int, leaves)))


class SdcVerifier:
    """Takes a run's steps, and checks those that are due for a check."""

    def __init__(self, prepared: PreparedRun, report: RunReporter, rollback: RollbackController, say: LogFn):
        """Set up the checks; every process of the job calls it."""
        every, self._step = prepared.experiment.verify.every, prepared.step
        self._every = effective_verify_every(every, self._step)
        if self._every != every:
            say(f"verify.every={every} pauses: one device is left, and steps are repeated on another one")
        self._report, self._rollback, self._say = report, rollback, say
        self._fresh, self._good, self._seconds = True, False, 0.0
        self._elsewhere: dict[int, RolledReplay] = {}
        if not self._every:
            return
        assert isinstance(self._step, CompiledStep)
        self._hosts = gather_texts(socket.gethostname())
        self._devices = list(self._step.placement.devices.devices.flat)
        self._sums = ShardSums(self._step.placement.devices)
        self._orders = replay_offsets([self._hosts[device.process_index] for device in self._devices], self._processes)

    @property
    def _processes(self) -> list[int]:
        return [device.process_index for device in self._devices]

    def run_step(self, state: TrainState, batch: Mapping[str, jax.Array], number: int) -> tuple[TrainState, Scalars]:
        """Take step `number`. If it is checked and found bad, the run is to roll back, and the old state is
        returned.

        Raises:
            TrainingError: The step never gives the same bits on other devices; or the run has
                rolled back too often.
        """
        if not (is_step_due(self._every, number) or (self._every and self._fresh)):
            return self._step(state, batch)
        began, compiled = time.perf_counter(), self._compile_seconds()
        result = self._checked(state, batch, number)
        spent = self._compile_seconds() - compiled
        # Booked with the usual program's.
        assert isinstance(self._step, CompiledStep)
        self._step.add_compile_seconds(spent)
        self._report.record_verification(number, time.perf_counter() - began - spent)
        return result

    def _checked(self, state: TrainState, batch: Mapping[str, jax.Array], number: int) -> tuple[TrainState, Scalars]:
        second = self._orders[0]
        self._tell_memory(second, batch)
        # The moved states are released before there is another one.
        moved = self._at(second).replay_step(state, batch)[2]
        new, scalars, usual = self._at(0).replay_step(state, batch)
        if not any_process(not np.array_equal(usual, moved)):
            self._fresh, self._good = False, True
            self._rollback.mark_verified(number)
            return new, scalars
        names, replays = leaf_names(new, scalars), ([usual, moved], [0, second])
        del new
        heartbeat().phase("compile")
        for order in self._orders[1:]:
            replays[0].append(self._at(order).replay_step(state, batch)[2])
            replays[1].append(order)
        verdict = compare_replays(*replays)
        if not self._good and not verdict.is_conclusive:
            self._look_again(state, batch, (usual, moved), names, verdict, number)
        heartbeat().phase("steps")
        self._fresh = True
        # As process 0 found it, in case the input of another one differs.
        self._rollback.mark_corrupted(broadcast_text(self._words(verdict, names, number)))
        return state, scalars

    def _at(self, places: int) -> RolledReplay:
        if places not in self._elsewhere:
            assert isinstance(self._step, CompiledStep)
            self._elsewhere[places] = RolledReplay(self._step, places, self._sums)
        return self._elsewhere[places]

    def _compile_seconds(self) -> float:
        return sum((each.step.compile_seconds for each in self._elsewhere.values()), 0.0)

    def _tell_memory(self, places: int, batch: Mapping[str, jax.Array]) -> None:
        if self._elsewhere:
            return
        more = self._at(places).extra_bytes(batch)
        memory = "" if more is None else f"; each needs {more / 2**20:,.1f} MiB more on each device than a usual step"
        self._say(f"every {self._every} steps one is checked on other devices{memory}")

    def _look_again(
        self,
        state: TrainState,
        batch: Mapping[str, jax.Array],
        first: tuple[np.ndarray, np.ndarray],
        names: list[str],
        verdict: ReplayComparison,
        number: int,
    ) -> None:
        """Repeat both executions after a first check that no majority explains, and end the run if they never
        agree.

        If an execution in one order gives what one in the other order gave, a device erred, and the step can
        be checked.

        Args:
            first: The checksums in the usual order and in the other one.

        Raises:
            TrainingError: The step is not one that can be checked.
        """
        usual, moved = first
        again = self._at(0).replay_step(state, batch)[2]
        elsewhere = self._at(self._orders[0]).replay_step(state, batch)[2]
        # For each pair, all processes have to agree.
        alike = [
            not any_process(not np.array_equal(one, other)) for one in (usual, again) for other in (moved, elsewhere)
        ]
        if any(alike):
            return
        if any_process(not np.array_equal(again, usual)):
            repeated = np.flatnonzero((again != usual).any((0, 2)))
            explanation = (
                f"the step is not deterministic: repeated on the same devices, it gives other bits in "
                f"{_listed([names[i] for i in repeated])}. A kernel that adds in no fixed order does that (on GPU, try "
                f"XLA_FLAGS=--xla_gpu_deterministic_ops=true), or else a device that errs at random"
            )
        else:
            explanation = (
                f"the step gives other bits on the devices in another order, in {_listed([names[i] for i in verdict.leaves])}: "
                f"its collectives add in an order that depends on the devices, or else a device errs every time"
            )
        raise TrainingError(
            broadcast_text(
                f"step {number} can't be checked: {explanation}. Look at the devices with `panax check --full`, "
                f"or set verify.every to 0"
            )
        )

    def _words(self, verdict: ReplayComparison, names: list[str], number: int) -> str:
        count = len(self._devices)
        where = f"{len(verdict.shards)} of {count} shards of {_listed([names[i] for i in verdict.leaves])}"
        sentence = f"step {number} gave other values on other devices, in {where}: silent data corruption"
        if len(verdict.odd_devices) == count > 2 or not verdict.odd_devices:
            return f"{sentence}. It spread to all shards, so the device can't be identified; look with `panax check --full`"
        devices = [
            f"device {device.id} of process {device.process_index} on {self._hosts[device.process_index]}"
            for device in (self._devices[place] for place in verdict.odd_devices)
        ]
        if count == 2:
            return f"{sentence}. With 2 devices there is no majority: it was {' or '.join(devices)}"
        return f"{sentence}. By the majority of 3 executions it was {_listed(devices)}"


def replay_offsets(hosts: Sequence[str], processes: Sequence[int]) -> list[int]:
    """Return the number of positions by which the devices are rolled for the second and the third execution;
    only one for 2 devices.

    As many shards as possible are placed on another host, then in another process, each time.

    Args:
        hosts: The host of each device in the mesh's order.
        processes: The process of each device.

    >>> replay_offsets(["a", "a", "b", "b", "c", "c"], [0, 0, 1, 1, 2, 2])
    [2, 4]
    >>> replay_offsets(["a", "a"], [0, 0])
    [1]
    """
    count, chosen = len(hosts), [0]

    def apart(names: Sequence[object], places: int) -> int:
        return sum(names[(i + places) % count] != names[(i + other) % count] for i in range(count) for other in chosen)

    while len(chosen) < min(3, count):
        rest = [places for places in range(1, count) if places not in chosen]
        chosen.append(max(rest, key=lambda places: (apart(hosts, places), apart(processes, places), -places)))
    return chosen[1:]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"
