"""Ranking models as a `Task`: the probability of a click."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Axes, Batch, DataFacts, Evaluation, Loss, Mean, RocHistogram, Sum, Task, logical_axes
from ...core.batch_checks import MASK_LEAF, UNCHECKED_RANGE, WEIGHT_RANGE, LeafRange
from ...core.errors import RecipeError
from ...core.measures import Metrics
from ...core.params.growth import GrowingVocab
from ...core.task import MatmulPrecision
from ...core.validation import Validated
from ...kernels.compute_dtype import resolve_dtype
from ...layers.stages.staged_task import ComputeType
from ...spmd import split_cotangent
from ..leaf_names import LEAF_ALIASES
from .dlrm import Dlrm, DlrmConfig

AUC_BINS = 2**18
MAX_LOGIT = 16.0
"""Logits beyond ± this value share the outermost bins: probabilities below 1e-7, or as close to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmTask(Validated, Task):
    """Train a `Dlrm` on batches with `label` (0 or 1), `numeric` and a leaf for each feature of its tables.

    Evaluations report the log loss in nats, the area under the ROC curve from 262,144 bins of the logit with
    a bound of its error (`auc`, `auc_error_bound`), and `calibration`: the sum of the probabilities divided
    by that of the labels. `loss_mask` masks rows.

    Attributes:
        compute_dtype: Dtype of embedding vectors and matmuls; tables, parameters and sums are float32.
        matmul_precision: Precision of float32 matmuls; None for the platform's default.
    """

    model: DlrmConfig
    compute_dtype: ComputeType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    matmul_precision: MatmulPrecision | None = None

    mesh_axes = frozenset({"replica", "fsdp", "expert", "context", "tensor"})
    names_axes = True
    splits_residual = False
    leaf_aliases = LEAF_ALIASES

    def __post_init__(self) -> None:
        if self.compute_dtype == "float16":
            raise RecipeError('task.compute_dtype="float16" needs loss scaling; use "bfloat16" or "float32"')

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        numeric = {"numeric": ("batch", None)} if self.model.numeric else {}
        return MappingProxyType(
            {**self.model.tables.batch_axes, **numeric, "label": ("batch",), "loss_mask": ("batch",)}
        )

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        advice = "a label is a probability: 0 or 1, or between; data.label_above makes one of ratings"
        numeric = {"numeric": UNCHECKED_RANGE} if self.model.numeric else {}
        label = {"label": LeafRange(0.0, 1.0, counted_by=MASK_LEAF, advice=advice)}
        return {MASK_LEAF: WEIGHT_RANGE, **label, **numeric, **self.model.tables.leaf_ranges}

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset(self.batch_axes) - {MASK_LEAF}

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(resolve_dtype(self.compute_dtype))

    def adapt_to_data(self, facts: DataFacts) -> "DlrmTask":
        tables = self.model.tables.adapt_to_data(facts.num_ids)
        return dataclasses.replace(self, model=dataclasses.replace(self.model, tables=tables))

    def flops_per_example(self) -> float:
        return 3 * self.model.flops

    def init(self, key: jax.Array) -> tuple[Dlrm, dict[str, Any]]:
        return Dlrm.build(key, self.model), self.model.tables.init_vocabularies()

    def state_axes(self, state: Any) -> Any:
        return self.model.tables.vocabulary_axes()

    @property
    def growing(self) -> tuple[GrowingVocab, ...]:
        return self.model.tables.growing

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)

    def row_ids(self, batch: Batch) -> Mapping[str, Int[Array, "batch ids"]]:
        return self.model.tables.row_ids(batch)

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        return {"log_loss": jnp.float32(micro_batches["label"].size) if mask is None else mask.sum()}

    def loss(self, params: Dlrm, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        label = batch["label"].astype(jnp.float32)
        mask = batch.get("loss_mask")
        mask = jnp.ones(label.shape, jnp.float32) if mask is None else mask
        logits = split_cotangent(params(batch, self.weight_dtype))
        weight = mask.sum()
        losses = {"log_loss": Loss((log_loss(logits, label) * mask).sum(), weight)}
        metrics: dict[str, Any] = {"examples": Sum(weight)}
        if not train:
            metrics |= click_metrics(logits, label, mask)
        return Evaluation(losses, state, metrics)


def log_loss(logits: Float[Array, " batch"], label: Float[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the log loss of each example, in nats.

    >>> log_loss(jnp.zeros(1), jnp.ones(1)).tolist() == [jnp.log(2.0)]
    True
    """
    return jax.nn.softplus(logits) - logits * label


def click_metrics(
    logits: Float[Array, " batch"], label: Float[Array, " batch"], mask: Float[Array, " batch"]
) -> Metrics:
    """Return the area under the ROC curve and the calibration (probabilities over labels), weighted by
    `mask`.
    """
    probability = jax.nn.sigmoid(logits)
    return {
        # Bins of the logit, not of the probability: clicks are rare, so most probabilities are close to 0.
        "auc": RocHistogram.of((logits / MAX_LOGIT + 1) / 2, label, mask, AUC_BINS),
        "calibration": Mean((probability * mask).sum(), (label * mask).sum()),
    }
