"""`report`: reads runs, builds the page, writes it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import DataError, RecipeError
from ..page.html import write_page
from .comparison import comparison_sections
from .costs import Rate
from .run_files import RunFiles, read_run
from .single import sections_of

PAGE, COMPARISON = "report.html", "comparison.html"
MAX_RUNS = 16
"""Maximum number of runs: more lines on one chart can't be told apart."""


def report(
    *runs: str | Path, rate: float | int | None = None, currency: str = "USD", output: str | Path | None = None
) -> Path:
    """Write a page about a run, or about several side by side.

    Args:
        runs: Their folders, as `runs/NAME`.
        rate: Price of a device-hour; None: no prices.
        currency: Currency of the rate.
        output: The page's file; by default `report.html` in the run's folder, or `comparison.html` in that of
            the first of several.

    Returns:
        The page's path.

    Raises:
        RecipeError: The rate or the list of runs is invalid.
        DataError: A folder is not a run's; or the page can't be written.
    """
    priced = Rate.of(rate, currency)
    run_files = read_runs(runs)
    place = Path(output) if output is not None else Path(runs[0]) / (PAGE if len(run_files) == 1 else COMPARISON)
    if place.is_dir():
        raise DataError(f"{place} is a folder; expected the name of a file for the page, as {place / PAGE}")
    if len(run_files) == 1:
        return write_page(place, f"Run {run_files[0].name}", sections_of(run_files[0], priced))
    title = f"Runs {' · '.join(run.name for run in run_files)}"
    return write_page(place, title, comparison_sections(run_files, priced))


def read_runs(folders: Sequence[str | Path]) -> list[RunFiles]:
    if not folders:
        raise RecipeError("expected the folder of a run, as runs/NAME, and got none")
    if len(folders) > MAX_RUNS:
        raise RecipeError(f"{len(folders)} runs; expected at most {MAX_RUNS}, or their curves can't be distinguished")
    places = [Path(folder).resolve() for folder in folders]
    for n, place in enumerate(places):
        if place in places[:n]:
            raise RecipeError(f"{folders[n]} is given twice; pass each run once")
    return _named_apart([read_run(folder) for folder in folders])


def _named_apart(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Distinguish runs of the same name by their folders."""
    names = [run.name for run in runs]
    folders = [run.folder.resolve() for run in runs]
    if len(set(names)) == len(names):
        return list(runs)
    short = [folder.name for folder in folders]
    labels = short if len(set(short)) == len(short) else [str(run.folder) for run in runs]
    return [dataclasses.replace(run, name=label) for run, label in zip(runs, labels)]
