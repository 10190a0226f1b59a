"""The golden runs of this commit, and the command that takes one group of them.

    python runs.py --list
    python runs.py GROUP --only NAME... --out FILE --folder FOLDER

A name stays the same when the library's names change: losses are compared between commits by it. Each commit defines how
its own runs are built. A group is a module beside this file with a function `run(name, folder)` that gives the rows.
"""  # fmt: skip

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

GROUPS: dict[str, tuple[str, ...]] = {
    "layouts": (
        "one_device", "replica", "fsdp", "hsdp", "tensor", "context_ring", "context_ulysses", "stage", "expert",
        "fsdp_tensor", "stage_fsdp", "expert_tensor",
    ),
    "optimizers": (
        "adamw", "schedule_free", "lamb", "lars", "muon", "soap", "shampoo", "lion", "adafactor", "sgd", "optax",
    ),
    "sums": ("int8", "sign", "bfloat16_in_backward", "delayed", "local_steps", "fragments"),
    "tables": ("rows", "lazy_adam", "row_adagrad", "row_sgd", "growing"),
    "agents": ("ppo", "dqn", "sac"),
    "text_recipes": ("quickstart", "moe_dense", "moe_quickstart", "vit_digits"),
    "recommender_recipes": ("dlrm_criteo", "dlrm_flights", "sasrec_ml100k", "hstu_ml100k"),
    "agent_recipes": ("dqn_gridworld", "sac_pendulum", "ppo_cartpole", "ppo_pendulum", "ppo_breakout"),
    "recovery": ("rollback", "verify", "resume", "resume_after_kill"),
}  # fmt: skip
"""Group to the names of its runs; those of a group share a process."""


def names() -> list[str]:
    return [f"{group}/{name}" for group, members in GROUPS.items() for name in members]


def cpu_seconds() -> float:
    """CPU seconds of this process and the children it has waited for."""
    return sum(os.times()[:4])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("group", nargs="?", choices=list(GROUPS))
    parser.add_argument("--only", nargs="+", default=[], help="names within the group")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each run, as soon as it ends")
    parser.add_argument("--folder", type=Path, help="an empty folder for what the runs write")
    parser.add_argument("--list", action="store_true", help="print the names of all runs")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(names()))
        return 0
    if options.group is None or options.out is None or options.folder is None:
        parser.error("expected GROUP, --out and --folder, or --list")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    module = importlib.import_module(f"golden_{options.group}")
    with open(options.out, "a", encoding="utf-8") as out:
        for name in options.only or GROUPS[options.group]:
            begun, used, answer = time.monotonic(), cpu_seconds(), {"name": f"{options.group}/{name}"}
            folder = options.folder / name
            folder.mkdir(parents=True)
            try:
                answer |= {"rows": module.run(name, folder)}
            except Exception:
                answer |= {"error": traceback.format_exc()}
            answer |= {"seconds": time.monotonic() - begun, "cpu_seconds": cpu_seconds() - used}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
