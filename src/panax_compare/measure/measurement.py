"""The measurement: columns are checked one after the other, then take turns, then are tried with other
batches."""

import contextlib
import dataclasses
import datetime
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from panax.core.errors import RecipeError
from panax.core.finite_stats import max_finite
from panax.system.host_memory import free_bytes
from panax.system.owned_dir import make_owned_dir, remove_owned_dir

from ..columns import EVERY, Column, find_column, select_columns
from ..environment import MachineLoad, describe_machine, free_device_bytes, has_gpu
from ..results import ColumnResult, Comparison, resume_or_start
from ..workload.compared_work import NUDGED, WORK, ComparedWork, read_work
from ..workload.settings import Settings, check_hardware
from .crew import ColumnError, WorkerGroup

LogFn = Callable[[str], None]

HEADROOM = 1.3
"""A further column stays alive together with the others if this multiple of the largest column's memory is
free."""


class Measurement:
    """A comparison in progress, in its folder."""

    def __init__(
        self, settings: Settings, folder: Path, command: str, say: LogFn, until: dict[str, float] | None = None
    ):
        """Begin a comparison, or resume the one in the folder.

        Args:
            until: Target of a `Race`, as plain values.
        """
        self.settings, self.folder, self.say, self._until = settings, folder, say, until
        self.columns = select_columns(settings.columns)
        check_hardware(settings.precision, has_gpu())
        folder.mkdir(parents=True, exist_ok=True)
        self.comparison: Comparison = resume_or_start(
            folder, dataclasses.asdict(settings) | ({} if until is None else {"until": until})
        )
        self.comparison.command = command
        self.comparison.started = self.comparison.started or datetime.datetime.now().astimezone().isoformat(
            timespec="seconds"
        )
        self.comparison.environment = describe_machine()
        self._alive: dict[str, WorkerGroup] = {}

    def run(self) -> Comparison:
        """Measure everything that is not measured yet. Finished parts are in the folder, also after an error or
        a signal."""
        self.comparison.sessions += 1
        try:
            self._checked()
            for number in range(self.settings.rounds):
                self._round(number)
            if self.settings.probes:
                self._probe()
            for column in self._with_state("pending"):
                self.result(column).state = "measured"
            self.comparison.complete = True
        finally:
            for crew in self._alive.values():
                crew.close()
            if self.comparison.columns:
                self._save()
        remove_owned_dir(self.folder / "work")
        return self.comparison

    def _checked(self) -> None:
        """Create the work, list the columns, and take the first steps of each column that can run."""
        self._list(self._work())
        for column in self._to_check():
            with self._recorded(column):
                self._check(column)
        self._nudge()

    def result(self, column: Column) -> ColumnResult:
        """Return the results of a column so far."""
        return self.comparison.columns[column.name]

    def _save(self) -> None:
        self.comparison.save(self.folder)

    def _work(self) -> ComparedWork:
        self.say("making the weights and batches")
        work = make_fixtures(self.settings, self.folder, self._until)
        kept = ("title", "family", "unit", "units_per_step", "flops_per_step", "parameters", "recipe")
        self.comparison.work = {name: getattr(work, name) for name in kept}
        self.comparison.work["optimizer"] = dataclasses.asdict(work.optimizer)
        self.say(work.title)
        return work

    def _list(self, work: ComparedWork) -> None:
        """Create an entry for each column; those that can't run have the reason."""
        for column in self.columns:
            entry = self.comparison.columns.setdefault(column.name, ColumnResult(column.name, column.title))
            entry.framework, entry.install = column.framework, column.install
            entry.processes, entry.layout = column.processes, column.layout
            missing = column.missing()
            if work.family not in column.families:
                entry.state, entry.reason = "impossible", column.unavailable_reason
            elif missing:
                entry.state, entry.reason = "absent", f"{', '.join(missing)} is not installed; run: {column.install}"
            elif entry.state in ("absent", "impossible", "failed") or len(entry.turns) < self.settings.rounds:
                entry.state = "pending"
            if entry.state in ("absent", "impossible"):
                self.say(f"{column.title}: {entry.state}: {entry.reason}")
        order = [column.name for column in EVERY]
        self.comparison.columns = dict(sorted(self.comparison.columns.items(), key=lambda item: order.index(item[0])))
        self._save()

    def _with_state(self, state: str) -> list[Column]:
        return [column for column in self.columns if self.result(column).state == state]

    def _to_check(self) -> list[Column]:
        return [column for column in self._with_state("pending") if not self.result(column).losses]

    @contextlib.contextmanager
    def _recorded(self, column: Column) -> Iterator[None]:
        """Record a column that fails in the context as failed; the others continue."""
        try:
            yield
        except ColumnError as error:
            entry = self.result(column)
            entry.state, entry.reason = "failed", str(error)
            self.say(f"{column.title}: failed: {error}")
            if column.name in self._alive:
                self._alive.pop(column.name).close()
        self._save()

    def _start(self, column: Column, work: str = "work") -> WorkerGroup:
        """Start a column's processes and prepare them; the caller closes them, or keeps them alive."""
        crew = WorkerGroup.of(column, self.folder)
        try:
            entry = self.result(column)
            about = crew.ask("prepare", column=column.name, folder=str(self.folder / work))
            entry.device, entry.versions, entry.notes = about["device"], about["versions"], about["notes"]
            crew.tracing_seconds = about["tracing_seconds"]
        except BaseException:
            crew.close()
            raise
        return crew

    def _check(self, column: Column) -> None:
        """Record the first losses, the time to the first step and the memory, while all other columns are
        idle."""
        entry = self.result(column)
        crew = self._start(column)
        self._alive[column.name] = crew
        reply = crew.ask("losses", steps=self.settings.checked_steps)
        entry.losses, entry.checked_seconds = reply["losses"], reply["seconds"]
        entry.first_step_seconds = reply["first_at"] - crew.started_at
        usual = statistics.median(reply["seconds"][1:] or reply["seconds"])
        entry.compile_seconds = crew.tracing_seconds + max(0.0, reply["seconds"][0] - usual)
        memory = crew.ask("memory")
        entry.peak_of = "process" if memory["device_bytes"] is None else "device"
        entry.peak_bytes = memory["device_bytes"] or memory["resident_bytes"]
        rates = crew.ask("product")
        entry.product, entry.registers = rates["flops_per_second"], rates["registers"]
        self.say(
            f"{column.title}: first step after {entry.first_step_seconds:.1f} s, losses "
            f"{', '.join(f'{loss:.5f}' for loss in entry.losses)}, {usual:.3f} s a step"
        )
        if not self.comparison.reference:
            self.comparison.reference = column.name
        self._keep_or_close(column, memory["resident_bytes"])

    def _keep_or_close(self, column: Column, resident_bytes: int) -> None:
        """Keep the processes of all columns alive while memory suffices, otherwise of none: each column is then
        restarted for every turn."""

        def largest(kind: str) -> int:
            peaks = (entry.peak_bytes or 0 for entry in self.comparison.columns.values() if entry.peak_of == kind)
            return max_finite(peaks, default=0)

        fits = free_bytes() >= HEADROOM * max(resident_bytes, largest("process"))
        if self.result(column).peak_of == "device":
            fits = fits and free_device_bytes() >= HEADROOM * largest("device")
        if not self.comparison.one_at_a_time and not fits:
            self.comparison.one_at_a_time = True
            self.say("memory does not suffice for all columns at once: each is restarted for every turn")
        if self.comparison.one_at_a_time:
            self._close_all()

    def _close_all(self) -> None:
        for name in list(self._alive):
            self._alive.pop(name).close()

    def _nudge(self) -> None:
        """Measure how far a rounding of the weights alone moves the reference's losses."""
        checked = [entry for entry in self.comparison.columns.values() if entry.losses]
        if self.comparison.nudged or len(checked) < 2:
            return
        column = find_column(self.comparison.reference)
        self.say(f"{column.title} once more, from weights that differ by a rounding")
        try:
            with self._start(column, "work/nudged") as crew:
                self.comparison.nudged = crew.ask("losses", steps=self.settings.checked_steps)["losses"]
        except ColumnError as error:
            self.say(f"that failed, and the tolerance is of one step's roundings alone: {error}")
        self._save()

    @contextlib.contextmanager
    def _running(self, column: Column) -> Iterator[WorkerGroup]:
        """Yield the column's processes, started and compiled if they are not alive."""
        if column.name in self._alive:
            yield self._alive[column.name]
            return
        crew = self._start(column)
        if self.comparison.one_at_a_time:
            with crew:
                crew.ask("losses", steps=1)
                yield crew
            return
        self._alive[column.name] = crew
        crew.ask("losses", steps=1)
        yield crew

    def _round(self, number: int) -> None:
        """Run one turn of each column that has not had it; each round begins with a different column."""
        waiting = self._with_state("pending")
        shift = number % max(len(waiting), 1)
        for column in (*waiting[shift:], *waiting[:shift]):
            entry = self.result(column)
            if len(entry.turns) > number:
                continue
            with self._recorded(column), self._running(column) as crew:
                load, cpu_before = MachineLoad(), crew.cpu_seconds()
                reply = crew.ask("time_steps", steps=self.settings.steps)
                others = load.others(crew.cpu_seconds() - cpu_before)
                turn = {name: reply[name] for name in ("seconds", "cpu_seconds", "loss")}
                entry.turns.append({**turn, "others": others, "load": os.getloadavg()[0], "round": number})
                if "sent_bytes" in reply:
                    each = reply.get("all", [reply])
                    entry.sent_bytes = [answer["sent_bytes"] for answer in each]
        seconds = ", ".join(
            f"{column.title} {self.result(column).turns[-1]['seconds']:.3f}"
            for column in waiting
            if self.result(column).turns
        )
        if seconds:
            self.say(f"round {number + 1} of {self.settings.rounds}: {seconds} s a step")

    def _probe(self) -> None:
        for column in self._with_state("pending"):
            if self.result(column).probe:
                continue
            entry = self.result(column)
            try:
                with self._running(column) as crew:
                    entry.probe = crew.ask("probe")
            except ColumnError as error:
                # It was measured anyway.
                entry.probe = {"failed": str(error)}
            self._save()


def make_fixtures(settings: Settings, folder: Path, until: dict[str, float] | None = None) -> ComparedWork:
    """Create the weights and batches, in the folder's `work`; those of an interrupted comparison are reused.

    Args:
        until: Target of the training; the batches are then the recipe's.

    Raises:
        RecipeError: The weights or batches can't be created.
    """
    place = folder / "work"
    if not (place / NUDGED / WORK).is_file():
        remove_owned_dir(place)
        try:
            make_owned_dir(place)
        except OSError as error:
            raise RecipeError(f"{error}; choose another --directory") from error
        with WorkerGroup("make", folder) as crew:
            try:
                steps = {} if until is None else {"stream_steps": int(until["steps"])}
                crew.ask("make", settings=dataclasses.asdict(settings), folder=str(place), **steps)
            except ColumnError as error:
                raise RecipeError(str(error).removeprefix("RecipeError: ")) from None
    return read_work(place)


def measure(settings: Settings, folder: Path, command: str, say: LogFn) -> Comparison:
    """Run a comparison to its end.

    Raises:
        PanaxError: The comparison can't begin.
    """
    measurement = Measurement(settings, folder, command, say)
    if measurement.comparison.complete and not _more(measurement):
        say(f"all of this was measured already, in {folder}; the report is rewritten")
        return measurement.comparison
    measurement.comparison.complete = False
    return measurement.run()


def _more(measurement: Measurement) -> bool:
    """Return True if something is left to measure."""
    entries = measurement.comparison.columns
    return any(
        column.name not in entries
        or (entries[column.name].state == "absent" and not column.missing())
        or (entries[column.name].state == "measured" and len(entries[column.name].turns) < measurement.settings.rounds)
        for column in measurement.columns
    )
