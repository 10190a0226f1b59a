"""What local steps cost the quickstart itself: held-out loss with four replicas that agree every 25 steps, paired by seed.

    python benchmarks/local_steps.py [--seeds 3] [--begin 1200] [--folder FOLDER]

For each seed one run adds its gradients up in every step, to the end. Another resumes from its checkpoint of step `--begin` with
local steps: the same steps, rows and tokens, over the same simulated devices. Each run is a process of `panax train`; one that
has ended is not run again. Results go to `local_steps.jsonl` in the folder.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

STEPS, REPLICAS, LOCAL = 1600, 4, 25


def trained(folder: Path, *flags: str) -> float:
    """Train the quickstart in a folder; the held-out loss at its end."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={REPLICAS}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "panax",
        "train",
        "quickstart",
        "--directory",
        str(folder),
        "--num-steps",
        str(STEPS),
    ]
    command += ["--mesh.replica", str(REPLICAS), "--mesh.fsdp", "1", *flags]
    if (loss := ended(folder)) is not None:
        return loss
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


def compared(folder: Path, seed: int, begin: int, outer: tuple[float, float]) -> dict[str, float]:
    """Both runs of a seed; `outer` is the outer optimizer's rate and momentum."""
    rate, momentum = outer
    whole, apart = folder / f"together_{seed}", folder / f"apart_{seed}_{begin}_{rate:g}_{momentum:g}"
    kept = ["--seed", str(seed), "--checkpoint.every", str(begin), "--checkpoint.keep-last", "9"]
    together = trained(whole, *kept)
    if not apart.exists():
        shutil.copytree(whole, apart)
        (apart / "metrics.jsonl").unlink()
        for checkpoint in (apart / "checkpoints").glob("step_*"):
            if int(checkpoint.name[5:]) != begin:
                shutil.rmtree(checkpoint)
    settings = ["--comms.local-steps", str(LOCAL), "--accept-changes"]
    settings += ["--comms.outer-rate", str(rate), "--comms.outer-momentum", str(momentum)]
    return {"seed": seed, "together": together, "apart": trained(apart, *kept, *settings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--begin", type=int, default=1200)
    parser.add_argument("--outer-rate", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/local_steps"))
    arguments = parser.parse_args()
    found = []
    for seed in range(arguments.seeds):
        found.append(
            compared(arguments.folder, seed, arguments.begin, (arguments.outer_rate, arguments.outer_momentum))
        )
        print(json.dumps(found[-1]), flush=True)
        with open(arguments.folder / "local_steps.jsonl", "w") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
    differences = [100 * (each["apart"] / each["together"] - 1) for each in found]
    error = 2 * statistics.stdev(differences) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    print(f"local steps from step {arguments.begin} on: {statistics.fmean(differences):+.2f} % +- {error:.2f}")


if __name__ == "__main__":
    main()
