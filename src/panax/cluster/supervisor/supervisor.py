"""The supervisor: starts a job's processes through its agents, monitors them, and restarts them after a
failure, without jax."""

import signal
import time
from typing import Any

from ...core.errors import LaunchError
from ..engines import RunningAgents
from ..job import CONTINUATION_VARIABLE, Job
from ..stragglers.monitor import StragglerMonitor
from .attempt import SAVED_EXIT_CODES, AttemptWorker, JobAttempt
from .diagnosis import LAYOUT_CAUSES, TERMINATION_CAUSES, Cause, Diagnosis, diagnose
from .drain import DrainingNodes
from .job_folder import Incident, JobFolder, failure_incident, layout_incident
from .job_layout import JobShape
from .nodes import Node, Nodes
from .roster import NodePool
from .stop_request import StopRequest
from .view import View

TICK_SECONDS = 0.5

ASLEEP_SECONDS = 3.0
"""Gap between two iterations of its loop after which the supervisor assumes that it was suspended itself."""
SETTLE_SECONDS = 0.5
"""Time after a failure for the other processes to report which was first."""

PORT_SECONDS = 10.0
"""Time for the first node's agent to find a port: it is otherwise idle then."""

STATUS_SECONDS = 2.0
LOOK_SECONDS = 1.0
"""Time between two checks if the job should run on other nodes."""

STACKS_SECONDS = 4.0

ANSWER_SECONDS = 8.0
"""Time for processes that have not taken a step to end by themselves; a compiler answers no signal."""

LONGEST_BACKOFF_SECONDS = 60.0


class Supervisor:
    """Supervisor of one job, to its end."""

    def __init__(self, job: Job, nodes: Nodes, placed: RunningAgents, record: JobFolder, view: View):
        self._job, self._nodes, self._placed, self._record, self._view = job, nodes, placed, record, view
        self._roster = NodePool(job, nodes, placed, view.say)
        self._watching = StragglerMonitor(job, self._roster, record, view.say)
        self._shape, self._changing = JobShape(()), ""
        self._looked_at = 0.0
        self._saved_before: int | None = None
        self._began = time.monotonic()
        self._attempt: JobAttempt | None = None
        self._misunderstood: set[int] = set()
        self._asks = StopRequest()
        self._stop_told = False
        self._leaving = DrainingNodes(nodes, self._asks)
        self._restarts = 0
        self._without_progress = 0
        self._furthest = -1
        self._goodput: float | None = None
        self._incident: Incident | None = None
        self._failure: Diagnosis | None = None
        self._port: int | None = None
        self._has_begun_run = record.has_begun_run()
        self._stacks: dict[int, str] = {}
        self._status_at = 0.0
        self._state = "placing"

    def run(self) -> int:
        """Supervise the job until it is done, stopped or given up.

        Returns:
            The exit code, like that of `panax train`.

        Raises:
            LaunchError: Nodes do not connect at the start, or are not alike.
        """
        with self._asks.handling_signals():
            try:
                return self._supervise()
            except BaseException as error:
                self._write_status({"exit_code": getattr(error, "exit_code", 1), "message": str(error) or repr(error)})
                raise

    def _supervise(self) -> int:
        while True:
            try:
                shape = self._gather()
            except LaunchError as error:
                # The engine granted nodes once, and may again.
                if self._attempt is not None and (code := self._placed.start_over()) is not None:
                    return self._report_end(code, f"{error}; the engine starts the job again")
                if self._failure is None:
                    raise
                why = f"{self._failure.message}; {error}"
                return self._report_end(error.exit_code, why, self._failure)
            if shape is None:
                assert self._asks.signal is not None
                return self._report_end(128 + self._asks.signal, f"stopped by {self._asks.signal.name} before it began")
            attempt = self._start(shape)
            diagnosis = self._follow(attempt)
            if diagnosis is None and self._changing and self._asks.signal is None:
                self._has_changed(attempt)
                continue
            if diagnosis is None:
                return self._report_success(attempt)
            if self._asks.signal is not None and attempt.step < 0 and diagnosis.cause in TERMINATION_CAUSES:
                # Before a process can save, it does not handle signals.
                self._end(attempt)
                return self._report_end(
                    128 + self._asks.signal,
                    f"stopped by {self._asks.signal.name} before a first step; checkpoints are as they were",
                )
            self._fail(attempt, diagnosis)
            if (reason := self._reason_to_give_up(diagnosis)) is not None:
                return self._report_end(diagnosis.exit_code or 6, reason, diagnosis)
            self._wait_before_restart()

    def _gather(self) -> JobShape | None:
        """Return the nodes and layout to run on next; None if the job is to end."""
        self._state = "placing"
        shape = self._roster.gather(lambda: self._pump(TICK_SECONDS), lambda: self._asks.signal is not None)
        if shape is not None and self._attempt is not None and shape.nodes != self._shape.nodes:
            self._view.say(f"continues with {shape.describe(self._job.nodes)}")
        if shape is not None and (cordoned := self._roster.cordoned_in_use(shape)):
            self._view.say(
                f"node {', '.join(map(str, cordoned))} was taken out, and stays: the job can't continue without it"
            )
        return shape

    def _start(self, shape: JobShape) -> JobAttempt:
        number = 1 if self._attempt is None else self._attempt.number + 1
        nodes, processes_per_node = self._nodes.here, self._job.processes_per_node
        first = shape.nodes[0]
        host = nodes[first].address or "127.0.0.1" if first in nodes else "127.0.0.1"
        self._port = self._job.port
        if self._port is None and first in nodes:
            self._nodes.tell(first, port=host)
            deadline = time.monotonic() + PORT_SECONDS
            while self._port is None and time.monotonic() < deadline and first in nodes:
                self._pump(TICK_SECONDS)
            if self._port is None:
                self._nodes.drop(first)
        now = time.monotonic()
        workers = [
            AttemptWorker(rank * processes_per_node + local, node, nodes[node].host if node in nodes else "?", now)
            for rank, node in enumerate(shape.nodes)
            for local in range(processes_per_node)
        ]
        changing = self._changing
        self._shape, self._changing, self._saved_before, self._failure = shape, "", None, None
        self._leaving.begin(shape.nodes)
        self._attempt = attempt = JobAttempt(number, workers, time.time())
        self._state, self._stop_told = "starting", False
        layout = [] if shape.layout is None else shape.layout.flags
        continuation = {CONTINUATION_VARIABLE: "1"} if changing else {}
        for rank, node in enumerate(shape.nodes):
            if node in nodes:
                self._nodes.tell(
                    node,
                    start={
                        "attempt": number,
                        "first": rank * processes_per_node,
                        "count": processes_per_node,
                        "processes": len(workers),
                        "command": self._job.command(has_begun=self._has_begun_run, layout=layout),
                        "environment": {**self._job.environment(), **continuation},
                        "folder": str(self._job.place.absolute()),
                        "coordinator": f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}",
                        "bind": nodes[node].address or "127.0.0.1",
                    },
                )
        return attempt

    def _follow(self, attempt: JobAttempt) -> Diagnosis | None:
        """Monitor an attempt until all processes have ended successfully (None), or there is a failure."""
        saved_by, stopped_at = float("inf"), None
        first_step_reported, polled_at = False, time.monotonic()
        while attempt.is_running:
            self._pump(TICK_SECONDS)
            now = time.monotonic()
            if now - polled_at > ASLEEP_SECONDS:
                # This process was suspended (Ctrl-Z, a migrated machine, a file system that hangs): pending
                # messages are read first.
                self._view.say(
                    f"the supervisor itself was suspended for {now - polled_at:.0f} s; it reads the messages that "
                    f"arrived meanwhile"
                )
                attempt.extend_deadlines(now - polled_at)
                saved_by += now - polled_at
                self._pump(TICK_SECONDS)
            polled_at = now = time.monotonic()
            if not attempt.is_running:
                break
            # This phase follows the setting aside of an earlier run's files.
            if not self._has_begun_run and attempt.workers[0].phase_times.keys() & {"restore", "first step"}:
                self._has_begun_run = True
                self._record.record_beginning()
            if attempt.first_step is not None and not first_step_reported:
                first_step_reported = True
                self._first_step(attempt)
            attempt.give_up_on_failed(now)
            if attempt.has_failed():
                return self._diagnose(attempt)
            self._roster.ask_for_missing()
            if self._asks.signal is None and self._record.is_stop_requested():
                self._asks.request(signal.SIGTERM)
                self._view.say("asked to stop by `panax stop`")
            if self._asks.signal is not None and not self._stop_told:
                self._view.say(f"stopping by {self._asks.signal.name}: all processes save at the same step, then end")
                saved_by, stopped_at = self._stop("stopping"), now
            if not self._stop_told and (why := self._due_change(attempt, now)):
                # A save is in progress: a request now ends the processes soon after it.
                self._changing = why
                saved_by = self._stop("changing")
            if stopped_at is not None and now - stopped_at > ANSWER_SECONDS and attempt.has_nothing_new:
                # There is no progress that a checkpoint would add.
                return Diagnosis(Cause.KILLED, "no process had taken a step", 0, 128 + signal.SIGTERM)
            if self._asks.at_once or (now > saved_by and not attempt.is_saving(now, self._job.policy)):
                why = (
                    "by a second signal"
                    if self._asks.at_once
                    else f"no save within {self._job.policy.save_seconds:.0f} s"
                )
                return Diagnosis(
                    Cause.KILLED,
                    f"ended at once: {why}; the last checkpoint is intact",
                    0,
                    128 + (self._asks.signal or signal.SIGTERM),
                )
            if (worker := attempt.find_stalled(now, self._job.policy)) is not None:
                return attempt.diagnose_hang(worker, now, self._ask_for_stacks())
        return self._diagnose(attempt) if attempt.has_failed() else None

    def _stop(self, state: str) -> float:
        """Make all processes save at the same step, and end; return their deadline."""
        self._stop_told, self._state = True, state
        self._nodes.tell(signal="SIGTERM")
        return time.monotonic() + self._job.policy.save_seconds

    def _due_change(self, attempt: JobAttempt, now: float) -> str:
        """Return why the job changes to another layout; empty until the save that it waits for has begun."""
        if attempt.step >= 0 and (why := str(self._leaving)):
            # A node is about to end: all save now.
            return why
        if now - self._looked_at < LOOK_SECONDS or attempt.step < 0:
            return ""
        self._looked_at = now
        why = self._roster.reason_to_change(self._shape)
        if why is None:
            self._saved_before = None
            return ""
        if self._saved_before is None:
            self._saved_before = attempt.saved
            self._view.say(f"{why}: the job gets a new layout at its next save")
        return why if attempt.saved > self._saved_before else ""

    def _has_changed(self, attempt: JobAttempt) -> None:
        """Record that the job stopped only to continue with another layout."""
        self._leaving.part()
        self._incident = layout_incident(self._changing, attempt.number, attempt.step, time.time())
        self._record.append_incident(self._incident)
        self._furthest = max(self._furthest, attempt.step)

    def _diagnose(self, attempt: JobAttempt) -> Diagnosis:
        """Diagnose a failure, after a moment in which the other processes may report their errors."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while attempt.is_running and time.monotonic() < deadline:
            self._pump(0.05)
        return diagnose(attempt.ends, attempt.collectives)

    def _ask_for_stacks(self) -> dict[int, str]:
        self._stacks = {}
        pending = set(self._nodes.here)
        self._nodes.tell(stacks=True)
        deadline = time.monotonic() + STACKS_SECONDS
        while pending and time.monotonic() < deadline:
            self._pump(0.1)
            pending = {node for node in pending if not any(w.process in self._stacks for w in self._workers(node))}
        return self._stacks

    def _workers(self, node: int) -> list[AttemptWorker]:
        return [] if self._attempt is None else [worker for worker in self._attempt.workers if worker.node == node]

    def _fail(self, attempt: JobAttempt, diagnosis: Diagnosis) -> None:
        """End the remaining processes, and record the failure."""
        start, at = time.monotonic(), time.time()
        step = attempt.step
        last = [end.at for end in attempt.ends] or [at - (start - attempt.workers[diagnosis.process].last_progress)]
        self._failure, self._incident = diagnosis, failure_incident(diagnosis, attempt.number, step, at)
        self._incident.detect = max(round(at - min(last), 3), 0.0)
        self._end(attempt)
        self._leaving.part()
        self._incident.teardown = round(time.monotonic() - start, 3)
        self._record.append_incident(self._incident)
        self._without_progress = 0 if step > self._furthest else self._without_progress + 1
        self._furthest = max(self._furthest, step)
        self._view.failure(diagnosis, step)

    def _end(self, attempt: JobAttempt) -> None:
        """Kill the remaining processes."""
        self._state = "ending"
        self._nodes.tell(kill=True)
        deadline = time.monotonic() + 20.0
        while attempt.is_running and time.monotonic() < deadline:
            self._pump(0.1)

    def _reason_to_give_up(self, diagnosis: Diagnosis) -> str | None:
        """Return why the job is not started again; None if it is."""
        policy = self._job.policy
        if self._asks.signal is not None:
            return f"stopped by {self._asks.signal.name}, and not all of it was saved: {diagnosis.message}"
        never_stepped = self._attempt is not None and self._attempt.step < 0 and diagnosis.cause in LAYOUT_CAUSES
        if never_stepped and self._roster.reject_shape(self._shape):
            self._view.say(f"the layout {self._shape.layout} can't be used: {diagnosis.message}")
            return None
        if not diagnosis.cause.is_retried:
            return f"{diagnosis.message}"
        if self._restarts >= policy.max_restarts:
            return f"given up after {self._restarts} restarts: {diagnosis.message}"
        if self._without_progress >= policy.max_without_progress:
            return (
                f"given up: {self._without_progress} starts in a row have not come beyond step {max(self._furthest, 0)}: "
                f"{diagnosis.message}"
            )
        return None

    def _wait_before_restart(self) -> None:
        self._restarts += 1
        seconds = 0.0
        if self._without_progress:
            doubled = self._job.policy.backoff_seconds * 2 ** (self._without_progress - 1)
            seconds = min(doubled, LONGEST_BACKOFF_SECONDS)
        self._state = "waiting"
        self._view.say(f"restart {self._restarts}" + (f" in {seconds:.0f} s" if seconds else ""))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._asks.signal is None:
            self._pump(min(TICK_SECONDS, deadline - time.monotonic()))

    def _first_step(self, attempt: JobAttempt) -> None:
        self._state = "running"
        self._write_status()
        if self._job.spare:
            # Started while nothing waits for them.
            environment = self._job.environment()
            self._nodes.tell(
                spares={"count": self._job.processes_per_node, "command": self._job.spare, "environment": environment}
            )
        self._view.first_step(attempt)
        incident = self._incident
        if incident is not None:
            incident.recovered(*(attempt.phase_time(name) for name in ("prepare", "compile", "first step")))
            self._record.append_incident(incident)
            self._view.recovered(incident)
            self._incident = None

    def _report_success(self, attempt: JobAttempt) -> int:
        codes = {end.code for end in attempt.ends}
        progress = (
            f"after step {attempt.step}; saved" if attempt.step >= 0 else "before a first step; nothing was to be saved"
        )
        if self._asks.signal is not None:
            return self._report_end(128 + self._asks.signal, f"stopped by {self._asks.signal.name} {progress}")
        if codes & set(SAVED_EXIT_CODES):
            code = max(code for code in codes if code)
            return self._report_end(code, f"stopped by {signal.Signals(code - 128).name} {progress}")
        return self._report_end(0, "done")

    def _report_end(self, code: int, message: str, diagnosis: Diagnosis | None = None) -> int:
        self._state, self._nodes.again = "ended", self._asks.by_system
        end: dict[str, Any] = {"exit_code": code, "message": message}
        if diagnosis is not None:
            end |= {"cause": diagnosis.cause.value, "process": diagnosis.process, "advice": diagnosis.advice}
            end["tail"] = list(diagnosis.tail)[-20:]
        self._write_status(end)
        self._view.end(code, message, diagnosis, self._restarts)
        return code

    def _pump(self, seconds: float) -> None:
        """Process agents' messages for at most some seconds; show and write the job's status."""
        now = time.monotonic()
        for node, message in self._nodes.messages(seconds):
            try:
                self._take(node, message)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
                # Caused by a library that writes to the worker's pipe, or another version: it is that node's
                # fault, not the job's.
                if node.number not in self._misunderstood:
                    self._misunderstood.add(node.number)
                    self._view.say(f"warning: {node.host} sent an invalid message, which is ignored: {error!r}")
        departed, self._nodes.departed = self._nodes.departed, []
        for number, host in departed:
            if self._attempt is not None:
                self._attempt.record_lost_node(number, host)
        if now - self._status_at >= STATUS_SECONDS:
            self._status_at = now
            self._nodes.ping()
            self._write_status()
            if self._attempt is not None:
                self._view.status(self._attempt, self._goodput, self._state)

    def _take(self, node: Node, message: dict[str, Any]) -> None:
        attempt, now = self._attempt, time.monotonic()
        for kind, content in message.items():
            if kind == "port":
                self._port = int(content)
            elif kind == "notice":
                self._view.say(f"{node.host} got {content}")
                self._leaving.tell(node.number, can_save=attempt is not None and attempt.step >= 0)
            elif kind == "lines":
                self._view.lines([str(line) for line in content])
            elif kind == "stacks":
                self._stacks |= {int(index): str(text) for index, text in content.items()}
            elif attempt is None or not isinstance(content, dict) or content.get("attempt") != attempt.number:
                # From workers that were given up before.
                continue
            elif kind == "started":
                for index, pid in content["of"].items():
                    attempt.workers[int(index)].pid = int(pid)
            elif kind == "beat":
                attempt.update(int(content["process"]), content, now)
                self._watching.record_heartbeat(attempt, int(content["process"]), content)
                # Reported for the whole run, including earlier attempts and jobs.
                self._goodput = attempt.values.get("goodput/fraction", self._goodput)
            elif kind == "exit":
                attempt.record_end(content, node.host)

    def _write_status(self, end: dict[str, Any] | None = None) -> None:
        attempt, now = self._attempt, time.monotonic()
        self._record.write_status(
            {
                "state": self._state,
                "name": self._job.name,
                "num_steps": self._job.num_steps,
                "seconds": round(now - self._began, 1),
                "restarts": self._restarts,
                "nodes": {"running": self._shape.nodes, "of": self._job.nodes, "layout": str(self._shape.layout or "")},
                "goodput": self._goodput,
                "attempt": 0 if attempt is None else attempt.number,
                "step": -1 if attempt is None else attempt.step,
                "values": {} if attempt is None else attempt.values,
                "breakdown": {} if attempt is None else attempt.breakdown(),
                "slow": self._watching.describe_slow(attempt),
                "processes": [] if attempt is None else [worker.to_status(now) for worker in attempt.workers],
                **({} if end is None else {"end": end}),
            }
        )
