"""Account of how often documents were seen: a file in the run's folder, and a line of text per part."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core import Position, Source
from ...data import Accounting
from ...system.replacement import replace_json

DATA_USAGE_FILE = "data_account.json"


def epoch_metrics(source: Source, position: Position) -> dict[str, float]:
    """Return the epochs up to `position` as metrics, in total and by part of a mixture; empty if the source
    doesn't count them."""
    if not isinstance(source, Accounting):
        return {}
    return {f"data/epochs/{name}" if name else "data/epochs": n for name, n in source.epochs(position).items()}


def summarize_data_usage(source: Source, position: Position) -> dict[str, dict[str, Any]]:
    """Return, by part: epochs, documents, and how often they were seen; empty if the source doesn't count."""
    if not isinstance(source, Accounting):
        return {}
    return {
        name: {
            "epochs": seen.epochs,
            "documents": len(seen.times),
            "times_seen": {
                "least": int(seen.times.min()),
                "most": int(seen.times.max()),
                "mean": float(seen.times.mean()),
            },
            "documents_by_times_seen": {
                str(times): int(count) for times, count in zip(*np.unique(seen.times, return_counts=True), strict=True)
            },
        }
        for name, seen in source.count_documents(position).items()
    }


def write_data_usage(folder: Path, step: int, parts: Mapping[str, Any]) -> None:
    """Write the account of the first `step` steps to `data_account.json` in the run's folder."""
    replace_json(folder / DATA_USAGE_FILE, {"step": step, "parts": parts})


def format_data_usage(parts: Mapping[str, Any]) -> Iterator[str]:
    """Format the account as text, one line for each part."""
    for name, part in parts.items():
        seen, documents = part["times_seen"], f"of the {part['documents']:,} documents was seen to its end"
        yield (
            f"data{f' of part {name!r}' if name else ''}: {part['epochs']:.2f} epochs; "
            + (f"each {documents} {_times(seen)}" if seen["most"] else f"none {documents} yet")
        )


def _times(times: Mapping[str, Any]) -> str:
    """Format how often documents were seen.

    >>> _times({"least": 1, "most": 1, "mean": 1.0}), _times({"least": 6, "most": 7, "mean": 6.84})
    ('once', '6 to 7 times, 6.84 on average')
    """
    least, most = times["least"], times["most"]
    if least == most:
        return "once" if most == 1 else f"{most} times"
    return f"{least} to {most} times, {times['mean']:.2f} on average"
