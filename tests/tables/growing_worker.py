"""A process of `test_table_growth.py`: trains a table that grows, and prints digests of the results.

python growing_worker.py ADDRESS PROCESSES INDEX MESH STEPS
"""

import hashlib
import json

import jax
from growing import keyed_batch, step_of
from launching import join_job
from tables_worker import whole


def main() -> None:
    mesh, steps = join_job()
    print(json.dumps(digests(json.loads(mesh), int(steps))), flush=True)


def digests(mesh: dict[str, int], steps: int) -> dict[str, str]:
    """Of the vocabulary, and each step's counts and loss, which processes may add up in another order."""
    step = step_of(mesh, 8)
    state, told = step.init(0), {}
    for seed in range(steps):
        state, scalars = step(state, step.put(keyed_batch(seed)))
        told |= {f"{seed} {name}": str(float(value)) for name, value in scalars.items() if "vocabulary" in name}
        told[f"{seed} loss"] = f"{float(scalars['loss']):.4g}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state):
        told[jax.tree_util.keystr(path)] = hashlib.sha256(whole(leaf).tobytes()).hexdigest()
    return told


if __name__ == "__main__":
    main()
