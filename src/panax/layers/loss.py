"""Cross-entropy from hidden states, on a mesh: the [token, vocab] logits are never whole, on any device.

Each device runs the fused kernel on its own tokens with the head gathered once, and adds up its own share of the head's
gradient. The shares meet in one reduction, straight into the head's storage layout and in its own precision.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ..core import current_layout, current_platform, gather
from ..core.contraction import spec_of
from ..kernels.cross_entropy import cross_entropy_sums, cross_entropy_sums_and_gradients


class TokenLoss(NamedTuple):
    """Sums over the tokens of a (micro-)batch, weighted by the mask."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]


def token_loss(
    hidden: Float[Array, "batch seq embed"],
    table: Float[Array, "vocab embed"],
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> TokenLoss:
    """Softmax cross-entropy of `hidden · tableᵀ`, and how many targets had the highest logit.

    Args:
        mask: Each token's weight; 0 leaves it out.
        soft_cap: Logits are squashed to ±soft_cap by a tanh (Gemma 2).
        z_loss: Weight of the squared log-partition that is added to the loss (PaLM, arXiv:2204.02311, section 5).
    """
    loss, correct = _token_loss(soft_cap, z_loss, hidden, table, targets, mask)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenLoss(loss, correct)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_loss(
    soft_cap: float | None, z_loss: float, hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def local(hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = cross_entropy_sums(
            _flat(hidden),
            table,
            targets.reshape(-1),
            mask.reshape(-1),
            soft_cap=soft_cap,
            z_loss=z_loss,
            platform=current_platform(),
        )
        return _over_devices(sums.loss_sum), _over_devices(sums.correct_sum)

    return _on_each_device(local, (PartitionSpec(), PartitionSpec()), hidden, table, targets, mask)


def _token_loss_forward(
    soft_cap: float | None, z_loss: float, hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    def local(hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        sums, dx, dtable = cross_entropy_sums_and_gradients(
            _flat(hidden),
            table,
            targets.reshape(-1),
            mask.reshape(-1),
            soft_cap=soft_cap,
            z_loss=z_loss,
            platform=current_platform(),
        )
        return _over_devices(sums.loss_sum), _over_devices(sums.correct_sum), dx.reshape(hidden.shape), dtable[None]

    layout = current_layout()
    rows = PartitionSpec() if layout is None else layout.compute_spec(("batch", "seq", "embed"))
    shares = PartitionSpec(_data_axes() or None)
    specs = (PartitionSpec(), PartitionSpec(), rows, shares)
    loss, correct, dx, dtable = _on_each_device(local, specs, hidden, table, targets, mask)
    dtable = jnp.einsum("nve->ve", dtable, out_sharding=spec_of(table)).astype(table.dtype)
    return (loss, correct), (dx, dtable)


def _token_loss_backward(
    soft_cap: float | None, z_loss: float, saved: Any, gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    dx, dtable = saved
    scale = gradient[0]
    return dx * scale.astype(dx.dtype), dtable * scale.astype(dtable.dtype), None, None


_token_loss.defvjp(_token_loss_forward, _token_loss_backward)


def _data_axes() -> tuple[str, ...]:
    """The mesh axes that tokens are split over."""
    layout = current_layout()
    if layout is None:
        return ()
    spec = layout.compute_spec(("batch", "seq"))
    return tuple(axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part))


def _over_devices(x: jax.Array) -> jax.Array:
    axes = _data_axes()
    return jax.lax.psum(x, axes) if axes else x


def _on_each_device(
    local: Any, out_specs: Any, hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array
) -> Any:
    table = gather(table, "vocab embed", hidden.dtype)
    layout = current_layout()
    if layout is None:
        return local(hidden, table, targets, mask)
    axes = _data_axes()
    rows = layout.compute_spec(("batch", "seq"))

    def varying(hidden: jax.Array, table: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
        return local(hidden, jax.lax.pcast(table, axes, to="varying") if axes else table, targets, mask)

    in_specs = (layout.compute_spec(("batch", "seq", "embed")), PartitionSpec(), rows, rows)
    return jax.shard_map(varying, in_specs=in_specs, out_specs=out_specs)(hidden, table, targets, mask)
