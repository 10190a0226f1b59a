"""Recommenders small enough to compile in seconds, with batches for them."""

import numpy as np

from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.models import (
    DecoderConfig,
    DlrmConfig,
    DlrmTask,
    HstuConfig,
    SequenceTask,
    TwoTowerConfig,
    TwoTowerTask,
)

ROWS, LENGTH, ITEMS = 16, 8, 50


def tables(**rows: int) -> TablesConfig:
    """A table for each leaf, `bag` with 4 ids in a bag; those of more than 32 rows are split over devices."""

    def table(leaf: str, count: int) -> TableConfig:
        feature = FeatureConfig(leaf=leaf, capacity=4 if leaf == "bag" else 1)
        return TableConfig(name=leaf, rows=count, width=4, features=(feature,))

    return TablesConfig(tables=tuple(table(leaf, count) for leaf, count in rows.items()), small_bytes=1024)


def dlrm(**changes) -> DlrmTask:
    settings = {"numeric": 3, "bottom": (8,), "top": (8,), "cross_layers": 2, "cross_rank": 4} | changes
    return DlrmTask(model=DlrmConfig(tables=tables(city=5, user=200, bag=300), **settings))


def clicks(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bag = np.where(np.arange(4) < rng.integers(0, 5, (rows, 1)), rng.integers(0, 300, (rows, 4)), -1)
    return {
        "numeric": rng.standard_normal((rows, 3)).astype(np.float32),
        "city": rng.integers(-1, 5, (rows, 1)).astype(np.int32),
        "user": np.minimum(rng.zipf(1.3, (rows, 1)), 200).astype(np.int32) - 1,
        "bag": bag.astype(np.int32),
        "label": rng.integers(0, 2, rows).astype(np.float32),
        "loss_mask": (np.arange(rows) < rows - 1).astype(np.float32),
    }


def towers(**changes) -> TwoTowerTask:
    model = TwoTowerConfig(query=tables(user=200, bag=300), item=tables(item=ITEMS), hidden=(8,), width=4)
    return TwoTowerTask(model=model, log_q_leaf="log_q", **changes)


def visits(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kept = {leaf: values for leaf, values in clicks(seed, rows).items() if leaf in ("user", "bag", "loss_mask")}
    item = np.minimum(rng.zipf(1.3, (rows, 1)), ITEMS).astype(np.int32) - 1
    return {**kept, "item": item, "log_q": np.log(rng.uniform(0.01, 0.2, rows)).astype(np.float32)}


SHAPE = {"vocab_size": ITEMS, "vocab_multiple": 8, "max_length": LENGTH, "embed": 16, "num_layers": 2, "heads": 2}


def sasrec(**changes) -> SequenceTask:
    model = DecoderConfig(**SHAPE, ffn=16, norm="layer", rotary=None, dropout=0.1)
    return SequenceTask(model=model, **changes)


def hstu(**changes) -> SequenceTask:
    # With the usual epsilon, three steps at the test's high rate make 1e-7 in the first weights to 1e-3 in the last.
    return SequenceTask(model=HstuConfig(**SHAPE, norm_epsilon=0.01, dropout=0.1), **changes)


def histories(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    there = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (rows, 1))
    items, targets = (np.where(there, rng.integers(0, ITEMS, (rows, LENGTH)), -1).astype(np.int32) for _ in range(2))
    times = np.cumsum(rng.integers(0, 10_000, (rows, LENGTH)), axis=1)
    return {
        "items": items,
        "targets": targets,
        "times": np.where(there, times, 0).astype(np.int32),
        "loss_mask": (np.arange(rows) > 0).astype(np.float32),
    }


TASKS = {
    "dlrm": (dlrm, clicks),
    "dcn": (lambda: dlrm(interaction="cross"), clicks),
    "two_tower": (towers, visits),
    "sasrec": (sasrec, histories),
    "sampled": (lambda: sasrec(negatives=10), histories),
    "hstu": (hstu, histories),
}
