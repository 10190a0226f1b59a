"""A published comparison of PyTorch and JAX on a ViT, as it was, without its flaws, and with each flaw
alone."""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from panax.core.errors import DataError, RecipeError
from panax.system import json_reader
from panax.system.owned_dir import remove_owned_dir
from panax.system.replacement import replace_json

from .environment import describe_machine, has_gpu
from .measure.crew import ColumnError, WorkerGroup
from .measure.measurement import make_fixtures
from .workload.settings import Settings

SIDES = {"torch": "PyTorch", "jax": "JAX"}
RESULTS = "published.json"
LEARNING_RATE = 1e-3

FLAWS: dict[str, tuple[str, str]] = {
    "labels": (
        "integer labels as distributions",
        "the JAX side passes integers to `optax.softmax_cross_entropy`, which expects a distribution over classes: each label "
        "is multiplied by the sum of all log-probabilities, which is not a cross-entropy",
    ),
    "scales": (
        "other initial weights",
        "the JAX side draws its matrices with a deviation of one by the square root of their inputs, PyTorch's with 0.02: two "
        "models train, not one",
    ),
    "clock": (
        "clock read too soon",
        "both sides read the clock without waiting for the device: what was dispatched is timed, not what was done",
    ),
    "data": (
        "data made in the timed loop",
        "both sides draw each batch inside the timed loop: random number generators are compared as well as training",
    ),
    "tf32": (
        "TF32 on one side",
        "the JAX side multiplies in TF32, its default on a GPU, and PyTorch in float32, its own",
    ),
}
"""Name and description of each flaw."""

LogFn = Callable[[str], None]


class Variant(NamedTuple):
    """The comparison with some of its flaws."""

    name: str
    title: str
    flaws: tuple[str, ...]


def variants(gpu: bool) -> list[Variant]:
    """Return the corrected comparison, each flaw that this machine can show alone, and all of them."""
    shown = tuple(flaw for flaw in FLAWS if gpu or flaw != "tf32")
    alone = [Variant(flaw, FLAWS[flaw][0], (flaw,)) for flaw in shown]
    return [Variant("corrected", "corrected", ()), *alone, Variant("published", "as published", shown)]


@dataclasses.dataclass
class Published:
    """Results: `found[variant][side]` holds `seconds` and `losses`, or `error`."""

    settings: dict[str, Any]
    command: str
    steps: int
    rounds: int
    title: str = ""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    found: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def seconds(self, variant: str, side: str) -> float | None:
        """Return the median over the rounds of the time of a step by the variant's clock."""
        times = self.found.get(variant, {}).get(side, {}).get("seconds")
        return statistics.median(times) if times else None

    def ratio(self, variant: str) -> float | None:
        """Return the ratio of JAX's time of a step to PyTorch's."""
        jax, torch = self.seconds(variant, "jax"), self.seconds(variant, "torch")
        return None if jax is None or torch is None else jax / torch

    def losses(self, variant: str, side: str) -> list[float]:
        return self.found.get(variant, {}).get(side, {}).get("losses", [])


def read_published_settings(options: argparse.Namespace) -> Settings:
    """Return the published setting; a size, a batch and a number of layers may shrink it.

    Raises:
        RecipeError: A flag has no effect here.
    """
    if options.work != ["vit"]:
        raise RecipeError(
            f"--as-published compares a ViT, not {' and '.join(options.work)}; expected `panax compare vit --as-published`"
        )
    for name, usual in (("precision", "f32"), ("attention", "fused"), ("columns", ""), ("learning_rate", 0.0)):
        if getattr(options, name) != usual:
            flag = "--" + name.replace("_", "-")
            raise RecipeError(f"{flag} has no effect with --as-published, which has fixed settings; remove it")
    return Settings(
        work="vit",
        size=options.size,
        batch_size=32 if options.batch_size is None else options.batch_size,
        layers=options.layers,
        image_size=options.image_size,
        patch_size=options.patch_size,
        classes=options.classes,
        optimizer="sgd",
        learning_rate=LEARNING_RATE,
        seed=options.seed,
    )


def measure_published(settings: Settings, folder: Path, command: str, steps: int, rounds: int, say: LogFn) -> Published:
    """Run both sides of every variant, each in a fresh process. Results of earlier calls are reused.

    Raises:
        RecipeError: The folder holds another comparison.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published = _begun(folder, Published(dataclasses.asdict(settings), command, steps, rounds))
    published.environment = describe_machine()
    published.title = make_fixtures(settings, folder).title
    say(published.title)
    for variant in variants(has_gpu()):
        for side in SIDES:
            results = published.found.setdefault(variant.name, {})
            if "seconds" in results.get(side, {}):
                continue
            with WorkerGroup(f"{side}-{variant.name}", folder) as crew:
                try:
                    results[side] = crew.ask(
                        "published",
                        side=side,
                        folder=str(folder / "work"),
                        flaws=variant.flaws,
                        steps=steps,
                        rounds=rounds,
                    )
                    say(f"{variant.title}, {SIDES[side]}: {published.seconds(variant.name, side):.3f} s a step")
                except ColumnError as error:
                    results[side] = {"error": str(error)}
                    say(f"{variant.title}, {SIDES[side]}: failed: {error}")
            _save(folder, published)
    remove_owned_dir(folder / "work")
    return published


def _begun(folder: Path, requested: Published) -> Published:
    path = folder / RESULTS
    if not path.is_file():
        return requested
    try:
        published = Published(**json_reader.read(path, constants=True))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} can't be read: {error}; remove it, or choose another folder with --directory"
        ) from error
    same = json.loads(json.dumps(requested.settings)) == published.settings
    if not same or (published.steps, published.rounds) != (requested.steps, requested.rounds):
        raise RecipeError(
            f"{folder} holds a comparison with other settings; choose another folder with --directory, or remove it"
        )
    published.command = requested.command
    return published


def _save(folder: Path, published: Published) -> None:
    replace_json(folder / RESULTS, dataclasses.asdict(published))
