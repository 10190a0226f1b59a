"""The five common questions about frameworks, answered only with the measurements of this run."""

from typing import Any, NamedTuple

from panax.core.finite_stats import max_finite, min_finite, sort_finite_first

from .columns import EVERY, Column
from .formats import format_ratio, format_seconds, format_size, join_words
from .results import ColumnResult, Comparison
from .verdict import ColumnFigures, describe_verdict
from .workload.sources import CodeLength, count_column_lines

RETRACED = 5.0
"""A step that takes this many times as long as usual was recompiled."""


class Answer(NamedTuple):
    """A question, the answer of this run in a sentence or two, and the evidence."""

    question: str
    answer: str
    evidence: tuple[str, ...]


def answer_questions(comparison: Comparison, rows: list[ColumnFigures]) -> list[Answer]:
    """Answer each of the five questions."""
    return [
        _abstraction(comparison),
        Answer("Performance", *_performance(comparison, rows)),
        _distributed(comparison),
        _debugging(comparison, rows),
        _ecosystem(comparison),
    ]


def _columns(comparison: Comparison) -> list[tuple[Column, ColumnResult]]:
    return [(column, comparison.columns[column.name]) for column in EVERY if column.name in comparison.columns]


def _ran(comparison: Comparison) -> list[tuple[Column, ColumnResult]]:
    return [(column, entry) for column, entry in _columns(comparison) if entry.losses]


def _abstraction(comparison: Comparison) -> Answer:
    question = "Abstraction and extensibility"
    family = comparison.work["family"]
    lengths: list[tuple[Column, CodeLength]] = [
        (column, count_column_lines(column, family)) for column, _ in _ran(comparison)
    ]
    if not lengths:
        return Answer(question, "No column ran, so this run gives no answer.", ())
    ordered = sort_finite_first(lengths, key=lambda measured: sum(measured[1]))
    shortest, longest = ordered[0], ordered[-1]
    without = [column.title for column, length in lengths if not length.model]
    answer = (
        f"{shortest[0].title} takes the least code to write for this model, {sum(shortest[1])} lines; {longest[0].title} the "
        f"most, {sum(longest[1])}. Nothing of the model had to be written for {join_words(without)}."
    )
    evidence = [
        f"{column.title}: {length.program} lines of program"
        + (
            f" and {length.model} of model ({column.model_source})"
            if length.model
            else f"; the model is {column.model_source}"
        )
        for column, length in lengths
    ]
    adapted = comparison.columns.get("adapted")
    if adapted is not None and adapted.losses:
        evidence.append("The module of the PyTorch columns ran on JAX without a change to it: column PyTorch adapted.")
    return Answer(question, answer, tuple(evidence))


def _performance(comparison: Comparison, rows: list[ColumnFigures]) -> tuple[str, tuple[str, ...]]:
    sentences = describe_verdict(comparison, rows)
    evidence = [
        f"{row.title}: {format_seconds(row.seconds)} a step ({format_seconds(row.low)} to {format_seconds(row.high)})"
        + (f", {format_ratio(row.ratio)} times the fastest PyTorch column" if row.ratio else "")
        + (f", {format_seconds(row.cpu_seconds)} of CPU time" if row.cpu_seconds is not None else "")
        for row in rows
        if row.seconds is not None
    ]
    timed = [row for row in rows if row.compared and row.peak_bytes]
    if len(timed) > 1:
        smallest = min_finite(timed, key=lambda row: row.peak_bytes or 0)
        largest = max_finite(timed, key=lambda row: row.peak_bytes or 0)
        evidence.append(
            f"Memory: {smallest.title} the least, {format_size(smallest.peak_bytes)}; {largest.title} the most, "
            f"{format_size(largest.peak_bytes)}"
        )
    return " ".join(sentences), tuple(evidence)


def _distributed(comparison: Comparison) -> Answer:
    question = "Distributed training"
    columns = [(column, entry) for column, entry in _ran(comparison) if entry.processes > 1]
    if not columns:
        return Answer(
            question,
            "No column of several processes took part, so this run gives no answer about distributed training.",
            (),
        )
    evidence = tuple(
        f"{column.title}: {entry.processes} processes"
        + (
            f", {join_words([format_size(sent) for sent in entry.sent_bytes])} sent by each in a step"
            if entry.sent_bytes
            else ""
        )
        for column, entry in columns
    )
    return Answer(
        question, f"{join_words([column.title for column, _ in columns])} trained on several processes.", evidence
    )


def _debugging(comparison: Comparison, rows: list[ColumnFigures]) -> Answer:
    question = "Prototyping and debugging"
    ran = [row for row in rows if row.first_step_seconds is not None]
    if not ran:
        return Answer(question, "No column ran, so this run gives no answer.", ())
    quick = min_finite(ran, key=lambda row: row.first_step_seconds or 0.0)
    slow = max_finite(ran, key=lambda row: row.first_step_seconds or 0.0)
    sentence = (
        f"{quick.title} shows its first loss {format_seconds(quick.first_step_seconds)} after its process starts, the soonest; "
        f"{slow.title} needs {format_seconds(slow.first_step_seconds)}."
    )
    evidence = [
        f"{row.title}: first loss after {format_seconds(row.first_step_seconds)}, with "
        f"{format_seconds(row.compile_seconds)} for "
        "tracing and compiling"
        for row in ran
    ]
    usual = {row.name: row.seconds for row in rows}
    probed = [(column, entry) for column, entry in _columns(comparison) if entry.probe]
    free = []
    for column, entry in probed:
        text, at_once = describe_new_shape(entry.probe, usual[column.name])
        free += [column.title] if at_once else []
        evidence.append(f"{column.title}, a batch with a row fewer: {text}")
    evidence += [
        f"{column.title}, a batch with a label too few: {describe_wrong_batch(entry.probe)}" for column, entry in probed
    ]
    if probed:
        sentence += f" A batch of another size was accepted without compiling by {join_words(free)}."
    return Answer(question, sentence, tuple(evidence))


def describe_new_shape(probe: dict[str, Any], usual: float | None) -> tuple[str, bool]:
    """Describe the result of a batch of another shape; also return True if it was handled like any other."""
    if "failed" in probe:
        return f"the process failed: {probe['failed']}", False
    first, second = probe["another_shape"]
    if "error" in first:
        return f"refused after {format_seconds(first['seconds'])}: {first['error']}", False
    fastest = min(second.get("seconds", first["seconds"]), usual or first["seconds"])
    if first["seconds"] < RETRACED * fastest:
        return f"taken as it is ({format_seconds(first['seconds'])})", True
    return (
        f"recompiled, unasked, in {format_seconds(first['seconds'])}; the next such batch took "
        f"{format_seconds(second['seconds'])}",
        False,
    )


def describe_wrong_batch(probe: dict[str, Any]) -> str:
    """Describe the result of an invalid batch."""
    if "failed" in probe:
        return f"the process failed: {probe['failed']}"
    trial = probe["wrong"][0]
    if "error" not in trial:
        return "no error: it was trained on"
    place = (
        "names a line of the column's own file" if trial["names_own_file"] else "names no line of the column's own file"
    )
    return f"`{trial['error']}`, after {format_seconds(trial['seconds'])}; the traceback has {trial['frames']} frames and {place}"


def _ecosystem(comparison: Comparison) -> Answer:
    question = "Ecosystem"
    columns = _columns(comparison)
    ran = [column.title for column, entry in columns if entry.losses]
    absent = [column.title for column, entry in columns if entry.state == "absent"]
    impossible = [column.title for column, entry in columns if entry.state == "impossible"]
    sentence = f"This model ran as {join_words(ran)}."
    if absent:
        sentence += f" Not installed here: {join_words(absent)}."
    if impossible:
        sentence += f" Without such a model: {join_words(impossible)}."
    evidence = [
        f"{column.title}: "
        + (
            f"the model is {column.model_source}; "
            + ", ".join(f"{name} {version}" for name, version in entry.versions.items())
            if entry.losses
            else f"{entry.state}: {entry.reason}"
        )
        for column, entry in columns
    ]
    evidence.append(
        "All columns read the same config.json and model.safetensors, which Panax wrote in Hugging Face's layout."
    )
    return Answer(question, sentence, tuple(evidence))
