"""Terminal view of a running job: its first process's output, events, and one line of status."""

import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from io import TextIOBase

from ...system.outlet import Outlet
from .attempt import JobAttempt, read_number
from .diagnosis import Cause, Diagnosis
from .job_folder import Incident

QUIET_SECONDS = 30.0
"""Seconds between status lines, if the output is not a terminal."""

ERROR = "panax: error: "
"""Prefix of a command's last message."""

AS_SAID = "as shown above"

TAIL_LINES = 8
COLUMNS = 80

LAST_LINES = 2000
"""Number of the first process's lines that are remembered: the findings of a hardware check on many hosts."""

NOISE = (
    "[Gloo] Rank ",
    "preemption_notifier.cc",
    "All log messages before absl::InitializeLog()",
    "cudart_stub.cc",
)
"""Fragments of lines by C libraries without any use for users; they remain in the process's log."""


class View:
    """Lines on a terminal, with a last one that changes; or in a file, with a status line at intervals."""

    def __init__(self, num_steps: int, *, quiet: bool = False, out: TextIOBase | None = None):
        self._num_steps, self._quiet = num_steps, quiet
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._outlet = Outlet(self._out)  # pyright: ignore[reportArgumentType]
        self._shown_at = time.monotonic()
        self._status = ""
        self._error_lines: deque[str] = deque(maxlen=LAST_LINES)

    def lines(self, lines: Sequence[str]) -> None:
        """Show the first process's output, as `panax train` would show it here."""
        if not self._quiet:
            visible = [line for line in lines if not any(part in line for part in NOISE)]
            self._error_lines.extend(line.strip() for line in visible if line.startswith((ERROR, "  ")))
            self._print(*visible)

    def has_shown(self, message: str) -> bool:
        """Return True if the first process has shown all lines of an error, regardless of how the first line begins."""
        first, *following = message.splitlines() or [""]
        error_lines = [line.removeprefix(ERROR) for line in self._error_lines]
        return any(line and first.endswith(line) for line in error_lines) and all(
            line.strip() in self._error_lines for line in following
        )

    def say(self, line: str) -> None:
        """Show an event of the job."""
        if not self._quiet:
            # Paths are not broken, so that they can be copied.
            how = {"subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}
            self._print(*textwrap.wrap(f"launch: {line}", COLUMNS, **how))

    def status(self, attempt: JobAttempt, goodput: float | None, state: str) -> None:
        """Show the job's current status."""
        if self._quiet:
            return
        self._status = status_line(attempt, goodput, state, self._num_steps)
        if self._terminal:
            self._write(self._status_text())
        elif time.monotonic() - self._shown_at >= QUIET_SECONDS:
            self._shown_at = time.monotonic()
            self._print(f"launch: {self._status}")

    def first_step(self, attempt: JobAttempt) -> None:
        """Show that the first step since a start or restart has been taken, and where the time went."""
        parts = attempt.breakdown()
        listed = ", ".join(f"{name} {took:.1f}" for name, took in parts.items())
        self.say(f"{len(attempt.workers)} processes; first step after {sum(parts.values()):.1f} s ({listed})")

    def failure(self, diagnosis: Diagnosis, step: int) -> None:
        """Show a failure of the job."""
        if diagnosis.cause is Cause.CHECK:
            # A list of findings: it is shown once, by the first process or at the end.
            return
        after = f" after step {step}" if step >= 0 else " before the first step"
        message = AS_SAID if self.has_shown(diagnosis.message) else diagnosis.message
        self.say(f"{diagnosis.cause.value}{after}: {message}")

    def recovered(self, incident: Incident) -> None:
        """Show that the job has taken a step again."""
        names = ("detect", "teardown", "restart", "restore", "first_step")
        parts = ((name.replace("_", " "), getattr(incident, name)) for name in names)
        times = ", ".join(f"{name} {took:.1f}" for name, took in parts if took is not None)
        self.say(f"trains again; seconds: {times}")

    def end(self, code: int, message: str, diagnosis: Diagnosis | None, restarts: int) -> None:
        """Show that the job has ended: why, and what to do."""
        self._status = ""
        if self._terminal and not self._quiet:
            self._write("\r\x1b[K")
        if diagnosis is not None and not self._quiet:
            # An error that a worker has reported is the message; its lines would repeat it.
            is_repeated = any(diagnosis.message.rpartition(": ")[2] in line for line in diagnosis.tail)
            last = [] if is_repeated else [f"  | {line}" for line in list(diagnosis.tail)[-TAIL_LINES:]]
            self._print(*([f"last lines of process {diagnosis.process}:", *last] if last else []))
        if code == 0:
            self.say(message + (f", after {restarts} restarts" if restarts else ""))
        self._outlet.close()

    def _print(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self._write(f"\r\x1b[K{text}{self._status_text()}" if self._terminal else text)

    def _status_text(self) -> str:
        columns = shutil.get_terminal_size().columns
        return f"\r\x1b[K{self._status[: columns - 1]}" if self._status else ""

    def _write(self, text: str) -> None:
        # A terminal that has gone, or is not read, blocks nothing: the job and its log continue.
        self._outlet.write(text)


def status_line(attempt: JobAttempt, goodput: float | None, state: str, num_steps: int) -> str:
    """Format one line on a job: step, loss, speed, goodput, the slowest host.

    In a synchronous step all processes take equally long; the slowest is the one that waits longest for its
    own data.
    """
    values = attempt.values
    parts = [state]
    if attempt.step >= 0:
        parts.append(f"step {attempt.step:,} of {num_steps:,}")
    else:
        phases = sorted({worker.phase for worker in attempt.workers})
        parts.append(f"phase {'/'.join(phases)}")
    for name, form in (
        ("train/loss", "loss {:.4f}"),
        ("speed/tokens_per_second", "{:,.0f} tokens/s"),
        ("speed/examples_per_second", "{:,.0f} examples/s"),
        ("speed/mfu", "MFU {:.1%}"),
    ):
        if name in values and not (name.endswith("examples_per_second") and "speed/tokens_per_second" in values):
            parts.append(form.format(values[name]))
    if goodput is not None:
        parts.append(f"goodput {goodput:.0%}")
    waits = [(read_number(worker.facts, "data_wait", 0.0), worker.host) for worker in attempt.workers]
    longest, host = max(waits)
    if longest >= 0.05:
        parts.append(f"slowest {host} ({longest:.0%} waiting for data)")
    return " | ".join(parts)
