"""Golden runs of the recommenders' recipes, on small files of the form they read, which are written first."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
from rows import Row, rows_of_fit

from panax.data import SyntheticClicks
from panax.run import EvaluateConfig
from panax_recipes.dlrm_criteo import dlrm_criteo
from panax_recipes.dlrm_flights import CATEGORIES, NUMBERS, dlrm_flights
from panax_recipes.sequences_ml100k import hstu_ml100k, sasrec_ml100k

RECIPES = {
    "dlrm_criteo": dlrm_criteo,
    "dlrm_flights": dlrm_flights,
    "sasrec_ml100k": sasrec_ml100k,
    "hstu_ml100k": hstu_ml100k,
}
STEPS = 4


def small(name: str, folder: Path):
    recipe = RECIPES[name]()
    model, examples = recipe.task.model, recipe.data.examples
    if name == "dlrm_criteo":
        tables = dataclasses.replace(model.tables, tables=model.tables.tables[:3])
        model = dataclasses.replace(model, tables=tables, numeric=2, bottom=(8,), top=(8,))
        examples = SyntheticClicks(num_examples=600, rows=(40, 300, 5), numeric=2, pairs=2)
    elif name == "dlrm_flights":
        model = dataclasses.replace(model, bottom=(8,), top=(8,))
        examples = dataclasses.replace(examples, paths=(write_flights(folder / "flights.csv"),))
    else:
        model = dataclasses.replace(model, embed=16, num_layers=2, max_length=12)
        examples = dataclasses.replace(examples, paths=(write_ratings(folder / "ratings.tsv"),), last=12)
    # A fifth held out, except where the recipe holds out everybody's last event.
    held_out = {"held_out": 0.2} if name.startswith("dlrm") else {}
    return dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, model=model),
        data=dataclasses.replace(recipe.data, examples=examples, batch_size=32, **held_out),
        optimizer=dataclasses.replace(
            recipe.optimizer, schedule=dataclasses.replace(recipe.optimizer.schedule, warmup_steps=1)
        ),
        num_steps=STEPS,
        evaluate=EvaluateConfig(every=0, batches=2),
        log_every=1,
        directory=str(folder / "run"),
    )


def write_flights(path: Path, count: int = 400) -> str:
    """Write flights with the recipe's columns: drawn ones, in the order of their time."""
    random = np.random.default_rng(0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["carrier", "origin", "dest", "hour", "time_hour", *NUMBERS, "arr_delay"])
        for i in range(count):
            hour, day = i % 24, 1 + i * 28 // count
            words = [f"{name}{random.integers(8)}" for name in CATEGORIES[:3]]
            numbers = [int(random.integers(100, 2000)) for _ in NUMBERS]
            time = f"2013-01-{day:02d}T{hour:02d}:00:00Z"
            table.writerow([*words, hour, time, *numbers, int(random.integers(-30, 60))])
    return str(path)


def write_ratings(path: Path, users: int = 60, events: int = 15) -> str:
    """Write ratings with the columns of MovieLens-100K in recbole's form."""
    random = np.random.default_rng(0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["user_id:token", "item_id:token", "rating:float", "timestamp:float"])
        for user in range(users):
            for event in range(events):
                table.writerow([user, int(random.zipf(1.3) % 200), 3, 1000 * event + user])
    return str(path)


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_fit(small(name, folder))
