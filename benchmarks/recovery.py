"""How long a run stands still after a worker is killed, and after a node is taken out and put back.

    python benchmarks/recovery.py [--kills 10] [--changes 3] [--no-spares]

Four processes of one device train the tests' tiny decoder on this machine, each a node of its own; the first start compiles
all programs. A random worker gets SIGKILL at a random moment, after the run has come further than before; the parts are those
that the supervisor books, from a worker's last sign of life to the next step of all four. Then a node is taken out and put back,
so that the layout changes. Run it on a machine with nothing else to do.
"""  # fmt: skip

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "tests" / "tiny_recipe.py"
PARTS = ("detect", "teardown", "restart", "restore", "first_step")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PANAX_", "XLA_"))},
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(RECIPE.parent)]),
}
FLAGS = ("--nodes", "4", "--processes", "4", "--devices", "1", "--num-steps", "100000", "--evaluate.every", "0")
SAVES = ("--checkpoint.every", "20", "--log-every", "20", "--max-restarts", "1000")


class Run:
    """A launched job."""

    def __init__(self, folder: Path, *flags: str):
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "panax",
            "launch",
            str(RECIPE),
            "--directory",
            str(folder),
            *FLAGS,
            *SAVES,
            *flags,
        ]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)

    def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its status, once it trains and that holds."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended with exit code {self.process.returncode}")
            try:
                found = json.loads((self.folder / "job/status.json").read_text())
            except (OSError, ValueError):
                found = {"state": ""}
            if found["state"] == "running" and what(found):
                return found
            time.sleep(0.1)

    def panax(self, command: str, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "panax", command, str(self.folder), *arguments],
            env=ENVIRONMENT,
            check=True,
            stdout=-3,
        )

    def incidents(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "job/incidents.jsonl").read_text().splitlines())
        return list({one["attempt"]: one for one in lines}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--changes", type=int, default=3)
    parser.add_argument("--no-spares", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="panax-recovery-") as folder:
        run = Run(Path(folder) / "run", *(["--no-spares"] if asked.no_spares else []))
        try:
            kill(run, asked.kills, rng)
            change(run, asked.changes)
            run.panax("stop")
            run.process.wait(60)
        finally:
            run.process.kill()
        found = run.incidents()
    told("killed, the same layout", [one for one in found if one["cause"] == "killed"])
    told("new layout", [one for one in found if one["cause"] == "new layout"])


def kill(run: Run, kills: int, rng: random.Random) -> None:
    furthest = 0
    for number in range(1, kills + 1):
        run.until(lambda found, n=number, step=furthest: found["attempt"] == n and found["step"] > step + 20)
        # The spares have been started after the first step.
        time.sleep(rng.uniform(4.0, 8.0))
        status = run.until(lambda found: True)
        furthest = status["step"]
        os.kill(rng.choice(status["processes"])["pid"], signal.SIGKILL)
    run.until(lambda found: found["attempt"] == kills + 1 and found["step"] > furthest)


def change(run: Run, changes: int) -> None:
    """Both layouts are seen once before they count; what the first of each takes is told too."""
    for _ in range(changes):
        for command, nodes in (("cordon", 3), ("uncordon", 4)):
            before = run.until(lambda found: True)["attempt"]
            time.sleep(5.0)
            run.panax(command, "3")
            run.until(
                lambda found, nodes=nodes, before=before: (
                    found["attempt"] > before and len(found["nodes"]["running"]) == nodes and found["step"] >= 0
                )
            )


def told(what: str, incidents: list[dict[str, Any]]) -> None:
    rows = [[one[part] or 0.0 for part in PARTS] for one in incidents if one["first_step"] is not None]
    if not rows:
        return
    sums = [sum(row) for row in rows]
    print(
        f"{what}: {len(rows)} times; seconds, median {statistics.median(sums):.1f} ({min(sums):.1f} to {max(sums):.1f})"
    )
    for part, column in zip(PARTS, zip(*rows)):
        print(f"  {part:10} {statistics.median(column):5.2f} ({min(column):.2f} to {max(column):.2f})")
    print("  each in turn:", ", ".join(f"{each:.1f}" for each in sums), flush=True)


if __name__ == "__main__":
    main()
