"""What cheaper communication costs the quickstart itself: held-out loss with four replicas, paired by seed.

    python benchmarks/communication_losses.py [--seeds 3] [--only local --only int8 ...] [--folder FOLDER]

For each seed one run adds its gradients up in float32 in every step, to the end. Others resume from a checkpoint of it and go on
otherwise: the same steps, rows and tokens, over the same simulated devices. Each run is a process of `panax train`; one that has
ended is not run again. Results go to `losses.jsonl` in the folder. The results of November 2026 are of the recipe as it was then:
AdamW, 1,600 steps of 16 rows, local steps in the last 300.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

STEPS, REPLICAS, KEPT = 550, 4, 50

WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    # The mean of replicas, 12 times; and DiLoCo's outer optimizer as often.
    "local": (450, ("--comms.local-steps", "8", "--comms.outer-rate", "1", "--comms.outer-momentum", "0")),
    "diloco": (450, ("--comms.local-steps", "8")),
    **{kind: (400, ("--comms.compress", kind)) for kind in ("bfloat16", "int8", "float8", "int4", "sign")},
}
"""From which step on, and the flags."""


def trained(folder: Path, *flags: str) -> float:
    """Train the quickstart in a folder; the held-out loss at its end."""
    if (loss := ended(folder)) is not None:
        return loss
    # Simulated devices wait for each other also where other programs use the machine.
    waits = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    devices = f"--xla_force_host_platform_device_count={REPLICAS} {waits}"
    environment = {**os.environ, "XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "panax", "train", "quickstart", "--directory", str(folder)]
    command += ["--num-steps", str(STEPS), "--mesh.replica", str(REPLICAS), "--mesh.fsdp", "1", *flags]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    loss = ended(folder)
    assert loss is not None
    return loss


def ended(folder: Path) -> float | None:
    """The held-out loss after the last step, if a run has come there."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [line["evaluation/loss"] for line in lines if "evaluation/loss" in line and line["step"] == STEPS]
    return found[-1] if found else None


def went_on(whole: Path, folder: Path, begin: int, flags: tuple[str, ...]) -> float:
    """The loss of a run that resumes from another run's checkpoint of step `begin`."""
    if not folder.exists():
        copy = folder.with_suffix(".copied")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        (copy / "metrics.jsonl").unlink()
        for checkpoint in (copy / "checkpoints").glob("step_*"):
            if int(checkpoint.name[5:]) != begin:
                shutil.rmtree(checkpoint)
        copy.rename(folder)
    return trained(folder, *flags, "--accept-changes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=WAYS, help="may be given more than once")
    parser.add_argument("--folder", type=Path, default=Path("runs/communication_losses"))
    asked = parser.parse_args()
    ways = asked.only or list(WAYS)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(asked.seeds):
        kept = ("--seed", str(seed), "--checkpoint.every", str(KEPT), "--checkpoint.keep-last", str(STEPS // KEPT))
        whole = asked.folder / f"together_{seed}"
        together = trained(whole, *kept)
        for name in ways:
            begin, flags = WAYS[name]
            loss = went_on(whole, asked.folder / f"{name}_{seed}", begin, (*kept, *flags))
            found[name].append(100 * (loss / together - 1))
            line = {"seed": seed, "way": name, "begin": begin, "together": together, "loss": loss}
            print(json.dumps(line), flush=True)
            with open(asked.folder / "losses.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
    for name, differences in found.items():
        error = 2 * statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        print(f"{name}, from step {WAYS[name][0]} on: {statistics.fmean(differences):+.2f} % +- {error:.2f}")


if __name__ == "__main__":
    main()
