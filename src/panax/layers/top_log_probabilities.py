"""Log-probabilities of given ids from hidden states on a mesh, without materializing the [token, vocab] logits on any
device.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from ..core import current_target
from ..core.layout.target import Target
from ..kernels.cross_entropy import CrossEntropySettings
from ..kernels.most_likely_tokens import most_likely_tokens
from ..kernels.top_log_probabilities import (
    TopInputs,
    TopLogProbabilities,
    TopSettings,
    top_log_probabilities,
    top_log_probability_gradients,
)
from ..spmd import WeightOp, all_gather_sequence, apply_weight_op, gather_weight
from ..spmd.weights import GatheredWeight
from .loss import find_vocab_axis


class TopTokens(NamedTuple):
    """The tokens of each position to compute log-probabilities of.

    Attributes:
        ids: Distinct token ids.
        targets: The tokens that follow.
        mask: 0 for positions without log-probabilities.
    """

    ids: Int[Array, "batch seq k"]
    targets: Int[Array, "batch seq"]
    mask: Float[Array, "batch seq"]


class TokenTops(NamedTuple):
    """Log-probabilities of each position's ids, of all other tokens together, and of the target; 0 if the mask is 0.

    Attributes:
        top: Of each id, at the temperature.
        tail: Of all others, at the temperature; -inf if there are none.
        target: At temperature 1.
    """

    top: Float[Array, "batch seq k"]
    tail: Float[Array, "batch seq"]
    target: Float[Array, "batch seq"]


def token_top_log_probabilities(
    hidden: Float[Array, "batch residual embed"],
    table: Any,
    given: TopTokens,
    settings: CrossEntropySettings = CrossEntropySettings(),  # noqa: B008
    *,
    temperature: float = 1.0,
) -> TokenTops:
    """Compute the log-probabilities of given tokens under the softmax of `hidden · tableᵀ / temperature`, in float32.

    On a mesh, they are of this device's tokens and equal along the axis that shards the vocabulary: of its logits, each
    device contributes those of its columns. As for `token_log_probabilities`, the backward pass computes the logits again.

    Args:
        table: The output head, a parameter with the axes `vocab embed`.
        settings: The soft-cap, and the number of real rows of the table; the axis that shards the vocabulary is the mesh's.

    Raises:
        ValueError: The settings have a z-loss or label smoothing, or the temperature is not positive.
    """
    vocabulary = dataclasses.replace(settings, vocab_axis=find_vocab_axis())
    op = _TokenTops(TopSettings(vocabulary=vocabulary, temperature=temperature), current_target())
    return apply_weight_op(
        op, _Inputs(all_gather_sequence(hidden), given), gather_weight(table, "vocab embed", hidden.dtype)
    )


class _Inputs(NamedTuple):
    hidden: jax.Array
    given: TopTokens

    @property
    def flat(self) -> TopInputs:
        leaves = (self.hidden, self.given.ids, self.given.targets, self.given.mask)
        return TopInputs(*(leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves))


@dataclasses.dataclass(frozen=True)
class _TokenTops(WeightOp):
    """The kernel of given log-probabilities."""

    settings: TopSettings
    target: Target

    def forward(self, inputs: _Inputs, *weights: GatheredWeight) -> tuple[TokenTops, Any]:
        head = weights[0].value
        values = top_log_probabilities(inputs.flat, head, self.settings, target=self.target)
        shape = inputs.given.targets.shape
        return TokenTops(*(leaf.reshape(*shape, *leaf.shape[1:]) for leaf in values)), (inputs, head)

    def backward(self, saved: Any, gradient: TokenTops, *dtypes: Any) -> tuple[_Inputs, list[Any]]:
        inputs, head = saved
        cotangent = TopLogProbabilities(*(leaf.reshape(-1, *leaf.shape[2:]) for leaf in gradient))
        dx, dtable = top_log_probability_gradients(inputs.flat, head, cotangent, self.settings, target=self.target)
        nothing: Any = TopTokens(None, None, None)  # pyright: ignore[reportArgumentType]
        return _Inputs(dx.reshape(inputs.hidden.shape), nothing), [dtable.astype(dtypes[0])]


class LikelyTokens(NamedTuple):
    """The most likely tokens of each position, in descending order, with their log-probabilities."""

    ids: Int[Array, "batch seq k"]
    log_probabilities: Float[Array, "batch seq k"]


def find_likely_tokens(
    hidden: Float[Array, "batch residual embed"],
    table: Any,
    top_k: int,
    settings: CrossEntropySettings = CrossEntropySettings(),  # noqa: B008
    *,
    temperature: float = 1.0,
) -> LikelyTokens:
    """Find the most likely tokens under the softmax of `hidden · tableᵀ / temperature`; for evaluations, not differentiable.

    On a mesh, they are of this device's tokens and equal along the axis that shards the vocabulary.

    Args:
        table: The output head, a parameter with the axes `vocab embed`.
        top_k: At most the size of the vocabulary.
        settings: As in `token_top_log_probabilities`.
    """
    vocabulary = dataclasses.replace(settings, vocab_axis=find_vocab_axis())
    op = _LikelyTokens(top_k, TopSettings(vocabulary=vocabulary, temperature=temperature), current_target())
    return apply_weight_op(op, all_gather_sequence(hidden), gather_weight(table, "vocab embed", hidden.dtype))


@dataclasses.dataclass(frozen=True)
class _LikelyTokens(WeightOp):
    """The kernel of most likely tokens."""

    top_k: int
    settings: TopSettings
    target: Target

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[LikelyTokens, Any]:
        x = inputs.reshape(-1, inputs.shape[-1])
        values = most_likely_tokens(x, weights[0].value, self.top_k, self.settings, target=self.target)
        return LikelyTokens(*(leaf.reshape(*inputs.shape[:2], self.top_k) for leaf in values)), None

    def backward(self, saved: Any, gradient: Any, *dtypes: Any) -> tuple[Any, list[Any]]:
        raise NotImplementedError("the most likely tokens have no gradient; evaluate without one")
