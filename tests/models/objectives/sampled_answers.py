"""Batches of a rollout's answers: packed, of uneven lengths, with one excluded answer and one of a single action."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs

from panax.core.batch_checks import KEPT_COUNT_LEAF, KEPT_LEAF, OLD_VALUE_LEAF, RETURN_LEAF
from panax.core.measures import total_loss
from panax.kernels import CrossEntropySettings
from panax.models import DecoderObjective, PolicyGradient
from panax.models.objectives.objective import VocabularyHead
from panax.models.objectives.policy_gradient import ADVANTAGE_LEAF, BEHAVIOR_LEAF, OLD_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF

EXCLUDED = (1, 2)
"""Row and segment of the answer without actions."""


def batch(*leaves: str, seed: int = 0, length: int = pairs.LENGTH) -> dict[str, np.ndarray]:
    """Rows of answers; log-probabilities are near those of a model that knows nothing.

    Args:
        leaves: Those besides advantages and behavior log-probabilities.
    """
    made = pairs.lay(pairs.random_answers(seed), length)
    rng = np.random.default_rng(seed + 1)
    row, segment = EXCLUDED
    made["loss_mask"][row][made["segment"][row] == segment] = 0.0
    advantages = rng.normal(size=(*made["segment"].shape[:1], made["segment"].max() + 1)).astype(np.float32)
    # A group without signal.
    advantages[0] = 0.0
    made[ADVANTAGE_LEAF] = np.take_along_axis(advantages, made["segment"], axis=1)
    for name in (BEHAVIOR_LEAF, OLD_LEAF, REFERENCE_LEAF):
        of_answers = np.take_along_axis(rng.uniform(-0.5, 0.3, advantages.shape), made["segment"], axis=1)
        drawn = -np.log(pairs.MODEL.vocab_size) + of_answers + rng.uniform(-0.4, 0.4, made["tokens"].shape)
        # What is stored where nothing was sampled is of no consequence.
        made[name] = np.where(made["loss_mask"] > 0, drawn, 7.0).astype(np.float32)
    for name in (RETURN_LEAF, OLD_VALUE_LEAF):
        made[name] = np.where(made["loss_mask"] > 0, rng.normal(size=made["tokens"].shape), 7.0).astype(np.float32)
    if KEPT_LEAF in leaves:
        made |= draw_kept(made, rng)
    others = {OLD_LEAF, REFERENCE_LEAF, RETURN_LEAF, OLD_VALUE_LEAF} - set(leaves)
    return {name: leaf for name, leaf in made.items() if name not in others}


def draw_kept(made: dict[str, np.ndarray], rng: np.random.Generator, candidates: int = 5) -> dict[str, np.ndarray]:
    """Five ids of each position, of which one to five were kept, the target among them."""
    shape, counted = made["targets"].shape, made["loss_mask"] > 0
    kept = np.argsort(rng.random((*shape, pairs.MODEL.vocab_size)), axis=-1)[..., :candidates].astype(np.int32)
    size = rng.integers(1, candidates + 1, shape).astype(np.int32)
    place = (rng.integers(0, candidates, shape) % size)[..., None]
    holds = (kept == made["targets"][..., None]).any(axis=-1, keepdims=True)
    # A target that is among the ids already, by chance, is swapped to its place.
    old = np.take_along_axis(kept, place, axis=-1)
    kept = np.where(holds & (kept == made["targets"][..., None]), old, kept)
    np.put_along_axis(kept, place, made["targets"][..., None].astype(np.int32), axis=-1)
    return {
        KEPT_LEAF: np.where(counted[..., None], kept, 0),
        KEPT_COUNT_LEAF: np.where(counted, size, 0),
    }


def batch_for(objective: DecoderObjective, **settings: Any) -> dict[str, np.ndarray]:
    """Rows with the leaves that an objective reads."""
    return batch(*objective.leaf_axes, **settings)


def find_answers(batch: dict[str, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """Row, and positions of the actions, of each answer with actions."""
    found = []
    for row, segment in enumerate(batch["segment"]):
        for number in range(1, segment.max() + 1):
            places = np.flatnonzero((segment == number) & (batch["loss_mask"][row] > 0))
            found += [(row, places)] if places.size else []
    return found


def draw_logits(batch: dict[str, np.ndarray], seed: int = 2) -> np.ndarray:
    """Logits that give an action about the probability that the batch's leaves have for it."""
    rng = np.random.default_rng(seed)
    return (0.3 * rng.normal(size=(*batch["tokens"].shape, pairs.MODEL.vocab_size))).astype(np.float32)


def evaluate(
    objective: PolicyGradient, batch: dict[str, np.ndarray], logits: np.ndarray, **settings: Any
) -> tuple[float, np.ndarray, dict[str, Any]]:
    """Total loss, its gradient by the logits, and metrics; the logits are the hidden states of a head that is the identity.

    Args:
        settings: Of the head.
    """
    vocab = pairs.MODEL.vocab_size

    @jax.jit
    def compute(logits: jax.Array, rows: Any) -> Any:
        def loss(logits: jax.Array) -> Any:
            head = VocabularyHead(logits, jnp.eye(vocab), CrossEntropySettings(**settings), vocab)
            losses, metrics = objective.compute(head, objective.targets(rows), True)
            return total_loss(losses), (losses, metrics)

        (value, (losses, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
        return value, gradient, losses, metrics, objective.loss_weights(rows)

    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    value, gradient, losses, metrics, weights = compute(jnp.asarray(logits), rows)
    assert {name: float(loss.weight) for name, loss in losses.items()} == {n: float(w) for n, w in weights.items()}
    return float(value), np.asarray(gradient), metrics
