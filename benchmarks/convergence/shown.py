"""The table of a sweep, and its plots as one HTML page."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from design import BATCHES, BUDGETS, PLAIN, SEEDS, SEQUENCE, TARGET, Group, Record, groups_of, paired_difference

from panax.metrics.page.blocks import Grid, Paragraph, Picture, Section, TextTable
from panax.metrics.page.html import page
from panax.metrics.page.lines import ChartStyle, Line, line_chart

HEAD = ("optimizer", "batch", "rate", "warm-up", "updates", "tokens", "seconds", f"difference to {PLAIN}", "")
Times = Mapping[tuple[str, int], float]
"""Milliseconds of an update, by optimizer and batch."""


def rows_of(records: Sequence[Record], times: Times) -> list[tuple[str, ...]]:
    """The table, a row for each group; the first row heads the columns."""
    groups = list(groups_of(records))
    plain = {each.batch: each for each in groups if each.optimizer == PLAIN}
    return [HEAD, *(_row(each, plain.get(each.batch), times) for each in groups)]


def _row(group: Group, plain: Group | None, times: Times) -> tuple[str, ...]:
    cell = next(iter(group.best.values())).cell
    mean, each = group.mean, times.get((group.optimizer, group.batch))
    tokens = BATCHES[group.batch] * SEQUENCE
    notes = []
    if mean is None:
        lowest = min(record.rank[1] for record in group.best.values())
        notes.append(f"{len(group.steps)} of {len(group.best)} seeds reach it, of {lowest:.2f} at best")
    if group.at_edge:
        notes.append("the best rate is at the grid's edge")
    if not group.complete:
        notes.append("not complete")
    return (
        group.optimizer,
        f"{group.batch}",
        f"{cell.rate:.3g}",
        f"{cell.warmup_steps}",
        "—" if mean is None else f"{mean:,.0f}",
        "—" if mean is None else f"{mean * tokens / 1e3:,.0f} k",
        "—" if mean is None or each is None else f"{mean * each / 1e3:,.1f}",
        _difference(group, plain),
        "; ".join(notes),
    )


def _difference(group: Group, plain: Group | None) -> str:
    if plain is None or group.optimizer == PLAIN:
        return ""
    found = paired_difference(group, plain)
    return "—" if found is None else f"{found[0]:+.1%} ± {found[1]:.1%}"


def about() -> str:
    """What was trained, in a few sentences."""
    rows = ", ".join(f"{count} at {times}" for times, count in BATCHES.items())
    updates = ", ".join(f"{count:,} at {times}" for times, count in BUDGETS.items())
    return (
        f"Updates to a held-out loss of {TARGET} nats per token: means of {len(SEEDS)} seeds at the best rate and warm-up. Rows "
        f"of {SEQUENCE} tokens in a batch: {rows} times the base batch. At most {updates} updates. The difference to {PLAIN} is "
        f"the mean over the seeds, with twice its standard error."
    )


def markdown(records: Sequence[Record], times: Times) -> str:
    """The table as Markdown."""
    head, *rows = rows_of(records, times)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([about(), "", *lines, ""])


def write_page(records: Sequence[Record], times: Times, path: Path) -> None:
    """Write the page: the table, the losses, and how much the rate matters."""
    groups = list(groups_of(records))
    losses, rates = [], []
    for batch in BATCHES:
        own = [each for each in groups if each.batch == batch]
        if not own:
            continue
        lines = [_curve(each) for each in own]
        losses.append(_picture(f"{batch} times the base batch: held-out loss", lines, "updates"))
        lines = [_by_rate(each, records) for each in own]
        rates.append(_picture(f"{batch} times the base batch: updates to {TARGET}", lines, "rate, powers of 2"))
    sections = [
        Section("", (Paragraph(about()), TextTable(tuple(rows_of(records, times))))),
        Section("The best rate and warm-up of each", (Grid(tuple(losses)),)),
        Section("How much the rate matters", (Grid(tuple(rates)), Paragraph("Rates beside the first grid's middle."))),
    ]
    path.write_text(page("Optimizers at large batches", sections), encoding="utf-8")


def _curve(group: Group) -> Line:
    record = next(iter(group.best.values()))
    return Line(group.optimizer, [step for step, _ in record.curve], [loss for _, loss in record.curve], marked=False)


def _by_rate(group: Group, records: Sequence[Record]) -> Line:
    """The fewest updates of each rate."""
    fewest: dict[int, float] = {}
    for each in records:
        if (each.cell.optimizer, each.cell.batch, each.cell.seed) == (group.optimizer, group.batch, SEEDS[0]):
            fewest[each.cell.power] = min(fewest.get(each.cell.power, math.inf), each.rank[0])
    powers = sorted(fewest)
    return Line(group.optimizer, powers, [fewest[power] for power in powers])


def _picture(title: str, lines: Sequence[Line], below: str) -> Picture:
    return Picture(title, line_chart(lines, below, ChartStyle(titles_above=True, readable=True)).svg, title=title)
