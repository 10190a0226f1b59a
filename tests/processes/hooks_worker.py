"""A process of `test_hooks_of_many.py`: a run with hooks that ask in one process alone, or fail there.

python hooks_worker.py ADDRESS PROCESSES INDEX FOLDER CACHE stop|raise
"""

import dataclasses
import json
from pathlib import Path

import jax
import tiny_recipe
from launching import join_job

from panax import fit
from panax.core import TrainingError
from panax.hooks import Hook, Samples
from panax.mesh import MeshShape
from panax.metrics import Tracker
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, QuestionConfig


class Asks(Hook):
    """In the last process alone, after the third step; all receive the same."""

    def __init__(self, what: str):
        self.what, self.evaluated, self.scores = what, [], []

    def after_step(self, run):
        if run.step == 1:
            run.evaluate()
        if run.step == 2:
            self.scores = [run.values["questions/choices/acc"], run.values["questions/texts/bits_per_byte"]]
        if run.step == 3 and jax.process_index() == jax.process_count() - 1:
            if self.what == "raise":
                raise ZeroDivisionError("in one process")
            run.stop("one process has enough")

    def after_evaluation(self, run, evaluation):
        self.evaluated.append((run.step, round(evaluation["loss"], 6)))


class Texts(Tracker):
    """Keeps the samples."""

    def __init__(self):
        self.found = {}

    def record(self, step, values):
        pass

    def text(self, step, name, text):
        self.found[step] = text


def main() -> None:
    folder, cache, what = join_job()
    asks, base, texts = Asks(what), tiny_recipe.tiny(), Texts()
    experiment = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, cache_dir=cache),
        directory=folder,
        num_steps=8,
        log_every=2,
        evaluate=EvaluateConfig(every=0, batches=1),
        optimizer=AdamW(schedule=Schedule(decay="constant")),
        mesh=MeshShape(fsdp=-1, tensor=2),
        questions=QuestionConfig(
            files=tuple(str(Path(folder).parent / f"{name}.jsonl") for name in ("choices", "texts")),
            every=2,
            rows=2,
            length=32,
        ),
        hooks=(asks, Samples(every=2, prompts=("def ",), tokens=4, temperature=0.0)),
        trackers=(texts,),
    )
    try:
        result = fit(experiment, quiet=True)
        ended = {"step": result.step, "stopped": result.stopped}
    except TrainingError as error:
        ended = {"error": str(error)}
    print(json.dumps({**ended, "evaluated": asks.evaluated, "scores": asks.scores, "texts": texts.found}), flush=True)


if __name__ == "__main__":
    main()
