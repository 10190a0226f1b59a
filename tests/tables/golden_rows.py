"""Makes `fbgemm_rowwise_adagrad.npz`: what FBGEMM's exact row-wise Adagrad makes of a table in 100 steps.

FBGEMM fits one version of torch, so it has an environment to itself:

    python3 -m venv fbgemm
    fbgemm/bin/pip install numpy torch==2.13.0
    fbgemm/bin/pip install --no-deps fbgemm-gpu-cpu==1.8.0
    fbgemm/bin/python tests/tables/golden_rows.py

Two features read one table, as bags of 0 to 5 ids: one as a sum with weights, one as a plain sum (weights of 1). Ids are
Zipf-distributed, so that a step has many duplicates, and some bags are empty. The loss is the inner product of the bags' vectors
with fixed numbers, plus half of their square: its gradient depends on the table.
"""

from pathlib import Path

import numpy as np

ROWS, WIDTH, BATCH, CAPACITY, STEPS, RATE, EPSILON = 200, 8, 32, 5, 100, 0.05, 1e-8
FILE = Path(__file__).with_name("fbgemm_rowwise_adagrad.npz")


def batches() -> dict[str, np.ndarray]:
    """Of all steps: ids (step, feature, row, place), -1 after the end of a bag, weights alike, and the fixed numbers."""
    rng = np.random.default_rng(0)
    shape = STEPS, 2, BATCH, CAPACITY
    ids = np.minimum(rng.zipf(1.3, shape) - 1, ROWS - 1)
    there = np.arange(CAPACITY) < rng.integers(0, CAPACITY + 1, (*shape[:-1], 1))
    weights = rng.uniform(0.1, 2.0, shape).astype(np.float32)
    weights[:, 1] = 1.0
    return {
        "ids": np.where(there, ids, -1).astype(np.int32),
        "weights": np.where(there, weights, 0).astype(np.float32),
        "directions": rng.standard_normal((STEPS, BATCH, 2 * WIDTH)).astype(np.float32),
        "first": rng.uniform(-0.1, 0.1, (ROWS, WIDTH)).astype(np.float32),
    }


def main() -> None:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    data = batches()
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0, 0],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPSILON,
        pooling_mode=PoolingMode.SUM,
    )
    table.split_embedding_weights()[0].copy_(torch.from_numpy(data["first"]))
    for step in range(STEPS):
        ids, weights = (data[name][step].reshape(2 * BATCH, CAPACITY) for name in ("ids", "weights"))
        there = ids >= 0
        offsets = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
        out = table(
            torch.from_numpy(ids[there].astype(np.int64)),
            torch.from_numpy(offsets.astype(np.int64)),
            torch.from_numpy(weights[there]),
        )
        loss = (out * torch.from_numpy(data["directions"][step])).sum() + 0.5 * (out * out).sum()
        (loss / BATCH).backward()
    after = table.split_embedding_weights()[0].detach().numpy()
    state = table.split_optimizer_states()[0][0].detach().numpy()
    np.savez_compressed(FILE, weights_after=after, state_after=state.reshape(ROWS), torch=torch.__version__)


if __name__ == "__main__":
    main()
