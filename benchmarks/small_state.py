"""What small states cost in held-out loss: moments in 8 and 16 bits, parameters in 16, each against float32.

    python benchmarks/small_state.py [--folder DIR] [--seeds 5] [--steps 400]

A decoder of 0.1 million parameters learns the quickstart's text with AdamW, whose rate ends at zero. A seed is that of the
weights and of the order of the data, the same for all kinds, so differences are paired: their mean over seeds is shown with twice
its standard error, in percent of float32's loss. Each training that ends is a line of trained.jsonl: the same command resumes.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from panax.cli.host_memory import keep_freed_memory

PLAIN, NEAREST, STOCHASTIC = "float32", "parameters in bfloat16, to the nearest", "parameters in bfloat16, by chance"
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: ({}, {}),
    "moments in int8": ({}, {"moments": "int8"}),
    "moments in bfloat16": ({}, {"moments": "bfloat16"}),
    NEAREST: ({"parameter_dtype": "bfloat16"}, {"moments": "float32"}),
    STOCHASTIC: ({"parameter_dtype": "bfloat16"}, {"moments": "float32", "rounding": "stochastic"}),
}
"""Settings of the task and of the optimizer."""

ROWS, SEQUENCE, HELD_OUT = 8, 64, 256
FILE = "trained.jsonl"


def experiment_of(kind: str, seed: int, steps: int) -> Any:
    from panax.data import BytePairTokenizer, PythonLibrary, TextData
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW, Schedule
    from panax.run import Experiment

    # Sides with enough powers of two for blocks of 256 numbers.
    model = DecoderConfig(max_length=256, embed=64, num_layers=1, heads=4, ffn=128, qk_norm=True)
    of_task, of_optimizer = KINDS[kind]
    schedule = Schedule(peak=5e-3, warmup_steps=steps // 20, decay="linear", final=0.0)
    return Experiment(
        task=DecoderTask(model=model, **of_task),
        data=TextData(
            corpus=PythonLibrary(definitions=True),
            tokenizer=BytePairTokenizer(vocab_size=512),
            sequence_length=SEQUENCE,
            batch_size=ROWS,
            seed=seed,
        ),
        optimizer=AdamW(b2=0.98, schedule=schedule, **of_optimizer),
        num_steps=steps,
    )


@functools.lru_cache(maxsize=1)
def batches_of(seed: int, steps: int) -> list[Any]:
    """The batches of a training, the same for all kinds."""
    from panax.run.prepare import prepare

    source = prepare(experiment_of(PLAIN, seed, steps)).data.train
    return [batch for batch, _ in itertools.islice(source.batches(), steps)]


class Trainer:
    """One kind, compiled once for all seeds."""

    def __init__(self, kind: str, steps: int):
        import numpy as np

        from panax.run.prepare import prepare

        self.kind, self.steps = kind, steps
        prepared = prepare(experiment_of(kind, 0, steps))
        self.step = prepared.step
        assert prepared.data.held_out is not None
        rows = []
        for found, _ in prepared.data.held_out.batches():
            rows.append(found)
            if len(rows) * ROWS >= HELD_OUT:
                break
        self.held_out = {name: np.concatenate([each[name] for each in rows])[:HELD_OUT] for name in rows[0]}

    def train(self, seed: int) -> dict[str, Any]:
        import jax

        from panax.train import evaluate_all

        state, began = self.step.init(seed), time.perf_counter()
        for batch in batches_of(seed, self.steps):
            state, _ = self.step(state, self.step.put(batch))
        loss = evaluate_all(self.step, state, [self.held_out])["loss"]
        seconds = time.perf_counter() - began
        sizes = {"parameters": state.params, "optimizer": state.optimizer_state}
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        bytes_of = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in sizes.items()}
        per = {f"{name}_bytes": round(total / count, 3) for name, total in bytes_of.items()}
        return {"kind": self.kind, "seed": seed, "steps": self.steps, "loss": loss, "seconds": round(seconds, 1), **per}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of losses with the same seeds: their mean, and twice its standard error."""

    mean: float
    doubled_error: float

    @classmethod
    def of(cls, differences: list[float]) -> "Difference":
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        return cls(statistics.fmean(differences), 2 * error)


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
        paired = [
            100 * (losses[kind, seed]["loss"] / losses[PLAIN, seed]["loss"] - 1)
            for seed in seeds
            if (PLAIN, seed) in losses
        ]
        found = Difference.of(paired)
        against = "" if kind == PLAIN else f"{found.mean:+.3f} ± {found.doubled_error:.3f}"
        lines.append(
            f"| {kind} | {one['parameters_bytes']} | {one['optimizer_bytes']} | {mean:.4f} | {against} | {len(seeds)} |"
        )
    both = [seed for kind, seed in losses if kind == STOCHASTIC and (NEAREST, seed) in losses]
    if both:
        found = Difference.of(
            [100 * (losses[STOCHASTIC, seed]["loss"] / losses[NEAREST, seed]["loss"] - 1) for seed in both]
        )
        lines += ["", f"By chance against to the nearest: {found.mean:+.3f} ± {found.doubled_error:.3f} %."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/small_state"), help="where trained.jsonl lies")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind")
    parser.add_argument("--steps", type=int, default=400, help="updates of each training")
    given = parser.parse_args()
    if given.seeds < 1 or given.steps < 20:
        parser.error("expected at least 1 seed and 20 steps")
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(each["kind"], each["seed"]) for each in records if each["steps"] == given.steps}
    trainers: dict[str, Trainer] = {}
    for seed in range(given.seeds):
        for kind in KINDS:
            if (kind, seed) in done:
                continue
            if kind not in trainers:
                trainers[kind] = Trainer(kind, given.steps)
            records.append(trainers[kind].train(seed))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(records[-1]) + "\n")
            print(records[-1], flush=True)
    print(table(records, given.steps))


if __name__ == "__main__":
    keep_freed_memory()
    main()
