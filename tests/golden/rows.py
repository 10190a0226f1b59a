"""Results of a golden run: rows of a step, a metric, and the value as a hexadecimal float, which loses no bit."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import panax
from panax.core import named_leaves
from panax.kernels.cpu.choice import read_environment_choice, use_choice

Row = tuple[int, str, str]
STEPS = 3

# All work on CPU is done by the kernels that the environment names, also outside of `fit`.
_kernels = read_environment_choice()
assert _kernels is not None, "the environment should pin the kernels by PANAX_CPU_KERNELS"
use_choice(_kernels)


def rows_of_step(step: Any, batches: Iterable[Any]) -> list[Row]:
    """Take a step with each batch: all scalars of each, and a sum over the parameters at the end."""
    state, rows, number = step.init(0), [], 0
    for number, batch in enumerate(batches, 1):
        state, scalars = step(state, step.put(batch))
        values = sorted(jax.device_get(dict(scalars)).items())
        rows += [(number, name, float(value).hex()) for name, value in values if is_number(value)]
    return [*rows, parameters_row(number, state)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.ndarray | np.generic) and np.ndim(value) == 0


def parameters_row(number: int, state: Any) -> Row:
    """The exact sum of all parameters' magnitudes: it depends on every bit of them, and not on their names or order."""
    leaves = [np.asarray(leaf) for leaf in named_leaves(state.params).values()]
    values = [np.abs(leaf.astype(np.float64)).ravel() for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)]
    return number, "parameters", math.fsum(float(value) for leaf in values for value in leaf).hex()


def rows_of_fit(experiment: Any, *, devices: int = 1) -> list[Row]:
    """Run an experiment to its end: the training and evaluation metrics it logged, and a sum over the parameters."""
    # Measuring the peak of the device takes longer than these runs.
    panax.run.reporting.report.measure_peak = lambda prepared: panax.metrics.Peak(1e9, "not measured")
    result = panax.fit(experiment, quiet=True, devices=jax.devices()[:devices])
    return [*logged_rows(Path(experiment.directory)), parameters_row(result.step, result.state)]


def logged_rows(folder: Path) -> list[Row]:
    """Rows of `metrics.jsonl`: the last value of each step's metric, as a step may have been taken again."""
    rows_by_key: dict[tuple[int, str], str] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if name.startswith(("train/", "evaluation/")):
                # JSON has no NaN; the log writes null.
                rows_by_key[values["step"], name] = "nan" if value is None else float(value).hex()
    if not rows_by_key:
        raise ValueError(f"{folder}/metrics.jsonl holds no metric of training; the names of metrics may have changed")
    return [(step, name, value) for (step, name), value in sorted(rows_by_key.items())]
