"""Creation of the work `dlrm`: MLPerf's 26 tables, scaled to memory, with weights and Zipf-distributed ids
drawn by NumPy."""

import itertools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from .compared_work import CONFIG, WEIGHTS, Batch, ComparedWork, OptimizerNumbers, save_batches
from .precision import Precision
from .settings import DEFAULT_SIZES, Settings

MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155,
    4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Rows of each table, and ids in each of its bags, of MLPerf's recommendation benchmark, v2."""

SHAPES: dict[str, tuple[int, int, bool]] = {
    "tiny": (50, 4, False),
    "100k": (100_000, 32, False),
    "1m": (1_000_000, 32, False),
    "1m-bags": (1_000_000, 32, True),
}
"""Maximum rows of a table, width of its rows, and whether bags have MLPerf's number of ids or one."""

NUMBERS, ZIPF, NUM_BATCHES = 13, 1.2, 4


def make_clicks(settings: Settings, folder: Path, numbers: OptimizerNumbers) -> ComparedWork:
    """Write the files of a DLRM (arXiv:1906.00091): a bottom of 512, 256 and the width, a top of 1024, 1024,
    512, 256 and 1."""
    size = settings.size or DEFAULT_SIZES["dlrm"]
    max_rows, width, bags = SHAPES[size]
    tiny = size == "tiny"
    bottom = (16, width) if tiny else (512, 256, width)
    top = (16, 1) if tiny else (1024, 1024, 512, 256, 1)
    rows = tuple(min(each, max_rows) for each in MLPERF_ROWS)
    capacities = MLPERF_BAGS if bags else (1,) * len(rows)
    vectors = len(rows) + 1
    inputs = width + vectors * (vectors - 1) // 2
    random = np.random.default_rng(settings.seed)
    tensors: dict[str, np.ndarray] = {}
    for number, count in enumerate(rows, 1):
        tensors[f"tables.c{number}.weight"] = _uniform(random, (count, width), count**-0.5)
    for name, widths in (("bottom", (NUMBERS, *bottom)), ("top", (inputs, *top))):
        for layer, (size_in, size_out) in enumerate(itertools.pairwise(widths)):
            tensors[f"{name}.{layer}.weight"] = _uniform(random, (size_out, size_in), (3 / size_in) ** 0.5)
            tensors[f"{name}.{layer}.bias"] = np.zeros(size_out, np.float32)
    save_file(tensors, folder / WEIGHTS)
    shape = {"rows": rows, "capacities": capacities, "width": width, "numeric": NUMBERS, "bottom": bottom, "top": top}
    (folder / CONFIG).write_text(json.dumps({"model_type": "dlrm", **shape}), encoding="utf-8")
    save_batches(folder, [_batch(random, settings.batch_size, rows, capacities) for _ in range(NUM_BATCHES)])
    parameters = sum(tensor.size for tensor in tensors.values())
    dense = sum(t.size for name, t in tensors.items() if name.endswith("weight") and not name.startswith("tables"))
    return ComparedWork(
        title=(
            f"DLRM: {len(rows)} tables of MLPerf's shape, at most {max_rows:,} rows of {width}, {sum(rows):,} in all, "
            f"{parameters / 1e6:,.1f} M parameters, {settings.batch_size} examples of {sum(capacities)} ids"
        ),
        folder=str(folder),
        family="dlrm",
        unit="examples",
        units_per_step=settings.batch_size,
        flops_per_step=6.0 * settings.batch_size * (dense + vectors**2 * width),
        parameters=parameters,
        optimizer=numbers,
        precision=Precision(settings.precision),
        attention=settings.attention,
        seed=settings.seed,
    )


def _uniform(random: np.random.Generator, shape: tuple[int, int], bound: float) -> np.ndarray:
    values = random.random(shape, np.float32)
    values *= 2 * bound
    values -= np.float32(bound)
    return values


def _batch(random: np.random.Generator, examples: int, rows: tuple[int, ...], capacities: tuple[int, ...]) -> Batch:
    ids = {
        f"c{number}": ((random.zipf(ZIPF, (examples, capacity)) - 1) % count).astype(np.int32)
        for number, (count, capacity) in enumerate(zip(rows, capacities, strict=True), 1)
    }
    numeric = random.exponential(1.0, (examples, NUMBERS)).astype(np.float32)
    return {**ids, "numeric": numeric, "label": random.integers(0, 2, examples).astype(np.float32)}
