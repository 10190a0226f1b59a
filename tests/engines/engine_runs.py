"""Trains the tests' tiny recipe alone and by `panax launch`, and compares what was learnt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_here import KERNELS

RECIPE = Path(__file__).parents[1] / "tiny_recipe.py"
STEPS = 12


def environment(folder: Path, **more: str) -> dict[str, str]:
    """For a command that trains in a folder, with a token in it that no node gets."""
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_", "RAY_"))
    }
    return settings | {
        "JAX_PLATFORMS": "cpu",
        "PANAX_CPU_KERNELS": KERNELS[0],
        "PANAX_CACHE": str(folder.parent / "panax-cache"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_TOKEN": "secret-of-mine",
        **more,
    }


def command(what: str, name: str, *flags: str) -> list[str]:
    """`panax train` or `panax launch` of the recipe; the run's name is that of its folder."""
    return [sys.executable, "-m", "panax", what, str(RECIPE), "--name", name, "--log-every", "1", *flags]


def steps(number: int = STEPS) -> tuple[str, str]:
    return "--num-steps", str(number)


def run(words: list[str], folder: Path, env: dict[str, str], code: int = 0, seconds: float = 240.0) -> str:
    """Return the output of a command that ends with this exit code."""
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "secret-of-mine" not in said
    return said


def losses(run_folder: Path) -> dict[int, float]:
    """The loss of each step; the last row of a step counts, which a restart wrote."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def equals(run_folder: Path, alone: dict[int, float]) -> None:
    """See that the run took all steps, with the losses of one process."""
    assert losses(run_folder) == pytest.approx(alone, rel=1e-5)
    secrets = [each for each in run_folder.rglob("*") if each.is_file() and b"secret-of-mine" in each.read_bytes()]
    assert secrets == []


def said_by(run_folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((run_folder / "job").rglob("*.log")))
