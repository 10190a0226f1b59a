"""What a person sees while training: one line that moves, and one line for each report."""

import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .throughput import Peak
from .trackers import Tracker

_PER_SECOND = "_per_second"


def plain_console() -> Console:
    """A console that takes no text for markup or emoji, whatever brackets a path has; what is styled is said by `style=`."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


def shown(console: Console | None = None) -> tuple[Callable[[str], None], Tracker]:
    """(what takes a run's notes, what shows its progress): a bar in a terminal, a line that changes in a notebook, else lines."""
    console = console or plain_console()
    if console.is_jupyter:
        return print, NotebookTracker()

    def say(line: str) -> None:
        console.print(line, style="yellow" if line.startswith("warning: ") else "dim")

    return say, ConsoleTracker(console)


class ConsoleTracker(Tracker):
    """Prints reports above a progress bar with the time that is left; plain lines where there is no terminal."""

    def __init__(self, console: Console):
        self.console = console
        self._progress: Progress | None = None

    def begin(self, first_step: int, num_steps: int, peak: Peak) -> None:
        self.num_steps = num_steps
        self._start = time.perf_counter()
        self._first = first_step
        self.console.print(f"MFU divides by {peak.source}", style="dim", markup=False, highlight=False)
        console = self.console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=num_steps, completed=first_step)
        self._progress.start()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)
        line = self._evaluation(values) if "evaluation/loss" in values else self._training(step, values)
        self.console.print(f"[bold]{step:>6}[/]/{self.num_steps}  {line}", markup=True, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _evaluation(self, values: Mapping[str, float]) -> str:
        which = " of averaged parameters" if "evaluation/ema_decay" in values else ""
        parts = [f"[green]held-out loss{which} {values['evaluation/loss']:.4f}[/]"]
        if "evaluation/bits_per_byte" in values:
            parts.append(f"{values['evaluation/bits_per_byte']:.3f} bits/byte")
        if "evaluation/accuracy" in values:
            parts.append(f"accuracy {values['evaluation/accuracy']:.1%}")
        return "  ".join(parts)

    def _training(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"loss {values['train/loss']:.4f}"]
        if "train/accuracy" in values:
            parts.append(f"acc {values['train/accuracy']:.1%}")
        for name, value in values.items():
            if name.startswith("speed/") and name.endswith(_PER_SECOND):
                unit = name.removeprefix("speed/").removesuffix(_PER_SECOND)
                parts.append(f"{value:,.0f} {'tok' if unit == 'tokens' else escape(unit)}/s")
        if "speed/mfu" in values:
            parts.append(f"MFU {values['speed/mfu']:.1%}")
        parts.append(f"{values['memory/bytes'] / 2**30:.2f} GiB")
        step_ms, stall, dispatch, device = (
            values.get(f"seconds/{name}", 0.0) * 1e3 for name in ("step", "data_stall", "dispatch", "device")
        )
        parts.append(f"step {step_ms:.0f} ms (data {stall:.0f}, dispatch {dispatch:.0f}, device {device:.0f})")
        left = self._seconds_left(step)
        if left is not None:
            parts.append(f"ETA {left // 60:.0f}:{left % 60:02.0f}")
        if "experts/load_max" in values:
            parts.append(f"expert load {values['experts/load_min']:.2f} to {values['experts/load_max']:.2f}")
        if values.get("experts/dropped"):
            parts.append(f"[yellow]{values['experts/dropped']:.1%} dropped[/]")
        if values.get("train/skipped"):
            parts.append(f"[red]{values['train/skipped']:.0f} skipped[/]")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        if step <= self._first:
            return None
        return (time.perf_counter() - self._start) / (step - self._first) * (self.num_steps - step)


class NotebookTracker(ConsoleTracker):
    """One line that changes as training goes on; an evaluation's stays."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self._written = 0

    def record(self, step: int, values: Mapping[str, float]) -> None:
        judged = "evaluation/loss" in values
        line = Text.from_markup(self._evaluation(values) if judged else self._training(step, values)).plain
        line = f"{step:>6}/{self.num_steps}  {line}"
        # Over what stood there, which may have been longer.
        sys.stdout.write("\r" + line.ljust(self._written) + ("\n" if judged else ""))
        sys.stdout.flush()
        self._written = 0 if judged else len(line)

    def close(self) -> None:
        super().close()
        if self._written:
            sys.stdout.write("\n")
            sys.stdout.flush()
