"""Metrics that a run has logged, as a table with a row for each reported step."""

from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ...system import json_reader

METRICS_FILE = "metrics.jsonl"


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a run's log in the order of their steps: `step`, and each value by name; training and
    evaluation merged.

    For steps that were repeated after a resume, the last values count. A truncated last line is
    dropped.

    Raises:
        DataError: A line is not in the format of a run's log.
    """
    path = Path(folder) / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        row = _row(line, f"{path}, line {number}")
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1] = rows[-1] | row
        else:
            rows.append(row)
    return rows


def to_dataframe(rows: list[dict[str, Any]], index: str | None = "step") -> Any:
    """Return rows as a pandas DataFrame, by default indexed by step; without pandas, as they are."""
    try:
        import pandas
    except ImportError:
        return rows
    found = pandas.DataFrame(rows)
    return found if index is None or not rows else found.set_index(index)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json_reader.parse(line, constants=True)
    except ValueError as error:
        raise DataError(f"{where} is not JSON; a run's log has an object in each line: {error}") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{where} has no step; a run's log has an object with a step in each line")
    # The time of writing: of little use for a step that was taken twice.
    row.pop("at", None)
    return row
