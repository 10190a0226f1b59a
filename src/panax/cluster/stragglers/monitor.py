"""Detection of degraded hosts and links: the supervisor compares the processes' measurements during training,
and names slow ones."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import LaunchError
from ...system.terminal_text import format_rate
from ..job import Job, Stragglers
from ..supervisor.attempt import AttemptWorker, JobAttempt
from ..supervisor.job_folder import JobFinding, JobFolder
from ..supervisor.roster import NodePool
from .slow_hosts import HostProbe, SlowHosts
from .slow_links import FLAPPING, SLOW, CollectiveTimes, SlowGroup, SlowLinks
from .slow_links import LinkChange as LinkChange

HELD_PROBES = 4
"""Number of later probes after which an incomplete probe is dropped: a full pipe loses lines."""


class StragglerMonitor:
    """Monitor of the probes of a job.

    Args:
        say: Called with messages for the user.
    """

    def __init__(self, job: Job, roster: NodePool, record: JobFolder, say: Callable[[str], None]):
        self._job, self._roster, self._record, self._say = job, roster, record, say
        self._attempt: JobAttempt | None = None
        self._probes: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._hosts = SlowHosts(job.policy.slow_factor, job.policy.slow_probes)
        self._links: dict[tuple[int, ...], SlowLinks] = {}
        self._taken_out = False
        self._standing: dict[Any, str] = {}

    def describe_slow(self, attempt: JobAttempt | None) -> list[str]:
        """Return the currently slow hosts and links, for the job's status."""
        return list(self._standing.values()) if attempt is self._attempt else []

    def record_heartbeat(self, attempt: JobAttempt, process: int, beat: Mapping[str, Any]) -> None:
        """Process a worker's message, and compare the measurements of a probe once it is complete."""
        facts = beat.get("facts")
        probe = facts.get("probe") if isinstance(facts, dict) else None
        if not isinstance(probe, dict) or not isinstance(number := probe.get("number"), int):
            return
        if attempt is not self._attempt:
            self._begin(attempt)
        self._probes.setdefault(number, {})[process] = probe
        if len(self._probes[number]) == len(attempt.workers):
            probes = self._probes.pop(number)
            self._compare_hosts(attempt, probes)
            self._compare_links(attempt, probes)
        self._probes = {each: probes for each, probes in self._probes.items() if each > number - HELD_PROBES}

    def _begin(self, attempt: JobAttempt) -> None:
        self._attempt, self._probes, self._taken_out, self._standing = attempt, {}, False, {}
        self._hosts.begin()
        for links in self._links.values():
            links.begin()

    # Hosts

    def _compare_hosts(self, attempt: JobAttempt, probes: Mapping[int, Mapping[str, Any]]) -> None:
        if self._job.policy.stragglers is Stragglers.IGNORE:
            return
        probes_by_unit: dict[int, list[HostProbe]] = {}
        matrix_flops = _profile(attempt).get("matrix_flops") or []
        for process, probe in sorted(probes.items()):
            probes_by_unit.setdefault(self._unit(attempt.workers[process]), []).append(
                _measured(probe, process, matrix_flops)
            )
        for change in self._hosts.add(
            {unit: _slowest(each) for unit, each in probes_by_unit.items()}, time.monotonic()
        ):
            name = self._name(attempt, change.host)
            step = int(next(iter(probes.values())).get("step", attempt.step))
            key = ("host", change.host)
            if not change.slow:
                self._standing.pop(key, None)
                self._tell(attempt, step, "host well again", f"{name} is as fast as the others again", change.host)
                continue
            message = f"{name} is slow: {change.slowness.description}"
            self._standing[key] = message
            self._tell(attempt, step, "slow host", f"{message}{self._hint(change.host)}", change.host)
            self._cordon(change.host, message)

    def _unit(self, worker: AttemptWorker) -> int:
        """Return the unit that is compared: the node, or the process of a job with one node."""
        return worker.node if self._job.nodes > 1 else worker.process

    def _name(self, attempt: JobAttempt, unit: int) -> str:
        workers = [worker for worker in attempt.workers if self._unit(worker) == unit]
        kind = "node" if self._job.nodes > 1 else "process"
        return f"{kind} {unit} on {workers[0].host}"

    def _hint(self, unit: int) -> str:
        if self._job.nodes == 1 or self._job.policy.stragglers is not Stragglers.WARN:
            return ""
        return f"; `panax cordon {self._job.folder} {unit}` continues without it"

    def _cordon(self, node: int, why: str) -> None:
        """Continue without a slow node, if the policy requests it and the job can: one at a time."""
        if self._job.policy.stragglers is not Stragglers.CORDON or self._job.nodes == 1 or self._taken_out:
            return
        if not self._roster.can_spare(node):
            self._say(
                f"node {node} stays in the job: without it the model has no layout, or fewer than --min-nodes "
                f"{self._job.policy.min_nodes} would remain"
            )
            return
        try:
            self._roster.cordon(node, why)
        except (LaunchError, OSError) as error:
            self._say(f"node {node} stays in the job: {error}")
            return
        self._taken_out = True

    # Links

    def _compare_links(self, attempt: JobAttempt, probes: Mapping[int, Mapping[str, Any]]) -> None:
        nodes = tuple(worker.node for worker in attempt.workers)
        first, profile = probes[min(probes)], _profile(attempt)
        if nodes not in self._links:
            self._links[nodes] = SlowLinks(str(first.get("platform", "")), _floats(profile.get("axes")))
        timed = {process: _timed(probe, attempt.workers[process].facts) for process, probe in probes.items()}
        step = int(first.get("step", attempt.step))
        for change in self._links[nodes].add(timed):
            self._tell_link(attempt, step, change, first, profile)

    def _tell_link(
        self, attempt: JobAttempt, step: int, change: LinkChange, probe: Mapping[str, Any], profile: Mapping[str, Any]
    ) -> None:
        link = change.link
        key = (link.axis, link.group)
        _, sent, kind = probe["axes"][link.axis]
        hosts = ", ".join(dict.fromkeys(attempt.workers[process].host for process in link.group))
        current, usual = format_rate(sent / link.seconds), format_rate(sent / link.baseline)
        before = f"{usual} {_source(link.axis, profile)}"
        took = f"an {kind} over it carries {current}, down from {before} ({_ms(link.seconds)} and {_ms(link.baseline)})"
        if change.what == SLOW:
            often = f", for the {_ordinal(link.times)} time" if link.times > 1 else ""
            message = f"mesh axis {link.axis} is slow between {hosts}{often}: {took}{self._suspects(attempt, link)}"
            self._standing[key] = message
            self._tell(attempt, step, "slow link", message)
        elif change.what == FLAPPING:
            message = (
                f"mesh axis {link.axis} between {hosts} is slow intermittently, {link.times} times in the last "
                f"probes: {took}{self._suspects(attempt, link)}"
            )
            self._tell(attempt, step, "flapping link", message)
        else:
            self._standing.pop(key, None)
            so_far = f"; it was slow {link.times} times so far" if link.times > 1 else ""
            message = f"mesh axis {link.axis} between {hosts} is as fast as before again: {current}{so_far}"
            self._tell(attempt, step, "link well again", message)

    @staticmethod
    def _suspects(attempt: JobAttempt, link: SlowGroup) -> str:
        workers = [attempt.workers[process] for process in link.suspects]
        names = [f"{worker.host} (process {worker.process})" for worker in workers]
        if len(names) == 1:
            return f". It is {names[0]}: its traffic is slow to every neighbor that was tried"
        return f". It is the link between {' and '.join(names)}" if names else ""

    def _tell(self, attempt: JobAttempt, step: int, kind: str, message: str, unit: int | None = None) -> None:
        self._say(f"{kind} at step {step}: {message}")
        self._record.append_finding(JobFinding(time.time(), attempt.number, step, kind, message, unit))


def _profile(attempt: JobAttempt) -> Mapping[str, Any]:
    """Return the result of a check before the run, as reported by process 0; empty without one."""
    profile = attempt.workers[0].facts.get("profile")
    return profile if isinstance(profile, dict) else {}


def _measured(probe: Mapping[str, Any], process: int, could: list[float]) -> HostProbe:
    flops = float(could[process]) if process < len(could) else 0.0
    return HostProbe(
        matrix=float(probe["matrix"]),
        host=float(probe["host"]),
        part=str(probe["host_part"]),
        device_wait=float(probe["device_wait"]),
        step=float(probe["step_seconds"]),
        could=float(probe["matrix_flops"]) / flops if flops > 0 else None,
    )


def _slowest(processes: list[HostProbe]) -> HostProbe:
    """Return one host's measurements, each from the slowest of its processes."""
    by_work, by_matrix = max(processes, key=lambda one: one.host), max(processes, key=lambda one: one.matrix)
    return dataclasses.replace(by_work, matrix=by_matrix.matrix, could=by_matrix.could)


def _timed(probe: Mapping[str, Any], facts: Mapping[str, Any]) -> CollectiveTimes:
    return CollectiveTimes(
        axes={axis: float(each[0]) for axis, each in probe["axes"].items()},
        groups={axis: tuple(each) for axis, each in facts.get("groups", {}).items()},
        links={int(process): float(seconds) for process, seconds in probe.get("links", {}).items()},
    )


def _floats(content: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in content.items()} if isinstance(content, dict) else {}


def _source(axis: str, profile: Mapping[str, Any]) -> str:
    by_check = axis in _floats(profile.get("axes"))
    return f"in the check before the run ({profile['of']})" if by_check else "at the run's first probes"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _ordinal(number: int) -> str:
    """Format an ordinal number.

    >>> [_ordinal(number) for number in (2, 3, 11, 22)]
    ['2nd', '3rd', '11th', '22nd']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
