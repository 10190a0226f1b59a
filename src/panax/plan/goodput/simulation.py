"""`simulate`: computes goodput, the best interval, and tables over both from a measured run, or from given
times."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import DataError, RecipeError, suggest_name
from .fleet import SECONDS_PER_DAY, Fleet
from .lives import simulate_lives
from .model import Forecast, best_every, forecast, young_daly_seconds
from .prediction import COUNTS, FLEET_FIELDS, STAGE_FIELDS, Simulation
from .stage_times import ASSUMED_SOURCE, GoodputFigures, read_stage_times
from .stages import StageTimes


def simulate(
    run: str | Path | None = None,
    *,
    devices: int,
    lives: int = 64,
    seed: int = 0,
    output: str | Path | None = None,
    **overrides: float | int | bool | None,
) -> Simulation:
    """Predict the goodput of a run on a number of devices, and how often it should save.

    Args:
        run: The folder of a measured run, to take stage times from; None if all of them are given.
        devices: Number of devices of the run.
        lives: Number of runs to simulate, for the variation between them.
        seed: Seed of the simulated runs.
        output: A file for a page with curves.
        overrides: Fields of `StageTimes` and `Fleet`, which override the measured values. None counts as not
            given.

    Raises:
        RecipeError: A time is missing or invalid.
        DataError: The folder is not a run's, or has no step; or the page can't be written.

    >>> times = dict(step=10.0, every=60, stall=5.0, detect=30.0, teardown=10.0, restart=60.0, restore=60.0, first_step=90.0)
    >>> simulation = simulate(devices=16384, **times)
    >>> round(simulation.now.goodput, 3), simulation.best.every
    (0.944, 33)
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    for name in overrides:
        if name not in STAGE_FIELDS and name not in FLEET_FIELDS:
            raise RecipeError(f"unknown stage time {name!r}; {suggest_name(name, [*STAGE_FIELDS, *FLEET_FIELDS])}")
    _check_output(output)
    read = GoodputFigures({}, {}, ()) if run is None else read_stage_times(run)
    times = {**read.times, **{name: value for name, value in overrides.items() if name in STAGE_FIELDS}}
    if "copy_stall" not in overrides and not times.get("copy_every"):
        times.pop("copy_stall", None)
    _check_complete(times, run)
    stages = StageTimes(**times)  # pyright: ignore[reportArgumentType]
    fleet = Fleet(devices=devices, **{name: value for name, value in overrides.items() if name in FLEET_FIELDS})  # pyright: ignore[reportArgumentType]
    current, lived = forecast(stages, fleet), simulate_lives(stages, fleet, count=lives, seed=seed)
    simulation = Simulation(
        run="" if run is None else str(run),
        stages=stages,
        fleet=fleet,
        now=current,
        best=_at(stages, fleet, best_every(stages, fleet)),
        theory=young_daly_seconds(stages, fleet),
        lives=lived,
        by_devices=_by_devices(stages, fleet),
        by_interval=_by_interval(stages, fleet),
        sources={name: "given" if name in overrides else read.sources[name] for name in times},
        assumptions=tuple(_assumptions(stages, fleet, read, overrides)),
    )
    if output is not None:
        from .page import write_page

        write_page(simulation, output)
    return simulation


def _check_output(output: str | Path | None) -> None:
    """Check the output path before the computation."""
    if output is None:
        return
    place = Path(output)
    if place.is_dir():
        raise DataError(
            f"{place} is a folder; expected the name of a file for the page, as {place / 'simulation.html'}"
        )
    if not place.parent.is_dir():
        raise DataError(
            f"can't write the page to {place}: there is no folder {place.parent}; create it, or choose another file"
        )


def _check_complete(times: Mapping[str, Any], run: str | Path | None) -> None:
    needed = [name for name, field in STAGE_FIELDS.items() if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in times]
    if not missing:
        return
    why = "without a measured run, expected" if run is None else f"{run} does not give"
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
    raise RecipeError(f"{why} these stage times: {', '.join(missing)}; set {flags} (in seconds; every in steps)")


def _at(stages: StageTimes, fleet: Fleet, every: int) -> Forecast:
    return forecast(dataclasses.replace(stages, every=every), fleet)


def _by_devices(stages: StageTimes, fleet: Fleet) -> tuple[tuple[Forecast, Forecast], ...]:
    counts = {max(count // fleet.devices_per_host, 2) * fleet.devices_per_host for count in COUNTS} | {fleet.devices}
    fleets = [dataclasses.replace(fleet, devices=count) for count in sorted(counts)]
    return tuple((forecast(stages, each), _at(stages, each, best_every(stages, each))) for each in fleets)


def _by_interval(stages: StageTimes, fleet: Fleet) -> tuple[Forecast, ...]:
    """Forecast intervals around the current and the best one, each twice the previous."""
    unit = stages.copy_every or 1
    max_count = int((fleet.days * SECONDS_PER_DAY - stages.stall) / (unit * stages.step_with_waits))
    best = best_every(stages, fleet) // unit
    counts = {round(best * 2.0**power) for power in range(-4, 5)} | {stages.every // unit}
    return tuple(_at(stages, fleet, count * unit) for count in sorted(counts) if 1 <= count <= max_count)


def _assumptions(stages: StageTimes, fleet: Fleet, read: GoodputFigures, overrides: Mapping[str, Any]) -> Sequence[str]:
    """List the assumptions of the figures, in addition to the measurements."""
    assumptions = list(read.notes)
    assumed = [name for name, source in read.sources.items() if source == ASSUMED_SOURCE and name not in overrides]
    if assumed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in assumed)
        assumptions.append(f"The measured run has not gone through every stage: {flags} are assumed; pass your own.")
    source = "as given" if "failures_per_device_day" in overrides else "that of Llama 3's training, not yours"
    assumptions.append(
        f"A device fails {fleet.failures_per_device_day:.3g} times a day ({source}), independently of the others and of its age."
    )
    if stages.measured_devices and stages.measured_devices != fleet.devices:
        assumptions.append(
            f"Steps, stalls, commits, restore and first step take as long on {fleet.devices:,} devices as on the "
            f"{stages.measured_devices:,} that were measured."
        )
    elif not stages.measured_devices:
        assumptions.append(
            f"The stage times are taken to be those on {fleet.devices:,} devices, and the same for every number."
        )
    if stages.restart_per_doubling:
        assumptions.append(
            f"Restart grows by {stages.restart_per_doubling:g} s with each doubling: {stages.restart_at(fleet.devices):.4g} s on "
            f"{fleet.devices:,} devices."
        )
    elif stages.measured_devices != fleet.devices:
        assumptions.append(
            "Restart is assumed not to grow with the number of devices; --restart-per-doubling lets it grow."
        )
    if "commit" not in overrides:
        assumptions.append(
            "A checkpoint is assumed to be committed as soon as its stall ends; --commit gives its duration."
        )
    if not fleet.replacement:
        assumptions.append("A lost host is assumed to be replaced at once; --replacement gives the delay in seconds.")
    if stages.copy_every and fleet.copies_lost is None:
        assumptions.append(
            "Copies in memory are lost where the neighboring host fails too before the run has recovered: a share of "
            f"{fleet.destroys_copies(stages):.2g} of all failures. Hosts that share a switch or a rack may fail together: "
            "--copies-lost sets that share."
        )
    if not fleet.planned_stops_per_day:
        assumptions.append("There are no planned stops; --planned-stops-per-day gives their number.")
    return assumptions
