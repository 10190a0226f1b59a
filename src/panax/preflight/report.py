"""Result of a pre-flight check: figures as short tables, findings, and the file with the profile."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..plan.search.profile import HardwareProfile
from ..system import json_reader
from ..system.terminal_text import align_columns, format_elapsed, format_flop_rate, format_rate
from .findings import HardwareFinding, process_name
from .full import FullCheck, part_lines

MAX_ROWS = 8
"""Maximum number of rows of a table; of more devices, links or disks the slowest are shown."""


@dataclasses.dataclass(frozen=True)
class Preflight:
    """Figures and findings of a check.

    Attributes:
        profile: All figures.
        findings: The problems; empty on healthy hardware.
        kept: The file with the profile; None if this process has written none.
        full: The result of a full check; None if none was requested.
        page: The file with the full check.
    """

    profile: HardwareProfile
    findings: tuple[HardwareFinding, ...]
    kept: Path | None = None
    full: FullCheck | None = None
    page: Path | None = None

    @property
    def healthy(self) -> bool:
        return not self.findings and not (self.full and self.full.failed)

    def __str__(self) -> str:
        full = [] if self.full is None else part_lines(self.full)
        return "\n".join([*format_figures(self.profile), *format_findings(self), *full])

    def to_json(self) -> str:
        """Return findings and profile as JSON."""
        findings = [dataclasses.asdict(each) for each in self.findings]
        content = {"healthy": self.healthy, "findings": findings, "kept": str(self.kept) if self.kept else None}
        if self.full is not None:
            parts = [dataclasses.asdict(each) | {"outcome": each.outcome.value} for each in self.full.parts]
            content |= {"full": dataclasses.asdict(self.full) | {"parts": parts}, "page": str(self.page)}
        return json.dumps(content | {"profile": json_reader.parse(self.profile.to_json(), constants=True)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the profile; see `HardwareProfile.save`."""
        self.profile.save(path)


def format_figures(profile: HardwareProfile) -> list[str]:
    """Format the figures, with a table for each kind of component."""
    return [
        *_head(profile),
        *_devices(profile),
        *_collectives(profile),
        *_links(profile),
        *_disks(profile),
        *_rest(profile),
    ]


def format_findings(result: Preflight) -> list[str]:
    """Format the findings, one paragraph each; if there are none, return one line that states this."""
    if not result.findings:
        return ["", "healthy: no finding"]
    count = len(result.findings)
    lines = ["", f"{count} finding{'s' if count > 1 else ''}"]
    for each in result.findings:
        lines += [f"  {each.kind:8} {each.where}", f"           {each.said}", f"           -> {each.advice}"]
    return lines


def _head(profile: HardwareProfile) -> Iterator[str]:
    mesh = " · ".join(f"{axis}={size}" for axis, size in profile.mesh.items() if size > 1) or "one device"
    processes, hosts = len(profile.processes), len(profile.hosts)
    yield (
        f"checked        {len(profile.places)} x {profile.device_kind}, {processes} process{'es' if processes > 1 else ''} on "
        f"{hosts} host{'s' if hosts > 1 else ''}, in {profile.seconds:.0f} s"
    )
    yield f"mesh           {mesh}"


def _devices(profile: HardwareProfile) -> Iterator[str]:
    simulated = profile.platform == "cpu"
    chosen = sorted(profile.devices, key=lambda each: each.matrix_flops)[:MAX_ROWS]
    rows = [("device", f"matrices ({profile.matrix_dtype})", "memory")]
    for each in sorted(chosen, key=lambda each: (each.process, each.name)):
        where = process_name(profile, each.process)
        name = f"{each.name.rpartition(':')[0]} of {where}" if simulated else f"{each.name} of {where}"
        rows.append((name, format_flop_rate(each.matrix_flops), format_rate(each.memory_bandwidth)))
    yield from _table(rows, 1, len(profile.devices) - len(chosen))


def _collectives(profile: HardwareProfile) -> Iterator[str]:
    if not profile.collectives:
        return
    rows: list[tuple[str, ...]] = [("axis", "collective", "latency", "bandwidth", "of")]
    rows += [
        (
            "·".join(each.axes),
            f"{each.kind} of {each.ways}",
            format_elapsed(each.latency_seconds),
            format_rate(each.bandwidth),
            _size(each.sent_bytes),
        )
        for each in profile.collectives
    ]
    yield from _table(rows, 2, 0)


def _links(profile: HardwareProfile) -> Iterator[str]:
    if not profile.links:
        return
    chosen = sorted(profile.links, key=lambda each: each.bandwidth)[:MAX_ROWS]
    rows = [("link", "axis", "latency", "bandwidth")]
    for each in sorted(chosen, key=lambda each: (each.source, each.target)):
        source, target = profile.places[each.source], profile.places[each.target]
        ends = f"{source.process} -> {target.process}"
        if source.process == target.process:
            ends = f"device {each.source} -> {each.target}"
        elif source.host != target.host:
            ends = f"{source.host} ({source.process}) -> {target.host} ({target.process})"
        else:
            ends = f"process {ends}"
        rows.append((ends, "·".join(each.axes), format_elapsed(each.latency_seconds), format_rate(each.bandwidth)))
    yield from _table(rows, 2, len(profile.links) - len(chosen))


def _disks(profile: HardwareProfile) -> Iterator[str]:
    if not profile.disks:
        return
    chosen = sorted(profile.disks, key=lambda each: each.write_bandwidth)[:MAX_ROWS]
    rows = [("place", "host", "writes", "reads")]
    chosen = sorted(chosen, key=lambda each: (each.place, each.host))
    rows += [
        (each.place, each.host, format_rate(each.write_bandwidth), format_rate(each.read_bandwidth)) for each in chosen
    ]
    yield from _table(rows, 2, len(profile.disks) - len(chosen))


def _rest(profile: HardwareProfile) -> Iterator[str]:
    yield ""
    if len(profile.processes) > 1:
        offsets = [each.clock_offset_seconds for each in profile.processes]
        error = max(each.clock_error_seconds for each in profile.processes)
        apart = max(offsets) - min(offsets)
        known = (
            f"within {format_elapsed(apart + 2 * error)}"
            if apart < 2 * error
            else f"{format_elapsed(apart)} apart (± {format_elapsed(error)})"
        )
        yield f"clocks         {known}"
    by_host = {each.host: each for each in profile.processes}
    busiest = max(by_host.values(), key=lambda each: each.stolen_cores)
    on = f" on {busiest.host}" if len(by_host) > 1 else ""
    yield f"others         {busiest.stolen_cores:.2f} of {busiest.cores} cores are used by other programs{on}"
    versions = next(iter(profile.processes)).versions
    named = ("python", "panax", "jax", "jaxlib", "numpy", "driver")
    version_list = ", ".join(f"{name} {versions[name]}" for name in named if name in versions)
    alike = all(each.versions == versions for each in profile.processes)
    several = len(profile.processes) > 1
    yield f"versions       {version_list}{'' if not several else ', and all else alike' if alike else '; not alike, see below'}"


def _table(rows: Sequence[tuple[str, ...]], left: int, hidden: int) -> Iterator[str]:
    yield ""
    yield from align_columns(rows, left)
    if hidden:
        yield f"and {hidden} more, none of them slower"


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
