"""Comparison page of several runs: figures, bars and curves side by side, and their differences."""

import math
from collections.abc import Mapping, Sequence

from panax.core.finite_stats import max_finite

from ..goodput import IDLE
from ..page.blocks import Block, Fold, Grid, Paragraph, Section, Strip, Strips, Tabs, TextTable
from ..page.svg import number as short
from .charts import KINDS, curve_picture, goodput_strip, kind_color, list_kinds, other_charts, select_charts, timeline
from .costs import Rate
from .figures import HELD_OUT, LOSS, MFU, RunFigures, compute_figures
from .formats import format_duration, format_energy, format_hours, format_loss, format_percent
from .incident_cards import has_incident_records, incident_blocks
from .origin import layout_blocks, read_environment, read_settings, reproduce_blocks
from .run_files import RunFiles
from .single import NO_LEDGER


def comparison_sections(runs: Sequence[RunFiles], rate: Rate) -> list[Section]:
    """Return all sections of the page, in order."""
    all_figures = [compute_figures(run) for run in runs]
    return [
        Section("", (_figures(all_figures, rate), *_bars(all_figures))),
        Section("Curves", _curves(all_figures)),
        Section("Settings that differ", _settings(runs)),
        Section("Environments", _environments(runs)),
        Section("Incidents", _incidents(all_figures, rate)),
        Section("How to reproduce them", _origins(runs)),
    ]


def _figures(all_figures: Sequence[RunFigures], rate: Rate) -> TextTable:
    rows: list[tuple[str, ...]] = [("", *(each.run.name for each in all_figures))]

    def row(title: str, values: Sequence[str]) -> None:
        if any(values):
            rows.append((title, *(value or "—" for value in values)))

    row("state", [each.state.word for each in all_figures])
    row("steps", ["" if each.run.last_step is None else f"{each.run.last_step:,}" for each in all_figures])
    for title, name in (("loss, held out", HELD_OUT), ("loss, training", LOSS)):
        values = [each.last(name) for each in all_figures]
        # Only for runs with the same last step.
        same = len({each.run.last_step for each in all_figures}) == 1
        row(title, _best(values) if same else [format_loss(value) for value in values])
    row("accuracy, held out", [format_percent(each.last("evaluation/accuracy")) for each in all_figures])
    row(
        "throughput, median",
        [f"{short(each.speed[1])} {each.speed[0]}/s" if each.speed else "" for each in all_figures],
    )
    row("MFU, median", [format_percent(each.median(MFU)) for each in all_figures])
    row("goodput", [format_percent(each.goodput) for each in all_figures])
    row("time", [format_duration(each.wall_seconds) for each in all_figures])
    row("devices", [read_environment(each.run).get("devices", "") for each in all_figures])
    row(
        "device-hours",
        ["" if each.device_hours is None else format_hours(each.device_hours.total) for each in all_figures],
    )
    row(
        "of them in steps that count",
        ["" if each.device_hours is None else format_hours(each.device_hours.training) for each in all_figures],
    )
    row("price", [each.price(rate) for each in all_figures])
    row("energy", ["" if each.run.energy is None else format_energy(each.run.energy[0]) for each in all_figures])
    row("incidents", [str(len(each.mishaps)) if has_incident_records(each) else "" for each in all_figures])
    return TextTable(tuple(rows))


def _best(values: Sequence[float | int | None]) -> list[str]:
    """Format losses, with the lowest in bold."""
    finite_values = [value for value in values if value is not None and math.isfinite(value)]
    smallest = min(finite_values) if len(finite_values) > 1 else None
    return [
        f"**{format_loss(value)}**" if value is not None and value == smallest else format_loss(value)
        for value in values
    ]


def _bars(all_figures: Sequence[RunFigures]) -> tuple[Block, ...]:
    totals = [_without_idle(each) for each in all_figures]
    longest = max_finite(totals, default=0.0)
    strips = [goodput_strip(each, each.run.name, longest) for each in all_figures]
    drawn: list[Strip] = [strip for strip in strips if strip is not None]
    lives = [timeline(each, each.run.name, row) for row, each in enumerate(all_figures)]
    if not drawn:
        return (Paragraph(NO_LEDGER, faint=True),)
    kinds = {kind for each in all_figures for kind in list_kinds(each)}
    ordered = sorted(kinds, key=lambda kind: list(KINDS).index(kind) if kind in KINDS else len(KINDS))
    legend = tuple((kind_color(kind), kind, "") for kind in ordered)
    blocks: list[Block] = [Strips(tuple(drawn), legend)]
    lacking = [each.run.name for each, strip in zip(all_figures, strips) if strip is None]
    if lacking:
        blocks.append(Paragraph(f"Without a bar, since goodput.jsonl is missing: {', '.join(lacking)}.", faint=True))
    timelines = tuple(life for life in lives if life is not None)
    blocks.append(Fold("When: each run from its start to its end", (Strips(timelines, legend),)))
    return tuple(blocks)


def _without_idle(figures: RunFigures) -> float | int:
    life = figures.run.life
    return 0.0 if life is None else sum(seconds for kind, seconds in life.seconds.items() if kind != IDLE)


def _curves(all_figures: Sequence[RunFigures]) -> tuple[Block, ...]:
    runs = [each.run for each in all_figures]
    drawn = select_charts(runs, apart=True)
    if not drawn:
        return (
            Paragraph("There are no curves: none of these runs has a metrics.jsonl with values in it.", faint=True),
        )
    by_step = Grid(tuple(curve_picture(chart, all_figures) for chart in drawn))
    ways: list[tuple[str, tuple[Block, ...]]] = [("by step", (by_step,))]
    if any(run.times is not None for run in runs):
        by_time = Grid(tuple(curve_picture(chart, all_figures, by_time=True) for chart in drawn))
        ways.append(("by time", (by_time, *_of_times(runs))))
    blocks: list[Block] = [Tabs("curves", tuple(ways))]
    if others := other_charts(runs, drawn, max_charts=12):
        pictures = tuple(curve_picture(chart, all_figures, points=300) for chart in others)
        blocks.append(Fold(f"{len(pictures)} more {'curve' if len(pictures) == 1 else 'curves'}", (Grid(pictures),)))
    return tuple(blocks)


def _of_times(runs: Sequence[RunFiles]) -> tuple[Block, ...]:
    estimated = [run.name for run in runs if run.times is not None and not run.times.measured]
    lacking = [run.name for run in runs if run.times is None]
    sentences = []
    if estimated:
        sentences.append(
            f"Time is that of the steps alone, by seconds/step, for {', '.join(estimated)}: there is no goodput.jsonl."
        )
    if lacking:
        sentences.append(f"Not drawn, since their times are unknown: {', '.join(lacking)}.")
    return (Paragraph(" ".join(sentences), faint=True),) if sentences else ()


def list_differences(mappings: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return rows of a name and its value in each mapping, if they differ."""
    names = dict.fromkeys(name for one in mappings for name in one)
    rows = [(name, *(one.get(name, "—") for one in mappings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _settings(runs: Sequence[RunFiles]) -> tuple[Block, ...]:
    known = [run for run in runs if run.facts]
    blocks: list[Block] = []
    rows = list_differences([read_settings(run) for run in known])
    if rows:
        blocks.append(TextTable((("setting", *(run.name for run in known)), *rows)))
    elif len(known) > 1:
        blocks.append(Paragraph("None: their settings are the same."))
    return (*blocks, *_without_sessions(runs))


def _without_sessions(runs: Sequence[RunFiles]) -> tuple[Block, ...]:
    lacking = [run.name for run in runs if not run.facts]
    return (Paragraph(f"Unknown without sessions.jsonl: {', '.join(lacking)}.", faint=True),) if lacking else ()


def _environments(runs: Sequence[RunFiles]) -> tuple[Block, ...]:
    known = [run for run in runs if run.facts]
    environments = [read_environment(run) for run in known]
    rows = list_differences(environments)
    blocks: list[Block] = []
    if rows:
        blocks.append(TextTable((("differs", *(run.name for run in known)), *rows)))
    if len(known) > 1:
        same = [
            (name, value)
            for name, value in environments[0].items()
            if all(one.get(name) == value for one in environments)
        ]
        if same:
            blocks.append(Fold(f"{len(same)} that are the same", (TextTable((("", ""), *same)),)))
    return (*blocks, *_without_sessions(runs))


def _incidents(all_figures: Sequence[RunFigures], rate: Rate) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for row, each in enumerate(all_figures):
        if each.mishaps:
            blocks += incident_blocks(each, rate, row=row, of=each.run.name)
    free = [each.run.name for each in all_figures if not each.mishaps and has_incident_records(each)]
    untold = [each.run.name for each in all_figures if not has_incident_records(each)]
    if free:
        blocks.append(Paragraph(f"There was none in {', '.join(free)}."))
    if untold:
        blocks.append(Paragraph(f"Unknown without goodput.jsonl and job/: {', '.join(untold)}.", faint=True))
    return tuple(blocks)


def _origins(runs: Sequence[RunFiles]) -> tuple[Block, ...]:
    return tuple(Fold(run.name, (*reproduce_blocks(run), *layout_blocks(run))) for run in runs)
