"""Figures of the models' pages: sizes, memory on three numbers of devices, and distances to `transformers`."""

import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from panax.adapters.huggingface.families import BUILT_IN
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.models import VIT_PRESETS, DecoderTask, VitTask
from panax.plan import parse_target, target_devices, walk_step
from panax.presets import preset
from panax.run.sketch import sketch_step

FILE = Path("docs") / "families" / "figures.json"

DEVICES = (1, 8, 64)
"""Numbers of devices that a page has a column for."""

ROWS_PER_DEVICE = {True: 32, False: 1}
"""Rows of a batch for each device: images, or rows of text."""

PARITY_TESTS = "tests/adapters/huggingface/test_huggingface_parity.py"

_DISTANCE = re.compile(r"^\.?(\w+) (logits|gradients): (?:at most )?(\S+) apart$", re.MULTILINE)


def measure_memory(name: str, devices: int) -> dict[str, int]:
    """Trace a training step of a preset on a mesh of H100s, all in `fsdp`; return its bytes on each device.

    Returns:
        `state` (parameters, optimizer and batch), `temporaries`, and `device`, the device's own memory.
    """
    target = parse_target(f"h100x{devices}")
    experiment = preset(name, mesh=MeshShape(fsdp=devices))
    task = experiment.task
    assert isinstance(task, DecoderTask | VitTask)
    rows = devices * ROWS_PER_DEVICE[name in VIT_PRESETS]
    experiment = dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, batch_size=rows),
        task=dataclasses.replace(task, remat="full"),
    )
    sketch = sketch_step(experiment, target_devices(target), lambda line: None, target.memory_bytes)
    cost = walk_step(sketch.step, sketch.batch())
    return {"state": cost.arguments, "temporaries": cost.temporaries, "device": target.memory_bytes}


def measure_presets(names: list[str]) -> dict[str, Any]:
    """Return memory by preset and by number of devices; a layout that a model can't have carries the reason."""
    measured: dict[str, Any] = {}
    for name in names:
        measured[name] = {}
        for devices in DEVICES:
            try:
                measured[name][str(devices)] = measure_memory(name, devices)
            except RecipeError as error:
                measured[name][str(devices)] = {"refused": str(error)}
            jax.clear_caches()
        print(name, measured[name], flush=True)
    return measured


def measure_parity(root: Path) -> dict[str, Any]:
    """Run the tests that compare each family with `transformers`; return the distances that they print."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-s", "-m", "", "-k", "test_logits or test_gradients"]
    done = subprocess.run(
        [*command, PARITY_TESTS], cwd=root, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{PARITY_TESTS} did not pass:\n{done.stdout[-2000:]}")
    distances: dict[str, dict[str, float]] = {}
    for family, what, distance in _DISTANCE.findall(done.stdout):
        distances.setdefault(family, {})[what] = float(distance)
    if missing := BUILT_IN.keys() - distances.keys():
        raise SystemExit(f"{PARITY_TESTS} printed no distances for {', '.join(sorted(missing))}")
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("jax", "torch", "transformers")},
        "families": distances,
    }


def read_figures(root: Path) -> dict[str, Any]:
    """Return the recorded figures."""
    return json.loads((root / FILE).read_text("utf-8"))


def write_figures(root: Path, figures: dict[str, Any]) -> None:
    """Record figures for the pages."""
    (root / FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", "utf-8")
