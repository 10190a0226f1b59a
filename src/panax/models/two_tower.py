"""Retrieval models of two towers: a query's vector and an item's, whose inner product says how well they fit."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Batch, Module, scope
from ..core.errors import RecipeError
from ..core.validated import Validated
from ..layers.perceptron import Perceptron
from ..layers.tables import EmbeddingTables, TablesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(Validated):
    """Two towers, each a few tables and a perceptron.

    Attributes:
        query: What the query's tower reads.
        item: What the item's tower reads; the first feature of its first table is the item's own id.
        hidden: Widths of each tower's perceptron.
        width: Of the vectors.
        normalised: Whether vectors have length 1, so that their inner product is the cosine.
        temperature: Inner products are divided by it.
    """

    query: TablesConfig
    item: TablesConfig
    hidden: tuple[int, ...] = (128,)
    width: int = 64
    normalised: bool = True
    temperature: float = 0.1

    def __post_init__(self) -> None:
        if min((self.width, *self.hidden)) < 1 or self.temperature <= 0:
            raise RecipeError(
                f"model.hidden={self.hidden}, width={self.width}, temperature={self.temperature}; expected positive numbers"
            )
        shared = set(self.query.batch_axes) & set(self.item.batch_axes)
        if shared:
            raise RecipeError(
                f"both towers read the batch leaf {min(shared)!r}; what a query and an item have in common says nothing of one "
                f"of them"
            )

    def __hash__(self) -> int:
        return hash((self.query, self.item, self.hidden, self.width, self.normalised, self.temperature))

    @property
    def item_leaf(self) -> str:
        """The batch's leaf of items' own ids."""
        return self.item.tables[0].features[0].leaf

    def placed(self) -> "TwoTowerConfig":
        """With the names under which a `TwoTower` holds its tables."""
        query = dataclasses.replace(self.query, in_params="query.tables")
        return dataclasses.replace(self, query=query, item=dataclasses.replace(self.item, in_params="item.tables"))


class Tower(Module):
    """Tables, then a perceptron over their vectors side by side."""

    tables: EmbeddingTables
    perceptron: Perceptron
    config: TwoTowerConfig = eqx.field(static=True)

    def __call__(self, batch: Batch, dtype: Any) -> Float[Array, "batch hidden"]:
        vectors = self.tables(batch)
        x = jnp.concatenate([vectors[leaf].astype(dtype) for leaf in sorted(vectors)], axis=1)
        x = self.perceptron(x).astype(jnp.float32)
        if not self.config.normalised:
            return x
        return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True) + 1e-12)


class TwoTower(Module):
    """A tower for queries and one for items."""

    query: Tower
    item: Tower
    config: TwoTowerConfig = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: TwoTowerConfig) -> "TwoTower":
        """Draw all parameters."""
        config = config.placed()

        def tower(key: jax.Array, tables: TablesConfig) -> Tower:
            inputs = sum(table.width * len(table.features) for table in tables.tables)
            table_key, own = jax.random.split(key)
            widths = (*config.hidden, config.width)
            return Tower(
                tables=tables.create(table_key),
                perceptron=Perceptron.build(own, inputs, widths, last_linear=True),
                config=config,
            )

        query_key, item_key = jax.random.split(key)
        return cls(query=tower(query_key, config.query), item=tower(item_key, config.item), config=config)

    def vectors(self, batch: Batch, dtype: Any) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch hidden"]]:
        """Of each row the query's and the item's, float32."""
        with scope("query"):
            query = self.query(batch, dtype)
        with scope("item"):
            return query, self.item(batch, dtype)


def in_batch_scores(
    query: Float[Array, "batch hidden"],
    items: Float[Array, "items hidden"],
    own: Int[Array, " batch"],
    names: Int[Array, " items"],
    log_q: Float[Array, " items"] | None,
    temperature: float,
) -> Float[Array, "batch items"]:
    """Each query's scores with all items of the global batch, of which number `own` is its own.

    An item that was drawn often is corrected for: the logarithm of its share is subtracted, so that scores estimate what a
    softmax over the whole catalogue has. Another row's item that is the query's own is left out.

    Args:
        names: Each item's id.
        log_q: The logarithm of the share of examples that each item has.

    Source: Sampling-bias-corrected neural modeling (RecSys 2019, doi:10.1145/3298689.3346996), section 3.
    """
    scores = jnp.einsum("bd,id->bi", query, items, preferred_element_type=jnp.float32) / temperature
    if log_q is not None:
        scores = scores - log_q[None]
    same = names[own][:, None] == names[None]
    others = jnp.arange(items.shape[0])[None] != own[:, None]
    return jnp.where(same & others, -jnp.inf, scores)
