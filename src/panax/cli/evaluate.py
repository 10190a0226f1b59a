"""`panax evaluate`: how good a trained model is."""

import argparse
from collections.abc import Sequence

from ..core.joining import only_alone
from ..run.trained import load_trained
from .main import warn
from .plugins import start_jax


def evaluate(arguments: Sequence[str]) -> int:
    """Print losses and metrics of a checkpoint, on what its run held out or on other data."""
    options = parser().parse_args(arguments)
    only_alone("panax evaluate")
    start_jax()
    trained = load_trained(options.run, warn, newest=True)
    found = trained.evaluate(options.data, options.batches)
    print(f"checkpoint  {trained.url}")
    averaged = " (averaged parameters)" if {"ema_decay", "averaged"} & found.keys() else ""
    print(f"data        {' '.join(options.data) if options.data else 'what the run held out'}{averaged}")
    width = max(map(len, found))
    for name, value in found.items():
        if name not in ("ema_decay", "averaged"):
            print(f"{name:{width}}  {value:.6g}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="panax evaluate", description="Losses and metrics of a trained model, on its newest checkpoint."
    )
    parser.add_argument("run", help="a run's folder (its newest checkpoint is taken), or a checkpoint's own")
    parser.add_argument(
        "--data", nargs="+", metavar="PATH", help="files, folders or globs (default: what the run held out)"
    )
    parser.add_argument("--batches", type=int, help="at most so many (default: as the run did; of other data all)")
    return parser
