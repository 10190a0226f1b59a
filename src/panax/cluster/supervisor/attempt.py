"""One attempt of a job's processes, as seen by the supervisor: each worker's phase, step and end, and the
time of each phase."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..job import RestartPolicy
from .collective_facts import CollectiveFacts
from .diagnosis import Diagnosis, WorkerExit, diagnose_hang

PHASES = ("start", "join", "prepare", "restore", "compile", "steps")
"""Phases before the first step, in order; a worker may skip some."""


HIDDEN_FACTS = ("address", "collectives", "groups", "profile")
"""Facts that explain others, and are not part of a process's status."""


def read_number(message: Mapping[str, Any], name: str, default: float) -> float:
    """Return a finite number from a message's field; `default` if it is missing or invalid."""
    value = message.get(name)
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_valid else default  # pyright: ignore[reportArgumentType]


def read_exit_code(error: Mapping[str, Any]) -> int:
    """Return the exit code that a worker sent with its error; 0 if it is missing or not a valid exit code."""
    code = error.get("exit_code")
    return code if type(code) is int and 0 < code < 256 else 0


@dataclasses.dataclass
class AttemptWorker:
    """State of a worker process.

    Attributes:
        step: The last reported step; -1 before the first.
        saved: The last step with a checkpoint that the worker has begun; -1 before the first.
        last_progress: Time of its last progress, by the supervisor's monotonic clock.
        phase_times: Phase to the time of its first entry, in seconds since the epoch by the worker's clock.
    """

    process: int
    node: int
    host: str
    last_progress: float
    pid: int | None = None
    phase: str = "start"
    step: int = -1
    saved: int = -1
    phase_times: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: dict[str, Any] | None = None
    error_at: float = float("inf")
    ended: WorkerExit | None = None

    def update(self, beat: Mapping[str, Any], now: float) -> None:
        """Process a message of the worker."""
        self.last_progress = now
        if isinstance(phase := beat.get("phase"), str):
            self.phase = phase
            self.phase_times.setdefault(phase, read_number(beat, "at", time.time()))
        if isinstance(step := beat.get("step"), int):
            if self.step < 0:
                self.phase_times.setdefault("first step", read_number(beat, "at", time.time()))
            self.step = step
            if "phase" not in beat:
                self.phase = "steps"
        if isinstance(saved := beat.get("saved"), int):
            self.saved = saved
        if isinstance(facts := beat.get("facts"), dict):
            self.facts |= facts
        if isinstance(error := beat.get("error"), dict):
            self.error, self.error_at = error, now

    def to_status(self, now: float) -> dict[str, Any]:
        """Return the worker's entry in the job's status."""
        ended = None if self.ended is None else self.ended.code
        return {
            "process": self.process,
            "node": self.node,
            "host": self.host,
            "pid": self.pid,
            "phase": self.phase,
            "step": self.step,
            "quiet_seconds": round(now - self.last_progress, 1),
            "exit_code": ended,
            **{name: fact for name, fact in self.facts.items() if name not in HIDDEN_FACTS},
        }


@dataclasses.dataclass
class JobAttempt:
    """One start of the job's processes.

    Attributes:
        started_at: Time of the start command, in seconds since the epoch.
        values: Values of the last step that the first process reported.
        saved_until: Last time at which a process was writing a checkpoint.
    """

    number: int
    workers: list[AttemptWorker]
    started_at: float
    first_step: int | None = None
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    saved_until: float = -math.inf

    def update(self, process: int, beat: Mapping[str, Any], now: float) -> None:
        """Process a message of a worker."""
        if not 0 <= process < len(self.workers):
            return
        self.workers[process].update(beat, now)
        if process == 0 and isinstance(values := beat.get("values"), dict):
            self.values = {str(name): value for name, value in values.items() if isinstance(value, int | float)}
        if self.first_step is None and self.step >= 0:
            self.first_step = self.step

    def record_end(self, end: Mapping[str, Any], host: str) -> None:
        """Record a worker's end, as reported by its agent."""
        worker = self.workers[int(end["process"])]
        worker.ended = WorkerExit(
            worker.process,
            host,
            end.get("code"),
            float(end.get("at", time.time())),
            worker.error,
            [str(line) for line in end.get("tail", ())],
            bool(end.get("out_of_memory")),
        )

    def record_lost_node(self, node: int, host: str) -> None:
        """Record that a node has gone with its workers."""
        for worker in self.workers:
            if worker.node == node and worker.ended is None:
                worker.ended = WorkerExit(worker.process, host, None, time.time(), worker.error)

    @property
    def step(self) -> int:
        """Return the last step completed by all processes; -1 before the first."""
        return min(worker.step for worker in self.workers)

    @property
    def saved(self) -> int:
        """Return the last step with a checkpoint of all processes; -1 before the first."""
        return min(worker.saved for worker in self.workers)

    @property
    def has_nothing_new(self) -> bool:
        """Return True if every process has reported a phase, but no step: there is no progress beyond the
        checkpoints."""
        return all(worker.phase_times and worker.step < 0 for worker in self.workers)

    @property
    def ends(self) -> list[WorkerExit]:
        return [worker.ended for worker in self.workers if worker.ended is not None]

    @property
    def is_running(self) -> bool:
        return any(worker.ended is None for worker in self.workers)

    def give_up_on_failed(self, now: float) -> None:
        """Count a worker as ended if it is still alive some time after it reported a fatal error.

        At its exit JAX may wait for the other processes, which wait for it.
        """
        for worker in self.workers:
            if worker.ended is None and worker.error and now - worker.error_at > EXIT_SECONDS:
                code = read_exit_code(worker.error) or 1
                worker.ended = WorkerExit(worker.process, worker.host, code, time.time() - EXIT_SECONDS, worker.error)

    def has_failed(self) -> bool:
        """Return True if a process has failed: stopping after a save is not a failure."""
        return any(end.code not in (0, *SAVED_EXIT_CODES) for end in self.ends)

    def find_stalled(self, now: float, policy: RestartPolicy) -> AttemptWorker | None:
        """Return the worker with the least progress if none makes progress any more; None while the job makes
        progress."""

        def limit(worker: AttemptWorker) -> float:
            # A run that returns to a checkpoint restores it after its first steps; a checked step may also
            # compile later.
            starts = self.step < 0 or worker.phase in ("restore", "compile")
            if worker.phase == "save":
                # It reports each file that it has written; one of them may take long.
                return max(policy.stall_seconds, policy.save_seconds)
            return policy.start_seconds if starts else policy.stall_seconds

        # A worker that has ended while others have not is one that they wait for.
        alive = [worker for worker in self.workers if worker.ended is None]
        if any(worker.phase == "save" and now - worker.last_progress <= limit(worker) for worker in alive):
            # The others wait for it; their waiting time does not count as a stall afterwards.
            self.saved_until = now
            return None
        since = {worker.process: worker.last_progress for worker in alive if worker.phase == "save"}
        hung = [
            worker
            for worker in alive
            if now - since.get(worker.process, max(worker.last_progress, self.saved_until)) > limit(worker)
        ]
        return min(hung, key=lambda worker: (worker.step, worker.last_progress)) if hung else None

    def is_saving(self, now: float, policy: RestartPolicy) -> bool:
        """Return True if a process is writing a checkpoint, and has made progress within the time for a
        save."""
        return any(
            worker.ended is None and worker.phase == "save" and now - worker.last_progress <= policy.save_seconds
            for worker in self.workers
        )

    def extend_deadlines(self, seconds: float) -> None:
        """Exclude a time in which the supervisor was suspended from the workers' time without progress."""
        self.saved_until += seconds
        for worker in self.workers:
            worker.last_progress += seconds
            worker.error_at += seconds

    def diagnose_hang(self, worker: AttemptWorker, now: float, stacks: Mapping[int, str]) -> Diagnosis:
        """Diagnose why there is no progress."""
        return diagnose_hang(
            worker.process, worker.host, now - worker.last_progress, worker.phase, stacks, (), self.collectives
        )

    @property
    def collectives(self) -> CollectiveFacts:
        """Return the step's collectives, as reported by the processes."""
        return CollectiveFacts.of(self.workers)

    def phase_time(self, phase: str) -> float | None:
        """Return the time when the last of all processes entered a phase; None before."""
        times = [worker.phase_times.get(phase) for worker in self.workers]
        found = [each for each in times if each is not None]
        return max(found) if len(found) == len(times) else None

    def to_status(self, now: float) -> dict[str, Any]:
        """Return the attempt's part of the job's status."""
        return {
            "attempt": self.number,
            "step": self.step,
            "values": self.values,
            "breakdown": self.breakdown(),
            "processes": [worker.to_status(now) for worker in self.workers],
        }

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of each phase before the first step, until the last process completed it."""
        parts, before = {}, self.started_at
        names: Sequence[str] = [*PHASES[1:-1], "first step"]
        for name, following in zip(["import", *names[:-1]], names, strict=True):
            at = self.phase_time(following)
            if at is not None:
                parts[name] = round(max(at - before, 0.0), 3)
                before = max(at, before)
        return parts


INITIAL_STATUS: dict[str, Any] = {"attempt": 0, "step": -1, "values": {}, "breakdown": {}, "processes": []}
"""A job's status before its first attempt."""

EXIT_SECONDS = 2.0
"""Time for a worker to end after it has reported its error."""

SAVED_EXIT_CODES = (129, 130, 138, 140, 143, 152)
"""Exit codes of a process that was asked to end, has saved, and has ended."""
