"""Cross-entropy from hidden states, on a mesh: the [token, vocab] logits are never whole, on any device.

Each device runs the fused kernel on its own tokens with its own part of the vocabulary, and adds up its own share of the head's
gradient, which is reduce-scattered into the head's storage layout in its own precision.
"""

import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from ..core import current_layout, current_target
from ..core.errors import LayoutError
from ..core.target import Target
from ..kernels.cross_entropy import cross_entropy_sums, cross_entropy_sums_and_gradients
from ..spmd import open_at_rest, whole_sequence
from ..spmd.weights import OpenedAtRest


class TokenLoss(NamedTuple):
    """Sums over the tokens of a (micro-)batch, weighted by the mask."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]


def token_loss(
    hidden: Float[Array, "batch residual embed"],
    table: Any,
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> TokenLoss:
    """Softmax cross-entropy of `hidden · tableᵀ`, and how many targets had the highest logit.

    On a mesh the sums are over this device's tokens, equal along the axis that splits the vocabulary.

    Args:
        table: The head, a parameter of the axes `vocab embed`.
        mask: Each token's weight; 0 leaves it out.
        soft_cap: Logits are squashed to ±soft_cap by a tanh (Gemma 2).
        z_loss: Weight of the squared log-partition that is added to the loss (PaLM, arXiv:2204.02311, section 5).
        vocab_size: The table's rows from here on are padding and get probability 0.
    """
    static = _Static(soft_cap, z_loss, vocab_size, _vocab_axis(), current_target())
    head = open_at_rest(table, "vocab embed", hidden.dtype)
    sums: tuple[jax.Array, jax.Array] = _token_loss(static, whole_sequence(hidden), head, targets, mask)
    return TokenLoss(*sums)


class _Static(NamedTuple):
    soft_cap: float | None
    z_loss: float
    vocab_size: int | None
    vocab_axis: str | None
    target: Target

    @property
    def options(self) -> dict[str, Any]:
        return self._asdict()


def _vocab_axis() -> str | None:
    layout = current_layout()
    axes = () if layout is None else layout.compute(("vocab",))[0]
    if len(axes) > 1:
        raise LayoutError(f"rules.compute: vocab -> {axes}; the loss splits a vocabulary over one mesh axis")
    return axes[0] if axes else None


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_loss(
    static: _Static, hidden: jax.Array, head: OpenedAtRest, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    sums = cross_entropy_sums(_flat(hidden), head.value, targets.reshape(-1), mask.reshape(-1), **static.options)
    return sums.loss_sum, sums.correct_sum


def _token_loss_forward(
    static: _Static, hidden: jax.Array, head: OpenedAtRest, targets: jax.Array, mask: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    sums, dx, dtable = cross_entropy_sums_and_gradients(
        _flat(hidden), head.value, targets.reshape(-1), mask.reshape(-1), **static.options
    )
    # Returned at once: a device then keeps its own part of the head's gradient until the backward pass.
    returned = OpenedAtRest(None, head.returned(dtable), None, head.to)
    return (sums.loss_sum, sums.correct_sum), (dx.reshape(hidden.shape), returned)


def _token_loss_backward(static: _Static, saved: Any, gradient: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    scale = gradient[0]
    return *jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), saved), None, None


_token_loss.defvjp(_token_loss_forward, _token_loss_backward)
