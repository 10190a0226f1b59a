"""Pictures of `moe_quickstart`: the loads of its experts, and its loss beside a dense model's with the same active size."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panax import Experiment, fit
from panax.metrics import Tracker
from panax.metrics.heat_map import encode_png
from panax.metrics.page.lines import Line, line_chart
from panax.run.reporting.history import read_history
from panax_recipes.moe_dense import moe_dense
from panax_recipes.moe_quickstart import moe_quickstart


class LastPictures(Tracker):
    """Keeps the last picture of each name."""

    def __init__(self) -> None:
        self.pictures: dict[str, Any] = {}

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Ignore scalars."""

    def picture(self, step: int, name: str, image: Any) -> None:
        """Store a picture, in place of an earlier one of its name."""
        self.pictures[name] = image


def draw_mixture(folder: Path) -> dict[str, bytes]:
    """Train both recipes with seed 0."""
    pictures = LastPictures()
    lines = [
        Line(name, *_train(dataclasses.replace(experiment, directory=str(folder / name), trackers=(pictures,))))
        for name, experiment in (("mixture", moe_quickstart()), ("dense", moe_dense()))
    ]
    (loads,) = pictures.pictures.values()
    chart = line_chart(lines, "step; training loss")
    # A page of another site has its own colors, which a picture can't take.
    svg = chart.svg.replace("<svg ", '<svg style="background:#fff;color:#222" ', 1)
    return {"moe-quickstart.svg": svg.encode(), "expert-load.png": encode_png(loads)}


def _train(experiment: Experiment) -> tuple[list[float], list[float]]:
    """Return the steps and the training losses that a run logs.

    Raises:
        KeyboardInterrupt: A signal stopped the run, which then returns its result so far.
    """
    if fit(experiment, quiet=True).interrupted_by:
        raise KeyboardInterrupt
    rows = [row for row in read_history(Path(experiment.directory or "")) if row.get("train/loss") is not None]
    return [row["step"] for row in rows], [row["train/loss"] for row in rows]
