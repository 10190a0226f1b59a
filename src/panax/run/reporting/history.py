"""What a run has logged, as a table with a row for each step that was reported."""

from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ...system import json_reader

METRICS_FILE = "metrics.jsonl"


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's log in the order of their steps: `step`, and each value under its name; evaluations beside training.

    Steps that were taken again after a resume count as they went the last time. A last line that is cut off is left out.

    Raises:
        DataError: A line is not what a run writes.
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
    """Rows as a pandas DataFrame, indexed by step by default, where pandas is installed; else as they are."""
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
    # When it was written: of a step that was taken twice, that says little.
    row.pop("at", None)
    return row
