"""Cross-entropy from hidden states on a mesh, without materializing the [token, vocab] logits on any device.

Each device runs the fused kernel on its tokens and its shard of the vocabulary, and accumulates its share of
the head's gradient, which is reduce-scattered to the head's storage sharding in the parameter's precision.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import current_layout, current_target
from ..core.errors import LayoutError
from ..core.layout.target import Target
from ..kernels.cross_entropy import CrossEntropySettings, cross_entropy_sums, cross_entropy_sums_and_gradients
from ..kernels.log_probabilities import linear_log_probabilities, log_probability_gradients
from ..spmd import WeightOp, all_gather_sequence, apply_weight_op, gather_weight, gather_weight_early
from ..spmd.weights import GatheredWeight, GatheredWeightWithGrad


class TokenLoss(NamedTuple):
    """Sums over the tokens of a (micro-)batch, weighted by the mask."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]


def token_loss(
    hidden: Float[Array, "batch residual embed"],
    table: Any,
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    settings: CrossEntropySettings = CrossEntropySettings(),  # noqa: B008
) -> TokenLoss:
    """Compute the softmax cross-entropy of `hidden · tableᵀ`, and count the targets with the highest logit.

    On a mesh, the sums cover this device's tokens and are equal along the axis that shards the vocabulary.

    Args:
        table: The output head, a parameter with the axes `vocab embed`.
        mask: Weight of each token; 0 excludes it.
        settings: Terms of the loss, and the number of real rows of the table; the axis that shards the
            vocabulary is the mesh's.
    """
    loss = _TokenLoss(dataclasses.replace(settings, vocab_axis=find_vocab_axis()), current_target())
    head = gather_weight_early(table, "vocab embed", hidden.dtype)
    sums: tuple[jax.Array, jax.Array] = apply_weight_op(loss, _Inputs(all_gather_sequence(hidden), targets, mask), head)
    return TokenLoss(*sums)


def token_log_probabilities(
    hidden: Float[Array, "batch residual embed"],
    table: Any,
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    settings: CrossEntropySettings = CrossEntropySettings(),  # noqa: B008
) -> Float[Array, "batch seq"]:
    """Compute the log-probability of each target under the softmax of `hidden · tableᵀ`, in float32.

    On a mesh, they are of this device's tokens and equal along the axis that shards the vocabulary. The backward pass
    computes the logits again: four matmuls with the table in all, where `token_loss` needs three.

    Args:
        table: The output head, a parameter with the axes `vocab embed`.
        mask: 0 for tokens without a log-probability: theirs is 0, and has no gradient.
        settings: The soft-cap, and the number of real rows of the table; the axis that shards the vocabulary is the mesh's.

    Raises:
        ValueError: The settings have a z-loss or label smoothing.
    """
    op = _TokenLogProbabilities(dataclasses.replace(settings, vocab_axis=find_vocab_axis()), current_target())
    return apply_weight_op(
        op, _Inputs(all_gather_sequence(hidden), targets, mask), gather_weight(table, "vocab embed", hidden.dtype)
    )


class _Inputs(NamedTuple):
    hidden: jax.Array
    targets: jax.Array
    mask: jax.Array

    @property
    def flat(self) -> "_Inputs":
        return _Inputs(*(leaf.reshape(-1, *leaf.shape[2:]) for leaf in self))


@dataclasses.dataclass(frozen=True)
class _TokenLoss(WeightOp):
    """The fused kernel; only the first of its sums is differentiable."""

    settings: CrossEntropySettings
    target: Target

    def value(self, inputs: _Inputs, *weights: GatheredWeightWithGrad) -> tuple[jax.Array, jax.Array]:
        x, targets, mask = inputs.flat
        sums = cross_entropy_sums(x, weights[0].value, targets, mask, self.settings, target=self.target)
        return sums.loss_sum, sums.correct_sum

    def forward(self, inputs: _Inputs, *weights: GatheredWeightWithGrad) -> tuple[tuple[jax.Array, jax.Array], Any]:
        x, targets, mask = inputs.flat
        (head,) = weights
        sums, dx, dtable = cross_entropy_sums_and_gradients(
            x, head.value, targets, mask, self.settings, target=self.target
        )
        # Reduce the head's gradient now, so that only its local shard is held until the backward pass.
        return (sums.loss_sum, sums.correct_sum), (dx.reshape(inputs.hidden.shape), head.reduce_grad(dtable))

    def backward(self, saved: Any, gradient: tuple[jax.Array, jax.Array], *dtypes: Any) -> tuple[_Inputs, list[Any]]:
        dx, returned = jax.tree.map(lambda leaf: leaf * gradient[0].astype(leaf.dtype), saved)
        return _Inputs(dx, None, None), [returned]  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class _TokenLogProbabilities(WeightOp):
    """The kernel of log-probabilities."""

    settings: CrossEntropySettings
    target: Target

    def forward(self, inputs: _Inputs, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        x, targets, mask = inputs.flat
        head = weights[0].value
        values = linear_log_probabilities(x, head, targets, mask, self.settings, target=self.target)
        return values.reshape(inputs.targets.shape), (inputs, head)

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[_Inputs, list[Any]]:
        inputs, head = saved
        x, targets, mask = inputs.flat
        counted = jnp.where(mask != 0, gradient.reshape(-1), 0.0)
        dx, dtable = log_probability_gradients(x, head, targets, counted, self.settings, target=self.target)
        d_inputs = _Inputs(dx.reshape(inputs.hidden.shape), None, None)  # pyright: ignore[reportArgumentType]
        return d_inputs, [dtable.astype(dtypes[0])]


def find_vocab_axis() -> str | None:
    """Return the mesh axis that shards the vocabulary of a head; None if it is whole.

    Raises:
        LayoutError: Several axes do.
    """
    layout = current_layout()
    axes = () if layout is None else layout.compute(("vocab",))[0]
    if len(axes) > 1:
        raise LayoutError(f"rules.compute: vocab -> {axes}; the loss splits a vocabulary over one mesh axis")
    return axes[0] if axes else None
