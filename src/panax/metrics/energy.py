"""Energy used by a run's devices, if they report it: NVIDIA's by NVML, processors by Linux's counters of
packages."""

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Reader of energy counters: the joules since the last reading.

    >>> joules = iter([5.0, 7.5, 8.0])
    >>> meter = EnergyMeter(lambda: next(joules), "a test")
    >>> meter.take(), meter.take()
    ({'joules': 2.5, 'joules_of': 'a test'}, {'joules': 0.5, 'joules_of': 'a test'})
    """

    def __init__(self, read: Callable[[], float], of: str):
        """Start measuring.

        Args:
            read: Returns the joules so far; monotonic.
            of: Description of the devices, for users.
        """
        self._read, self._of = read, of
        self._last = read()

    def take(self) -> dict[str, Any]:
        """Return the joules since the last call, and their source; empty if the counters can no longer be read."""
        with contextlib.suppress(OSError, ValueError):
            now = self._read()
            used, self._last = now - self._last, now
            return {"joules": round(used, 3), "joules_of": self._of}
        return {}


def find_energy_meter(platform: str) -> EnergyMeter | None:
    """Return a meter of this host's devices of a platform, by jax's name; None if they don't report
    energy."""
    return _gpu_meter() if platform == "gpu" else _package_meter() if platform == "cpu" else None


def _package_meter(where: Path = POWERCAP) -> EnergyMeter | None:
    """Return a meter of the host's processor packages; on most systems only root may read them."""
    counters: list[_WrappingCounter] = []
    with contextlib.suppress(OSError, ValueError):
        for package in sorted(where.glob("intel-rapl:[0-9]*")):
            # `intel-rapl:0:1` is a part of `intel-rapl:0`
            if package.name.count(":") == 1 and (package / "name").read_text().startswith("package"):
                counters.append(_WrappingCounter(package))
    if not counters:
        return None
    name = "processor package" if len(counters) == 1 else f"{len(counters)} processor packages"
    return EnergyMeter(
        lambda: sum(counter.joules() for counter in counters), f"the first host's {name}, other programs included"
    )


class _WrappingCounter:
    """One counter of microjoules, which restarts at 0 after its range."""

    def __init__(self, package: Path):
        self._file = package / "energy_uj"
        self._range = int((package / "max_energy_range_uj").read_text())
        self._before, self._wrapped = int(self._file.read_text()), 0

    def joules(self) -> float:
        microjoules = int(self._file.read_text())
        if microjoules < self._before:
            self._wrapped += self._range
        self._before = microjoules
        return (self._wrapped + microjoules) / 1e6


def _gpu_meter() -> EnergyMeter | None:
    """Return a meter of the GPUs that this process may use, by NVML; None without its Python package, or on
    cards without counters."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(n) for n in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        handles = [_handle(pynvml, name.strip()) for name in names if name.strip()]

        def joules() -> float:
            try:
                return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3
            except pynvml.NVMLError as error:
                raise OSError(str(error)) from error

        count = f"{len(handles)} GPUs" if len(handles) > 1 else "a GPU"
        return EnergyMeter(joules, f"{count} of the first process") if handles else None
    except pynvml.NVMLError:
        return None


def _handle(pynvml: Any, name: str) -> Any:
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
