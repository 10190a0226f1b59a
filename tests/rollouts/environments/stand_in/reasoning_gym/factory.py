"""Data sets by name, and how one is created."""

import dataclasses
import os
import random


@dataclasses.dataclass
class SumsConfig:
    size: int = 500
    seed: int | None = None
    max_terms: int = 3
    operators: tuple[str, ...] = ("+",)

    def validate(self):
        assert self.max_terms > 1, "max_terms must be > 1"


class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        print("progress")
        rng = random.Random(self.config.seed * 1000 + index)
        names = " ".join({"apples", "pears", "plums", "figs", "dates", "limes"})
        terms = [rng.randint(1, 9) for _ in range(self.config.max_terms)]
        version = os.environ.get("STAND_IN_VERSION", "1")
        return {
            "question": f"{version}, #{index}: {names}: {self.config.operators[0].join(map(str, terms))} of {self.config.size}",
            "answer": str(sum(terms)),
            "metadata": {"terms": tuple(terms)},
        }

    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["terms"], tuple)  # an entry that was JSON in between has a list
        return 1.0 if answer == entry["answer"] else 0.01


class Broken(Sums):
    def __getitem__(self, index):
        raise RuntimeError("the generator is broken")


DATASETS = {"sums": (Sums, SumsConfig), "broken": (Broken, SumsConfig)}


def create_dataset(name, **settings):
    cls, config_cls = DATASETS[name]
    config = config_cls(**settings)
    config.validate()
    return cls(config)
