"""Phases of a run, the events that change them, and the table of all changes.

A run trains until one event ends its steps: the last step, a hook's request or failure, a signal. Two events lead to
another state of the model, from which it trains again: a rollback, and other islands that have gone ahead.
"""

import enum
from collections.abc import Mapping


class RunPhase(enum.Enum):
    """Phase of a run, with its next action."""

    TRAINING = "takes the next step"
    ROLLING_BACK = "restores an earlier state"
    CATCHING_UP = "adopts the state of the other islands"
    COMPLETE = "has taken all its steps; it evaluates and saves"
    STOPPED = "was ended by a hook; it evaluates and saves"
    INTERRUPTED = "was ended by a signal; it saves"
    FAILED = "a hook has failed; it saves, and raises the hook's error"

    @property
    def restores(self) -> bool:
        """Return True if the run is to continue from another state, so that the last step has no consequences."""
        return self in (RunPhase.ROLLING_BACK, RunPhase.CATCHING_UP)


class RunEvent(enum.Enum):
    """Event that changes the phase of a run."""

    LAST_STEP = enum.auto()
    STOP_REQUESTED = enum.auto()
    HOOK_FAILED = enum.auto()
    SIGNAL = enum.auto()
    ROLLBACK_DUE = enum.auto()
    ISLANDS_AHEAD = enum.auto()
    RESTORED = enum.auto()


TRANSITIONS: Mapping[tuple[RunPhase, RunEvent], RunPhase] = {
    (RunPhase.TRAINING, RunEvent.LAST_STEP): RunPhase.COMPLETE,
    (RunPhase.TRAINING, RunEvent.STOP_REQUESTED): RunPhase.STOPPED,
    (RunPhase.TRAINING, RunEvent.HOOK_FAILED): RunPhase.FAILED,
    (RunPhase.TRAINING, RunEvent.SIGNAL): RunPhase.INTERRUPTED,
    (RunPhase.TRAINING, RunEvent.ROLLBACK_DUE): RunPhase.ROLLING_BACK,
    (RunPhase.TRAINING, RunEvent.ISLANDS_AHEAD): RunPhase.CATCHING_UP,
    # The last step's scalars are read when it is complete, and the islands meet after it.
    (RunPhase.COMPLETE, RunEvent.ROLLBACK_DUE): RunPhase.ROLLING_BACK,
    (RunPhase.COMPLETE, RunEvent.ISLANDS_AHEAD): RunPhase.CATCHING_UP,
    # A hook sees the last step, too.
    (RunPhase.COMPLETE, RunEvent.STOP_REQUESTED): RunPhase.STOPPED,
    (RunPhase.COMPLETE, RunEvent.HOOK_FAILED): RunPhase.FAILED,
    # A hook sees the evaluation at the end.
    (RunPhase.STOPPED, RunEvent.STOP_REQUESTED): RunPhase.STOPPED,
    (RunPhase.STOPPED, RunEvent.HOOK_FAILED): RunPhase.FAILED,
    (RunPhase.ROLLING_BACK, RunEvent.RESTORED): RunPhase.TRAINING,
    (RunPhase.CATCHING_UP, RunEvent.RESTORED): RunPhase.TRAINING,
}
"""The next phase for each phase and event; any other pair is a mistake in Panax."""


def next_phase(phase: RunPhase, event: RunEvent) -> RunPhase:
    """Return the phase after an event.

    Raises:
        AssertionError: The event can't happen in this phase.

    >>> next_phase(RunPhase.TRAINING, RunEvent.LAST_STEP)
    <RunPhase.COMPLETE: 'has taken all its steps; it evaluates and saves'>
    """
    assert (phase, event) in TRANSITIONS, f"{event} in {phase}"
    return TRANSITIONS[phase, event]
