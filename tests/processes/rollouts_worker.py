"""A process of `test_rollouts_of_many.py`: a run that learns from rewards which are random numbers, as are the replies of an
environment.

python rollouts_worker.py ADDRESS PROCESSES INDEX FOLDER CACHE TURNS ASYNCHRONOUS [TEACHER JUDGE]

With a teacher and a reward model, it has a value head too.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from launching import join_job

from panax import fit
from panax.core.params.checksums import fingerprint_weights
from panax.mesh import MeshShape
from panax.models import PolicyGradient
from panax.rollouts import Gae, RewardModel, Teacher, TextEnvironment
from panax.run import EvaluateConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "run" / "rollouts"))

STOPS = tuple(range(0, 256, 3))


def main() -> None:
    from letters import __file__ as letters_file
    from letters import letters

    folder, _, turns, asynchronous, *judges = join_job()
    settings: dict[str, Any] = {
        "mesh": MeshShape(fsdp=2, tensor=2),
        "num_steps": 4,
        "evaluate": EvaluateConfig(every=4),
    }
    if int(turns) > 1:
        function = str(Path(letters_file).with_name("environment_functions.py")) + ":any_number"
        settings["data"] = {
            "environment": TextEnvironment(function=function, tokens=16, turns=int(turns)),
            "stop_ids": STOPS,
        }
        settings["model"] = {"max_length": 32}
    settings["data"] = {**settings.get("data", {}), "asynchronous": asynchronous == "True"}
    experiment = letters(Path(folder).parent, "any_number", directory=folder, **settings)
    if judges:
        teacher, judge = judges
        data = dataclasses.replace(
            experiment.data,
            rewards=(RewardModel(run=judge), *experiment.data.rewards),
            teacher=Teacher(model=teacher),
            gae=Gae(kl_in_reward=0.1),
        )
        task = dataclasses.replace(experiment.task, objective=PolicyGradient(value_weight=0.5))
        experiment = dataclasses.replace(experiment, data=data, task=task)
    said: list[str] = []
    result = fit(experiment, say=said.append)
    weights = fingerprint_weights(result.state.params)
    print(
        json.dumps({"step": result.step, "weights": weights, "evaluation": result.evaluation, "said": said}), flush=True
    )


if __name__ == "__main__":
    main()
