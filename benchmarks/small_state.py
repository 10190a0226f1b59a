"""What small states cost in held-out loss: moments in 8 and 16 bits, parameters in 16, each against float32.

    python benchmarks/small_state.py [--folder DIR] [--seeds 5] [--steps 400]

A decoder of 0.1 million parameters learns the quickstart's text with AdamW, whose rate ends at zero. A seed is that of the
weights and of the order of the data, the same for all kinds, so differences are paired: their mean over seeds is shown with twice
its standard error, in percent of float32's loss. Each training that ends is a line of trained.jsonl: the same command resumes.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from paired import Difference, small_experiment, train_all

from panax.system.allocator import keep_freed_memory

PLAIN, NEAREST, STOCHASTIC = "float32", "parameters in bfloat16, to the nearest", "parameters in bfloat16, by chance"
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: ({}, {}),
    "moments in int8": ({}, {"moments": "int8"}),
    "moments in bfloat16": ({}, {"moments": "bfloat16"}),
    NEAREST: ({"parameter_dtype": "bfloat16"}, {"moments": "float32"}),
    STOCHASTIC: ({"parameter_dtype": "bfloat16"}, {"moments": "float32", "rounding": "stochastic"}),
}
"""Settings of the task and of the optimizer."""

ROWS = 8


def experiment_of(kind: str, seed: int, steps: int) -> Any:
    return small_experiment(seed, steps, ROWS, *KINDS[kind])


def table(records: list[dict[str, Any]], steps: int) -> str:
    """What was trained so far, in Markdown."""
    losses = {(each["kind"], each["seed"]): each for each in records if each["steps"] == steps}
    lines = [
        "| kind | bytes of a parameter | of its optimizer state | held-out loss | against float32, % | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        seeds = [seed for each, seed in losses if each == kind]
        if not seeds:
            continue
        one = losses[kind, seeds[0]]
        mean = statistics.fmean(losses[kind, seed]["loss"] for seed in seeds)
        against = "" if kind == PLAIN else str(Difference.between(kind, PLAIN, losses))
        lines.append(
            f"| {kind} | {one['parameters_bytes']} | {one['optimizer_bytes']} | {mean:.4f} | {against} | {len(seeds)} |"
        )
    if any(kind == STOCHASTIC and (NEAREST, seed) in losses for kind, seed in losses):
        found = Difference.between(STOCHASTIC, NEAREST, losses)
        lines += ["", f"By chance against to the nearest: {found} %."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/small_state"), help="where trained.jsonl lies")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind")
    parser.add_argument("--steps", type=int, default=400, help="updates of each training")
    given = parser.parse_args()
    if given.seeds < 1 or given.steps < 20:
        parser.error("expected at least 1 seed and 20 steps")
    records = train_all(given.folder, KINDS, PLAIN, given.seeds, given.steps, experiment_of)
    print(table(records, given.steps))


if __name__ == "__main__":
    keep_freed_memory()
    main()
