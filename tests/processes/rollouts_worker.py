"""A process of `test_rollouts_of_many.py`: a run that learns from rewards which are random numbers.

python rollouts_worker.py ADDRESS PROCESSES INDEX FOLDER CACHE
"""

import json
import sys
from pathlib import Path

from launching import join_job

from panax import fit
from panax.core.params.checksums import fingerprint_weights
from panax.mesh import MeshShape
from panax.run import EvaluateConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "run" / "rollouts"))


def main() -> None:
    from letters import letters

    folder, _ = join_job()
    settings = {"mesh": MeshShape(fsdp=2, tensor=2), "num_steps": 4, "evaluate": EvaluateConfig(every=4)}
    said: list[str] = []
    result = fit(letters(Path(folder).parent, "any_number", directory=folder, **settings), say=said.append)
    weights = fingerprint_weights(result.state.params)
    print(
        json.dumps({"step": result.step, "weights": weights, "evaluation": result.evaluation, "said": said}), flush=True
    )


if __name__ == "__main__":
    main()
