"""A process of `test_compiling_once.py`: trains the tiny recipe and prints what it compiled.

python once_worker.py ADDRESS PROCESSES INDEX FOLDER
"""

import dataclasses
import json
import os

import jax
import tiny_recipe
from launching import join_job

from panax import fit
from panax.compiling.cache import compilation_stats
from panax.run import EvaluateConfig


def main() -> None:
    [folder] = join_job()
    if "APART" in os.environ:
        os.environ["PANAX_CACHE"] += str(jax.process_index())
    base, said = tiny_recipe.tiny(), []
    experiment = dataclasses.replace(base, directory=folder, num_steps=2, evaluate=EvaluateConfig(every=0, batches=1))
    result = fit(experiment, say=said.append)
    print(
        json.dumps({**dataclasses.asdict(compilation_stats()), "loss": result.evaluation["loss"], "said": said}),
        flush=True,
    )


if __name__ == "__main__":
    main()
