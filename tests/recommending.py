"""A tiny recommender: pooled rows of a few tables, one matrix, a logistic loss. It names its axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from panax.core import Evaluation, Loss, Module, Task, logical_axes, normal, parameter
from panax.core.params.module import name_key
from panax.layers import EmbeddingTables, FeatureConfig, TableConfig, TablesConfig
from panax.spmd import contract, split_cotangent


def tiny_tables(**placements: Any) -> TablesConfig:
    """Three tables: `user` of 300 rows, `item` of 1,000, read by two features, and `day` of 7."""

    def table(name: str, rows: int, *features: FeatureConfig, width: int = 8) -> TableConfig:
        return TableConfig(name=name, rows=rows, width=width, features=features, placement=placements.get(name, "auto"))

    return TablesConfig(
        tables=(
            table("user", 300, FeatureConfig(leaf="user")),
            table(
                "item",
                1000,
                FeatureConfig(leaf="seen", capacity=5, pooling="mean"),
                FeatureConfig(leaf="bought", capacity=3, weights_leaf="spent"),
            ),
            table("day", 7, FeatureConfig(leaf="day", capacity=2, pooling="max")),
        ),
        small_bytes=1024,
    )


class Model(Module):
    tables: EmbeddingTables
    w_out: Float[Array, "row_width class"] = parameter(normal("row_width"))


@dataclasses.dataclass(frozen=True)
class TinyRecommender(Task):
    tables: TablesConfig = dataclasses.field(default_factory=tiny_tables)
    names_axes = True
    splits_residual = False
    mesh_axes = frozenset({"replica", "fsdp", "expert", "tensor"})

    @property
    def leaf_ranges(self) -> dict[str, range]:
        return self.tables.leaf_ranges

    def init(self, key: jax.Array) -> tuple[Model, None]:
        tables = self.tables.create(name_key(key, "tables"))
        return Model.create(key, {"row_width": 8, "class": 2}, tables=tables), None

    def row_ids(self, batch: Any) -> Any:
        return self.tables.row_ids(batch)

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool) -> Evaluation:
        vectors = params.tables(batch)
        x = vectors["user"] * (vectors["seen"] + vectors["bought"]) + vectors["day"]
        logits = split_cotangent(contract("batch row_width, row_width class -> batch class", x, params.w_out))
        label = jax.nn.one_hot(batch["label"], 2)
        losses = -(jax.nn.log_softmax(logits) * label).sum(axis=-1)
        return Evaluation({"click": Loss(losses.sum(), jnp.float32(losses.shape[0]))}, state, {})

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)


def batch_of(seed: int, rows: int = 16, **ranges: int) -> dict[str, np.ndarray]:
    """Ids with duplicates, bags that are not full and some that are empty."""
    rng = np.random.default_rng(seed)

    def bags(most: int, capacity: int) -> np.ndarray:
        ids = np.minimum(rng.zipf(1.2, (rows, capacity)) - 1, most - 1)
        length = rng.integers(0, capacity + 1, (rows, 1))
        return np.where(np.arange(capacity) < length, ids, -1).astype(np.int32)

    return {
        "user": bags(ranges.get("user", 300), 1),
        "seen": bags(ranges.get("seen", 1000), 5),
        "bought": bags(ranges.get("bought", 1000), 3),
        "spent": rng.uniform(0, 2, (rows, 3)).astype(np.float32),
        "day": bags(7, 2),
        "label": rng.integers(0, 2, rows).astype(np.int32),
    }


BATCH_AXES = {
    "label": ("batch",),
    **dict.fromkeys(("user", "seen", "bought", "spent", "day"), ("batch", None)),
}
