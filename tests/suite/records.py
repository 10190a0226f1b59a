"""Recorded durations of tests: `tests/durations.json`, which `python tests/timings --record` writes."""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).parent.parent / "durations.json"

SHORTEST_SECONDS = 0.2
"""Cases that take less are not recorded."""


def read_durations(path: Path = FILE) -> dict[str, tuple[float, float]]:
    """Read (wall seconds, CPU seconds) of each case, by its file under `tests/` and its name; empty if nothing was recorded."""
    if not path.exists():
        return {}
    return {case: (wall, cpu) for case, (wall, cpu) in json.loads(path.read_text(encoding="utf-8")).items()}


def write_durations(measured: Mapping[str, tuple[float, float]], path: Path = FILE) -> None:
    """Write the durations from `SHORTEST_SECONDS` on; cases that were not measured keep theirs."""
    merged = {case: row for case, row in read_durations(path).items() if case not in measured}
    merged |= {case: row for case, row in measured.items() if row[0] >= SHORTEST_SECONDS}
    rows = (f"{json.dumps(case)}: [{wall:.1f}, {cpu:.1f}]" for case, (wall, cpu) in sorted(merged.items()))
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
