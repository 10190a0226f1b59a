"""Replay of a run up to one step, from the nearest checkpoint before it, with the run's own program."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...checkpoint import Checkpoint, Checkpointer
from ...checkpoint.branches import read_origin
from ...checkpoint.run_record import read_record
from ...core import TrainState
from ...core.errors import CheckpointError, DamagedError, DataError, RecipeError
from ...data.loading.prefetch import PrefetchIterator
from ...job.agreement import is_process_zero
from ...stores import open_store
from ...system.files import expand_user
from ...train import CompiledStep
from ..experiment import Experiment
from ..feed import DeviceBatch, prefetch_to_device
from ..folder.initial_state import init_state
from ..folder.previous_run import SETTINGS, changed_settings
from ..opened_data import LogFn
from ..parts.run_start import RunStart
from ..preparation import PreparedRun, prepare
from ..recovery.skipped_batches import DataProgress, Rollback, matches_history, read_rollbacks
from ..start import checkpoint_location, choose_kernels, start_from_checkpoint
from .conditions import differing_conditions
from .record import RunRecords, ScalarComparison, compare_scalars

MAX_STEPS = 1000
"""Default maximum number of steps that are replayed to reach one."""


@dataclasses.dataclass(frozen=True)
class ReplayedStep:
    """A step of a run, taken again.

    Attributes:
        step: Its number, from 1.
        source: Address of the checkpoint that the replay began with; "the first state" without one.
        replayed: Number of steps that were replayed, this one included.
        before: The state before it.
        after: The state after it.
        batch: Its batch, on the devices.
        number: Number of the batch in the data's order.
        scalars: Its scalars that are single numbers.
        comparisons: Recorded scalars on the way, beside those of the replay.
        conditions: Conditions that differ from those of the run.
        following: Batches of the next steps, as far as they were requested.
    """

    prepared: PreparedRun
    step: int
    source: str
    replayed: int
    before: TrainState
    after: TrainState
    batch: Mapping[str, jax.Array]
    number: int
    scalars: Mapping[str, float]
    comparisons: tuple[ScalarComparison, ...]
    conditions: tuple[str, ...]
    following: tuple[Mapping[str, jax.Array], ...]

    @property
    def is_verified(self) -> bool:
        """Return True if all that the run has recorded on the way equals the replay to the bit."""
        return bool(self.comparisons) and all(each.is_equal for each in self.comparisons)


def replay_step(
    experiment: Experiment,
    records: RunRecords,
    step: int,
    say: LogFn,
    *,
    max_steps: int = MAX_STEPS,
    ahead: int = 0,
    devices: Any = None,
) -> ReplayedStep:
    """Replay a run up to a step, and compare it with the run's record.

    If the run has recorded nothing of this step, the replay continues to the next one of which it has, at most `log_every`
    steps later. Nothing is written to the run's folder.

    Args:
        experiment: The experiment of the run at that step.
        max_steps: Maximum number of steps to replay.
        ahead: Number of batches after the step's to keep.

    Raises:
        CheckpointError: The step is out of reach, or a checkpoint is of other settings.
        RecipeError: The run is of a kind that can't be replayed, or trains on several machines.
        DataError: The data has changed, or has ended.
    """
    _check_replayable(experiment, step)
    compute_dtype = choose_kernels(experiment, say, fresh=False)
    store = open_store(checkpoint_location(experiment))
    prepared = prepare(experiment, say, devices, compute_dtype=compute_dtype)
    assert isinstance(prepared.step, CompiledStep)
    record = read_record(store)
    conditions = differing_conditions(records.session_of(step), prepared, "" if record is None else record.kernels)
    start = find_start_before(prepared, Checkpointer(store, say=say), records, step, say, max_steps)
    verified_at = records.next_recorded(step, experiment.log_every)
    last = max(step, verified_at or step)
    say(f"replaying steps {start.step + 1} to {last} from {start.source}")
    target: _Found | None = None
    comparisons: list[ScalarComparison] = []
    state, following = start.state, []
    with contextlib.closing(_batches(prepared, start)) as batches:
        for number in range(start.step + 1, max(last, step + ahead) + 1):
            if number <= last:
                item = _next(batches, number)
            elif (item := next(batches, None)) is None:
                break
            if number > step and len(following) < ahead:
                following.append(item.batch)
            if number > last:
                continue
            before = copy_state(state) if number == step else None
            state, scalars = prepared.step(state, item.batch)
            values = read_scalars(scalars)
            comparisons += compare_scalars(number, records.scalars.get(number, {}), values)
            if before is not None:
                target = _Found(before, copy_state(state) if last > step else state, item, values)
    assert target is not None
    return ReplayedStep(
        prepared,
        step,
        start.source,
        step - start.step,
        target.before,
        target.after,
        target.item.batch,
        target.item.number,
        target.scalars,
        tuple(comparisons),
        tuple(conditions),
        tuple(following),
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    before: TrainState
    after: TrainState
    item: DeviceBatch
    scalars: Mapping[str, float]


def _check_replayable(experiment: Experiment, step: int) -> None:
    """Raise a RecipeError for a run that can't be replayed, and why."""
    from ...rollouts.rollout_data import RolloutData

    if jax.process_count() > 1 or not is_process_zero():
        raise RecipeError(
            "a step is replayed in one process; run this command alone, with as many devices as its memory needs"
        )
    if isinstance(experiment.data, RolloutData):
        raise RecipeError(
            f"{experiment.name} learns from answers that its model draws, which a replay would have to draw again in the same "
            f"rows; steps of such runs can't be replayed yet"
        )
    if experiment.comms.islands.count > 1:
        raise RecipeError(
            f"{experiment.name} trains on {experiment.comms.islands.count} islands that exchange their parameters; a step of one "
            f"of them depends on messages of the others, and can't be replayed alone"
        )
    if experiment.debug:
        raise RecipeError(
            f"{experiment.name} was debugged: its steps ran without a compiled program, so there is none to replay"
        )
    if not 1 <= step <= experiment.num_steps:
        raise RecipeError(f"step {step}; expected a step from 1 to num_steps={experiment.num_steps}")


def find_start_before(
    prepared: PreparedRun, checkpointer: Checkpointer, records: RunRecords, step: int, say: LogFn, max_steps: int
) -> RunStart:
    """Restore the newest undamaged checkpoint before a step, or the run's first state.

    Raises:
        CheckpointError: No state before the step is within `max_steps` steps, or one that is has trained with other settings.
    """
    rollbacks = read_rollbacks(checkpointer.store) or ()
    session = records.session_of(step)
    began = 0 if session is None else session.first_step
    candidates = [each for each in checkpointer.steps() if step - max_steps <= each < step]
    for number in sorted(candidates, reverse=True):
        checkpoint = checkpointer.open(number)
        if not matches_history(checkpoint.manifest, rollbacks):
            continue
        changed = changed_settings(prepared.experiment, checkpoint)
        if changed and number < began:
            break
        try:
            start = start_from_checkpoint(prepared, checkpoint, say, accept_changes=bool(changed))
        except DamagedError as error:
            say(f"warning: the checkpoint of step {number} is not used: {error}")
            continue
        return _with_rollbacks(start, rollbacks)
    origin = read_origin(checkpointer.store)
    if origin is not None and origin.step < step <= origin.step + max_steps:
        start = start_from_checkpoint(prepared, origin.open(), say, accept_changes=True)
        return _with_rollbacks(start, rollbacks or start.progress.rollbacks)
    if origin is None and step <= max_steps and _trains_alike_from_start(prepared, records, step):
        state = init_state(prepared, say)
        return RunStart(state, 0, None, None, progress=DataProgress(rollbacks=tuple(rollbacks)))
    raise CheckpointError(describe_reach(checkpointer.steps(), step, max_steps, began))


def _with_rollbacks(start: RunStart, rollbacks: Sequence[Rollback]) -> RunStart:
    return dataclasses.replace(start, progress=dataclasses.replace(start.progress, rollbacks=tuple(rollbacks)))


def _trains_alike_from_start(prepared: PreparedRun, records: RunRecords, step: int) -> bool:
    """Return True if the run has trained with the settings of the step's session from step 0 on."""
    current = records.session_of(step)
    before = [each for each in records.sessions if current is not None and each.first_step < current.first_step]
    return all(_same_training(each.facts, current.facts if current else {}) for each in before)


def _same_training(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    from ..folder.previous_run import UNTRACKED_SETTINGS

    def tracked(facts: Mapping[str, Any]) -> dict[str, Any]:
        settings = facts.get("settings")
        return {k: v for k, v in settings.items() if k not in UNTRACKED_SETTINGS} if isinstance(settings, dict) else {}

    return tracked(first) == tracked(second)


def describe_reach(steps: Sequence[int], step: int, max_steps: int, began: int) -> str:
    """Describe the steps of a run that can be reached, if one can't.

    >>> print(describe_reach([400, 800], 300, 100, 0))
    step 300 is out of reach: no checkpoint is at most 100 steps before it. Within reach are steps 1 to 100, 401 to 500, 801 to \
900; a checkpoint is there for good with checkpoint.keep_every, and --most replays more steps
    """
    reached: list[list[int]] = []
    for first in sorted({0, *steps}):
        if reached and first <= reached[-1][1]:
            reached[-1][1] = first + max_steps
        else:
            reached.append([first + 1, first + max_steps])
    ranges = ", ".join(f"{first} to {last}" for first, last in reached)
    why = f"no checkpoint is at most {max_steps} steps before it"
    if began and not any(began <= each < step for each in steps):
        why = f"{why} and of the settings that the run has had since step {began}"
    return (
        f"step {step} is out of reach: {why}. Within reach are steps {ranges}; a checkpoint is there for good with "
        f"checkpoint.keep_every, and --most replays more steps"
    )


def _batches(prepared: PreparedRun, start: RunStart) -> PrefetchIterator[DeviceBatch]:
    skipped = start.progress.skipped_batches | frozenset(prepared.experiment.skip_batches)
    return prefetch_to_device(
        prepared.data.train, prepared.step, start.position, num_drawn=start.progress.drawn, skipped=skipped
    )


def _next(batches: Iterator[DeviceBatch], number: int) -> DeviceBatch:
    item = next(batches, None)
    if item is None:
        raise DataError(f"the data ended before step {number}; it has changed since the run")
    return item


def copy_state(state: TrainState) -> TrainState:
    """Copy a state: a step takes over the memory of the one that it is given."""
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def read_scalars(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Return those of a step's scalars that are single numbers; waits for the devices."""
    host = jax.device_get(dict(scalars))
    return {
        name: float(value)
        for name, value in host.items()
        if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0
    }


def settings_at(records: RunRecords, checkpoint: Checkpoint | None, step: int) -> tuple[str, str]:
    """Return the settings of a run at a step, as JSON, and their address.

    Raises:
        CheckpointError: Neither the sessions nor a checkpoint have any.
    """
    session = records.session_of(step)
    if session is not None and isinstance(session.facts.get("settings"), dict):
        return json.dumps(session.facts["settings"]), f"the session of step {step} in {records.folder}"
    text = None if checkpoint is None else checkpoint.attachment(SETTINGS)
    if text is None or checkpoint is None:
        raise CheckpointError(f"{records.folder} has recorded no settings of step {step}; pass the run's recipe")
    return text, f"{SETTINGS} of {checkpoint.url}"


def run_folder(run: str | Path) -> Path:
    """Return a run's folder as a path of this machine.

    Raises:
        CheckpointError: It is the address of an object store, or not a folder.
    """
    if "://" in str(run):
        raise CheckpointError(f"{run} is not a run's folder; logs are in a folder of this machine, like runs/NAME")
    folder = expand_user(run)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; name a run's folder, like runs/NAME")
    return folder
