"""The examples of JAX libraries run as a user runs them, and what they train is good."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax_nnx_digits", "keras_digits"])
def test_digits_are_learned_and_come_back(name, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    held_out, itself = re.findall(r"(?:saw|itself): ([\d.]+)", run.stdout)
    assert float(held_out) > 0.95
    assert abs(float(held_out) - float(itself)) < 1e-3
