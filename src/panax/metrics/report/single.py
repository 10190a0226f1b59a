"""Page of one run: a summary first, then all details."""

from ..goodput import Session
from ..page.blocks import Block, FigureTiles, Fold, Grid, Paragraph, Section, Strips, TextTable, Tile
from .charts import curve_picture, goodput_strip, kind_color, list_kinds, other_charts, select_charts, timeline
from .costs import Rate
from .figures import HELD_OUT, LOSS, MFU, RunFigures, compute_figures
from .formats import (
    format_duration,
    format_energy,
    format_hours,
    format_loss,
    format_percent,
    format_time,
    format_value,
)
from .incident_cards import has_incident_records, incident_blocks
from .origin import environment_blocks, layout_blocks, reproduce_blocks
from .questions import question_sections
from .run_files import RunFiles, mapping

RATE_ADVICE = "give --rate for a price"
NO_LEDGER = (
    "Where the time went is unknown: this run's folder has no goodput.jsonl, which versions of Panax with `panax report` "
    "write."
)


def sections_of(run: RunFiles, rate: Rate) -> list[Section]:
    """Return all sections of the page, in order."""
    figures = compute_figures(run)
    return [
        Section("", (*_lead(figures), tiles(figures, rate), *_time_bars(figures))),
        Section("Incidents", tuple(incident_blocks(figures, rate))),
        Section("Curves", _curves(figures)),
        *question_sections(run.questions),
        Section("Time and cost", _costs(figures, rate)),
        Section("Sessions", _sessions(figures)),
        Section("Layout", tuple(layout_blocks(run))),
        Section("Environment", tuple(environment_blocks(run))),
        Section("How to reproduce it", tuple(reproduce_blocks(run))),
    ]


def _lead(figures: RunFigures) -> tuple[Block, ...]:
    run = figures.run
    said = [f"{figures.state.word.capitalize()}: {figures.state.detail}.", describe_hardware(run)]
    blocks: list[Block] = [Paragraph(" ".join(filter(None, said)))]
    if run.unread:
        lines = ", ".join(f"{count:,} of {name}" for name, count in run.unread.items())
        blocks.append(Paragraph(f"Lines that could not be read are skipped: {lines}.", faint=True))
    return tuple(blocks)


def describe_hardware(run: RunFiles) -> str:
    """Describe the devices and processes of the newest session, in a sentence."""
    devices = mapping(run.facts, "devices")
    count, kind = devices.get("count"), devices.get("kind")
    if count is None:
        return ""
    processes = run.facts.get("processes")
    at = f" in {format_value(processes)} processes" if isinstance(processes, int) and processes > 1 else ""
    return f"On {format_value(count)} x {format_value(kind)}{at}."


def tiles(figures: RunFigures, rate: Rate) -> FigureTiles:
    """Return the main figures as tiles."""
    run = figures.run
    step, of = run.last_step, run.num_steps
    steps = "no step yet" if step is None else f"step {step:,}" + (f" of {of:,}" if of else "")
    loss, held_out = figures.last(LOSS), figures.last(HELD_OUT)
    main, note = (held_out, "held out") if held_out is not None else (loss, "training")
    if held_out is not None and loss is not None:
        note = f"held out; training {format_loss(loss)}"
    unit, speed = figures.speed or ("", None)
    mfu = figures.median(MFU)
    cost = figures.device_hours
    count, known = len(figures.mishaps), has_incident_records(figures)
    causes = ", ".join(dict.fromkeys(mishap.cause for mishap in figures.mishaps))
    return FigureTiles(
        (
            Tile("State", figures.state.word, steps, figures.state.tone),
            Tile(
                "Loss at the end",
                format_loss(main) or "—",
                note if main is not None else "none was logged",
            ),
            Tile(
                "Throughput",
                "—" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
                "none was logged"
                if speed is None
                else f"{unit}/s, median" + (f"; MFU {format_percent(mfu)}" if mfu else ""),
            ),
            Tile(
                "Goodput",
                format_percent(figures.goodput) or "—",
                "of the time" if figures.goodput is not None else "no goodput.jsonl",
            ),
            Tile("Time", format_duration(figures.wall_seconds, brief=True) or "—", _time_note(figures)),
            Tile(
                "Device-hours",
                "—" if cost is None else format_hours(cost.total),
                "not known" if cost is None else figures.price(rate) or RATE_ADVICE,
            ),
            Tile("Incidents", str(count), format_value(causes), "bad" if count else "good")
            if known
            else Tile("Incidents", "—", "not known"),
        )
    )


def _time_note(figures: RunFigures) -> str:
    life = figures.run.life
    if life is None:
        return (
            "" if figures.wall_seconds is None else "in steps alone" if not figures.run.status else "since the launch"
        )
    count = len(life.sessions)
    return f"in {count} sessions" if count > 1 else "in one session"


def build_legend(run_figures: RunFigures, *, figures: bool = True) -> tuple[tuple[int, str, str], ...]:
    """Return the legend of the kinds of time that a run has spent."""
    life = run_figures.run.life
    if life is None:
        return ()
    return tuple(
        (kind_color(kind), kind, format_duration(life.seconds[kind]) if figures else "")
        for kind in list_kinds(run_figures)
    )


def _time_bars(figures: RunFigures) -> tuple[Block, ...]:
    strips = [strip for strip in (goodput_strip(figures, "Where the time went"), timeline(figures, "When")) if strip]
    return (Strips(tuple(strips), build_legend(figures)),) if strips else (Paragraph(NO_LEDGER, faint=True),)


def _curves(figures: RunFigures) -> tuple[Block, ...]:
    if not figures.run.curves:
        return (
            Paragraph(
                "There are no curves: metrics.jsonl is missing or empty; a run writes it from its first report on.",
                faint=True,
            ),
        )
    drawn = select_charts([figures.run], apart=False)
    blocks: list[Block] = [Grid(tuple(curve_picture(chart, [figures]) for chart in drawn))]
    explanation = (
        "Of many points, the minimum and the maximum of each stretch are drawn; values that are not finite are gaps."
    )
    if figures.mishaps:
        explanation += " Dashed lines are incidents."
    blocks.append(Paragraph(explanation, faint=True))
    if others := other_charts([figures.run], drawn):
        pictures = tuple(curve_picture(chart, [figures], points=240) for chart in others)
        blocks.append(Fold(f"{len(pictures)} more {'curve' if len(pictures) == 1 else 'curves'}", (Grid(pictures),)))
    return tuple(blocks)


def _costs(figures: RunFigures, rate: Rate) -> tuple[Block, ...]:
    life, cost = figures.run.life, figures.device_hours
    if life is None:
        return (Paragraph(NO_LEDGER, faint=True),)
    total_seconds = sum(life.seconds.values())
    heads = (
        "spent on",
        "time",
        "share",
        "device-hours",
        *((f"at {rate.per_hour:g} {rate.currency}",) if rate.per_hour is not None else ()),
    )
    rows: list[tuple[str, ...]] = [heads]
    for kind in list_kinds(figures):
        spent = None if cost is None else cost.by_kind.get(kind, 0.0)
        price = (rate.price(spent),) if rate.per_hour is not None else ()
        rows.append(
            (
                kind,
                format_duration(life.seconds[kind]),
                format_percent(life.seconds[kind] / total_seconds),
                format_hours(spent),
                *price,
            )
        )
    total = None if cost is None else cost.total
    price = (rate.price(total),) if rate.per_hour is not None else ()
    rows.append(("in all", format_duration(total_seconds), "", format_hours(total), *price))
    blocks: list[Block] = [TextTable(tuple(rows), marked=len(rows) - 2)]
    if cost is None:
        blocks.append(
            Paragraph(
                "Device-hours are unknown: sessions.jsonl does not state how many devices each session had.",
                faint=True,
            )
        )
    else:
        blocks.append(
            Paragraph(
                "Device-hours are devices times time, restarts included; idle time counts none. "
                + (
                    f"A device-hour is counted at {rate.per_hour:g} {rate.currency}."
                    if rate.per_hour is not None
                    else "No price: pass --rate, the price of a device-hour."
                ),
                faint=True,
            )
        )
    blocks.append(_energy(figures))
    return tuple(blocks)


def _energy(figures: RunFigures) -> Block:
    if figures.run.energy is None:
        return Paragraph("Energy is unknown: no device has reported it.", faint=True)
    joules, of = figures.run.energy
    return Paragraph(f"**Energy:** {format_energy(joules)}, of {of}.")


def _sessions(figures: RunFigures) -> tuple[Block, ...]:
    life = figures.run.life
    if life is None:
        return (Paragraph("The number of the run's starts is unknown without goodput.jsonl.", faint=True),)
    rows = [
        ("session", "began", "for", "steps", "devices", "ended", "steps lost", "work lost", "until it trained again")
    ]
    for session in life.sessions:
        devices = mapping(figures.run.session(session), "devices")
        count = figures.run.devices(session)
        newest = session is life.sessions[-1]
        rows.append(
            (
                str(session.number),
                format_time(session.began),
                format_duration(session.ended - session.began),
                _steps(session),
                f"{count} x {format_value(devices.get('kind'))}" if count else "",
                format_value(session.end) or (figures.state.word if newest else "without a message"),
                f"{session.lost_steps:,}" if session.lost_steps else "",
                format_duration(session.lost_seconds) if session.lost_seconds else "",
                format_duration(session.restart_seconds) if session.restart_seconds else "",
            )
        )
    return (TextTable(tuple(rows)),)


def _steps(session: Session) -> str:
    if session.first_step is None or session.last_step is None:
        return "none"
    return f"{session.first_step:,} to {session.last_step:,}"
