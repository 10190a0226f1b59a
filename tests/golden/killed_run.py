"""A small run that can be interrupted, and the child process that trains it until it kills itself.

    python killed_run.py FOLDER
"""  # fmt: skip

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_recipe

from panax.checkpoint import CheckpointConfig
from panax.hooks import Hook, RunView
from panax.run import EvaluateConfig, Experiment

EVERY, LAST = 3, 8
"""Steps between checkpoints, and of the whole run."""


class StopAfter(Hook):
    """Stop the run after a step."""

    def __init__(self, step: int):
        self.step = step

    def after_step(self, run: RunView) -> None:
        if run.step == self.step:
            run.stop("to be resumed")


class KillAfterSave(Hook):
    """Kill this process after the step that follows the first checkpoint, as soon as that is whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def after_step(self, run: RunView) -> None:
        if run.step <= EVERY + 1:
            return
        deadline = time.monotonic() + 60
        while not list(self.folder.glob("run/checkpoints/step_*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def experiment(folder: Path, *hooks: Any) -> Experiment:
    recipe = tiny_recipe.tiny()
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, cache_dir=str(folder / "cache")),
        optimizer=dataclasses.replace(
            recipe.optimizer, schedule=dataclasses.replace(recipe.optimizer.schedule, warmup_steps=2)
        ),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=2, keep_best=0),
        evaluate=EvaluateConfig(every=0, batches=1),
        hooks=hooks,
        num_steps=LAST,
        log_every=1,
        directory=str(folder / "run"),
    )


if __name__ == "__main__":
    from rows import rows_of_fit

    where = Path(sys.argv[1])
    rows_of_fit(experiment(where, KillAfterSave(where)))
