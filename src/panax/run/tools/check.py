"""`check`: measurement and assessment of the hardware that a run would use, before it starts."""

import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from ...core.errors import PanaxError, RecipeError
from ...core.layout.target import device_target
from ...job.agreement import broadcast_text, is_process_zero
from ...mesh import MeshShape, Placement
from ...plan.search.profile import HardwareProfile, profile_path
from ...plan.walk.walk import walk_step
from ...preflight import CollectiveUse, Preflight, find_problems, measure, summarize_uses
from ...preflight.full import check_single_process, chip_name, format_markdown, full_check, result_file, write_result
from ...preflight.report import format_figures, format_findings
from ...system.files import expand_user
from ...train.compiled_step import CompiledStep
from ..auto_mesh import LogFn
from ..experiment import Experiment
from ..sketch import sketch_step
from ..start import checkpoint_location

DEFAULT_FOLDER = "runs"
"""Default folder of runs."""


class CheckError(PanaxError):
    """Error raised if a check that had to pass has findings."""

    exit_code = 6


def check(
    experiment: Experiment | None = None,
    *,
    mesh: MeshShape | None = None,
    places: Sequence[str] = (),
    save: str | Path | None = None,
    strict: bool = False,
    full: bool = False,
    output: str | Path | None = None,
    say: LogFn = lambda line: None,
) -> Preflight:
    """Measure each device, mesh axis, link, clock and disk, compare them with each other, and report
    anomalies.

    Every process of a job calls this together, before training; it takes seconds. The profile is stored in
    Panax's cache, where `panax inspect` finds it, or in `save`.

    Args:
        experiment: The experiment to train: its mesh is measured, the collectives of its step at their
            message sizes, and the disks of its folder and checkpoints. None: the usual collectives over
            `mesh`.
        mesh: The mesh if no experiment is given; by default all devices along `fsdp`.
        places: Further folders or stores to write to and read from.
        save: A file for the profile, instead of the cache.
        strict: Raise if anything is found, or if a part of a full check fails.
        full: Also run every kernel against its definition, a few steps on each kind of layout, a checkpoint
            and a benchmark, in this one process, and write a page about all of it.
        output: The new file for that page; by default a dated one in `benchmarks/results`, or in the current
            folder if that does not exist.
        say: Called with a line before each measurement.

    Returns:
        The same result in every process: print it, or look at `findings` and `profile`.

    Raises:
        CheckError: `strict` is set, and something was found or failed.
        PanaxError: The experiment or the mesh can't be used here.
    """
    if experiment is not None and mesh is not None:
        raise RecipeError("check takes an experiment, which has a mesh, or a mesh; pass one of them")
    if output is not None and not full:
        raise RecipeError(
            "output has no effect without full: only a full check writes a page; pass --full too, or remove it"
        )
    target, page = device_target(jax.local_devices()[0]), None
    if full:
        check_single_process()
        # Before minutes of work: an existing file is not overwritten.
        page = result_file(output, datetime.datetime.now(datetime.UTC).date().isoformat(), target.platform, chip_name())
    uses: list[CollectiveUse] | None = None
    if experiment is None:
        placement = Placement.create(mesh)
        chosen = [DEFAULT_FOLDER] if not places else []
    else:
        placement, uses = _of_run(experiment, say)
        chosen = [experiment.folder]
        if experiment.checkpoint.directory:
            chosen.append(checkpoint_location(experiment))
    version = sys.modules[__name__.partition(".")[0]].__version__
    measured_places = list(dict.fromkeys([*chosen, *map(str, places)]))
    profile, broken = measure(placement.mesh, uses, measured_places, version, say)
    result = Preflight(profile, (*find_problems(profile), *broken))
    result = dataclasses.replace(result, kept=_write_profile(profile, save))
    if page is not None:
        full_result = full_check(version, say)
        checked = [*format_figures(profile), *format_findings(result)]
        write_result(page, format_markdown(full_result, checked))
        result = dataclasses.replace(result, full=full_result, page=page)
    if strict and not result.healthy:
        raise CheckError(_summarize_findings(result))
    return result


def _summarize_findings(result: Preflight) -> str:
    """Format the findings of a check as one message."""
    count, failed = len(result.findings), result.full.failed if result.full else ()
    parts = f", {len(failed)} part{'s' if len(failed) > 1 else ''} of the full check failed" if failed else ""
    lines = [f"the check has {count} finding{'s' if count != 1 else ''}{parts}, and nothing was started:"]
    lines += [f"  {each}" for each in result.findings]
    return "\n".join([*lines, *(f"  {each.group}: {each.name}: {each.why.partition(chr(10))[0]}" for each in failed)])


def _of_run(experiment: Experiment, say: LogFn) -> tuple[Placement, list[CollectiveUse] | None]:
    """Return the mesh of a run and the collectives of its step; None for the latter if they are not known."""
    sketch = sketch_step(experiment, jax.devices(), say)
    if not isinstance(sketch.step, CompiledStep):
        return Placement.create(devices=jax.devices()[:1]), None
    placement = sketch.step.placement
    if not sketch.task.names_axes or placement.devices.size == 1:
        return placement, None
    return placement, summarize_uses(walk_step(sketch.step, sketch.batch()).traffic)


def _write_profile(profile: HardwareProfile, save: str | Path | None) -> Path | None:
    """Write the profile to `save` or to the cache; return its path in every process, or None if the cache
    can't be written."""
    failed, path = "", expand_user(save) if save is not None else profile_path(profile)
    if is_process_zero():
        try:
            profile.save(path)
        except OSError as error:
            if save is not None:
                failed = f"the profile can't be written to {path}: {error.strerror or error}"
            path = None
    if failed := broadcast_text(failed):
        raise CheckError(failed)
    written = broadcast_text("" if path is None else str(path))
    return Path(written) if written else None
