"""`RewardTask`: a reward for each answer, from a decoder's last hidden state of it, learned from preference pairs."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid
from jaxtyping import Array, Bool, Float

from ...core import Axes, Batch, Loss, Mean, Sum
from ...core.batch_checks import MASK_LEAF, WEIGHT_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...core.task import REWARD_SCORES
from ...layers import Context, router_weights
from ...spmd import ValueState, assert_sharding, split_cotangent, token_axes
from ..objectives.pair_checks import check_pairs, count_chosen_starts
from ..objectives.segment_totals import find_slots, find_starts, sum_own_positions, sum_segments
from ..vision.vit import ClassHead
from .headed_task import HeadedDecoder, HeadedTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardTask(HeadedTask):
    """Train a decoder and a linear layer to give chosen answers higher rewards than rejected ones (Bradley-Terry).

    An answer's reward is a linear function of the final hidden state of its last token. Rows hold pairs as for
    `Preference`: `data.Preferences` makes them. The loss is the mean of -log sigmoid(difference) over the pairs of the
    global batch. The decoder's weights can be those of a released model (`init="hf:DIR"`), and those of a reward model
    with a head of one class.

    Source: InstructGPT (arXiv:2203.02155), section 3.5; centering: arXiv:2312.09244.

    Attributes:
        centering: Weight of the mean squared sum of both rewards, which keeps them around 0.
    """

    centering: float = 0.0

    reads_pairs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centering < 0.0:
            raise RecipeError(f"task.centering={self.centering}; expected 0 or more")
        if self.pooling != "last":
            raise RecipeError(f'task.pooling="{self.pooling}" has no effect: a reward is of the last token; remove it')

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"tokens", "segment", "position", MASK_LEAF})

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict.fromkeys(("tokens", "segment", "position", "targets", MASK_LEAF), ("batch", "seq"))

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        return {
            "tokens": id_range(self.model.vocab_size, advice="raise task.model.vocab_size"),
            "segment": LeafRange(0, integral=True),
            "position": id_range(self.model.max_length, advice="raise task.model.max_length"),
            MASK_LEAF: WEIGHT_RANGE,
        }

    def reward_score_task(self, rows: int) -> "RewardScores":
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return RewardScores(**settings, rows=rows)

    @property
    def vocabulary_size(self) -> int | None:
        return self.model.vocab_size or None

    def build_head(self, key: jax.Array) -> ClassHead:
        return ClassHead.create(key, {"embed": self.model.embed, "class": 1})

    def valid(self, batch: Batch) -> Bool[Array, "batch seq"]:
        return batch["segment"] != 0

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        context = super().context(batch, key, train)
        return context._replace(position=batch["position"], segment=batch["segment"])

    def loss_weights(
        self, params: HeadedDecoder, state: object, micro_batches: Batch, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        pairs = count_chosen_starts(micro_batches)
        weights = {"preference": pairs} | ({"centering": pairs} if self.centering else {})
        moe = self.model.feed_forward
        if moe is None or not self.model.mixture_layers:
            return weights
        return {**weights, **router_weights(moe, jax.vmap(self.count_tokens)(micro_batches).sum())}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        slots, segment = find_slots(batch), batch["segment"]
        following = jnp.pad(segment[:, 1:], ((0, 0), (0, 1)))
        ends = (segment != 0) & (following != segment)
        starts = find_starts(batch)
        return {
            "slot": slots.slot,
            "starts": starts,
            "ends": ends.astype(jnp.float32),
            "chosen": (segment % 2 == 1).astype(jnp.float32),
            MASK_LEAF: batch[MASK_LEAF],
            "stray": slots.stray,
        }

    def compute_metrics(
        self,
        params: HeadedDecoder,
        items: Float[Array, "batch residual embed"],
        targets: Mapping[str, Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        slot, starts, mask = targets["slot"], targets["starts"], targets[MASK_LEAF]
        rewards = self.rewards(params, items)
        values = jnp.stack([rewards * targets["ends"], mask, starts], axis=-1)
        sums = sum_segments(values, slot).reshape(-1, 2, values.shape[-1])
        counted = sum_own_positions((starts * targets["chosen"])[..., None], slot).reshape(-1, 2)[:, 0]
        weight = (starts * targets["chosen"]).sum()
        chosen, rejected = split_cotangent(sums[:, 0, 0]), split_cotangent(sums[:, 1, 0])
        losses = {"preference": Loss((-log_sigmoid(chosen - rejected) * counted).sum(), weight)}
        if self.centering:
            losses["centering"] = Loss(((chosen + rejected) ** 2 * counted).sum(), weight, self.centering)
        values_by_name = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        }
        metrics = {name: Mean((value * counted).sum(), weight) for name, value in values_by_name.items()}
        faults = check_pairs(jax.lax.stop_gradient(sums[:, :, 1:]), targets["stray"])
        return losses, {**metrics, "tokens": Sum((mask != 0).astype(jnp.float32).sum()), "pairs": Sum(weight), **faults}

    def rewards(
        self, params: HeadedDecoder, items: Float[Array, "batch residual embed"]
    ) -> Float[Array, "batch residual"]:
        """Return the reward of a text that would end at each position, in float32."""
        assert params.head is not None
        hidden = params.decoder.final_norm(items).astype(jnp.float32)
        return params.head(hidden.reshape(-1, hidden.shape[-1])).reshape(hidden.shape[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardScores(RewardTask):
    """Evaluate the reward of each row's text; no objective to train.

    Batches have `tokens`, `segment` (1 for the text of a row, then 0), `position` and `loss_mask`, which is not read.

    Attributes:
        rows: Rows of the global batch.
    """

    rows: int

    reads_pairs = False

    def loss_weights(
        self, params: HeadedDecoder, state: object, micro_batches: Batch, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        return {"score": (micro_batches["position"] == 0).astype(jnp.float32).sum()}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        return {**super().targets(batch), "place": jnp.broadcast_to(batch["row"][:, None], batch["segment"].shape)}

    def compute_metrics(
        self,
        params: HeadedDecoder,
        items: Float[Array, "batch residual embed"],
        targets: Mapping[str, Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        rewards = (self.rewards(params, items) * targets["ends"]).sum(axis=1)
        scores = jnp.zeros((self.rows,), rewards.dtype).at[targets["place"][:, 0]].add(rewards)
        scores = assert_sharding(scores, dict.fromkeys(token_axes(), ValueState.PARTIAL))
        return {"score": Loss(rewards.sum(), targets["starts"].sum())}, {REWARD_SCORES: Sum(scores)}
