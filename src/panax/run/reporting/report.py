"""Reports of a run in progress: scalars a step late, seconds by part, speed, memory, a requested profile."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ...compiling.cache import compilation_stats
from ...core import DataChecks, Position, Task
from ...core.errors import TrainingError
from ...core.monitors import MonitorReport
from ...core.params.logical import Role, axis_for_role
from ...job.agreement import broadcast_text, is_process_zero
from ...job.heartbeat import heartbeat
from ...kernels.registry import TIMED
from ...metrics import (
    BackgroundReporter,
    ConsoleTracker,
    JsonlTracker,
    Peak,
    RunFacts,
    StepClock,
    TensorBoardTracker,
    Tracker,
    Trackers,
    find_peak_flops,
    heat_map,
    memory_in_use_bytes,
)
from ...metrics.ledger import Ledger
from ...system import json_reader
from ...train.update import check_finite_update
from ..folder.description import serialize_config
from ..opened_data import LogFn
from ..parts.run_part import RunPart, RunProgress
from ..preparation import PreparedRun
from ..recovery.skipped_batches import DataProgress, append_rollback_log, format_batch_numbers
from .document_counts import epoch_metrics, format_data_usage, summarize_data_usage, write_data_usage
from .question_scores import QuestionScores
from .session import record_facts
from .step_profiler import StepProfiler
from .step_warnings import describe_skipped_updates, skipped_updates_advice, zero_gradient_warning

SUPERVISED_PREFIXES = ("train/loss", "speed/", "goodput/fraction")
"""Prefixes of the scalars that a supervisor shows while the job runs."""

RECORDS_PER_HEAT_MAP = 5
"""Number of records between two heat maps."""


class DecideRollback(Protocol):
    """Function that is called with the scalars of each step as soon as they are read."""

    def __call__(self, step: int, values: Mapping[str, float], /) -> bool:
        """Return True if the run rolls back, rather than ends, after too many skipped updates."""
        ...


@dataclasses.dataclass(frozen=True)
class ReportTargets:
    """Destinations of a run's reports.

    Attributes:
        say: Called with each message for the user.
        trackers: Trackers after the experiment's own. Each is called by its own thread.
        messages: Reporter of the console's lines, among which a tracker shows progress.
        run_id: Run id for the trackers; a resumed run keeps it.
    """

    say: LogFn
    trackers: tuple[Tracker, ...] = ()
    messages: BackgroundReporter | None = None
    run_id: str = ""


class RunReporter(RunPart):
    """Reports of one run: stores the scalars of the last step until the next one runs, then reads them and
    sends them to trackers.

    Attributes:
        clock: Measures the parts of a step.
        ledger: Accounts for the seconds of the run.
        peak: Peak FLOPs for the model FLOPs utilization; None if the task does not declare its FLOPs.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        first_step: int,
        targets: ReportTargets,
        ledger: Ledger,
        decide_rollback: DecideRollback,
    ):
        """
        Args:
            ledger: Ledger of the session's seconds.
        """
        experiment = prepared.experiment
        folder = Path(prepared.folder)
        self._prepared = prepared
        say = self._say = targets.say
        self._decide_rollback = decide_rollback
        self.ledger = ledger
        named = [
            (str(folder / "metrics.jsonl"), JsonlTracker(folder / "metrics.jsonl")),
            (str(folder / "tensorboard"), TensorBoardTracker(folder / "tensorboard", first_step + 1)),
            *((type(tracker).__name__, tracker) for tracker in (*experiment.trackers, *targets.trackers)),
        ]
        self._lanes: list[BackgroundReporter] = []
        places: list[tuple[Tracker, BackgroundReporter]] = []
        for name, tracker in named if is_process_zero() else []:
            if targets.messages is not None and isinstance(tracker, ConsoleTracker):
                places.append((tracker, targets.messages))
                continue
            lane = BackgroundReporter(name, say, threaded=not experiment.debug, close_seconds=tracker.close_seconds)
            self._lanes.append(lane)
            places.append((tracker, lane))
        self._trackers = Trackers(places)
        self._watch = prepared.task.create_monitor()
        self._pictured = 0
        self._pending: tuple[int, Mapping[str, Any], Position | None] | None = None
        self._latest: dict[str, float] = {}
        self._counted = 0
        self._length: int | None = None
        self._rollout: dict[str, float] = {}
        self._compiled = self._booked = 0.0
        self._kernels_said = 0
        self._profiler = StepProfiler(folder / "tensorboard", experiment.profile, say)
        self._first_told = self._gradient_seen = self._interrupted = False
        self.clock = StepClock()
        self.peak = measure_peak(prepared) if has_flops(prepared.task) else None
        self._trackers.about(RunFacts(experiment.name, targets.run_id, prepared.folder, serialize_config(experiment)))
        self._trackers.begin(first_step, prepared.experiment.num_steps, self.peak)
        record_facts(prepared, targets.run_id, first_step, self._lanes[0] if self._lanes else None)

    def before_step(self, number: int) -> None:
        """Start or end the profile, if it starts or ends at this step."""
        self._profiler.before_step(number, self.flush)

    def after_step(self, run: RunProgress) -> None:
        """Take the scalars of a step, still being computed, and report those of the step before: the devices
        never wait for the loop."""
        compiled, self._compiled = self._compiled, getattr(self._prepared.step, "compile_seconds", 0.0)
        if compiled != self._compiled or self._length is None or self._interrupted:
            # A step that was compiled, or checked, is excluded from all speed figures.
            self._interrupted = False
            self.clock.restart()
            self._counted = 0
            self._report_kernels()
        else:
            self._counted += self._count_units(run.batch)
            self.clock.tick()
        self._length = self._row_length(run.batch)
        with self.clock.measure("device"):
            self.flush()
        self._pending = (run.step, run.scalars, run.position)
        self.ledger.record_step(run.step)

    def _row_length(self, batch: Mapping[str, Any]) -> int:
        """Return the number of positions in a row; 0 if rows have none."""
        rows_of_positions = (axis_for_role(Role.ROWS), axis_for_role(Role.POSITIONS))
        axes = self._prepared.step.batch_axes
        return next((leaf.shape[1] for name, leaf in batch.items() if axes.get(name, ())[:2] == rows_of_positions), 0)

    def _count_units(self, batch: Mapping[str, Any]) -> int:
        rows = next(iter(batch.values())).shape[0]
        return rows * (self._length or self._prepared.task.units_per_row)

    def measure_data_wait(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that books the wait for a batch, except for the time that the devices were
        busy."""
        scalars = {} if self._pending is None else self._pending[1]
        return self.ledger.measure_data_wait(lambda: jax.block_until_ready(scalars))

    def block_until_ready(self) -> None:
        """Wait until the devices are done, since the state is needed; this counts as the step's time."""
        if self._pending is not None:
            jax.block_until_ready(self._pending[1])

    def record_compilation(self) -> None:
        """Move the seconds of tracing and compilation since the last call to "compile" in the ledger."""
        seconds, self._booked = self._booked, getattr(self._prepared.step, "compile_seconds", 0.0)
        if self._booked > seconds:
            self.ledger.reassign(self._booked - seconds, "compile")

    def _report_kernels(self) -> None:
        """Report the kernels used by the programs compiled since the last call."""
        lines = getattr(self._prepared.step, "kernels_used", [])
        for line in lines[self._kernels_said :]:
            # The choice by timing was reported as the run began.
            if not line.endswith(TIMED):
                self._say(line)
        self._kernels_said = len(lines)

    def flush(self) -> None:
        """Wait for the scalars that are pending, and report them.

        Raises:
            TrainingError: Too many updates in a row were skipped.
            DataError: The step found its batch to be invalid.
        """
        if self._pending is None:
            return
        (number, scalars, position), self._pending = self._pending, None
        host_scalars = jax.device_get(dict(scalars))
        if not self._first_told:
            self._first_told = True
            _report_first_step()
        for name in [name for name, value in host_scalars.items() if isinstance(value, DataChecks)]:
            host_scalars.pop(name).raise_if_failed(f"the batch of step {number}")
        values = {name: float(value) for name, value in host_scalars.items() if np.ndim(value) == 0}
        check_finite_update(number, values)
        if not self._gradient_seen:
            self._gradient_seen = True
            if (line := zero_gradient_warning(self._prepared, number, values)) is not None:
                self._say(line)
        if self._watch is not None:
            self._watch.add(host_scalars)
        experiment = self._prepared.experiment
        self._latest.update(_named(values))
        goes_back = self._decide_rollback(number, values)
        if values.get("skipped_in_a_row", 0) >= experiment.step.max_skipped and not goes_back:
            raise TrainingError(
                f"{describe_skipped_updates(number, values)}; {skipped_updates_advice(experiment, values)}"
            )
        if number % experiment.log_every == 0 or number == experiment.num_steps:
            self._record(number, values, position)

    def record_rollback(self, progress: DataProgress) -> None:
        """Report that the run has rolled back; pending scalars of later steps are dropped."""
        rollback, count = progress.rollbacks[-1], len(progress.rollbacks)
        self._pending = None
        if self._watch is not None:
            self._watch.take()
        self.clock.restart()
        self._counted = 0
        alike = sum(each.is_corruption == rollback.is_corruption for each in progress.rollbacks)
        config = self._prepared.experiment.verify if rollback.is_corruption else self._prepared.experiment.rollback
        without = f" and skips {format_batch_numbers(rollback.batches)}" if rollback.batches else ""
        self._say(
            f"{rollback.why}: the run returns to step {rollback.to} ({rollback.source}){without}; rollback {alike} of at most "
            f"{config.max_rollbacks}"
        )
        values = {"rollback/count": float(count), "rollback/batches_left_out": float(len(progress.skipped_batches))}
        self._latest.update(values)
        self._trackers.record(rollback.to, values)
        if is_process_zero():
            self._lanes[0].put(append_rollback_log, Path(self._prepared.folder), progress.rollbacks)

    def record_verification(self, number: int, seconds: float) -> None:
        """Report that step `number` was checked on other devices, and the seconds that this took, which do not
        count as the steps' time."""
        values = {"verify/seconds": seconds}
        self._latest.update(values)
        self._trackers.record(number, values)
        self._interrupted = True

    def record_evaluation(self, number: int, values: Mapping[str, float]) -> None:
        """Report an evaluation; its time is not counted as the steps'."""
        self._record_between_steps(number, {f"evaluation/{name}": value for name, value in values.items()})

    def record_question_scores(self, number: int, scores: QuestionScores) -> None:
        """Report scores on questions, and write them to a file; their time is not counted as the steps'."""
        self._record_between_steps(number, {f"questions/{name}": value for name, value in scores.values().items()})
        for line in scores.lines():
            self._say(f"step {number}: {line}")
        if is_process_zero():
            self._lanes[0].put(scores.write, Path(self._prepared.folder), number)

    def record_rollout(self, number: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Report a rollout: its figures with those of the steps that learn from it, and texts for users to read.

        Args:
            number: The first step that learns from it.
        """
        self._rollout = {f"rollout/{name}": value for name, value in values.items()}
        self._latest.update(self._rollout)
        for name, text in texts.items():
            self._trackers.text(number, name, text)

    def _record_between_steps(self, number: int, named: Mapping[str, float]) -> None:
        self._latest.update(named)
        self._trackers.record(number, named)
        self.clock.restart()
        self._counted = 0

    def record_missing_evaluation(self, number: int) -> None:
        """Report that an evaluation has no figure, and drop the figures of earlier ones."""
        for name in [name for name in self._latest if name.startswith("evaluation/")]:
            del self._latest[name]
        self._say(
            f"warning: step {number}: nothing in the held-out data counts (no target carries loss), so the evaluation has no "
            f"figure; look at it with `panax data show`: answers may be cut away (data.sequence_length), or every row masked out"
        )
        self.clock.restart()
        self._counted = 0

    @property
    def values(self) -> Mapping[str, float]:
        """Return the scalars read last, by the names under which they are logged."""
        return self._latest

    @property
    def trackers(self) -> Tracker:
        """Return all trackers of this run as one."""
        return self._trackers

    def record_data_usage(self, number: int, position: Position | None) -> None:
        """Report, and write to a file, how often the documents have been seen in the steps so far."""
        if position is None or not is_process_zero():
            return
        parts = summarize_data_usage(self._prepared.data.train, position)
        if parts:
            self._lanes[0].put(write_data_usage, Path(self._prepared.folder), number, parts)
        for line in format_data_usage(parts):
            self._say(line)

    def end(self, number: int, word: str) -> None:
        """Record how the run's time was spent up to here.

        Args:
            word: How the session ends.
        """
        self.ledger.word = word
        spent = self.ledger.scalars()
        self._trackers.record(number, spent)
        self._send_to_supervisor({**self._latest, **spent})

    def close(self) -> None:
        self._profiler.close(self.flush)
        self._trackers.close()
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.close()

    def _record(self, number: int, values: Mapping[str, float], position: Position | None) -> None:
        experiment = self._prepared.experiment
        record = _named(values) | self._rollout
        steps = self.clock.steps
        seconds = self.clock.take()
        if steps:
            record |= {f"seconds/{name}": value for name, value in seconds.items()}
            record |= self._speed(self._counted / (seconds["step"] * steps))
        self._counted = 0
        record["memory/bytes"] = memory_in_use_bytes()
        if position is not None:
            record |= epoch_metrics(self._prepared.data.train, position)
        watched = MonitorReport() if self._watch is None else self._watch.take()
        record |= self.ledger.scalars()
        self._trackers.record(number, {**record, **watched.scalars})
        self._send_to_supervisor(record)
        for warning in watched.warnings:
            self._say(f"warning: step {number}: {warning}")
        if watched.heat_maps and (
            not self._pictured
            or number >= self._pictured + RECORDS_PER_HEAT_MAP * experiment.log_every
            or number == experiment.num_steps
        ):
            for name, figures in watched.heat_maps.items():
                self._trackers.picture(number, name, heat_map(figures))
            self._pictured = number

    def _send_to_supervisor(self, record: Mapping[str, float]) -> None:
        """Send figures for a job's live view: the first process sends the job's, each process its share of
        time waiting for data."""
        supervisor = heartbeat()
        if not supervisor.is_supervised:
            return
        if is_process_zero():
            supervisor.values({name: value for name, value in record.items() if name.startswith(SUPERVISED_PREFIXES)})
        if record.get("seconds/step"):
            supervisor.facts(data_wait=round(record.get("seconds/data_stall", 0.0) / record["seconds/step"], 4))

    def _speed(self, per_second: float) -> dict[str, float]:
        """Return tokens, or the task's other unit, per second, and the share of the devices' peak."""
        task = self._prepared.task
        unit, flops = (
            ("tokens", task.flops_per_token(self._length)) if self._length else (task.unit, task.flops_per_example())
        )
        speed = {f"speed/{unit}_per_second": per_second}
        if flops is None or self.peak is None:
            return speed
        return speed | {"speed/mfu": flops * per_second / self.peak.flops_per_second}


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in values.items() if name != "skipped_in_a_row"}


def _report_first_step() -> None:
    """Report to a supervisor when this process has taken its first step, its CPU time, and the programs
    compiled for it."""
    done = compilation_stats()
    heartbeat().facts(
        first_step_at=round(time.time(), 3),
        first_step_cpu_seconds=round(time.process_time(), 3),
        programs_read=done.hits,
        programs_received=done.received,
        programs_compiled=done.misses,
    )


def has_flops(task: Task) -> bool:
    """Return True if there are FLOPs to compare with a peak; measuring the peak takes most of a second."""
    return task.flops_per_example() is not None or task.flops_per_token(1) is not None


def measure_peak(prepared: PreparedRun) -> Peak:
    """Find the peak of the devices that this run uses, in its compute dtype.

    The first process finds it for all: processes of one host that measured at the same time would slow each
    other down.
    """
    placement = getattr(prepared.step, "placement", None)
    devices = [jax.devices()[0]] if placement is None else list(placement.devices.devices.flat)
    peak = find_peak_flops(devices, prepared.task.compute_dtype) if is_process_zero() else None
    if jax.process_count() == 1 and peak is not None:
        return peak
    text = broadcast_text("" if peak is None else json.dumps(dataclasses.asdict(peak)))
    return Peak(**json_reader.parse(text, constants=True))
