"""Kill -9 at random moments, start again with the same command: the end is bitwise that of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tiny_recipe

from panax.checkpoint import open_checkpoint

STEPS = 90

# An agent's environments, replay buffer and target network are in its checkpoints.
RECIPES: dict[str, tuple[str, ...]] = {
    "decoder": (str(Path(tiny_recipe.__file__)), "--evaluate.every", "50"),
    "agent": (
        "dqn_gridworld", "--task.rollouts-per-step", "20", "--task.capacity", "1600", "--task.warmup", "16",
        "--task.evaluation-episodes", "2", "--evaluate.every", "0",
    ),
}  # fmt: skip


def start(folder: Path, recipe: str) -> subprocess.Popen:
    environment = dict(
        os.environ,
        PANAX_CACHE=str(folder.parent / "cache"),
        # Restarts are to fall into training, not into compiling.
        JAX_COMPILATION_CACHE_DIR=os.path.join(tempfile.gettempdir(), f"panax-test-cache-{os.getuid()}"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        PYTHONPATH=os.pathsep.join([str(Path(tiny_recipe.__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )
    command = [sys.executable, "-m", "panax.cli.main", "train", *RECIPES[recipe], "--directory", str(folder),
               "--num-steps", str(STEPS), "--checkpoint.every", "3", "--mesh.fsdp", "2"]  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(folder: Path, recipe: str) -> dict[str, bytes]:
    """Run to the end; every array of the last checkpoint."""
    process = start(folder, recipe)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    last = open_checkpoint(folder / "checkpoints" / f"step_{STEPS:08d}")
    return {name: last.read(name).tobytes() for name in last.manifest.arrays}


def disturb(folder: Path, recipe: str, kills: int, rng: random.Random) -> list[int]:
    """Start and kill `kills` times, each at a random moment after training has begun; the steps it was then found at."""
    outcomes = []
    for _ in range(kills):
        process = start(folder, recipe)
        before = newest(folder)
        deadline = time.monotonic() + 120
        # Wait for a save by this process, then for a random moment: in a step, in a save, in a removal.
        while newest(folder) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        outcomes.append(newest(folder))
    return outcomes


def newest(folder: Path) -> int:
    return max(
        (int(path.name[5:]) for path in folder.glob("checkpoints/step_*") if (path / "manifest.json").is_file()),
        default=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_random_moments_ends_bitwise_the_same(recipe, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    undisturbed, folder = finish(tmp_path / "undisturbed", recipe), tmp_path / "run"
    steps = disturb(folder, recipe, 10, random.Random(seed))
    assert steps == sorted(steps), (seed, steps)
    assert len({*steps, 0}) > 1, (seed, steps)
    assert steps[0] > 0 and steps[-1] < STEPS, (seed, steps)
    outcomes = finish(folder, recipe)
    assert outcomes.keys() == undisturbed.keys()
    assert [name for name in outcomes if outcomes[name] != undisturbed[name]] == [], (seed, steps)
    assert recipe != "agent" or any("replay" in name for name in outcomes)
