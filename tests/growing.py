"""The tiny recommender with a table that grows: its items are known by keys."""

import dataclasses
from typing import Any

import jax
import numpy as np
from recommending import TinyRecommender, batch_of, tiny_tables

from panax.layers import Growth
from panax.mesh import MeshShape, Placement
from panax.optim import RowWiseAdagrad, Schedule, Sgd
from panax.train import CompiledStep, Program
from panax.train.update import StepConfig

WAYS, ROWS = 4, 64
OPTIMIZER = RowWiseAdagrad(schedule=Schedule(peak=0.1, decay="constant"))


def growing_tables(growth: Growth | None = None, **settings: Any) -> Any:
    tables = tiny_tables()
    item = dataclasses.replace(tables.tables[1], growth=growth or Growth(ways=WAYS), **{"rows": ROWS, **settings})
    return dataclasses.replace(tables, tables=(tables.tables[0], item, tables.tables[2]))


AXES = {"label": ("batch",), **growing_tables().batch_axes}


@dataclasses.dataclass(frozen=True)
class Grower(TinyRecommender):
    """The tiny recommender, its items known by keys."""

    tables: Any = dataclasses.field(default_factory=lambda: growing_tables(placement="rows"))

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        return super().init(key)[0], self.tables.init_vocabularies()

    def state_axes(self, state: Any) -> Any:
        return self.tables.vocabulary_axes()

    @property
    def growing(self) -> Any:
        return self.tables.growing

    @property
    def batch_axes(self) -> Any:
        return self.tables.batch_axes


def key_of(ids: np.ndarray) -> np.ndarray:
    """Some 64 bits for each id; zeros for -1."""
    with np.errstate(over="ignore"):
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = np.stack([mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)], axis=-1).astype(np.uint32)
    return np.where((ids < 0)[..., None], np.uint32(0), words)


def keyed_batch(seed: int, rows: int = 16, *, most: int = 90, fresh: bool = True) -> dict[str, np.ndarray]:
    """Items that come and go: in each batch others of many."""
    batch = batch_of(seed, rows, seen=most, bought=most)
    first = 7 * seed if fresh else 0
    for leaf in ("seen", "bought"):
        ids = batch[leaf]
        batch[leaf] = key_of(np.where(ids < 0, -1, ids + first))
    return batch


def step_of(
    mesh: dict[str, int] | None, devices: int, task: Any = None, optimizer: Any = OPTIMIZER, micro: int = 1
) -> CompiledStep:
    program = Program.create(
        task or Grower(),
        Sgd(schedule=Schedule(peak=0.1)),
        num_steps=10,
        embedding_optimizer=optimizer,
        config=StepConfig(micro_batches=micro),
    )
    shape = None if mesh is None else MeshShape(**mesh)
    return CompiledStep(program, Placement.create(shape, devices=jax.devices()[:devices]), AXES)
