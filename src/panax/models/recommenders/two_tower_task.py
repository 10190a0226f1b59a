"""Two-tower retrieval as a `Task`: an in-batch softmax of each query over all items of the global batch."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ...core import Axes, Batch, DataFacts, Evaluation, Loss, Mean, Sum, Task, logical_axes
from ...core.batch_checks import MASK_LEAF, UNCHECKED_RANGE, WEIGHT_RANGE, LeafRange
from ...core.params.growth import GrowingVocab
from ...core.validation import Validated
from ...kernels.compute_dtype import resolve_dtype
from ...layers.stages.staged_task import UnscaledType
from ...spmd import split_cotangent
from ..in_batch_softmax import in_batch_softmax
from ..leaf_names import LEAF_ALIASES
from .two_tower import TwoTower, TwoTowerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerTask(Validated, Task):
    """Train a `TwoTower` on batches of queries with their positive item; all other rows' items are negatives.

    On a mesh the softmax is over the items of all devices, so the loss is that of one device.

    Attributes:
        log_q_leaf: Name of the batch leaf, float32 (batch), with the logarithm of the item's share of all
            examples. It corrects for popular items being negatives more often. "": no correction.
        compute_dtype: Dtype of the MLPs' matmuls.
    """

    model: TwoTowerConfig
    log_q_leaf: str = ""
    compute_dtype: UnscaledType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]

    mesh_axes = frozenset({"replica", "fsdp", "expert", "context", "tensor"})
    names_axes = True
    splits_residual = False
    sums_over_rows = False
    leaf_aliases = LEAF_ALIASES

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        model = self.model
        plain = ("loss_mask", self.log_q_leaf) if self.log_q_leaf else ("loss_mask",)
        return MappingProxyType({**model.query.batch_axes, **model.item.batch_axes, **dict.fromkeys(plain, ("batch",))})

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        log_q = {self.log_q_leaf: UNCHECKED_RANGE} if self.log_q_leaf else {}
        return {MASK_LEAF: WEIGHT_RANGE, **log_q, **self.model.query.leaf_ranges, **self.model.item.leaf_ranges}

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset(self.batch_axes) - {MASK_LEAF}

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(resolve_dtype(self.compute_dtype))

    def adapt_to_data(self, facts: DataFacts) -> "TwoTowerTask":
        model = self.model
        towers = model.query.adapt_to_data(facts.num_ids), model.item.adapt_to_data(facts.num_ids)
        return dataclasses.replace(self, model=dataclasses.replace(model, query=towers[0], item=towers[1]))

    def init(self, key: jax.Array) -> tuple[TwoTower, dict[str, Any]]:
        model = self.model
        return TwoTower.build(key, model), {**model.query.init_vocabularies(), **model.item.init_vocabularies()}

    def state_axes(self, state: Any) -> Any:
        return {**self.model.query.vocabulary_axes(), **self.model.item.vocabulary_axes()}

    @property
    def growing(self) -> tuple[GrowingVocab, ...]:
        model = self.model.with_table_names()
        return (*model.query.growing, *model.item.growing)

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)

    def row_ids(self, batch: Batch) -> Mapping[str, Int[Array, "batch ids"]]:
        model = self.model.with_table_names()
        return {**model.query.row_ids(batch), **model.item.row_ids(batch)}

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        return {"in_batch": jnp.float32(micro_batches[self.model.item_leaf].size) if mask is None else mask.sum()}

    def loss(self, params: TwoTower, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        query, item = params.vectors(batch, self.weight_dtype)
        names = batch[self.model.item_leaf][:, 0]
        mask = batch.get("loss_mask")
        mask = jnp.ones(names.shape, jnp.float32) if mask is None else mask
        log_q = batch.get(self.log_q_leaf, jnp.zeros(names.shape, jnp.float32))
        result = in_batch_softmax(query, item, mask, self.model.temperature, names=names, log_q=log_q)
        losses = split_cotangent(result.loss)
        weight = mask.sum()
        metrics = {"in_batch_accuracy": Mean((result.right * mask).sum(), weight), "examples": Sum(weight)}
        return Evaluation({"in_batch": Loss((losses * mask).sum(), weight)}, state, metrics)
