"""Time of a table's update against its number of rows: ratios of one interleaved run.

    python benchmarks/tables.py                     # 100 thousand to 16 million rows of 32 numbers: 2.7 GiB
    python benchmarks/tables.py --rows 1000 10000 --rounds 3

Each step asks for the same Zipf-distributed ids, so that what differs is the table alone. Steps of all sizes take turns, and a
size's time is divided by that of the smallest one in the same turn: a machine that others load changes both.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from panax.core import Evaluation, Loss, Module, Task, logical_axes, parameter
from panax.layers import EmbeddingTables, FeatureConfig, TableConfig, TablesConfig
from panax.mesh import Placement
from panax.optim import LazyAdam, RowOptimizer, RowSgd, RowWiseAdagrad, Sgd
from panax.train import CompiledStep, Program

OPTIMIZERS: dict[str, RowOptimizer] = {"adagrad": RowWiseAdagrad(), "adam": LazyAdam(), "sgd": RowSgd()}


class Model(Module):
    tables: EmbeddingTables
    bias: Float[Array, " row_width"] = parameter(lambda key, shape, axes: jnp.zeros(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class OneTable(Task):
    """Bags that are to be zero: an update, and next to no model."""

    tables: TablesConfig
    width: int

    def init(self, key: jax.Array) -> tuple[Model, None]:
        return Model.create(key, {"row_width": self.width}, tables=self.tables.create(key)), None

    def row_ids(self, batch: Any) -> Any:
        return self.tables.row_ids(batch)

    def loss(self, params: Model, state: Any, batch: Any, key: jax.Array, train: bool) -> Evaluation:
        bags = params.tables(batch)["ids"] + params.bias[None]
        return Evaluation({"square": Loss(jnp.square(bags).sum(), jnp.float32(bags.shape[0]))}, state, {})

    def parameter_axes(self, params: Model) -> Any:
        return logical_axes(params)


def step_of(rows: int, width: int, examples: int, capacity: int, optimizer: RowOptimizer) -> tuple[Any, Any, Any]:
    """(a compiled step, its first state, a batch on the device)."""
    feature = FeatureConfig(leaf="ids", capacity=capacity)
    table = TableConfig(name="table", rows=rows, width=width, features=(feature,), placement="rows")
    program = Program.create(
        OneTable(TablesConfig(tables=(table,)), width), Sgd(), num_steps=1000, embedding_optimizer=optimizer
    )
    step = CompiledStep(program, Placement.create(devices=jax.devices()[:1]), {"ids": ("batch", None)})
    # Spread over all rows as a hash would, with the same number of distinct ones in every table.
    rank = np.minimum(np.random.default_rng(0).zipf(1.2, (examples, capacity)), 2**31).astype(np.int64)
    batch = step.put({"ids": (rank * 2654435761 % rows).astype(np.int32)})
    return step, step.init(0), batch


def measured(sizes: list[int], rounds: int, **settings: Any) -> dict[str, Any]:
    """For each number of rows the best time, and the median of its ratios to the smallest table's in the same turn."""
    steps = {rows: step_of(rows, **settings) for rows in sizes}
    states = {rows: state for rows, (_, state, _) in steps.items()}
    seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
    for turn in range(rounds + 2):
        for rows, (step, _, batch) in steps.items():
            began = time.perf_counter()
            states[rows], _ = jax.block_until_ready(step(states[rows], batch))
            if turn >= 2:
                seconds[rows].append(time.perf_counter() - began)
    first = seconds[sizes[0]]
    return {
        f"{rows:,}": {
            "best_ms": round(1000 * min(found), 3),
            "ratio": round(statistics.median(one / other for one, other in zip(found, first)), 3),
        }
        for rows, found in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--capacity", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    chosen = parser.parse_args()
    found = measured(
        chosen.rows,
        chosen.rounds,
        width=chosen.width,
        examples=chosen.examples,
        capacity=chosen.capacity,
        optimizer=OPTIMIZERS[chosen.optimizer],
    )
    print(json.dumps({"optimizer": chosen.optimizer, "rows": found}, indent=2))


if __name__ == "__main__":
    main()
