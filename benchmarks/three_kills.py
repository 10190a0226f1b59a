"""A run that is killed three times and continues on three other meshes, beside the same run undisturbed on one device.

    python benchmarks/three_kills.py [--steps 160] [--picture docs/images/three-kills.svg]

Trains a small version of `quickstart` in float32 on eight simulated CPU devices. The first run stays on one device. The second
begins there, gets SIGKILL at a quarter of the steps, and the same command continues with another mesh, three times. Prints the
largest difference of the two losses at one step, and draws both. Exits with 1 if the difference exceeds rounding.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MESHES = (
    (),
    ("--mesh.fsdp", "8"),
    ("--mesh.replica", "2", "--mesh.tensor", "2", "--mesh.context", "2"),
    ("--mesh.stage", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"),
)
SMALL = (
    "--task.model.embed", "128", "--task.model.num-layers", "4", "--task.model.ffn", "256", "--task.compute-dtype", "float32",
    "--data.batch-size", "16", "--evaluate.every", "0", "--log-every", "1", "--checkpoint.every", "5",
    "--hooks.0.every", "1000000",
)  # fmt: skip
TOLERANCE = 1e-5
"""Relative difference that rounding may reach: float32 sums in another order, amplified by the updates in between. A lost or
repeated batch changes the loss of a step by several percent."""

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PANAX_", "XLA_"))},
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "recipes")]),
}


def main() -> int:
    """Make both runs, compare and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    options = parser.parse_args()
    if options.steps < 40:
        parser.error(f"--steps {options.steps}: expected 40 or more, so that each part has steps and a checkpoint")
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed, killed = Path(scratch) / "undisturbed", Path(scratch) / "killed"
        train(undisturbed, options.steps, MESHES[0])
        parts: list[dict[int, float]] = []
        for number, mesh in enumerate(MESHES):
            last = number == len(MESHES) - 1
            begin = max(losses(killed), default=0)
            train(killed, options.steps, mesh, kill_at=None if last else (number + 1) * options.steps // len(MESHES))
            parts.append({step: loss for step, loss in losses(killed).items() if step > begin - 5})
        reference, found = losses(undisturbed), losses(killed)
    worst = max(abs(found[step] / reference[step] - 1) for step in reference)
    names = [" ".join(mesh).replace("--mesh.", "") or "one device" for mesh in MESHES]
    for name, part in zip(names, parts):
        print(f"{name}: steps {min(part)} to {max(part)}")
    print(f"largest difference of the losses at one step: {worst:.1e} of the loss; {options.steps} steps, 3 kills")
    if options.picture:
        draw(options.picture, reference, parts, names)
    return 0 if worst < TOLERANCE and len(found) == options.steps else 1


def train(folder: Path, steps: int, mesh: tuple[str, ...], kill_at: int | None = None) -> None:
    """Run the command to its end, or kill it once it has logged a step."""
    command = [sys.executable, "-m", "panax", "train", "quickstart", "--directory", str(folder)]
    command += [*SMALL, "--num-steps", str(steps), *mesh]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if kill_at is not None and max(losses(folder), default=0) >= kill_at:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.05)
    if process.returncode or kill_at is not None:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}, kill at step {kill_at}")


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step, as far as the run has written it; of a step that was repeated, the last."""
    path = folder / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # The last line, half written.
            continue
        if "train/loss" in row:
            found[row["step"]] = row["train/loss"]
    return found


def draw(path: Path, reference: dict[int, float], parts: list[dict[int, float]], names: list[str]) -> None:
    """Draw the undisturbed run as a line, and each part of the other as dashes over it."""
    sys.path.insert(0, str(ROOT / "src"))
    from panax.metrics.page.blocks import Annotation
    from panax.metrics.page.lines import Line, line_chart

    lines = [Line("undisturbed", tuple(reference), tuple(reference.values()), marked=False)]
    lines += [
        Line(name, tuple(part), tuple(part.values()), dashes="7 5", marked=False) for name, part in zip(names, parts)
    ]
    kills = [Annotation(max(part), "kill -9", "killed") for part in parts[:-1]]
    chart = line_chart(lines, "step; training loss; vertical lines: kill -9", marks=kills)
    # As a picture in a page of another site it can't take that page's colors.
    path.write_text(chart.svg.replace("<svg ", '<svg style="background:#fff;color:#222" ', 1), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
