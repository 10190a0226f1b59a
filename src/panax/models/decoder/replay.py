"""Router replay: train on the experts that answers were drawn with.

A router's choice is not continuous: a difference in rounding, or an update of the parameters, may choose another expert, and the
probabilities of the next token jump. With replay, the choices of the draw are those of training.

Source: rollout routing replay (arXiv:2510.11370).
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Int

from ...core.batch_checks import EXPERTS_LEAF, LeafRange, id_range
from ...core.errors import RecipeError
from ...layers.moe.routing import RouterState
from ...spmd import local_sequence
from ..objectives.objective import DecoderObjective
from .config import DecoderConfig


def check_replay(model: DecoderConfig) -> None:
    """Check that a model has choices to replay.

    Raises:
        RecipeError: It has no mixture of experts, or one that does not choose the best experts of each token.
    """
    moe = model.feed_forward
    if moe is None or not model.mixture_layers:
        raise RecipeError(
            "task.objective.replay_experts=True has no effect on a model without a mixture of experts; remove it, or set "
            "task.model.feed_forward=MoE(...)"
        )
    if moe.choice != "token":
        why = "experts choose their tokens" if moe.experts_choose else "a custom router returns its own weights"
        raise RecipeError(
            f"task.objective.replay_experts=True needs tokens that choose their best experts; with "
            f"task.model.feed_forward.choice={moe.choice!r} {why}: remove one of both"
        )
    check_draws_as_trained(model)


def check_draws_as_trained(model: DecoderConfig) -> None:
    """Check that a token's experts in training are those that it is drawn with.

    Raises:
        RecipeError: Training drops tokens that come after others of their row.
    """
    moe = model.feed_forward
    if moe is not None and model.mixture_layers and moe.capacity is not None:
        raise RecipeError(
            f"task.model.feed_forward.capacity={moe.capacity} drops tokens in training, which are not dropped when answers are "
            f"drawn: the model would learn from answers of another one; set capacity=None"
        )


def replay_ranges(model: DecoderConfig, objective: DecoderObjective) -> Mapping[str, LeafRange]:
    """Return the values that the leaf of recorded experts may hold; empty without replay."""
    if not objective.replays_experts or model.feed_forward is None:
        return {}
    return {EXPERTS_LEAF: id_range(model.feed_forward.experts, least=-1)}


def replay_experts(
    model: DecoderConfig, state: RouterState | None, experts: Int[Array, "batch seq layer active"]
) -> RouterState:
    """Return the inputs of the mixture layers, with the recorded experts of this device's positions.

    Args:
        state: Their inputs without a record.

    Raises:
        RecipeError: The record is of another number of layers, or of experts per token.
    """
    moe = model.feed_forward
    expected = None if moe is None else (len(model.mixture_layers), moe.active)
    if experts.shape[2:] != expected:
        raise RecipeError(
            f"the batch's leaf {EXPERTS_LEAF!r} has the shape {experts.shape}; expected {expected or (0, 0)} in its last two "
            f"dimensions (mixture layers, task.model.feed_forward.active): use the experts of this model's own draws, or remove "
            f"it"
        )
    # The record is of the whole row; the residual stream may be split further.
    local = jnp.moveaxis(local_sequence(experts), 2, 0)
    return RouterState(None if state is None else state.bias, local)
