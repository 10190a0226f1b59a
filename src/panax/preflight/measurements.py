"""All measurements, one after the other, in every process at the same time; each process gets one profile of
all figures."""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from ..core.errors import StoreError
from ..job.agreement import gather_ints, gather_texts
from ..plan.search.profile import (
    CollectiveRates,
    DeviceLocation,
    DeviceRates,
    DiskRates,
    HardwareProfile,
    LinkRates,
    ProcessFacts,
)
from ..system import json_reader
from .clocks import estimate_offset, record_passages
from .collectives import CollectiveFigures, CollectiveUse, default_uses, measure_collective, slowest_figures
from .cores import CoreUsage, busy_cores, measure_usage, read_core_times
from .devices import DeviceFigures, measure_device, select_devices, size_for
from .disks import DiskFigures, measure_disk
from .findings import HardwareFinding
from .links import LinkFigures, measure_links
from .versions import host_name, local_versions

LogFn = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _ProcessMeasurements:
    """Measurements of one process."""

    host: str
    passages: list[tuple[float, float]]
    devices: list[DeviceFigures]
    collectives: list[CollectiveFigures]
    links: list[LinkFigures]
    disks: list[DiskFigures]
    unwritable: list[tuple[str, str]]
    usage: CoreUsage
    versions: dict[str, str]

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> "_ProcessMeasurements":
        content = json_reader.parse(text, constants=True)
        return cls(
            host=content["host"],
            passages=[tuple(each) for each in content["passages"]],
            devices=[DeviceFigures(**each) for each in content["devices"]],
            collectives=[CollectiveFigures(**each | {"axes": tuple(each["axes"])}) for each in content["collectives"]],
            links=[LinkFigures(**each | {"axes": tuple(each["axes"])}) for each in content["links"]],
            disks=[DiskFigures(**each) for each in content["disks"]],
            unwritable=[tuple(each) for each in content["unwritable"]],
            usage=CoreUsage(**content["usage"] | {"programs": [tuple(each) for each in content["usage"]["programs"]]}),
            versions=content["versions"],
        )


def measure(
    mesh: Mesh, uses: Sequence[CollectiveUse] | None, places: Sequence[str], version: str, say: LogFn
) -> tuple[HardwareProfile, list[HardwareFinding]]:
    """Measure the devices of a mesh, the links between them, and locations of files; all processes of the job
    call it together.

    Args:
        uses: The collectives to measure; None for the usual ones.
        places: Folders and stores, to each of which one process of every host writes.
        version: Panax's version.

    Returns:
        The same profile in every process, and the locations that can't be written.
    """
    start = time.perf_counter()
    host, index = host_name(), jax.process_index()
    hosts = gather_texts(host)
    say("clocks and versions")
    passed, versions = record_passages(), local_versions(version, jax.local_devices()[0])
    # Together: work of one process before the others begin would count as another program's.
    gather_ints(0)
    before = read_core_times()
    say("devices")
    devices = [measure_device(device) for device in select_devices()]
    several = mesh.size > 1
    measured_uses = list(default_uses(mesh.shape) if uses is None else uses) if several else []
    collectives, links = [], []
    for number, use in enumerate(measured_uses):
        say(f"{use.kind} over {'·'.join(use.axes)} ({number + 1} of {len(measured_uses)})")
        collectives.append(measure_collective(mesh, use))
    if several:
        say("links")
        links = measure_links(mesh)
    gather_ints(0)
    used = measure_usage(before, read_core_times())
    disks, unwritable = [], []
    for place in places if hosts.index(host) == index else ():
        say(f"{place}")
        try:
            disks.append(measure_disk(place))
        except (StoreError, OSError) as error:
            # The others wait for this process's figures: an error here is a finding, too.
            unwritable.append((place, str(error)))
    mine = _ProcessMeasurements(host, passed, devices, collectives, links, disks, unwritable, used, versions)
    by_process = [_ProcessMeasurements.of(text) for text in gather_texts(mine.text())]
    profile = _profile(mesh, by_process, time.perf_counter() - start)
    broken = [
        HardwareFinding(
            "disk", f"{place} on host {each.host}", text, "the run could not save there; correct that first"
        )
        for each in by_process
        for place, text in each.unwritable
    ]
    return profile, broken


def _profile(mesh: Mesh, by_process: Sequence[_ProcessMeasurements], seconds: float) -> HardwareProfile:
    first = mesh.devices.flat[0]
    return HardwareProfile(
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        platform=first.platform,
        device_kind=first.device_kind,
        matrix_dtype=size_for(first.platform).dtype,
        mesh=dict(mesh.shape.items()),
        places=tuple(
            DeviceLocation(process=each.process_index, host=by_process[each.process_index].host)
            for each in mesh.devices.flat
        ),
        devices=tuple(
            DeviceRates(
                name=f"{first.device_kind}:{device.index}",
                process=process,
                host=each.host,
                matrix_flops=device.matrix_flops,
                memory_bandwidth=device.memory_bandwidth,
                slowest_ratio=device.slowest_ratio,
            )
            for process, each in enumerate(by_process)
            for device in each.devices
        ),
        collectives=tuple(_collective(each) for each in slowest_figures([each.collectives for each in by_process])),
        links=tuple(
            LinkRates(
                axes=link.axes,
                source=link.source,
                target=link.target,
                sent_bytes=link.sent_bytes,
                latency_seconds=link.small_seconds,
                bandwidth=link.sent_bytes / _transfer_seconds(link.large_seconds, 2 * link.small_seconds),
            )
            for each in by_process
            for link in each.links
        ),
        disks=tuple(
            DiskRates(host=each.host, **dataclasses.asdict(disk)) for each in by_process for disk in each.disks
        ),
        processes=tuple(_facts(by_process, index) for index in range(len(by_process))),
        seconds=round(seconds, 2),
    )


def _collective(figures: CollectiveFigures) -> CollectiveRates:
    return CollectiveRates(
        kind=figures.kind,
        axes=figures.axes,
        ways=figures.ways,
        sent_bytes=figures.sent_bytes,
        latency_seconds=figures.small_seconds,
        bandwidth=figures.sent_bytes / _transfer_seconds(figures.large_seconds, figures.small_seconds),
    )


def _transfer_seconds(large: float, small: float) -> float:
    """Return a large message's transfer time without latency, at least half of the measured time."""
    return max(large - small, large / 2)


def _facts(by_process: Sequence[_ProcessMeasurements], index: int) -> ProcessFacts:
    mine = by_process[index]
    offset, error = estimate_offset(mine.passages, by_process[0].passages) if index else (0.0, 0.0)
    cores, by = busy_cores([each.usage for each in by_process if each.usage.machine == mine.usage.machine])
    return ProcessFacts(
        index=index,
        host=mine.host,
        clock_offset_seconds=offset,
        clock_error_seconds=error,
        cores=mine.usage.cores,
        stolen_cores=cores,
        stolen_by=by,
        versions=mine.versions,
    )
