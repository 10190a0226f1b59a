"""Probes for slow hosts and links: measurements that a slow host or link would change, at steps that all
processes agree on.

In a synchronous step all processes take equally long, so that each measures only its own work: matrix
multiplications on its devices while they are idle, and the seconds that its own work between steps takes. All
of them together time one collective over each mesh axis that crosses processes, and, if that is slow, each
link to a neighbor. Nothing is decided here: a supervisor receives the figures of all processes, compares
them and reports which is slow (`panax.cluster.stragglers.monitor`).
"""

import dataclasses
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ...job.agreement import any_process, broadcast_text, gather_ints, gather_texts, is_process_zero
from ...job.heartbeat import heartbeat
from ...plan.search.profile import HardwareProfile, newest_profile, profile_in, profiles_folder
from ...plan.walk.walk import traffic_of_trace
from ...preflight.probes import (
    AxisProbe,
    AxisUse,
    LinkProbe,
    MatrixProbe,
    axes_across_processes,
    axis_peers,
    axis_uses,
    is_same_hosts,
)
from ...system import json_reader
from ...train import CompiledStep
from ..parts.run_part import RunPart, RunProgress
from ..preparation import PreparedRun
from ..reporting.report import RunReporter

MAX_TIME_SHARE = 0.01
"""Maximum share of the run's time for probes, if the interval is chosen automatically."""

MIN_INTERVAL_STEPS = 10
"""Minimum steps between two probes, if the interval is chosen automatically."""

MAX_INTERVAL_STEPS = 1_000_000

SUSPECT_FACTOR = 2.0
"""Factor by which a collective must have slowed down for each link to be measured; the supervisor may not
call it slow yet."""

SUSPECT_SECONDS = {"cpu": 1e-2}
_SUSPECT_SECONDS = 1e-4
"""Seconds by which it must also have slowed down, by platform."""

BASELINE_PROBES = 3
"""Number of first probes with a median that is the reference time of a collective."""

MAX_LINK_PROBES = 3
"""Maximum number of probes in a row that measure links: one that stays slow need not be located again."""

HOST_PARTS = ("data_stall", "hooks")
"""Parts of a step, by the run's clock, that are a host's own work, with the time that no part covers."""

BIND_VARIABLE = "PANAX_BIND"
"""Environment variable with the address at which other processes reach this one, set by an agent."""

PARTS = {"data_stall": "waiting for data", "hooks": "hooks", "other": "its own work between steps"}


class HardwareProbe(RunPart):
    """The probes of one process; disabled without a supervisor, or with a single process."""

    def __init__(self, prepared: PreparedRun, report: RunReporter):
        """Set up the probes; every process of the job calls it."""
        self._prepared, self._report = prepared, report
        self._every = prepared.experiment.probe.every
        step = prepared.step
        several = jax.process_count() > 1 and self._every != 0 and isinstance(step, CompiledStep)
        self._on = several and not any_process(not heartbeat().is_supervised)
        if not self._on:
            return
        assert isinstance(step, CompiledStep)
        self._mesh = step.placement.mesh
        self._next = self._every if self._every > 0 else MIN_INTERVAL_STEPS
        self._taken = self._steps = 0
        self._window = ProbeWindow(report)
        self._costs: list[float] = []
        self._matrix: MatrixProbe | None = None
        self._axes: list[AxisProbe] = []
        self._links: LinkProbe | None = None
        self._first: dict[str, list[float]] = {}
        self._located = 0
        self._number = 0
        groups = {axis: axis_peers(self._mesh, axis) for axis in axes_across_processes(self._mesh)}
        heartbeat().facts(
            groups={axis: members[:MAX_NAMED_COLLECTIVES] for axis, members in groups.items()},
            address=os.environ.get(BIND_VARIABLE, ""),
        )
        if is_process_zero():
            step.when_traced = self._report_collectives

    def after_step(self, run: RunProgress) -> None:
        """Count a step that was dispatched; probe if it is time. Every process of the job calls it."""
        if not self._on:
            return
        self._taken += 1
        self._steps += 1
        self._window.tick()
        if self._taken < self._next:
            return
        clock, parts = self._report.clock, self._window.seconds()
        with clock.measure("device"):
            # The running step has to be waited for sooner or later.
            self._report.block_until_ready()
        if self._matrix is None:
            with self._report.ledger.measure("compile"):
                self._prepare()
        with clock.measure("probe"):
            self._probe(run.step, parts)
        self._window.restart()

    def _prepare(self) -> None:
        """Compile the programs of a probe."""
        self._matrix = MatrixProbe()
        hosts = gather_texts(socket.gethostname())
        uses_text = ""
        if is_process_zero():
            profile, name = self._profile(hosts)
            uses = axis_uses(self._mesh, profile)
            uses_text = json.dumps([dataclasses.asdict(use) for use in uses])
            if profile is not None:
                _report_profile(profile, name, uses)
        self._axes = [
            AxisProbe(self._mesh, AxisUse(**use))
            for use in json_reader.parse(broadcast_text(uses_text), constants=True)
        ]
        # The first time that all processes meet: compile the programs by which they agree.
        self._agree(False, 1.0)

    def _profile(self, hosts: Sequence[str]) -> tuple[HardwareProfile | None, str]:
        """Return the newest profile of these hosts in this mesh, and its file's name."""
        sizes = dict(self._mesh.shape.items())
        places = [profile_in(self._prepared.folder), *sorted(profiles_folder().glob("*.json"))]
        newest = newest_profile(self._mesh.devices.flat[0].device_kind, sizes, places)
        if newest is None or not is_same_hosts(newest[0], hosts, sizes):
            return None, ""
        return newest[0], newest[1].name

    def _probe(self, step: int, parts: dict[str, float]) -> None:
        assert self._matrix is not None
        began = time.perf_counter()
        axes: dict[str, float] = {}
        matrix = [self._burst(0)]
        for turn in (1, 2):
            for each in self._axes:
                axes[each.use.axis] = min(each(), axes.get(each.use.axis, math.inf))
            matrix.append(self._burst(turn))
        for axis, seconds in axes.items():
            self._first.setdefault(axis, []).append(seconds)
        suspects, every = self._agree(self._suspects(axes), parts["step"])
        matrix.append(self._burst(3))
        links = self._find(suspects)
        if 0 < self._located <= MAX_LINK_PROBES and self._every < 0:
            # Probe again soon, at any cost, to see if it is still slow. All processes have the same count.
            every = MIN_INTERVAL_STEPS
        self._costs.append(time.perf_counter() - began - self._compiling)
        self._number += 1
        self._taken, self._next = 0, every
        part_seconds = {name: parts[name] for name in PARTS}
        slowest_part = max(part_seconds, key=lambda name: part_seconds[name])
        heartbeat().facts(
            probe={
                "number": self._number,
                "step": step,
                "every": every,
                "cost": _rounded(self._costs[-1]),
                "platform": self._mesh.devices.flat[0].platform,
                "step_seconds": _rounded(parts["step"]),
                "matrix": _rounded(min(matrix)),
                "matrix_flops": self._matrix.flops,
                "host": _rounded(sum(part_seconds.values())),
                "host_part": PARTS[slowest_part],
                "device_wait": _rounded(parts["device"]),
                "axes": {
                    each.use.axis: [_rounded(axes[each.use.axis]), each.sent_bytes, each.use.kind]
                    for each in self._axes
                },
                **({"links": {str(process): _rounded(seconds) for process, seconds in links.items()}} if links else {}),
            }
        )

    def _burst(self, turn: int) -> float:
        """Run multiplications in every second turn, between which all processes meet, so that processes of one
        host take turns."""
        assert self._matrix is not None
        return self._matrix() if turn % 2 == jax.process_index() % 2 else math.inf

    def _suspects(self, axes: dict[str, float]) -> bool:
        """Return True if a collective took longer than at first."""
        baseline = SUSPECT_SECONDS.get(self._mesh.devices.flat[0].platform, _SUSPECT_SECONDS)
        for axis, seconds in axes.items():
            usual = statistics.median(self._first[axis][:BASELINE_PROBES])
            expected = next(each.use.expected_seconds for each in self._axes if each.use.axis == axis)
            for reference in (usual, *(() if expected is None else (expected,))):
                if seconds > max(SUSPECT_FACTOR * reference, reference + baseline):
                    return True
        return False

    def _agree(self, suspects: bool, step_seconds: float) -> tuple[bool, int]:
        """Return (True if any process suspects a link, process 0's number of steps until the next probe)."""
        every = self._every if self._every > 0 else probe_interval(self._costs, self._steps, step_seconds)
        gathered = gather_ints(int(suspects), every)
        return bool(gathered[:, 0].any()), int(gathered[0, 1])

    def _find(self, suspected: bool) -> dict[int, float]:
        """Measure the time of a message to each process; empty if no link is suspected."""
        self._located, self._compiling = self._located + 1 if suspected else 0, 0.0
        if not 0 < self._located <= MAX_LINK_PROBES:
            return {}
        if self._links is None:
            began = time.perf_counter()
            with self._report.ledger.measure("compile"):
                self._links = LinkProbe(self._mesh)
            self._compiling = time.perf_counter() - began
        return self._links()

    def _report_collectives(self, traced: Any) -> None:
        """Report the collectives of the step to the supervisor, in case one never ends."""
        assert isinstance(self._prepared.step, CompiledStep)
        collectives = traffic_of_trace(traced, self._prepared.step.placement.sizes)
        kinds = sorted({(each.axes, each.kind) for each in collectives})
        heartbeat().facts(collectives=[[kind, list(axes)] for axes, kind in kinds[:MAX_NAMED_COLLECTIVES]])


MAX_NAMED_COLLECTIVES = 64
"""Maximum number of processes or collectives in one line to the supervisor."""


class ProbeWindow:
    """The steps since the last probe: the time of each of their parts, by the run's clock."""

    def __init__(self, report: RunReporter):
        self._clock = report.clock
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self._since, self._before = time.perf_counter(), dict(self._clock.totals)
        self._steps: list[dict[str, float]] = []

    def tick(self) -> None:
        """Record a step that has been dispatched."""
        time_now, totals = time.perf_counter(), dict(self._clock.totals)
        parts = {name: seconds - self._before.get(name, 0.0) for name, seconds in totals.items()}
        parts["step"] = time_now - self._since
        parts["other"] = max(0.0, parts["step"] - sum(parts[name] for name in totals))
        self._steps.append(parts)
        self._since, self._before = time_now, totals

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a usual step, by part."""
        # The first one after a probe, or after the compilation, waits for things that others don't.
        return typical_step(self._steps[2:] or self._steps[1:] or self._steps)


def typical_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Compute the seconds of a usual step, by part: the median of each; for data stalls and hooks, which only
    some steps have, the mean.

    >>> typical_step([{"step": 1.0, "other": 0.1, "hooks": 0.0}, {"step": 1.0, "other": 0.1, "hooks": 0.5}])["hooks"]
    0.25
    """
    typical = dict.fromkeys(("step", "device", *PARTS), 0.0)
    for name in typical:
        values = [each.get(name, 0.0) for each in steps]
        typical[name] = statistics.mean(values) if name in HOST_PARTS else statistics.median(values)
    return typical


def probe_interval(costs: Sequence[float], steps: int, step_seconds: float) -> int:
    """Compute the steps until the next probe, so that all of them together take at most the allowed share of
    the time.

    Args:
        costs: Seconds of each probe so far.
        steps: Steps taken so far.

    >>> probe_interval([0.02], 10, 0.5), probe_interval([0.02], 10, 0.01), probe_interval([0.1, 0.1], 40, 0.5)
    (10, 390, 20)
    """
    coming = max(costs[-BASELINE_PROBES:], default=0.0)
    needed = math.ceil(round((sum(costs) + coming) / (MAX_TIME_SHARE * max(step_seconds, 1e-6)), 6))
    return min(max(needed - steps, MIN_INTERVAL_STEPS), MAX_INTERVAL_STEPS)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _report_profile(profile: HardwareProfile, name: str, uses: Sequence[AxisUse]) -> None:
    """Report the figures of a check of these hosts before the run to the supervisor."""
    rates: dict[int, float] = {}
    for device in profile.devices:
        rates[device.process] = min(rates.get(device.process, math.inf), device.matrix_flops)
    axes = {use.axis: use.expected_seconds for use in uses if use.expected_seconds is not None}
    flops = [rates.get(process, 0.0) for process in range(min(len(profile.processes), MAX_NAMED_COLLECTIVES))]
    heartbeat().facts(profile={"of": name, "axes": axes, "matrix_flops": flops})
