"""Profiles of hosts that are alike, for tests that make one of them odd."""

import dataclasses
from typing import Any

from panax.plan.search.profile import (
    CollectiveRates,
    DeviceLocation,
    DeviceRates,
    DiskRates,
    HardwareProfile,
    LinkRates,
    ProcessFacts,
)
from panax.preflight.links import neighbor_links

VERSIONS = {"jax": "0.10.2", "numpy": "2.4.6", "kernel": "6.1"}


def healthy(hosts: int = 4, platform: str = "cpu", kind: str = "cpu", one_host: bool = False) -> HardwareProfile:
    """A process with one device on each host, all along fsdp; figures differ by a few percent."""
    names = ["a"] * hosts if one_host else [chr(ord("a") + index) for index in range(hosts)]
    links = neighbor_links([("fsdp", hosts)], list(range(hosts)), between_processes=True)
    both = [(link.source, link.target) for link in links] + [(link.target, link.source) for link in links]
    return HardwareProfile(
        made="2026-11-23T02:00:00+00:00",
        platform=platform,
        device_kind=kind,
        matrix_dtype="float32",
        mesh={"fsdp": hosts},
        places=tuple(DeviceLocation(process=index, host=name) for index, name in enumerate(names)),
        devices=tuple(
            DeviceRates(
                name=f"{kind}:{index}",
                process=index,
                host=name,
                matrix_flops=700e12 * (1 + 0.02 * index),
                memory_bandwidth=3e12 * (1 + 0.01 * index),
            )
            for index, name in enumerate(names)
        ),
        collectives=(
            CollectiveRates(
                kind="all-gather", axes=("fsdp",), ways=hosts, sent_bytes=2**22, latency_seconds=2e-4, bandwidth=1e9
            ),
        ),
        links=tuple(
            LinkRates(
                axes=("fsdp",),
                source=source,
                target=target,
                sent_bytes=2**21,
                latency_seconds=1e-4 * (1 + 0.1 * source),
                bandwidth=2e9 * (1 + 0.1 * target),
            )
            for source, target in both
        ),
        disks=tuple(
            DiskRates(place="runs", host=name, written_bytes=2**26, write_bandwidth=3e8, read_bandwidth=9e8)
            for name in dict.fromkeys(names)
        ),
        processes=tuple(
            ProcessFacts(index=index, host=name, clock_error_seconds=5e-4, cores=8, versions=VERSIONS)
            for index, name in enumerate(names)
        ),
    )


def with_one(profile: HardwareProfile, field: str, which: Any, **changes: Any) -> HardwareProfile:
    """The profile with some of a field's items changed: those for which `which` is true."""
    items = tuple(dataclasses.replace(each, **changes) if which(each) else each for each in getattr(profile, field))
    assert items != getattr(profile, field)
    return dataclasses.replace(profile, **{field: items})
