"""A process of a training job for the fault tests: the tiny recipe, saving often.

python fit_worker.py ADDRESS PROCESSES INDEX FOLDER LAYOUT STEPS [SETTINGS]
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import phases
import tiny_recipe
from launching import join_job

from panax.checkpoint import CheckpointConfig, MemoryConfig
from panax.mesh import MeshShape
from panax.run import EvaluateConfig, Experiment, fit


def experiment(folder: str, layout: dict[str, Any], steps: int, **settings) -> Experiment:
    recipe = tiny_recipe.tiny()
    memory = MemoryConfig(every=settings.pop("memory", 0))
    checkpoint = CheckpointConfig(**({"every": 4, "keep_last": 2, "retry_seconds": 0.05} | settings), memory=memory)
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, batch_size=12, cache_dir=f"{folder}/cache"),
        num_steps=steps,
        mesh=MeshShape(**layout),
        checkpoint=checkpoint,
        evaluate=EvaluateConfig(every=0, batches=1),
        directory=f"{folder}/run",
    )


def main() -> None:
    folder, layout, steps, *settings = join_job()
    os.environ["PANAX_MEMORY"] = f"{folder}/host-{jax.process_index()}"
    if "PANAX_TEST_PHASE" in os.environ:
        saves = int(os.environ["PANAX_TEST_SAVES"])
        phases.install(os.environ["PANAX_TEST_PHASE"], Path(folder, "announced"), saves)
    options = json.loads(settings[0]) if settings else {}
    result = fit(
        experiment(folder, json.loads(layout), int(steps), **options), say=lambda line: print(line, flush=True)
    )
    print(json.dumps({"step": result.step, "by": result.interrupted_by}), flush=True)


if __name__ == "__main__":
    main()
