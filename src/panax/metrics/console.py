"""Terminal output of training: a progress line, and one line for each report."""

import sys
import textwrap
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..core.sanitize import make_printable
from .throughput import Peak
from .trackers import Tracker

_PER_SECOND = "_per_second"

_WORTH_SAYING = 0.1
"""Share of a step's time from which a part is shown separately."""


def plain_console() -> Console:
    """Return a console that does not interpret markup or emoji, whatever brackets a path has; styles are
    given by `style=`."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


WIDTH = 80
"""Columns of the output: every line that can be broken fits them, and so does a report of a step unless a
terminal is wider."""


def wrap_line(line: str, indent: int = 2) -> str:
    """Break a line between words into lines of at most 80 columns; names and paths are not broken.

    >>> print(wrap_line("note " + "word " * 16, 5))
    note word word word word word word word word word word word word word word word
         word
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(part) for part in line.split("\n"))


def open_console(console: Console | None = None) -> tuple[Callable[[str], None], Tracker]:
    """Return (function for a run's notes, tracker for its progress): a bar in a terminal, a changing line in
    a notebook, else lines."""
    console = console or plain_console()
    if console.is_jupyter:
        return print, NotebookTracker()

    def say(line: str) -> None:
        # Styled as text: `style=` would also apply to the bar, until it is drawn again.
        console.print(Text(wrap_line(make_printable(line)), style="yellow" if line.startswith("warning: ") else "dim"))

    return say, ConsoleTracker(console)


class ConsoleTracker(Tracker):
    """Printer of reports above a progress bar with the remaining time; plain lines without a terminal."""

    def __init__(self, console: Console):
        self.console = console
        self.width = max(WIDTH, console.width) if console.is_terminal else WIDTH
        self._progress: Progress | None = None

    def begin(self, first_step: int, num_steps: int, peak: Peak | None) -> None:
        self.num_steps = num_steps
        self._start = time.perf_counter()
        self._first = first_step
        if peak is not None:
            self.console.print(wrap_line(f"MFU divides by {peak.source}"), style="dim", markup=False, highlight=False)
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
        line = self._line(step, values)
        if line:
            head = f"[bold]{step:>6}[/]/{self.num_steps}  "
            self.console.print(head + line, markup=True, highlight=False, soft_wrap=True)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        """Format the line of a report; empty for values that a hook logs."""
        if "evaluation/loss" in values:
            return self._evaluation(values)
        return self._training(step, values) if "memory/bytes" in values else ""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _evaluation(self, values: Mapping[str, float]) -> str:
        which = " of averaged parameters" if {"evaluation/ema_decay", "evaluation/averaged"} & values.keys() else ""
        parts = [f"[green]held-out loss{which} {values['evaluation/loss']:.4f}[/]"]
        if "evaluation/reward" in values:
            parts = [f"[green]held-out reward{which} {values['evaluation/reward']:.4f}[/]"]
        if "evaluation/return" in values:
            parts = [f"[green]return{which} {values['evaluation/return']:.1f}[/]"]
            if "evaluation/return_ci95" in values:
                parts.append(f"+- {values['evaluation/return_ci95']:.1f}")
            parts.append(f"{values.get('evaluation/episodes', 0):.0f} episodes")
        if "evaluation/bits_per_byte" in values:
            parts.append(f"{values['evaluation/bits_per_byte']:.3f} bits/byte")
        if "evaluation/accuracy" in values:
            parts.append(f"accuracy {values['evaluation/accuracy']:.1%}")
        for name in ("auc", "ndcg@10", "hit_rate@10"):
            if f"evaluation/{name}" in values:
                parts.append(f"{name} {values[f'evaluation/{name}']:.4f}")
        return "  ".join(parts)

    def _training(self, step: int, values: Mapping[str, float]) -> str:
        """Return the parts that fit the line, chosen by rank, in order of display."""
        parts: list[tuple[int, str]] = []
        for rank, name, form in ((0, "loss", "loss {:.4f}"), (3, "accuracy", "acc {:.1%}")):
            if f"train/{name}" in values:
                parts.append((rank, form.format(values[f"train/{name}"])))
        if "rollout/reward" in values:
            parts.append((0, f"reward {values['rollout/reward']:.3f}"))
        if "train/episode_return" in values:
            parts.append((0, f"return {values['train/episode_return']:.1f}"))
        for name, value in values.items():
            if name.startswith("speed/") and name.endswith(_PER_SECOND):
                unit = name.removeprefix("speed/").removesuffix(_PER_SECOND)
                parts.append((2, f"{value:,.0f} {'tok' if unit == 'tokens' else escape(unit)}/s"))
        if "speed/mfu" in values:
            parts.append((4, f"MFU {values['speed/mfu']:.1%}"))
        parts.append((7, f"{values['memory/bytes'] / 2**30:.2f} GiB"))
        seconds = values.get("seconds/step", 0.0)
        if seconds:
            parts.append((6, f"{seconds * 1e3:.0f} ms/step"))
        for name, called in (
            ("data_stall", "data"), ("hooks", "hooks"), ("save", "saving"), ("rollout", "drawing"),
        ):  # fmt: skip
            share = values.get(f"seconds/{name}", 0.0) / seconds if seconds else 0.0
            if share > _WORTH_SAYING:
                parts.append((5, f"[yellow]{share:.0%} {called}[/]"))
        left = self._seconds_left(step)
        if left is not None:
            parts.append((1, f"ETA {left // 60:.0f}:{left % 60:02.0f}"))
        if "experts/load_max" in values:
            parts.append((8, f"expert load {values['experts/load_min']:.2f} to {values['experts/load_max']:.2f}"))
        if values.get("experts/dropped"):
            parts.append((1, f"[yellow]{values['experts/dropped']:.1%} dropped[/]"))
        if values.get("train/skipped"):
            parts.append((1, f"[red]{values['train/skipped']:.0f} skipped[/]"))
        return "  ".join(_fitting(parts, self.width - len(f"{step:>6}/{self.num_steps}  ")))

    def _seconds_left(self, step: int) -> float | None:
        if step <= self._first:
            return None
        return (time.perf_counter() - self._start) / (step - self._first) * (self.num_steps - step)


def _fitting(parts: list[tuple[int, str]], width: int) -> list[str]:
    """Return the parts of the lowest ranks that fit a number of columns, in their order; always at least the
    first one."""
    chosen: list[int] = []
    for place in sorted(range(len(parts)), key=lambda place: parts[place][0]):
        if len(Text.from_markup("  ".join(parts[each][1] for each in sorted([*chosen, place]))).plain) <= width:
            chosen.append(place)
    return [parts[place][1] for place in sorted(chosen) or [0]]


class NotebookTracker(ConsoleTracker):
    """One line that changes during training; an evaluation's remains."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self._written = 0

    def record(self, step: int, values: Mapping[str, float]) -> None:
        judged = "evaluation/loss" in values
        shown = self._line(step, values)
        if not shown:
            return
        line = f"{step:>6}/{self.num_steps}  {Text.from_markup(shown).plain}"
        # Overwrites the previous line, which may have been longer.
        sys.stdout.write("\r" + line.ljust(self._written) + ("\n" if judged else ""))
        sys.stdout.flush()
        self._written = 0 if judged else len(line)

    def close(self) -> None:
        super().close()
        if self._written:
            sys.stdout.write("\n")
            sys.stdout.flush()
