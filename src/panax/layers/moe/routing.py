"""Routing of tokens to experts, and the weights of their results.

Shapes: `residual` = this device's positions of each row; `assignment` = (position, expert) pairs of a row;
`router` = all experts. The expert index equal to the number of experts means "no expert".

Sources: Mixtral (arXiv:2401.04088), DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), expert choice
(arXiv:2202.09368), Switch Transformer (arXiv:2101.03961: capacity, jitter), ST-MoE (arXiv:2202.08906: the
router's z-loss), rollout routing replay (arXiv:2510.11370).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ...core import Module, current_layout, normal, parameter, uniform
from ...core.errors import RecipeError
from ...core.layout.layout import MeshAxes, axis_size, row_order
from ...kernels.product import materialize, sum_few
from ...kernels.row_functions import softmax
from ...parallel.context import zigzag_inverse
from ...spmd import ValueState, add_bias, assert_cotangent_sharding, assert_sharding, contract
from ...spmd.collectives import all_gather
from .moe_config import ROUTERS, MoE


class Assignments(eqx.Module):
    """Assignments of tokens to experts, row by row.

    Attributes:
        position: Index of the token among this device's positions of the row.
        expert: Index of the expert; the number of experts for padding and dropped tokens.
        weight: Factor of the expert's result; float32.
        uses: Number of assignments of each token, with tokens in order; None for any number in any order.
        most: Maximum number of assignments per row that have an expert.
    """

    position: Int[Array, "batch assignment"]
    expert: Int[Array, "batch assignment"]
    weight: Float[Array, "batch assignment"]
    uses: int | None = eqx.field(static=True)
    most: int = eqx.field(static=True)


class RouterTerms(NamedTuple):
    """Terms of a router's losses and metrics: sums over this device's tokens, without padding.

    `group` indexes the rows if the balancing loss is per row, otherwise it has size 1.

    Attributes:
        probability: Of each expert; the balancing loss is differentiated through it.
        load: Number of tokens that chose each expert, dropped ones included.
        z: Squared log-sum-exp of the logits.
        entropy: Entropy of each token's distribution over experts, in nats.
        dropped: Number of assignments dropped for exceeding capacity.
        tokens: Number of tokens.
    """

    probability: Float[Array, "group router"]
    load: Float[Array, "group router"]
    z: Float[Array, ""]
    entropy: Float[Array, ""]
    dropped: Float[Array, ""]
    tokens: Float[Array, ""]


class RouterState(NamedTuple):
    """Inputs of a mixture layer beside the residual stream; with a leading axis of layers for all of them.

    Attributes:
        bias: Selection bias of the experts, a part of the model state; None without one.
        experts: Experts to use in place of the best ones: choices that were recorded when tokens were drawn. -1 for a position
            without a record, which takes its best ones. None for no record at all.
    """

    bias: Float[Array, "*layer router"] | None = None
    experts: Int[Array, "*layer batch residual active"] | None = None


class Tokens(NamedTuple):
    """Inputs of a router in addition to the features.

    Attributes:
        valid: False for padding; None if there is no padding.
        place: Index of each position in its global row; None for 0, 1, 2, ...
        row: Index of each row in the global batch.
        key: PRNG key of the layer and step for the jitter; None for no jitter.
        bias: Selection bias of the experts, if they have one.
        experts: See `RouterState`.
    """

    valid: Bool[Array, "batch residual"] | None = None
    place: Int[Array, " residual"] | None = None
    row: Int[Array, " batch"] | None = None
    key: Key[Array, ""] | None = None
    bias: Float[Array, " router"] | None = None
    experts: Int[Array, "batch residual active"] | None = None


class Router(Module):
    """A linear layer in float32 that scores experts, and the choice by these scores."""

    moe: MoE = eqx.field(static=True)
    w: Float[Array, "embed router"] = parameter(normal("embed"))
    b: Float[Array, " router"] | None = parameter(None, default=None)

    def __call__(self, x: Float[Array, "batch residual embed"], tokens: Tokens) -> tuple[Assignments, RouterTerms]:
        moe, wide = self.moe, x.astype(jnp.float32)
        if moe.jitter > 0.0 and tokens.key is not None and tokens.row is not None:
            noise = uniform(x.shape, tokens.key, tokens.row, tokens.place)
            wide = wide * (1.0 + moe.jitter * (2.0 * noise - 1.0))
        logits = contract("batch residual embed, embed router -> batch residual router", wide, self.w)
        if self.b is not None:
            logits = add_bias(logits, self.b, "router")
        if moe.scores == "softmax":
            scores = probability = softmax(logits)
        else:
            scores = materialize(jax.nn.sigmoid(logits))
            probability = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
        # load: [batch, router], counted before any token is dropped.
        if moe.experts_choose:
            assigned, load, dropped = _assign_by_expert_choice(moe, scores, tokens)
        else:
            chosen = (
                _choose_best_experts(moe, scores, tokens)
                if moe.choice == "token"
                else _choose_by_custom_router(moe, logits, tokens)
            )
            assigned, load, dropped = _assign_chosen(moe, chosen, tokens)
        valid = jnp.ones(x.shape[:2], jnp.float32) if tokens.valid is None else tokens.valid.astype(jnp.float32)
        # The entropy is a metric only, so it has no gradient.
        metric_probability = jax.lax.stop_gradient(probability)
        entropy = -(metric_probability * jnp.log(jnp.maximum(metric_probability, 1e-20))).sum(axis=-1)
        summed = (probability * valid[:, :, None]).sum(axis=1)
        if moe.balance_scope != "sequence":
            summed, load = summed.sum(axis=0, keepdims=True), load.sum(axis=0, keepdims=True)
        z = (jnp.square(jax.nn.logsumexp(logits, axis=-1)) * valid).sum()
        return assigned, RouterTerms(summed, load, z, (entropy * valid).sum(), dropped, valid.sum())


def _choose_best_experts(moe: MoE, scores: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Choose each token's best experts, or those of its record, and compute their weights."""
    expert = jax.lax.top_k(jax.lax.stop_gradient(_selection_scores(moe, scores, tokens.bias)), moe.active)[1]
    if tokens.experts is not None:
        # The weights below are of the current scores, so that the router has gradients.
        expert = jnp.where(tokens.experts >= 0, tokens.experts, expert)
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    if moe.normalize_topk:
        weight = weight / (sum_few(weight, -1, keepdims=True) + moe.topk_epsilon)
    return expert, materialize(weight * moe.scale)


def _choose_by_custom_router(moe: MoE, logits: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Choose experts by a registered router, and check its result."""
    expert, weight = ROUTERS[moe.choice](moe, logits, tokens)
    expected_shape = (*logits.shape[:2], moe.active)
    if (
        expert.shape != expected_shape
        or weight.shape != expected_shape
        or not jnp.issubdtype(expert.dtype, jnp.integer)
    ):
        raise RecipeError(
            f"the router {moe.choice!r} gave experts {expert.dtype}{list(expert.shape)} and weights {list(weight.shape)}; "
            f"expected integers {list(expected_shape)} (batch, positions, task.model.feed_forward.active) and a weight for each"
        )
    return expert.astype(jnp.int32), weight.astype(jnp.float32)


def _assign_chosen(
    moe: MoE, chosen: tuple[jax.Array, jax.Array], tokens: Tokens
) -> tuple[Assignments, jax.Array, jax.Array]:
    """Assign tokens to the experts chosen for each; return (assigned, each row's load, dropped)."""
    (expert, weight), experts = chosen, moe.experts
    batch, length, _ = expert.shape
    if tokens.valid is not None:
        expert = jnp.where(tokens.valid[:, :, None], expert, experts)
    load = _count(expert.reshape(batch, -1), experts)
    dropped = jnp.float32(0.0)
    if moe.capacity is not None:
        # Mark padding differently from tokens without an expert: padding must not raise the capacity.
        padded = expert if tokens.valid is None else jnp.where(tokens.valid[:, :, None], expert, experts + 1)
        within_capacity = _within_capacity(moe, padded, tokens.place)
        dropped = ((expert < experts) & ~within_capacity).sum(dtype=jnp.float32)
        expert = jnp.where(within_capacity, expert, experts)
    position = jnp.arange(length * moe.active, dtype=jnp.int32) // moe.active
    position = jnp.broadcast_to(position[None], (batch, length * moe.active))
    expert, weight = expert.reshape(batch, -1), weight.reshape(batch, -1)
    assigned = Assignments(position, expert, weight, uses=moe.active, most=length * moe.active)
    return assigned, load, dropped


def _selection_scores(moe: MoE, scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Compute the scores for selection: biased, and -inf for experts in groups that a token does not use."""
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)[None, None]
    if moe.groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], moe.groups, -1)
    best = jax.lax.top_k(grouped, 1 if moe.group_score == "best" else 2)[0].sum(axis=-1)
    chosen = jax.lax.top_k(best, moe.active_groups)[1]
    used = jax.nn.one_hot(chosen, moe.groups, dtype=bool).any(axis=-2)
    return jnp.where(used[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _within_capacity(moe: MoE, expert: jax.Array, place: jax.Array | None) -> jax.Array:
    """Return a mask of the assignments that are among the first of their row, up to each expert's capacity."""
    rows = _whole_rows(expert)
    batch, length, _ = rows.shape
    rank = jax.vmap(lambda row: rank_by_expert(row, moe.experts)[1])(rows.reshape(batch, -1))
    tokens = (rows[:, :, 0] <= moe.experts).sum(axis=-1)
    kept = rank.reshape(rows.shape) < _capacities(moe, length)[tokens][:, None, None]
    return _select_local_positions(kept, place, expert.shape[1])


def _capacities(moe: MoE, length: int) -> Int[Array, " tokens"]:
    """Return an expert's capacity for a row of 0 to `length` tokens; padding does not count."""
    return jnp.array([moe.row_capacity(tokens) for tokens in range(length + 1)], jnp.int32)


def _assign_by_expert_choice(moe: MoE, scores: jax.Array, tokens: Tokens) -> tuple[Assignments, jax.Array, jax.Array]:
    """Choose each expert's best tokens of each row. If rows are sharded, all devices of a row compute the same
    choice, and each returns that of its positions."""
    batch, length, experts = scores.shape
    metric_scores = jax.lax.stop_gradient(scores)
    if tokens.valid is not None:
        metric_scores = jnp.where(tokens.valid[:, :, None], metric_scores, -jnp.inf)
    rows = _whole_rows(metric_scores)
    # best, place: [batch, expert, capacity], with positions in the global row.
    best, place = jax.lax.top_k(rows.swapaxes(1, 2), moe.row_capacity(rows.shape[1]))
    count = (rows > -jnp.inf).any(axis=-1).sum(axis=-1)
    within_capacity = jnp.arange(best.shape[-1])[None, None] < _capacities(moe, rows.shape[1])[count][:, None, None]
    if rows.shape[1] != length:
        # Convert to local positions; `length` marks positions of other devices.
        assert tokens.place is not None
        local_positions = (
            jnp.full((rows.shape[1],), length, jnp.int32).at[tokens.place].set(jnp.arange(length, dtype=jnp.int32))
        )
        place = local_positions[place]
    here = (place < length) & (best > -jnp.inf) & within_capacity
    expert = jnp.arange(experts, dtype=jnp.int32)[None, :, None]
    inside = jnp.minimum(place, length - 1)
    # A device's weights belong to its own tokens, and so do their cotangents, in whatever order.
    own_scores = assert_cotangent_sharding(scores, dict.fromkeys(_row_axes(), ValueState.SPLIT), 1)
    weight = own_scores[jnp.arange(batch)[:, None, None], inside, expert] * moe.scale
    expert = jnp.where(here, expert, experts).reshape(batch, -1)
    weight = jnp.where(here, weight, 0.0).reshape(batch, -1)
    assigned = Assignments(inside.reshape(batch, -1), expert, weight, uses=None, most=expert.shape[1])
    # Each device counts only its own tokens, so the load is a partial sum.
    load = assert_sharding(_count(expert, experts), dict.fromkeys(_row_axes(), ValueState.PARTIAL))
    return assigned, load, jnp.float32(0.0)


def rank_by_expert(
    expert: Int[Array, " assignment"], experts: int
) -> tuple[Int[Array, " expert"], Int[Array, " assignment"]]:
    """Count the assignments of each expert, and rank each assignment among its expert's, in order.

    >>> counts, rank = rank_by_expert(jnp.array([1, 0, 1, 3]), 3)
    >>> counts.tolist(), rank.tolist()
    ([1, 2, 0], [0, 0, 1, 0])
    """
    order = jnp.argsort(expert, stable=True)
    edges = jnp.searchsorted(expert[order], jnp.arange(experts + 2, dtype=expert.dtype)).astype(jnp.int32)
    among = jnp.arange(expert.shape[0], dtype=jnp.int32) - edges[expert[order]]
    return jnp.diff(edges)[:experts], jnp.zeros_like(among).at[order].set(among)


def _count(expert: jax.Array, experts: int) -> jax.Array:
    """Count the assignments of each row to each expert, as float32."""
    return jax.vmap(lambda row: jnp.zeros(experts, jnp.float32).at[row].add(1.0, mode="drop"))(expert)


def _row_axes() -> MeshAxes:
    """Return the mesh axes that shard a row's positions."""
    layout = current_layout()
    return () if layout is None else layout.compute(("residual",))[0]


def _whole_rows(x: jax.Array) -> jax.Array:
    """Gather all positions of this device's rows, in order."""
    axes = _row_axes()
    if not axes:
        return x
    rows = all_gather(x, axes, 1)
    if row_order() == "contiguous":
        return rows
    return jnp.take(rows, zigzag_inverse(rows.shape[1], axis_size("context")), axis=1)


def _select_local_positions(rows: jax.Array, place: jax.Array | None, length: int) -> jax.Array:
    """Select this device's positions of whole rows."""
    if rows.shape[1] == length:
        return rows
    assert place is not None
    return jnp.take(rows, place, axis=1)
