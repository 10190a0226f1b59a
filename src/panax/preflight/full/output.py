"""Result of a full check: a table for the terminal, and one dated Markdown file."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.errors import RecipeError
from ...system.files import expand_user
from ...system.terminal_text import align_columns, format_elapsed
from .parts import CheckOutcome, CheckResult, FullCheck

RESULTS = Path("benchmarks/results")
"""Folder of results, if the current folder has it."""


def part_lines(result: FullCheck) -> list[str]:
    """Format the parts as a table, then failures and their reasons, then skipped parts and theirs."""
    head = f"full check     {result.platform} ({result.chip}), in {format_elapsed(result.seconds)}: {result.format_summary()}"
    rows = [(part.group, part.name, part.outcome.value, _took(part)) for part in result.parts]
    lines = ["", head, "", *align_columns([("part", "", "", "took"), *rows], left=3)]
    for part in result.parts:
        if part.group == "benchmark" and part.figures:
            lines += ["", *(f"{name:<14} {value}" for name, value in part.figures.items())]
    for title, outcome in (("failed", CheckOutcome.FAILED), ("left out", CheckOutcome.LEFT_OUT)):
        reasons: dict[str, list[CheckResult]] = {}
        for part in result.parts:
            if part.outcome is outcome:
                reasons.setdefault(part.why, []).append(part)
        if reasons:
            lines += ["", title, *(line for reason, parts in reasons.items() for line in _with_reason(reason, parts))]
    return lines


def _took(part: CheckResult) -> str:
    return "" if part.outcome is CheckOutcome.LEFT_OUT else format_elapsed(part.seconds)


def _with_reason(reason: str, parts: Sequence[CheckResult]) -> Iterator[str]:
    first, *rest = reason.splitlines() or [""]
    yield f"  {'; '.join(f'{part.group}: {part.name}' for part in parts)}"
    yield f"           {first}"
    if rest:
        yield f"           and {len(rest)} more lines, in the file"


def format_markdown(result: FullCheck, checked: Sequence[str], command: str = "panax check --full") -> str:
    """Format the result as a Markdown page.

    Args:
        checked: Lines of the pre-flight check: figures and findings.
        command: The command that was run.
    """
    device = f"{result.platform}, {result.chip}"
    lines = [
        f"# Full check on {device}, {result.day}",
        "",
        f"`{command}` took {format_elapsed(result.seconds)} for its {len(result.parts)} parts: {result.format_summary()}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in result.facts.items()),
        "",
        "## Parts",
        "",
        "| part | | | took | figures |",
        "|---|---|---|---|---|",
    ]
    for part in result.parts:
        figures = "; ".join(f"{name}: {value}" for name, value in part.figures.items())
        if part.outcome is CheckOutcome.LEFT_OUT:
            figures = part.why
        elif part.outcome is CheckOutcome.FAILED:
            figures = "see below"
        cells = (part.group, part.name, part.outcome.value, _took(part), figures)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if result.failed:
        lines += ["", "## What failed"]
        for part in result.failed:
            lines += ["", f"### {part.group}: {part.name}", "", *_block(part.why)]
    lines += ["", "## Figures of the hardware", "", *_block("\n".join(checked).strip())]
    return "\n".join(lines) + "\n"


def result_file(output: str | Path | None, day: str, platform: str, chip: str) -> Path:
    """Return the path of the page: a file that does not exist yet.

    Args:
        output: The file that the user requests; None: a dated name, numbered if there is one of that day.

    Raises:
        RecipeError: The requested file exists, or its folder does not.
    """
    if output is not None:
        path = expand_user(output)
        if path.exists():
            raise RecipeError(f"--output {path}: it exists already; name another file, or remove it")
        if not path.parent.is_dir():
            raise RecipeError(
                f"--output {path}: the folder {path.parent} is missing; create it, or choose another file"
            )
        return path
    folder = RESULTS if RESULTS.is_dir() else Path()
    stem = f"{day}-check-{platform}-{chip}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for name in names if not (path := folder / f"{name}.md").exists())


def write_result(path: Path, text: str) -> None:
    """Write a page to a file that must be new.

    Raises:
        RecipeError: The file exists, or can't be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RecipeError(
            f"{path} was written by another program meanwhile; name another file with --output"
        ) from error
    except OSError as error:
        raise RecipeError(
            f"{path} can't be written: {error.strerror or error}; name another file with --output"
        ) from error


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _block(text: str) -> list[str]:
    """Return a Markdown code block with a fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]
