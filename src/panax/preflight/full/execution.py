"""Execution of all parts of a full check, one after the other, on the devices of this process."""

import datetime
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax

from ...core.errors import RecipeError
from ...core.layout.target import Target, device_target
from ...system.cpu_info import describe_processor
from ..versions import local_versions
from .kernels import kernel_cases
from .layouts import layout_cases
from .parts import Case, FullCheck, run_case
from .sizes import Sizes, sizes_for
from .train_benchmark import training_cases

LogFn = Callable[[str], None]


def cases(sizes: Sizes | None = None, folder: Path = Path(), target: Target | None = None) -> list[Case]:
    """Return all parts of the check for the attached device.

    Args:
        target: By default that device's; parts for another target can be listed, but not run.
        sizes: By default those for its platform.
        folder: Folder in which the checkpoint is written and removed.
    """
    sizes = sizes or sizes_for((target or device_target(jax.local_devices()[0])).platform)
    return [*kernel_cases(sizes, target), *layout_cases(), *training_cases(sizes, folder)]


def full_check(
    version: str,
    say: LogFn = lambda line: None,
    *,
    sizes: Sizes | None = None,
    folder: Path = Path(),
    only: Callable[[Case], bool] = lambda case: True,
) -> FullCheck:
    """Run every part; a failing part is stored with its error, and the check continues.

    Args:
        version: Panax's version.
        say: Called with a line before each part.
        only: Returns True for the parts to run.

    Raises:
        RecipeError: There are several processes; each part is for one.
    """
    check_single_process()
    start, day = time.perf_counter(), datetime.datetime.now(datetime.UTC).date().isoformat()
    device, results = jax.local_devices()[0], []
    chosen = [each for each in cases(sizes, folder) if only(each)]
    for number, case in enumerate(chosen):
        say(f"{case} ({number + 1} of {len(chosen)})")
        results.append(run_case(case))
    facts = {"devices": f"{jax.local_device_count()} x {device.device_kind}", **local_versions(version, device)}
    return FullCheck(
        day=day,
        platform=device_target(device).platform,
        chip=chip_name(),
        facts=facts,
        parts=tuple(results),
        seconds=time.perf_counter() - start,
    )


def check_single_process() -> None:
    """Check that this process is alone.

    Raises:
        RecipeError: This process is one of several.
    """
    if jax.process_count() > 1:
        raise RecipeError(
            f"--full runs in one process, and this job has {jax.process_count()}; run `panax check --full` alone on a host of "
            f"each kind"
        )


def chip_name() -> str:
    """Return the chip as a part of a file name: its architecture, or the name of a CPU."""
    device = jax.local_devices()[0]
    name = device_target(device).architecture
    if not name:
        name = describe_processor().partition(";")[0] if device.platform == "cpu" else device.device_kind
    words = re.sub(r"\((r|tm|c)\)|\bcpu\b|\bprocessor\b|@.*", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9.]+", words))[:40] or "unknown"
