"""Click-ranking models: embedding tables, an MLP over numeric features, and feature interactions."""

import dataclasses
import itertools
import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Module, scope
from ...core.errors import RecipeError
from ...core.validation import Validated
from ...layers.perceptron import CrossLayer, Perceptron, dot_interaction
from ...layers.tables.tables import EmbeddingTables, TablesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig(Validated):
    """A DLRM (arXiv:1906.00091), or with cross layers a DCN-v2 (arXiv:2008.13535).

    Attributes:
        tables: Embedding tables of the categorical features. With "dot" all must have one width.
        numeric: Number of columns of the batch's leaf `numeric`; 0 for none.
        numeric_scale: Divisor of each of these columns; () leaves them unscaled.
        log_numeric: Replace each numeric value x by log(1 + x), as is usual for counts; negative values count
            as 0.
        bottom: Widths of the MLP over the numeric features; with "dot" a last layer of the tables' width
            follows.
        interaction: Feature interaction: "dot" for pairwise inner products, "cross" for low-rank cross
            layers.
        cross_layers: Number of cross layers, for "cross".
        cross_rank: Rank of the cross layers.
        top: Widths of the MLP over the interactions; one more layer computes the logit.
    """

    tables: TablesConfig
    numeric: int = 0
    numeric_scale: tuple[float | int, ...] = ()
    log_numeric: bool = False
    bottom: tuple[int, ...] = (512, 256)
    interaction: Literal["dot", "cross"] = "dot"
    cross_layers: int = 3
    cross_rank: int = 512
    top: tuple[int, ...] = (1024, 1024, 512, 256)

    def __post_init__(self) -> None:
        for name in ("bottom", "top"):
            if any(width < 1 for width in getattr(self, name)):
                raise RecipeError(f"model.{name}={getattr(self, name)}; expected widths of at least 1")
        if self.numeric < 0 or self.cross_layers < 1 or self.cross_rank < 1:
            raise RecipeError(
                f"model.numeric={self.numeric}, cross_layers={self.cross_layers}, cross_rank={self.cross_rank}; expected 0 or "
                f"more columns, and at least 1 of the others"
            )
        scale = self.numeric_scale
        if scale and (len(scale) != self.numeric or not all(0 < each < math.inf for each in scale)):
            raise RecipeError(
                f"model.numeric_scale={scale}; expected {self.numeric} positive numbers, one for each column (model.numeric)"
            )
        widths = sorted({table.width for table in self.tables.tables})
        if self.interaction == "dot" and len(widths) > 1:
            raise RecipeError(
                f'model.interaction="dot" multiplies vectors of one width, and the tables have {widths}; use one width, or '
                f'"cross"'
            )

        if self.interaction == "dot" and len(self.leaves) + (self.numeric > 0) < 2:
            raise RecipeError(
                f'model.interaction="dot" multiplies each two vectors, and there is one, of {self.leaves}; add a feature or '
                f'columns of numbers (model.numeric), or use "cross"'
            )

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the batch leaves that the tables look up, one per embedding vector."""
        return tuple(feature.leaf for table in self.tables.tables for feature in table.features)

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        if not self.numeric:
            return ()
        return (*self.bottom, self.tables.tables[0].width) if self.interaction == "dot" else self.bottom

    @property
    def num_interaction_features(self) -> int:
        """Width of the concatenated features after the bottom MLP."""
        of_tables = sum(table.width * len(table.features) for table in self.tables.tables)
        return of_tables + (self.bottom_widths[-1] if self.bottom_widths else self.numeric)

    @property
    def top_inputs(self) -> int:
        if self.interaction == "cross":
            return self.num_interaction_features
        vectors = len(self.leaves) + (self.numeric > 0)
        return vectors * (vectors - 1) // 2 + (self.bottom_widths[-1] if self.numeric else 0)

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls in one example's forward pass."""
        sizes = [(self.numeric, *self.bottom_widths), (self.top_inputs, *self.top, 1)]
        dense = sum(a * b for widths in sizes for a, b in itertools.pairwise(widths))
        if self.interaction == "cross":
            return 2.0 * (dense + self.cross_layers * 2 * self.num_interaction_features * self.cross_rank)
        return 2.0 * (dense + (len(self.leaves) + (self.numeric > 0)) ** 2 * self.tables.tables[0].width)


class Dlrm(Module):
    """A ranking model, from a batch to the logit of each example's label."""

    tables: EmbeddingTables
    bottom: Perceptron
    cross: tuple[CrossLayer, ...]
    top: Perceptron
    config: DlrmConfig = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: DlrmConfig) -> "Dlrm":
        """Initialize all parameters."""
        table_key, bottom_key, cross_key, top_key = jax.random.split(key, 4)
        crossed = config.cross_layers if config.interaction == "cross" else 0
        return cls(
            tables=config.tables.create(table_key),
            bottom=Perceptron.build(bottom_key, config.numeric, config.bottom_widths),
            cross=tuple(
                CrossLayer.build(
                    jax.random.fold_in(cross_key, layer), config.num_interaction_features, config.cross_rank
                )
                for layer in range(crossed)
            ),
            top=Perceptron.build(top_key, config.top_inputs, (*config.top, 1), last_linear=True),
            config=config,
        )

    def __call__(self, batch: Batch, dtype: Any) -> Float[Array, " batch"]:
        """Return the logits, in float32.

        Args:
            dtype: Dtype of the matmuls.

        Raises:
            RecipeError: The batch lacks a leaf, or has another number of columns.
        """
        config = self.config
        with scope("tables"):
            vectors = {leaf: vector.astype(dtype) for leaf, vector in self.tables(batch).items()}
        features = [vectors[leaf] for leaf in config.leaves]
        numbers = []
        if config.numeric:
            with scope("bottom"):
                numbers = [self.bottom(self._numeric(batch, dtype))]
        with scope("interaction"):
            if config.interaction == "dot":
                pairs = dot_interaction(jnp.stack([*numbers, *features], axis=1))
                x = jnp.concatenate([*numbers, pairs], axis=1)
            else:
                x0 = x = jnp.concatenate([*numbers, *features], axis=1)
                for layer in self.cross:
                    x = layer(x0, x)
        with scope("top"):
            return self.top(x)[:, 0].astype(jnp.float32)

    def _numeric(self, batch: Batch, dtype: Any) -> Float[Array, "batch width"]:
        numeric, columns = batch.get("numeric"), self.config.numeric
        if numeric is None or numeric.shape[1] != columns:
            found = "no leaf 'numeric'" if numeric is None else f"{numeric.shape[1]} columns of numbers"
            raise RecipeError(f"the batch has {found}, and model.numeric={columns}; set it to the data's columns")
        if self.config.numeric_scale:
            numeric = numeric / jnp.asarray(self.config.numeric_scale, jnp.float32)[None]
        return (jnp.log1p(jnp.maximum(numeric, 0.0)) if self.config.log_numeric else numeric).astype(dtype)
