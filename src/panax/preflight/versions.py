"""Versions that a process runs: libraries, driver, kernel, processor."""

import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..system.cpu_info import describe_processor

LIBRARIES = ("jax", "jaxlib", "numpy", "equinox", "optax", "obstore")
"""Libraries that every run computes with, in the order in which they are reported."""

PLUGINS = re.compile(r"(jax[-_](cuda|rocm).*|libtpu|nvidia[-_](nccl|cudnn|cublas|cuda[-_]runtime).*)", re.IGNORECASE)
"""Distributions that bring a platform to JAX."""

SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_PROTO", "NCCL_ALGO", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Environment variables that change a program's behavior on a device."""


def host_name() -> str:
    """Return this host's name, as in findings."""
    return socket.gethostname()


def local_versions(panax_version: str, device: Any) -> dict[str, str]:
    """Return name to version of everything that should be the same in each process.

    Args:
        device: A JAX device.
    """
    versions = {"panax": panax_version, "python": platform.python_version()}
    versions |= {name: _version_of(name) for name in LIBRARIES}
    for each in importlib.metadata.distributions():
        name = str(each.metadata["Name"] or "").lower()
        if PLUGINS.fullmatch(name):
            # Of two with one name the first is imported.
            versions.setdefault(name, each.version)
    versions["device"] = str(device.device_kind)
    versions["backend"] = " ".join(str(device.client.platform_version).split())[:120]
    if driver := _driver():
        versions["driver"] = driver
    versions["kernel"] = platform.release()
    versions["processor"] = describe_processor().partition(";")[0]
    versions |= {name: value for name in SETTINGS if (value := os.environ.get(name))}
    return versions


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text(errors="replace"))
    return found.group(0) if found else "unknown"


def find_outliers(values: Mapping[int, str]) -> tuple[str | None, dict[str, list[int]]]:
    """Return the most common value, and the others with their processes; the former is None if no value is
    most common.

    >>> find_outliers({0: "1", 1: "2", 2: "1"})
    ('1', {'2': [1]})
    >>> find_outliers({0: "1", 1: "2"})
    (None, {'1': [0], '2': [1]})
    """
    groups: dict[str, list[int]] = {}
    for process, value in values.items():
        groups.setdefault(value, []).append(process)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    if len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1]):
        return None, groups
    return ordered[0][0], dict(ordered[1:])
