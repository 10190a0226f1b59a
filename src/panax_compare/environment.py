"""Description of the machine and the software, without importing a framework."""

import glob
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from panax.system import children

from .measure.cores import usable_cores

PACKAGES = ("panax", "jax", "jaxlib", "flax", "optax", "equinox", "torch", "torch_xla", "transformers", "numpy")

VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")


def has_gpu() -> bool:
    """Return True if an NVIDIA GPU is attached and not hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or os.environ.get("JAX_PLATFORMS") == "cpu"
    return bool(glob.glob("/dev/nvidia[0-9]*")) and not hidden


def describe_machine() -> dict[str, Any]:
    """Describe the processor, cores, memory, accelerator, operating system, versions, and variables that
    affect speed."""
    memory = psutil.virtual_memory()
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": memory.total,
        "accelerators": _gpus(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{named[0] if named else platform.machine()}{' with ' + ', '.join(fast) if fast else ''}"


def _gpus() -> list[str]:
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return found


def free_device_bytes() -> int:
    """Return the free memory of the fullest NVIDIA GPU; practically unlimited if it can't be queried."""
    command = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    try:
        return min(int(line) for line in children.run_command(command, 30).output.split()) * 2**20
    except (OSError, ValueError):
        return 2**62


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class MachineLoad:
    """Use of the machine's cores over time: by this comparison's processes, and by all others."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._busy = _busy_seconds()

    def others(self, own_cpu_seconds: float) -> float:
        """Return the average number of cores that other programs used since this was created."""
        wall = max(time.monotonic() - self._wall, 1e-9)
        return max(0.0, (_busy_seconds() - self._busy - own_cpu_seconds) / wall)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
