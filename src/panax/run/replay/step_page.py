"""The page of an opened step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...metrics.page.blocks import Block as PageBlock
from ...metrics.page.blocks import Code, FigureTiles, Paragraph, Points, Section, TextTable, Tile
from ...metrics.page.html import write_page
from ...train.taps.program_tree import StepPhase
from .step_tables import (
    describe_origin,
    describe_rows,
    describe_taps,
    module_rows,
    outcome_rows,
    parameter_rows,
    row_rows,
    scalar_rows,
)
from .tables_format import figure
from .what_if import ChangedStep

if TYPE_CHECKING:
    from .step_view import StepView

MAX_ROWS = 24
"""Maximum number of rows of a batch in the table of shares."""


def write_step_page(output: str | Path, view: "StepView", outcomes: Sequence[ChangedStep] = ()) -> Path:
    """Write the page of a step.

    Raises:
        DataError: The page can't be written.
    """
    return write_page(output, f"Step {view.step} of {view.run}", step_sections(view, outcomes))


def step_sections(view: "StepView", outcomes: Sequence[ChangedStep] = ()) -> tuple[Section, ...]:
    """Return the sections of a step's page: what comes first is what explains the step."""
    return tuple(_sections(view, outcomes))


def _sections(view: "StepView", outcomes: Sequence[ChangedStep]) -> Iterator[Section]:
    replay = view.replay
    steps = f"{replay.replayed} step{'s' if replay.replayed > 1 else ''}"
    lead = (
        Paragraph(f"{_sentence(view.verdict)}", lead=True),
        Paragraph(f"Replayed {steps} from {replay.source}; batch {replay.number} of the data.", faint=True),
    )
    yield Section("", (*lead, FigureTiles(tuple(_tiles(view)))))
    if view.origin is not None:
        yield Section(
            "The first value that is not finite",
            tuple(Paragraph(_sentence(line)) for line in describe_origin(view.origin)),
        )
    if view.findings:
        yield Section("What stands out", (Points(view.findings),))
    if view.notes:
        yield Section("Notes", (Points(view.notes),))
    for number, outcome in enumerate(outcomes, start=1):
        title = "What if" if len(outcomes) == 1 else f"What if, {number}"
        yield Section(title, (Paragraph(_sentence(outcome.change)), TextTable(outcome_rows(outcome))))
    yield Section("Scalars", (TextTable(scalar_rows(view)),))
    yield Section("Rows", tuple(_row_blocks(view)))
    yield Section("Batch", (Code("\n".join(view.batch)),))
    taps = Paragraph(_sentence(describe_taps(view)), faint=True)
    yield Section("Activations", (taps, _table(module_rows(view.modules, StepPhase.FORWARD))))
    yield Section("Gradients of activations", (taps, _table(module_rows(view.modules, StepPhase.BACKWARD))))
    yield Section("Parameters", (TextTable(parameter_rows(view.parameters), marked=_worst(view)),))


def _tiles(view: "StepView") -> Iterator[Tile]:
    replay = view.replay
    tone = "good" if replay.is_verified else "bad"
    yield Tile(
        "Replay", "equal to the bit" if replay.is_verified else "not equal", tone=tone if replay.comparisons else ""
    )
    for name, label in (("loss", "Loss"), ("gradient_norm", "Gradient norm"), ("learning_rate", "Learning rate")):
        if name in view.scalars:
            yield Tile(label, figure(view.scalars[name]))


def _row_blocks(view: "StepView") -> Iterator[PageBlock]:
    yield Paragraph(_sentence(describe_rows(view.rows)), faint=True)
    if not isinstance(view.rows, str):
        yield TextTable(row_rows(view.rows, MAX_ROWS))


def _worst(view: "StepView") -> int | None:
    """Return the index of the parameter with the largest update relative to its norm."""
    ratios = [each.update.norm / each.value.norm if each.value.norm else 0.0 for each in view.parameters]
    return max(range(len(ratios)), key=ratios.__getitem__) if ratios else None


def _table(rows: tuple[tuple[str, ...], ...]) -> PageBlock:
    return TextTable(rows) if len(rows) > 1 else Paragraph("None: this task's program names no modules.", faint=True)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
