"""The report's content, from the measurements."""

import json

from panax.core.finite_stats import min_finite
from panax.metrics.page.blocks import Block, Code, Paragraph, Picture, Points, Section, TextTable

from ..columns import EVERY
from ..formats import format_percent, format_rate, format_ratio, format_seconds, format_size
from ..questions import answer_questions
from ..results import Comparison
from ..verdict import ColumnFigures, comparison_peak, compute_rows, describe_verdict, loss_tolerances
from ..workload.precision import Precision
from ..workload.settings import PRECISIONS
from ..workload.sources import count_column_lines, read_source
from .plots import ColumnBar, bars, lines


def sections_of(comparison: Comparison) -> list[Section]:
    """Return all sections of the report, in order."""
    rows = compute_rows(comparison)
    return [
        Section("The answer", _lead(comparison, rows)),
        Section("Table", _table(comparison, rows)),
        *([Section("Distributed", _distributed(comparison, rows))] if any(row.layout for row in rows) else []),
        Section("Plots", _plots(comparison, rows)),
        Section("Five questions", _questions(comparison, rows)),
        Section("What was equal, and what was not", _equality(comparison, rows)),
        Section("Machine and software", _environment(comparison)),
        Section("Programs of the columns", _programs(comparison)),
    ]


def title_of(comparison: Comparison) -> str:
    """Return the title of the page."""
    return f"{comparison.settings['work']}: PyTorch or JAX?"


def _lead(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    settings, machine = comparison.settings, comparison.environment
    hardware = ", ".join([machine["processor"], f"{machine['cores']} cores", *machine["accelerators"]])
    blocks = [Paragraph(" ".join(describe_verdict(comparison, rows)), lead=True)]
    blocks.append(
        Paragraph(
            f"{comparison.work['title']}. Precision {settings['precision']}, attention {settings['attention']}, "
            f"{comparison.work['optimizer']['name']}; {hardware}. This holds for this hardware and this model."
        )
    )
    if not comparison.complete:
        blocks.append(
            Paragraph(
                "This comparison was interrupted: it shows what was finished. The same command resumes from there."
            )
        )
    return tuple(blocks)


HEADINGS = (
    "column", "step", "range", "per second", "MFU", "to fastest PyTorch", "compile", "first loss after", "peak memory",
    "CPU time per step", "cores of others",
)  # fmt: skip


def _table(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    cells: list[tuple[str, ...]] = [HEADINGS]
    faint = []
    for n, row in enumerate(rows):
        if row.seconds is None:
            faint.append(n)
        cells.append(
            (
                row.title,
                format_seconds(row.seconds) or row.state,
                f"{format_seconds(row.low)} to {format_seconds(row.high)}" if row.seconds else "",
                format_rate(row.per_second),
                format_percent(row.utilization),
                format_ratio(row.ratio),
                format_seconds(row.compile_seconds),
                format_seconds(row.first_step_seconds),
                format_size(row.peak_bytes),
                format_seconds(row.cpu_seconds),
                "" if row.others is None else f"{row.others:.1f}",
            )
        )
    timed = [(row.seconds, n) for n, row in enumerate(rows) if row.compared and row.seconds]
    settings, peak = comparison.settings, comparison_peak(comparison)
    notes = [
        f"A step is the median of {settings['rounds']} rounds, each the mean of {settings['steps']} steps dispatched one after "
        "the other, with the device waited for before and after; columns take turns, another one begins each round.",
        f"Per second: {comparison.work['unit']}. To fastest PyTorch: step times divided within each round; below 1 is faster.",
        "First loss after: from the start of the process, imports, weights, tracing and compiling included.",
        f"Peak memory is {_of_what(comparison)}. Cores of others: used by other programs during the column's turns.",
    ]
    if peak is not None:
        notes.insert(
            2,
            f"MFU: {comparison.work['flops_per_step'] / 1e9:,.4g} GFLOP of products in a step, counted from the shapes, by "
            f"{peak.source}.",
        )
    remarks = [f"{row.title}: {row.remark}." for row in rows if row.remark]
    return (
        TextTable(tuple(cells), marked=min_finite(timed)[1] if timed else None, faint=tuple(faint)),
        *([Points(tuple(remarks))] if remarks else []),
        Points(tuple(notes)),
    )


def _distributed(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    """Compare the columns of several processes and of simulated devices, layout by layout."""
    cells: list[tuple[str, ...]] = [
        ("layout", "column", "processes", "step", "by PyTorch's", "losses", "bytes sent by each in a step", "counted")
    ]
    for row in rows:
        entry = comparison.columns[row.name]
        if not row.layout:
            continue
        sent = max(entry.sent_bytes, default=None)
        cells.append(
            (
                row.layout,
                row.title,
                str(entry.processes) if entry.processes > 1 else "1, simulated devices",
                format_seconds(row.seconds) or row.state,
                format_ratio(row.ratio),
                "equal" if row.compared else row.remark,
                "" if sent is None else format_size(sent),
                "" if sent is None else ("on loopback" if entry.processes > 1 else "in the program"),
            )
        )
    return (
        TextTable(tuple(cells)),
        Points(
            (
                "Losses: equal to those of the reference column, which is of one process, within the same tolerance.",
                "Processes share the cores equally, each bound to its own; all batches are the same global ones.",
                "Bytes on loopback: the count of its interface during the turn, shared equally, headers included. In the "
                "program: the bytes that a device sends by the compiled program's collectives, in rings.",
            )
        ),
    )


def _of_what(comparison: Comparison) -> str:
    kinds = {entry.peak_of for entry in comparison.columns.values() if entry.peak_bytes}
    if kinds == {"device"}:
        return "the device's, as the framework's allocator counts it"
    return (
        "the largest resident set of the process (weights that are read by mapping a file count while they are mapped)"
    )


def _plots(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    plots: list[Block] = []
    timed = [row for row in rows if row.seconds is not None]
    if timed:
        steps = [
            ColumnBar(
                row.name,
                row.title,
                row.seconds or 0,
                row.low or 0,
                row.high or 0,
                format_seconds(row.seconds),
                not row.compared,
            )
            for row in timed
        ]
        plots.append(
            Picture(
                "steps",
                bars(steps, "seconds a step"),
                "Time of a step: median of the rounds, line from the minimum to the maximum.",
            )
        )
    known = {name: entry for name, entry in comparison.columns.items() if entry.losses}
    if known:
        series = {name: (entry.title, entry.losses) for name, entry in known.items()}
        plots.append(
            Picture(
                "losses",
                lines(series, "step"),
                "The losses of the first steps; where columns agree, lines lie on each other.",
            )
        )
    allowed = loss_tolerances(comparison)
    reference = known.get(comparison.reference)
    if reference is not None and len(known) > 1:
        apart = {
            name: (entry.title, [abs(a - b) for a, b in zip(entry.losses, reference.losses)])
            for name, entry in known.items()
            if name != comparison.reference
        }
        apart["limit"] = ("tolerance", allowed)
        caption = (
            f"How far the losses are from those of {reference.title}; below the dotted line, rounding explains it."
        )
        plots.append(Picture("apart", lines(apart, "step", logarithmic=True), caption))
    rows_with_memory = [row for row in rows if row.peak_bytes]
    if rows_with_memory:
        memory = [
            ColumnBar(
                row.name, row.title, (row.peak_bytes or 0) / 2**30, 0, 0, format_size(row.peak_bytes), not row.compared
            )
            for row in rows_with_memory
        ]
        plots.append(Picture("memory", bars(memory, "GiB"), f"Peak memory: {_of_what(comparison)}."))
    return tuple(plots)


def _questions(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    found: list[Block] = []
    for number, answer in enumerate(answer_questions(comparison, rows), 1):
        found.append(Paragraph(f"**{number}. {answer.question}.** {answer.answer}"))
        if answer.evidence:
            found.append(Points(answer.evidence))
    return tuple(found)


def _equality(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[Block, ...]:
    settings, numbers = comparison.settings, comparison.work["optimizer"]
    optimizer = ", ".join(f"{name}={value}" for name, value in numbers.items())
    equal = [
        f"Weights: one model.safetensors, drawn by Panax's task from seed {settings['seed']}; {comparison.work['parameters']:,} "
        "parameters.",
        "Batches: the same arrays, made before any clock started and on the device before any step; four, in turn.",
        f"Loss: mean cross-entropy in float32. Optimizer: {optimizer}; norms, biases and class tokens don't decay.",
        f"Precision {settings['precision']}: {PRECISIONS[settings['precision']]}.",
        f"{comparison.environment['cores']} cores for every column; the device is waited for before every reading of the clock.",
    ]
    checked = [
        f"{row.title}: {'agrees' if row.apart <= 1 else 'differs'}, "
        + (f"{row.apart:.2f} of what rounding explains" if row.apart <= 1 else row.remark)
        for row in rows
        if row.apart is not None
    ]
    unequal = [
        "Panax's own columns (Panax, PyTorch adapted) keep freed memory in the process, as `panax train` does on a CPU; the "
        "others run with the C library's settings, as their users have them.",
        "Panax's step also computes the norm of the gradient and skips an update that is not finite; the others don't.",
        "torch.compile compiles the forward and backward pass; the update is PyTorch's fused one in both PyTorch columns.",
    ]
    if Precision(settings["precision"]).is_mixed:
        unequal.append(
            "torch.autocast keeps the residual stream in float32 where Panax, plain JAX and Flax keep it in bfloat16."
        )
    unequal += [f"{entry.title}: {note}" for entry in comparison.columns.values() for note in entry.notes]
    if comparison.one_at_a_time:
        unequal.append("Memory did not suffice for all columns at once: each was restarted for every turn.")
    if comparison.sessions > 1:
        unequal.append(
            f"The comparison was run in {comparison.sessions} parts; columns of different parts did not take turns."
        )
    return (
        Paragraph("Equal:"),
        Points(tuple(equal)),
        Paragraph(
            "Asserted before the timing: the losses of the first steps agree to within the error of rounding: a few roundings "
            "of the precision, and eight times the effect of a nudge of the reference's weights by one rounding.",
        ),
        Points(tuple(checked)),
        Paragraph("Not equal:"),
        Points(tuple(unequal)),
    )


def _environment(comparison: Comparison) -> tuple[Block, ...]:
    facts = comparison.environment
    rows = [
        ("what", "here"),
        ("processor", f"{facts['processor']}, {facts['cores']} cores"),
        ("memory", format_size(facts["memory_bytes"])),
        ("accelerators", ", ".join(facts["accelerators"]) or "none"),
        ("system", f"{facts['system']}, Python {facts['python']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        ("variables", ", ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none that matter"),
        ("begun", comparison.started),
    ]
    return (
        TextTable(tuple(rows)),
        Code(comparison.command, "console"),
        Code(json.dumps(comparison.settings, indent=1), "json", "All settings"),
    )


def _programs(comparison: Comparison) -> tuple[Block, ...]:
    family = comparison.work["family"]
    blocks: list[Block] = [
        Paragraph(
            "What each column ran, and how many lines of code that is (without blank lines, comments and docstrings)."
        )
    ]
    seen: set[str] = set()
    lengths = [("column", "program", "model", "files")]
    files: list[Block] = []
    for column in EVERY:
        if column.name not in comparison.columns or family not in column.families:
            continue
        program, model = column.files(family)
        length = count_column_lines(column, family)
        names = ", ".join(f"{name}.py" for name in (*program, *model))
        lengths.append((column.title, str(length.program), str(length.model or "a library's"), names))
        for name in (*program, *model):
            if name not in seen:
                files.append(Code(read_source(name), "python", f"{name.replace('.', '/')}.py"))
                seen.add(name)
    return (*blocks, TextTable(tuple(lengths)), *files)
