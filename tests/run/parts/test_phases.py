"""The table of a run's phases: from each phase a run that trains or ends is reached, and each row is needed by a run."""

from pathlib import Path

import pytest

from panax.run.parts.phases import TRANSITIONS, RunEvent, RunPhase, next_phase


def reachable(phase: RunPhase) -> set[RunPhase]:
    reached, new = {phase}, {phase}
    while new:
        new = {after for (before, _), after in TRANSITIONS.items() if before in new} - reached
        reached |= new
    return reached


def test_every_phase_is_reached_and_a_run_that_restores_trains_again():
    assert reachable(RunPhase.TRAINING) == set(RunPhase)
    for phase in RunPhase:
        events = {event for before, event in TRANSITIONS if before is phase}
        assert (events == {RunEvent.RESTORED}) == phase.restores
    assert {TRANSITIONS[phase, RunEvent.RESTORED] for phase in RunPhase if phase.restores} == {RunPhase.TRAINING}


def test_a_run_that_was_ended_neither_trains_nor_rolls_back():
    """A failure outweighs a stop, and neither is taken back by a rollback that is found to be due afterwards."""
    assert reachable(RunPhase.STOPPED) == {RunPhase.STOPPED, RunPhase.FAILED}
    assert reachable(RunPhase.FAILED) == {RunPhase.FAILED}
    assert reachable(RunPhase.INTERRUPTED) == {RunPhase.INTERRUPTED}


def test_other_pairs_are_mistakes():
    with pytest.raises(AssertionError, match=r"ROLLBACK_DUE in RunPhase\.STOPPED"):
        next_phase(RunPhase.STOPPED, RunEvent.ROLLBACK_DUE)


def test_the_page_has_the_table():
    page = Path("docs/extending/run-part.md").read_text()
    rows = [f"| {before.name} | {event.name} | {after.name} |" for (before, event), after in TRANSITIONS.items()]
    assert [line for line in page.splitlines() if line.count("|") == 4 and line.isupper()] == rows
