"""Conditions on which the bits of a step depend: those of the session that took it, compared with those of a replay."""

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax

from ...kernels import timed_kernels_in_force
from ...system.cpu_info import describe_processor
from ..preparation import PreparedRun
from .record import RunSession

_PACKAGES = (
    "jax",
    "jaxlib",
    "panax-jax",
    "numpy",
    "optax",
    "equinox",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def differing_conditions(session: RunSession | None, prepared: PreparedRun, kernels: str) -> list[str]:
    """List the conditions that differ from those of a session, each as "NAME: BEFORE, here NOW"; or one line if nothing is
    recorded.

    Args:
        session: The session that took the step; None if the run has recorded none.
        kernels: The run's record of kernels that were chosen by timing; empty for none.
    """
    if session is None:
        return ["the run has recorded no session, so the processor, devices and versions of this step are not known"]
    return [
        f"{name}: {before}, here {now}"
        for name, before, now in _pairs(session.facts, prepared, kernels)
        if before != now
    ]


def _pairs(facts: Mapping[str, Any], prepared: PreparedRun, kernels: str) -> Iterator[tuple[str, str, str]]:
    devices = facts.get("devices")
    if isinstance(devices, Mapping):
        here = [jax.devices()[0]] if prepared.placement is None else list(prepared.placement.devices.devices.flat)
        yield "devices", _devices(devices), f"{len(here)} of {here[0].platform} ({here[0].device_kind})"
    mesh = facts.get("mesh")
    if isinstance(mesh, Mapping):
        sizes = {} if prepared.placement is None else prepared.placement.sizes
        yield "mesh", _mesh(mesh), _mesh({axis: size for axis, size in sizes.items() if size > 1})
    if isinstance(facts.get("processes"), int):
        yield "processes", str(facts["processes"]), str(jax.process_count())
    versions = facts.get("versions")
    for name in _PACKAGES:
        if isinstance(versions, Mapping) and (before := versions.get(name)) is not None:
            yield f"version of {name}", str(before), _version(name)
    if isinstance(facts.get("processor"), str):
        here = f"{describe_processor().split(';')[0]}, {os.cpu_count()} threads"
        yield "processor", facts["processor"], here
    now = timed_kernels_in_force()
    if kernels or now:
        yield "kernels chosen by timing", kernels or "none", now or "none"


def _devices(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('count')} of {facts.get('platform')} ({facts.get('kind')})"


def _mesh(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sorted(sizes.items())) or "one device"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
