"""`panax launch` with processes that train: losses as of one process, and the run's folder as on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from panax.cluster.record import incidents

TESTS = Path(__file__).parents[1]
RECIPE = str(TESTS / "tiny_recipe.py")
STEPS = ("--num-steps", "8", "--checkpoint.every", "4", "--log-every", "1", "--evaluate.every", "8")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def panax(*arguments: str, devices: int = 4, seconds: float = 400) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_PROC", "XLA_"))}
    environment = kept | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "panax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = panax("train", RECIPE, "--directory", str(folder), "--mesh.fsdp", "4", *STEPS)
    assert found.returncode == 0, found.stderr
    return losses(folder)


def test_four_processes_train_as_one_does(alone, tmp_path):
    found = panax(
        "launch", RECIPE, "--processes", "4", "--devices", "1", "--directory", str(tmp_path), "--mesh.fsdp", "4", *STEPS
    )
    assert found.returncode == 0, found.stderr
    together = losses(tmp_path)
    assert len(together) == 8 and together == pytest.approx(alone, rel=1e-5)
    status = json.loads((tmp_path / "job/status.json").read_text())
    assert [one["step"] for one in status["processes"]] == [8] * 4 and status["end"]["exit_code"] == 0
    assert "4 processes; first step after" in found.stderr and "held-out loss" in found.stderr
    assert not incidents(tmp_path / "job")
    again = panax(
        "launch", RECIPE, "--processes", "2", "--devices", "2", "--directory", str(tmp_path), "--mesh.fsdp", "4", *STEPS
    )
    assert again.returncode == 0 and "all 8 steps are done" in again.stderr, again.stderr


def test_a_recipe_that_one_host_does_not_have_is_not_tried_again(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os, tiny_recipe\n"
        "if os.environ.get('PANAX_PROCESS') == '1':\n    import absent_here\n"
        "from panax import Experiment\n"
        "def mine() -> Experiment:\n    return tiny_recipe.tiny()\n"
    )
    found = panax(
        "launch", str(recipe), "--processes", "2", "--devices", "1", "--directory", str(tmp_path / "run"), seconds=60
    )
    assert found.returncode == 2 and "process 1 on" in found.stderr and "absent_here" in found.stderr
    assert len(found.stderr.splitlines()) < 12, found.stderr
