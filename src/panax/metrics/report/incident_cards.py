"""The incidents of a run as cards, each with its cause and its cost."""

from collections.abc import Iterator

from ..page.blocks import Block, Card, Code, Fold, Paragraph, TextTable
from .charts import incident_anchor
from .costs import Rate
from .figures import RunFigures
from .formats import format_duration, format_hours, format_time, format_value
from .incidents import RunIncident

PHASE_WORDS = {
    "detect": "detection",
    "teardown": "teardown",
    "restart": "restart",
    "restore": "restore",
    "first_step": "first step",
}


MAX_EXPANDED = 3
"""Maximum number of cards shown; more incidents are a table first, with their cards collapsed."""


def has_incident_records(figures: RunFigures) -> bool:
    """Return True if the run's files contain information on incidents at all."""
    return bool(figures.mishaps) or figures.run.life is not None or bool(figures.run.job)


def incident_blocks(figures: RunFigures, rate: Rate, *, row: int = 0, of: str = "") -> Iterator[Block]:
    """Yield a card for each incident; or one line on why there is none.

    Args:
        row: The run's index on a page of several.
        of: The run's name on a page of several.
    """
    if not figures.mishaps:
        known = has_incident_records(figures)
        explanation = (
            "There was none." if known else "None is known: a run without goodput.jsonl and job/ has no record of them."
        )
        yield Paragraph(explanation, faint=not known)
        return
    if figures.run.life is None:
        yield Paragraph("The loss is unknown: there is no goodput.jsonl.", faint=True)
    cards = tuple(_card(mishap, n, rate, row, of) for n, mishap in enumerate(figures.mishaps, start=1))
    if len(cards) <= MAX_EXPANDED:
        yield from cards
        return
    yield _table(figures, rate, of)
    yield Fold(f"Each of the {len(cards)} with its message and last lines", cards)


def _table(figures: RunFigures, rate: Rate, of: str) -> TextTable:
    heads = (of or "incident", "when", "step", "cause", "steps lost", "until it trained again", "device-hours")
    rows: list[tuple[str, ...]] = [(*heads, *(("price",) if rate.per_hour is not None else ()))]
    for n, mishap in enumerate(figures.mishaps, start=1):
        price = (rate.price(mishap.device_hours),) if rate.per_hour is not None else ()
        step = "" if mishap.step is None else f"{mishap.step:,}"
        lost = "" if mishap.lost_steps is None else f"{mishap.lost_steps:,}"
        when, again = format_time(mishap.at), format_duration(mishap.restart_seconds)
        rows.append((str(n), when, step, mishap.cause, lost, again, format_hours(mishap.device_hours), *price))
    lost = [mishap.device_hours for mishap in figures.mishaps if mishap.device_hours is not None]
    if lost:
        price = (rate.price(sum(lost)),) if rate.per_hour is not None else ()
        rows.append(("in all", "", "", "", "", "", format_hours(sum(lost)), *price))
    return TextTable(tuple(rows), marked=len(rows) - 2 if lost else None)


def _card(mishap: RunIncident, n: int, rate: Rate, row: int, of: str) -> Card:
    at = "" if mishap.step is None else f" at step {mishap.step:,}"
    facts = [("when", format_time(mishap.at))]
    if mishap.process is not None:
        facts.append(("process", str(mishap.process)))
    if mishap.lost_steps is not None:
        facts.append(("steps lost", f"{mishap.lost_steps:,}"))
        facts.append(("work lost", format_duration(mishap.lost_seconds) or "none"))
        facts.append(
            (
                "until it trained again",
                "it did not" if mishap.restart_seconds is None else format_duration(mishap.restart_seconds),
            )
        )
    hours_lost = mishap.device_hours
    if hours_lost is not None:
        price = rate.price(hours_lost)
        facts.append(("cost", f"{format_hours(hours_lost)} device-hours" + (f", {price}" if price else "")))
    elif mishap.lost_steps is not None:
        facts.append(("cost", "unknown without sessions.jsonl"))
    blocks: list[Block] = []
    if mishap.phases:
        parts = [f"{PHASE_WORDS[name]} {format_duration(seconds)}" for name, seconds in mishap.phases.items()]
        facts.append(("recovery took", ", ".join(parts)))
    if mishap.message:
        blocks.append(Paragraph(format_value(mishap.message)))
    if mishap.tail:
        who = "" if mishap.process is None else f" of process {mishap.process}"
        blocks.append(Code("\n".join(mishap.tail), title=f"Last lines{who}"))
    label = f"{of}: incident {n}" if of else f"Incident {n}"
    return Card(incident_anchor(n, row), f"{label}{at}: {mishap.cause}", tuple(facts), tuple(blocks))
