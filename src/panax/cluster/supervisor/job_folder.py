"""Files of a job in its run's folder, for users and for `panax status`, `stop` and `logs`: plain JSON,
without secrets."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import LaunchError, describe_type
from ...system import files, json_reader
from ...system.lock import open_locked
from ...system.replacement import replace_file, replace_json
from ..job import Job, filter_environment
from .diagnosis import Cause, Diagnosis

LAYOUTS, CORDONED = "layouts.json", "cordoned.json"
PLACE, JOB, STATUS, INCIDENTS, STOP, LOCK = "job", "job.json", "status.json", "incidents.jsonl", "stop", "lock"
FINDINGS = "findings.jsonl"
BEGUN_FILE = "begun"
"""File with the submission of the job that last began the run."""

STALE_SECONDS = 20.0
"""Age from which a status is stale: its supervisor has gone, or can't write."""


@dataclasses.dataclass
class Incident:
    """A failure, and the times of its recovery in seconds. Times of phases not completed yet are None.

    Attributes:
        detect: From the last sign of life to the detection by the supervisor.
        teardown: Ending the remaining processes.
        restart: From starting again until all processes had joined, including the backoff before it.
        restore: From there until the state was restored.
        first_step: From there until all processes had taken the first step.
    """

    attempt: int
    at: float
    step: int
    cause: str
    message: str
    process: int
    tail: Sequence[str]
    detect: float | None = None
    teardown: float | None = None
    restart: float | None = None
    restore: float | None = None
    first_step: float | None = None

    def recovered(self, joined: float | None, restored: float | None, first: float | None) -> None:
        """Record the times of recovery, from when all processes had joined, restored the state and taken a
        step."""
        if joined is not None:
            self.restart = round(joined - self.at - (self.teardown or 0.0), 3)
            if restored is not None:
                self.restore = round(restored - joined, 3)
                self.first_step = None if first is None else round(first - restored, 3)


@dataclasses.dataclass(frozen=True)
class JobFinding:
    """A problem of a job that continues, or its end.

    Attributes:
        kind: "slow host", "slow link", "flapping link", "host well again" or "link well again".
        unit: The node, or the process if the job has one node; None for a link.
    """

    at: float
    attempt: int
    step: int
    kind: str
    message: str
    unit: int | None = None


class JobFolder:
    """The job's files, written only by the supervisor while it holds their lock."""

    def __init__(self, job: Job):
        self._place = job.place
        self._job = job

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against a second supervisor.

        Raises:
            LaunchError: Another supervisor holds the lock, or the folder can't be written.
        """
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            lock = open_locked(self._place / LOCK)
        except BlockingIOError as error:
            raise LaunchError(
                f"another `panax launch` is at work in {self._job.folder}; see it with `panax status {self._job.folder}`, end it "
                f"with `panax stop {self._job.folder}`, or give this run another --name"
            ) from error
        except OSError as error:
            raise LaunchError(f"can't write to {self._place}: {error}; choose another --directory") from error
        with lock:
            (self._place / STOP).unlink(missing_ok=True)
            if not self.has_begun_run():
                # From nodes of another launch.
                for name in (LAYOUTS, CORDONED):
                    (self._place / name).unlink(missing_ok=True)
            yield

    def begin(self, engine: str) -> None:
        """Write the description of the job, in place of an earlier job's."""
        replace_json(
            self._place / JOB,
            {
                "name": self._job.name,
                "command": self._job.shown,
                "engine": engine,
                "processes": self._job.processes,
                "nodes": self._job.nodes,
                "policy": dataclasses.asdict(self._job.policy),
                "supervisor": {"pid": os.getpid(), "host": os.uname().nodename},
                "began": time.time(),
                "environment": filter_environment(),
            },
        )

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Write the job's status; a disk error does not end the job."""
        with contextlib.suppress(OSError):
            replace_json(self._place / STATUS, {"at": time.time(), **status})

    def append_incident(self, incident: Incident) -> None:
        """Append an incident; of several lines on one attempt's failure, the last is valid."""
        with contextlib.suppress(OSError):
            files.append_lines(
                self._place / INCIDENTS, [json.dumps({"began": time.time(), **dataclasses.asdict(incident)})]
            )

    def append_finding(self, finding: JobFinding) -> None:
        """Append a finding."""
        with contextlib.suppress(OSError):
            files.append_lines(self._place / FINDINGS, [json.dumps(dataclasses.asdict(finding))])

    def has_begun_run(self) -> bool:
        """Return True if this job has recorded the beginning of its run."""
        path = self._place / BEGUN_FILE
        return bool(self._job.submission) and path.is_file() and path.read_text() == self._job.submission

    def record_beginning(self) -> None:
        """Record that the run has begun: an earlier run's files have been moved away, if requested."""
        with contextlib.suppress(OSError):
            replace_file(self._place / BEGUN_FILE, self._job.submission)

    def is_stop_requested(self) -> bool:
        """Return True if `panax stop` requested the job's end."""
        return (self._place / STOP).exists()


def job_folder_path(run: str | Path) -> Path:
    """Return the folder of the job's files in a run's folder.

    Raises:
        LaunchError: The folder does not exist.
    """
    folder = Path(run) / PLACE
    if not (folder / JOB).is_file():
        what = "there is no such folder" if not Path(run).is_dir() else f"{PLACE}/{JOB} is missing"
        raise LaunchError(
            f"{run} does not hold a job that `panax launch` has started: {what}; name a run's folder, as runs/NAME"
        )
    return folder


def read_job_file(path: Path) -> dict[str, Any]:
    """Read one of the job's files.

    Raises:
        LaunchError: The file can't be read, or is not a JSON object.
    """
    try:
        found = json_reader.read(path, constants=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"can't read {path}: {error}; the job may have ended before it was written") from error
    if not isinstance(found, dict):
        raise LaunchError(f"{path} holds {describe_type(found)}; expected an object, as `panax launch` writes it")
    return found


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """Return the incidents of a job, oldest first, without truncated lines."""
    return list({(one["at"], one["attempt"]): one for one in _lines(folder / INCIDENTS)}.values())


def read_findings(folder: Path) -> list[dict[str, Any]]:
    """Return the findings of a job, oldest first."""
    return [one for one in _lines(folder / FINDINGS) if {"step", "kind", "message"} <= one.keys()]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            one = json_reader.parse(line, constants=True)
            if isinstance(one, dict) and {"at", "attempt"} <= one.keys():
                yield one


def layout_incident(why: str, attempt: int, step: int, at: float) -> Incident:
    """Create an incident without a failure: the job got a new layout."""
    return Incident(attempt, at, step, Cause.CHANGED.value, why, 0, (), detect=0.0, teardown=0.0)


def failure_incident(diagnosis: Diagnosis, attempt: int, step: int, at: float) -> Incident:
    """Create an incident for a failure that was just diagnosed."""
    return Incident(
        attempt, at, step, diagnosis.cause.value, diagnosis.message, diagnosis.process, list(diagnosis.tail)[-20:]
    )
