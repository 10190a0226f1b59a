"""What the recipes of post-training learn, over seeds: preferences by DPO, and adapters against the training of all weights.

For each seed, the model of sft_quickstart is trained, and from its checkpoint by dpo_quickstart, by lora_quickstart with rank 16,
and by the same answers with all weights. The table has means over the seeds with 95 % intervals (Student's t), of values and of
paired differences.

    python benchmarks/post_training.py [--seeds 5]
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
from typing import Any

import panax
from panax.models import DecoderTask, LoRA, Preference
from panax.system import json_reader
from panax_recipes.dpo_quickstart import dpo_quickstart
from panax_recipes.lora_quickstart import lora_quickstart
from panax_recipes.sft_quickstart import sft_quickstart

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Quantiles of Student's distribution, by the number of values."""

RIGHT = "questions/questions/exact_match"


def interval(values: list[float]) -> str:
    """Return a mean with the half width of its 95 % interval."""
    half = T_975[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} +- {half:.3f}"


def train(experiment: panax.Experiment) -> dict[str, float]:
    """Train, and return the last evaluation with the share of right answers."""
    result = panax.fit(experiment, quiet=True)
    return {**result.evaluation, RIGHT: score(experiment)}


def score(experiment: panax.Experiment) -> float:
    """Return the share of right answers at the end of a run, as it was logged."""
    with open(os.path.join(experiment.folder, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json_reader.parse(line, constants=True) for line in file]
    return [record[RIGHT] for record in records if RIGHT in record][-1]


def of_seed(seed: int, folder: str) -> dict[str, dict[str, float]]:
    """Train all runs of a seed; return their results by name."""

    def placed(experiment: panax.Experiment, name: str, **changes: Any) -> panax.Experiment:
        return dataclasses.replace(experiment, seed=seed, directory=os.path.join(folder, f"{name}-{seed}"), **changes)

    first = placed(sft_quickstart(), "sft")
    results = {"sft": train(first)}
    init = f"checkpoint:{first.folder}"
    pairs, answers = dpo_quickstart(), lora_quickstart()
    assert isinstance(pairs.task, DecoderTask) and isinstance(answers.task, DecoderTask)
    results["dpo"] = train(panax.add_reference(placed(pairs, "dpo", init=init)))
    alone = dataclasses.replace(pairs.task, objective=Preference(beta=0.1))
    results["dpo without sft_weight"] = train(panax.add_reference(placed(pairs, "alone", init=init, task=alone)))
    adapted = dataclasses.replace(answers.task, adapter=LoRA.of_rank(16))
    results["lora"] = train(placed(answers, "lora", init=init, task=adapted))
    whole = dataclasses.replace(answers.task, adapter=None)
    results["all weights"] = train(placed(answers, "whole", init=init, task=whole, optimizer=first.optimizer))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [of_seed(seed, folder) for seed in range(options.seeds)]
    for name in runs[0]:
        print(f"{name}: right answers {interval([run[name][RIGHT] for run in runs])}", end="")
        for metric in ("rewards/accuracies", "logps/chosen", "loss"):
            if metric in runs[0][name]:
                print(f"; {metric} {interval([run[name][metric] for run in runs])}", end="")
        print()
    ratios = [run["lora"]["loss"] / run["all weights"]["loss"] for run in runs]
    print(f"held-out loss of lora over that of all weights: {interval(ratios)}")


if __name__ == "__main__":
    main()
