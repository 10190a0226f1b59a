"""The parent's side of a column: its process, or several that step together, and their answers."""

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from panax.core.finite_stats import max_finite
from panax.system import json_reader
from panax.system.allocator import huge_page_environment
from panax.system.signals import signal_name

from ..columns import Column
from .job import ColumnJob, find_free_port

WORKER = ("-m", "panax.cli.commands.compare", "--worker")


class ColumnError(Exception):
    """A column's process failed; the comparison continues without it."""


class WorkerGroup:
    """The processes of one column.

    Each is in a separate session, so that Ctrl-C only reaches the comparison, which then ends them.

    Attributes:
        started_at: `time.monotonic()` just before the first process was started; one clock for all processes.
        tracing_seconds: Time that the column reported for tracing before its first step.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        processes: int = 1,
        devices: int = 1,
        is_panax: bool = False,
        python: str = sys.executable,
    ):
        """Start the processes.

        Args:
            folder: Folder for the output of the processes.
            is_panax: True if Panax runs the step: the process sets its allocator as `panax train` does.
            python: The interpreter.
        """
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started_at = time.monotonic()
        self.tracing_seconds = 0.0
        self._processes: list[subprocess.Popen[str]] = []
        port = find_free_port() if processes > 1 else 0
        for rank in range(processes):
            environment = {
                **os.environ,
                # Several columns share an accelerator: none may allocate all of its memory at start.
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "HF_HUB_OFFLINE": "1",
                "PANAX_COMPARE_OWN": "1" if is_panax else "",
                **(huge_page_environment() if is_panax else {}),
                **ColumnJob.environment(rank, processes, port, devices),
            }
            if python != sys.executable:
                environment["PYTHONPATH"] = str(link_packages(folder))
            with open(self.log, "a", encoding="utf-8") as log:
                self._processes.append(
                    subprocess.Popen(
                        (python, *WORKER),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )

    @classmethod
    def of(cls, column: Column, folder: Path) -> "WorkerGroup":
        """Start a column's processes."""
        python = os.environ.get(column.python, sys.executable) if column.python else sys.executable
        return cls(column.name, folder, column.processes, column.devices, column.is_panax, python)

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send a command, and return the first process's answer; if there are several processes, `all` has
        every answer.

        Raises:
            ColumnError: A process failed or ended.
        """
        line = json.dumps({"do": what, **arguments}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise ColumnError(self._ended(process)) from None
        answers = [self._answer(process) for process in self._processes]
        for answer in answers:
            if "error" in answer:
                raise ColumnError(answer["error"])
        return answers[0] if len(answers) == 1 else {**answers[0], **_combine_answers(answers), "all": answers}

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ColumnError(self._ended(process))
        return json_reader.parse(line, constants=True)

    def _ended(self, process: subprocess.Popen[str]) -> str:
        code = process.wait()
        tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        if code == -signal.SIGKILL:
            return "its process was killed (signal 9), as the kernel does when memory runs out"
        cause = f"by {signal_name(-code)}" if code < 0 else f"with code {code}"
        return f"its process ended {cause}: {' '.join(tail)[:300]}"

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all processes of the column have used so far."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(process.pid).cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End the processes; their state is no longer needed."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # Unread output is lost with its reader.
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def link_packages(folder: Path) -> Path:
    """Create a folder in which another interpreter finds this Panax, and nothing else of this environment."""
    place = folder / "packages"
    place.mkdir(exist_ok=True)
    for name in ("panax", "panax_compare"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(Path(spec.origin).parent, target_is_directory=True)
    return place.absolute()


def _combine_answers(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the answers of several processes: each returns the mean loss of its equal share of the rows, or
    of all rows."""
    combined: dict[str, Any] = {}
    if "losses" in answers[0]:
        combined["losses"] = [statistics.fmean(each) for each in zip(*(answer["losses"] for answer in answers))]
        combined["first_at"] = max_finite(answer["first_at"] for answer in answers)
    if "cpu_seconds" in answers[0]:
        combined["loss"] = statistics.fmean(answer["loss"] for answer in answers)
        combined["seconds"] = max_finite(answer["seconds"] for answer in answers)
        combined["cpu_seconds"] = sum(answer["cpu_seconds"] for answer in answers)
    if "held_out" in answers[0]:
        combined["held_out"] = statistics.fmean(answer["held_out"] for answer in answers)
        combined["seconds"] = max_finite(answer["seconds"] for answer in answers)
    if "resident_bytes" in answers[0]:
        combined["resident_bytes"] = max_finite(answer["resident_bytes"] for answer in answers)
    return combined
