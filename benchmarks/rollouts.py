"""Results of the recipes of reinforcement learning over seeds: greedy answers before and after, by the recipe's own reward.

For each seed, the first recipe is trained, and from its checkpoint the second one. Both answer the first recipe's questions
greedily. `reward` is the mean of the second recipe's first reward, `distinct` the share of different answers, `seconds` the time
of the second run with its compilation, and `CPU seconds` that of its processors without those of the rewards.

    python benchmarks/rollouts.py [--before sft_json] [--after grpo_json] [--seeds 5]
"""

import argparse
import dataclasses
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import panax
from panax.cli.recipes import find_recipe
from panax.generate import GenerationRequest
from panax.rollouts import RewardPool, RolloutData
from panax.system import json_reader


def read_questions(experiment: panax.Experiment) -> list[dict[str, Any]]:
    """Return the records of a recipe's questions."""
    records = []
    for path in experiment.questions.files:
        with open(path, encoding="utf-8") as file:
            records += [json_reader.parse_as(dict, line) for line in file]
    return records


def answer_greedily(folder: str, records: Sequence[Mapping[str, Any]], data: RolloutData) -> list[str]:
    """Return the greedy answers of a run's newest checkpoint."""
    model = panax.load(folder, newest=True)
    assert model.tokenizer is not None
    engine = model.create_engine(rows=data.rows, at_least=data.length)
    prompts = [tuple(model.tokenizer.encode(record["prompt"])) for record in records]
    requests = [GenerationRequest(prompt, data.greedy_sampling()) for prompt in prompts]
    return [completion.text for completion in engine.generate(requests)]


def measure(folder: str, records: Sequence[dict[str, Any]], data: RolloutData) -> dict[str, float]:
    """Return the mean reward of greedy answers, and the share of distinct ones."""
    answers = answer_greedily(folder, records, data)
    with RewardPool(data.rewards[:1], processes=data.processes) as pool:
        verdicts = pool.score(list(zip(answers, records, strict=True)))
    values = []
    for (verdict,) in verdicts:
        if verdict.value is None:
            raise SystemExit(f"error: a question has no reward: {verdict.error}")
        values.append(verdict.value)
    return {"reward": statistics.mean(values), "distinct": len(set(answers)) / len(answers)}


def train_pair(before: panax.Experiment, after: panax.Experiment, seed: int, folder: str) -> dict[str, float]:
    """Train both recipes with a seed; return what was measured of them."""
    assert isinstance(after.data, RolloutData)
    first = dataclasses.replace(before, seed=seed, directory=os.path.join(folder, f"before-{seed}"))
    panax.fit(first, quiet=True)
    second = dataclasses.replace(
        after,
        seed=seed,
        init=f"checkpoint:{first.folder}",
        directory=os.path.join(folder, f"after-{seed}"),
        data=dataclasses.replace(after.data, seed=seed),
    )
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    panax.fit(second, quiet=True)
    seconds, usage = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    records = read_questions(before)
    results = {}
    for name, experiment in (("before", first), ("after", second)):
        for metric, value in measure(experiment.folder, records, after.data).items():
            results[f"{metric} {name}"] = value
    results["seconds"] = seconds
    results["CPU seconds"] = usage.ru_utime + usage.ru_stime - used.ru_utime - used.ru_stime
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="sft_json", help="the recipe of supervised training")
    parser.add_argument(
        "--after", default="grpo_json", help="the recipe of reinforcement learning, which begins with it"
    )
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    before, after = find_recipe(options.before)(), find_recipe(options.after)()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            results = train_pair(before, after, seed, folder)
            if seed == 0:
                print(f"| seed | {' | '.join(results)} |\n|{'---|' * (len(results) + 1)}")
            print(f"| {seed} | {' | '.join(f'{value:.3f}' for value in results.values())} |", flush=True)


if __name__ == "__main__":
    main()
