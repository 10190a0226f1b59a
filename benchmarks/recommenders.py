"""How good the recommenders' recipes are, beside what they are to be measured by.

    python benchmarks/recommenders.py flights                  a DLRM and scikit-learn's logistic regression with a tuned C
    python benchmarks/recommenders.py criteo                   a DLRM, logistic regression, and the best possible area
    python benchmarks/recommenders.py sequences --seeds 5      SASRec, HSTU, and a plain PyTorch SASRec, over seeds
    python benchmarks/recommenders.py sequences --seeds 2 --steps 400

Figures are written into `--directory` as soon as they are there (a run of many seeds resumes where it was stopped); a table
of all of them is printed in the end. The logistic regression is given the largest area over all C that are tried, on the held-out
rows themselves: so it is compared with at its best. Needs `python3 install.py --extra recommenders`, and for sequences PyTorch.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import panax
from panax.data import ExampleData, Examples
from panax.run import Experiment
from panax_recipes.dlrm_criteo import dlrm_criteo
from panax_recipes.dlrm_flights import dlrm_flights
from panax_recipes.sequences_ml100k import hstu_ml100k, sasrec_ml100k

STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LINEAR_ROWS = 1_000_000
"""The most rows that the logistic regression learns from: it has few weights."""

Figures = dict[str, float]


class Kept:
    """Figures in a file, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Figures] = json.loads(path.read_text()) if path.exists() else {}

    def once(self, name: str, measure: Callable[[], Figures]) -> Figures:
        """What was measured under this name, now or before."""
        if name not in self.found:
            self.found[name] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")
            print(name, self.found[name], flush=True)
        return self.found[name]


def trained(experiment: Experiment, directory: Path) -> Figures:
    """What a recipe's last evaluation says."""
    result = panax.fit(dataclasses.replace(experiment, directory=str(directory)), quiet=True)
    if result.interrupted_by is not None:
        raise SystemExit(f"{experiment.name} was stopped by {result.interrupted_by}; the same command goes on")
    names = ("loss", "auc", "auc_error_bound", "calibration", "ndcg@10", "hit_rate@10", "mrr")
    return {name: result.evaluation[name] for name in names if name in result.evaluation}


def parts(data: ExampleData) -> tuple[Examples, Examples]:
    opened = data.open()
    assert opened.held_out is not None
    return opened.train.examples, opened.held_out.examples


def linear(data: ExampleData, leaves: tuple[str, ...]) -> Iterator[tuple[str, Figures]]:
    """Logistic regression on one-hot categories and standardized numbers, for each C."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    train, held_out = parts(data)
    rows = [part.read(np.arange(min(part.num_examples, LINEAR_ROWS))) for part in (train, held_out)]
    sizes = {leaf: 1 + max(int(part[leaf].max()) for part in rows) for leaf in leaves}
    mean, deviation = rows[0]["numeric"].mean(axis=0), rows[0]["numeric"].std(axis=0)

    def matrix(part: dict[str, np.ndarray]) -> Any:
        columns = []
        for leaf in leaves:
            row = np.flatnonzero(part[leaf][:, 0] >= 0)
            ones = np.ones(len(row))
            columns.append(sparse.csr_matrix((ones, (row, part[leaf][row, 0])), (len(part["label"]), sizes[leaf])))
        return sparse.hstack([*columns, sparse.csr_matrix((part["numeric"] - mean) / deviation)]).tocsr()

    x, held_out_x = map(matrix, rows)
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300).fit(x, rows[0]["label"])
        yield f"{strength:g}", {"auc": roc_auc_score(rows[1]["label"], model.decision_function(held_out_x))}


def best_linear(kept: Kept, name: str, data: ExampleData, leaves: tuple[str, ...]) -> None:
    if f"{name}/logistic regression" not in kept.found:
        best = max((figures["auc"], float(strength)) for strength, figures in linear(data, leaves))
        kept.once(f"{name}/logistic regression", lambda: {"auc": best[0], "C": best[1]})


def flights(kept: Kept, options: argparse.Namespace) -> None:
    from panax_recipes.dlrm_flights import CATEGORIES

    experiment = dlrm_flights()
    best_linear(kept, "flights", experiment.data, CATEGORIES)
    for seed in range(options.seeds):
        seeded = dataclasses.replace(experiment, seed=seed, num_steps=options.steps or experiment.num_steps)
        kept.once(f"flights/dlrm/seed {seed}", lambda e=seeded: trained(e, options.directory / f"flights-{e.seed}"))


def criteo(kept: Kept, options: argparse.Namespace) -> None:
    from panax_recipes.dlrm_criteo import CLICKS

    experiment = dlrm_criteo()
    leaves = tuple(f"c{number}" for number in range(1, len(CLICKS.rows) + 1))
    held_out: Any = parts(experiment.data)[1]
    kept.once("criteo/best possible", lambda: {"auc": held_out.bayes_auc()})
    kept.once("criteo/the teacher on the held-out rows", lambda: _of_teacher(held_out))
    best_linear(kept, "criteo", experiment.data, leaves)
    for seed in range(options.seeds):
        seeded = dataclasses.replace(experiment, seed=seed, num_steps=options.steps or experiment.num_steps)
        kept.once(f"criteo/dlrm/seed {seed}", lambda e=seeded: trained(e, options.directory / f"criteo-{e.seed}"))


def _of_teacher(held_out: Any) -> Figures:
    from sklearn.metrics import roc_auc_score

    numbers = np.arange(held_out.num_examples)
    return {"auc": roc_auc_score(held_out.read(numbers)["label"], held_out.logits(numbers))}


def sequences(kept: Kept, options: argparse.Namespace) -> None:
    from torch_sasrec import trained as trained_by_torch

    for seed in range(options.seeds):
        for recipe in (sasrec_ml100k, hstu_ml100k):
            experiment = recipe()
            experiment = dataclasses.replace(
                experiment,
                seed=seed,
                data=dataclasses.replace(experiment.data, seed=seed),
                num_steps=options.steps or experiment.num_steps,
            )
            where = options.directory / f"{experiment.name}-{seed}"
            name = f"sequences/{experiment.name}/seed {seed}"
            kept.once(name, lambda e=experiment, where=where: trained(e, where))
            if recipe is sasrec_ml100k:
                halves: Any = parts(experiment.data)
                kept.once(
                    f"sequences/PyTorch SASRec/seed {seed}",
                    lambda e=experiment, halves=halves, seed=seed: trained_by_torch(e, *halves, seed),
                )


WORKS = {"flights": flights, "criteo": criteo, "sequences": sequences}


def table(kept: Kept, work: str) -> str:
    """Each program's figures: the mean, and its standard error over seeds."""
    of: dict[str, list[Figures]] = {}
    for name, figures in kept.found.items():
        if name.startswith(f"{work}/"):
            of.setdefault(name.split("/")[1], []).append(figures)
    lines = ["| program | seeds | figures |", "|---|---|---|"]
    for program, every in of.items():
        shown = []
        for figure in every[0]:
            values = [figures[figure] for figures in every]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            shown.append(f"{figure} {statistics.mean(values):.5f}" + ("" if error is None else f" ± {error:.5f}"))
        lines.append(f"| {program} | {len(every)} | {', '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--seeds", type=int, default=1, help="0, 1, ... up to so many")
    parser.add_argument("--steps", type=int, default=0, help="instead of the recipe's")
    parser.add_argument("--directory", type=Path, default=Path("runs/recommenders"), help="of runs and figures")
    options = parser.parse_args()
    options.directory = options.directory / (f"steps-{options.steps}" if options.steps else "recipe")
    kept = Kept(options.directory / "figures.json")
    WORKS[options.work](kept, options)
    print(table(kept, options.work))


if __name__ == "__main__":
    main()
