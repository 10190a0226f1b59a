"""Two-tower retrieval models: the inner product of a query's and an item's vector is their score."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Module, scope
from ...core.errors import RecipeError
from ...core.validation import Validated
from ...layers.perceptron import Perceptron
from ...layers.tables.tables import EmbeddingTables, TablesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(Validated):
    """Config of two towers, each of embedding tables and an MLP.

    Attributes:
        query: Tables of the query tower.
        item: Tables of the item tower; the first feature of the first table must be the item's id.
        hidden: Hidden widths of each tower's MLP.
        width: Width of the output vectors.
        normalize: True to normalize vectors to length 1, so that inner products are cosines.
        temperature: Divisor of the inner products.
    """

    query: TablesConfig
    item: TablesConfig
    hidden: tuple[int, ...] = (128,)
    width: int = 64
    normalize: bool = True
    temperature: float = 0.1

    def __post_init__(self) -> None:
        if min((self.width, *self.hidden)) < 1 or self.temperature <= 0:
            raise RecipeError(
                f"model.hidden={self.hidden}, width={self.width}, temperature={self.temperature}; expected positive numbers"
            )
        shared = set(self.query.batch_axes) & set(self.item.batch_axes)
        if shared:
            raise RecipeError(
                f"both towers read the batch leaf {min(shared)!r}; a leaf must belong to either the query or the item, not to "
                f"both"
            )

    def __hash__(self) -> int:
        return hash((self.query, self.item, self.hidden, self.width, self.normalize, self.temperature))

    @property
    def item_leaf(self) -> str:
        """Name of the batch leaf with the items' ids."""
        return self.item.tables[0].features[0].leaf

    def with_table_names(self) -> "TwoTowerConfig":
        """Return the config with the names under which a `TwoTower` stores its tables."""
        query = dataclasses.replace(self.query, in_params="query.tables")
        return dataclasses.replace(self, query=query, item=dataclasses.replace(self.item, in_params="item.tables"))


class Tower(Module):
    """Embedding tables, followed by an MLP over the concatenated vectors."""

    tables: EmbeddingTables
    perceptron: Perceptron
    config: TwoTowerConfig = eqx.field(static=True)

    def __call__(self, batch: Batch, dtype: Any) -> Float[Array, "batch hidden"]:
        vectors = self.tables(batch)
        x = jnp.concatenate([vectors[leaf].astype(dtype) for leaf in sorted(vectors)], axis=1)
        x = self.perceptron(x).astype(jnp.float32)
        if not self.config.normalize:
            return x
        return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True) + 1e-12)


class TwoTower(Module):
    """A retrieval model with a query tower and an item tower."""

    query: Tower
    item: Tower
    config: TwoTowerConfig = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: TwoTowerConfig) -> "TwoTower":
        """Initialize all parameters."""
        config = config.with_table_names()

        def tower(key: jax.Array, tables: TablesConfig) -> Tower:
            inputs = sum(table.width * len(table.features) for table in tables.tables)
            table_key, perceptron_key = jax.random.split(key)
            widths = (*config.hidden, config.width)
            return Tower(
                tables=tables.create(table_key),
                perceptron=Perceptron.build(perceptron_key, inputs, widths, last_linear=True),
                config=config,
            )

        query_key, item_key = jax.random.split(key)
        return cls(query=tower(query_key, config.query), item=tower(item_key, config.item), config=config)

    def vectors(self, batch: Batch, dtype: Any) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch hidden"]]:
        """Return each row's query vector and item vector, in float32."""
        with scope("query"):
            query = self.query(batch, dtype)
        with scope("item"):
            return query, self.item(batch, dtype)
