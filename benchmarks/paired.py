"""Trainings of several kinds with the same seeds, resumed cell by cell, and their paired differences."""

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FILE = "trained.jsonl"
SEQUENCE, HELD_OUT = 64, 256
"""Tokens of a row, and held-out rows."""

ExperimentOf = Callable[[str, int, int], Any]
"""(kind, seed, steps) to an experiment."""


def small_experiment(
    seed: int, steps: int, rows: int, task: dict[str, Any], optimizer: dict[str, Any], **more: Any
) -> Any:
    """A decoder of 0.1 million parameters on the quickstart's text, with AdamW whose rate ends at zero."""
    from panax.data import BytePairTokenizer, PythonLibrary, TextData
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW, Schedule
    from panax.run import Experiment

    # Sides with enough powers of two for blocks of 256 numbers.
    model = DecoderConfig(max_length=256, embed=64, num_layers=1, heads=4, ffn=128, qk_norm=True)
    schedule = Schedule(peak=5e-3, warmup_steps=steps // 20, decay="linear", final=0.0)
    return Experiment(
        task=DecoderTask(model=model, **task),
        data=TextData(
            corpus=PythonLibrary(definitions=True),
            tokenizer=BytePairTokenizer(vocab_size=512),
            sequence_length=SEQUENCE,
            batch_size=rows,
            seed=seed,
        ),
        optimizer=AdamW(b2=0.98, schedule=schedule, **optimizer),
        num_steps=steps,
        **more,
    )


class Trainer:
    """One kind, compiled once for all seeds."""

    def __init__(self, kind: str, plain: str, steps: int, experiment_of: ExperimentOf):
        import numpy as np

        from panax.run.preparation import prepare

        self.kind, self.steps = kind, steps
        self._batches = functools.partial(_batches_of, experiment_of, plain)
        prepared = prepare(experiment_of(kind, 0, steps))
        self.step = prepared.step
        assert prepared.data.held_out is not None
        rows: list[Any] = []
        for found, _ in prepared.data.held_out.batches():
            rows.append(found)
            if sum(len(each["tokens"]) for each in rows) >= HELD_OUT:
                break
        self.held_out = {name: np.concatenate([each[name] for each in rows])[:HELD_OUT] for name in rows[0]}

    def train(self, seed: int) -> dict[str, Any]:
        import jax

        from panax.train import evaluate_all

        state, began = self.step.init(seed), time.perf_counter()
        for batch in self._batches(seed, self.steps):
            # Simulated devices that are many steps behind one another may wait for ever.
            state, _ = jax.block_until_ready(self.step(state, self.step.put(batch)))
        loss = evaluate_all(self.step, state, [self.held_out])["loss"]
        seconds = time.perf_counter() - began
        sizes = {"parameters": state.params, "optimizer": state.optimizer_state}
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        bytes_of = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in sizes.items()}
        per = {f"{name}_bytes": round(total / count, 3) for name, total in bytes_of.items()}
        return {"kind": self.kind, "seed": seed, "steps": self.steps, "loss": loss, "seconds": round(seconds, 1), **per}


@functools.lru_cache(maxsize=1)
def _batches_of(experiment_of: ExperimentOf, plain: str, seed: int, steps: int) -> list[Any]:
    """The batches of a training, the same for all kinds."""
    from panax.run.preparation import prepare

    source = prepare(experiment_of(plain, seed, steps)).data.train
    return [batch for batch, _ in itertools.islice(source.batches(), steps)]


def train_all(
    folder: Path, kinds: Iterable[str], plain: str, seeds: int, steps: int, experiment_of: ExperimentOf
) -> list[dict[str, Any]]:
    """Train what is lacking, a line of the folder's file for each training, and give all there is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(each["kind"], each["seed"]) for each in records if each["steps"] == steps}
    trainers: dict[str, Trainer] = {}
    for seed in range(seeds):
        for kind in kinds:
            if (kind, seed) in done:
                continue
            if kind not in trainers:
                trainers[kind] = Trainer(kind, plain, steps, experiment_of)
            records.append(trainers[kind].train(seed))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(records[-1]) + "\n")
            print(records[-1], flush=True)
    return records


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of losses with the same seeds: their mean, and twice its standard error."""

    mean: float
    doubled_error: float

    @classmethod
    def of(cls, differences: list[float]) -> "Difference":
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        return cls(statistics.fmean(differences), 2 * error)

    @classmethod
    def between(cls, kind: str, plain: str, losses: dict[tuple[str, int], dict[str, Any]]) -> "Difference":
        """In percent of the other's loss, over the seeds that both have."""
        seeds = [seed for each, seed in losses if each == kind and (plain, seed) in losses]
        return cls.of([100 * (losses[kind, seed]["loss"] / losses[plain, seed]["loss"] - 1) for seed in seeds])

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.doubled_error:.3f}"
