"""Folders as runs leave them, for the tests of reports."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]], cut: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut, encoding="utf-8")


def write_metrics(folder: Path, steps: int = 40, **values: float) -> None:
    """A loss that falls, a line a step, an evaluation each tenth one, and a last line that is cut short."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = None if step == 7 else 5.0 / step
        speed = {"seconds/step": 0.5, "speed/tokens_per_second": 1000.0 + step, "speed/mfu": 0.4}
        rows.append(
            {"step": step, "train/loss": loss, "train/learning_rate": 1e-3, "memory/bytes": 2**30, **speed, **values}
        )
        if step % 10 == 0:
            rows.append({"step": step, "evaluation/loss": 5.5 / step, "evaluation/accuracy": step / 100})
    write_lines(folder / "metrics.jsonl", rows, '{"step": 41, "train/lo')


def interval(
    session: int, since: float, until: float, step: int | None, kind: str = "training", **more: Any
) -> dict[str, Any]:
    """A line of the ledger of time, in seconds since the run began."""
    lasted = {"seconds": {kind: float(until - since)}}
    return {"session": session, "from": BEGAN + since, "to": BEGAN + until, "step": step, **lasted, **more}


def session(number: int, at: float, devices: int = 4, **more: Any) -> dict[str, Any]:
    """A line of `sessions.jsonl`."""
    return {
        "session": number, "at": BEGAN + at, "run_id": "r1", "name": "tiny",
        "command": ["panax", "train", "quickstart", "--optimizer.schedule.peak", "3e-3"],
        "settings": {"type": "Experiment", "seed": 5, "optimizer": {"type": "AdamW", "schedule": {"type": "S", "peak": 3e-3}}},
        "mesh": {"fsdp": devices}, "devices": {"count": devices, "kind": "H100", "platform": "gpu"}, "processes": 1,
        "hosts": ["a"], "versions": {"panax": "0.1.1", "jax": "0.10.2"}, "python": "3.11.7", "system": "Linux",
        "processor": "EPYC", "git": {"commit": "abc123", "dirty": True}, "parameters": 12345, "num_steps": 40,
        "layout": ["params.w  embed -> fsdp"], **more,
    }  # fmt: skip


def write_failed_twice(folder: Path) -> None:
    """A run of three sessions: a supervisor saw the first one fail, the second one died silently, and the third one is done.

    In seconds: 0 to 10 start, to 30 training (steps 1 to 20); restart to 40, counted by the next session; training to 55
    (steps 16 to 30); restart to 65.5; training to 80 (steps 26 to 40).
    """
    write_metrics(folder)
    ledger = [
        interval(1, 0, 10, 0, "start"),
        interval(1, 10, 25, 15, joules=3.6e6, joules_of="4 GPUs"),
        interval(1, 25, 30, 20),
        interval(2, 30, 35, None, "restart", gap="restart"),
        interval(2, 35, 40, 15, "restart"),
        interval(2, 40, 50, 25),
        interval(2, 50, 55, 30),
        interval(3, 65, 65.5, 25, "restart", gap="restart"),
        interval(3, 65.5, 80, 40, end="done"),
    ]
    write_lines(folder / "goodput.jsonl", ledger)
    write_lines(folder / "sessions.jsonl", [session(1, 0), session(2, 35, 2), session(3, 65)])
    incident = {
        "attempt": 1, "at": BEGAN + 31, "step": 20, "cause": "lost host", "message": "host b <is> gone", "process": 1,
        "tail": ["one", "</code><script>bad()</script>"], "detect": None, "teardown": None,
    }  # fmt: skip
    known = {"detect": 1.0, "teardown": 2.0, "restart": 3.0, "restore": 4.0, "first_step": 5.0}
    write_lines(folder / "job/incidents.jsonl", [incident, {**incident, **known}])
    write_lines(folder / "job/job.json", [{"name": "tiny", "command": "panax train quickstart", "engine": "local"}])
