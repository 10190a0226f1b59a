"""The gated delta rule over rows sharded along a context axis, in contiguous order.

A part of a row changes the state by an affine map: `transfer @ state + written`. Every device computes the map of
its part, without any output; the maps are gathered, and each device composes those of the parts before its own,
which gives the state before its first position. From there it computes its output like a single device does.

A device sends its map, which has key_dim * (key_dim + value_dim) elements per head and row, whatever the length
of its part. The corrections are computed twice, the scores once.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.kernels.delta_rule.delta_rule import DeltaInputs, delta_rule, delta_rule_map
from panax.spmd.linear import all_gather_sum, shift_right
from panax.spmd.sharding_marks import ValueState, assert_cotangent_sharding, assert_sharding


def delta_rule_over_devices(
    inputs: DeltaInputs,
    segments: Int[Array, "batch seq"] | None,
    *,
    axis_name: str,
    axis_size: int,
    target: Target,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute the output of `delta_rule` over whole rows; this device holds its contiguous part of each.

    Must be called with `axis_name` manual. Sent by each device: n-1 times its map in float32, forward and backward.

    Args:
        segments: Of the local positions; 0 is padding.
        axis_name: The mesh axis that shards rows.
        axis_size: Number of devices along it.
    """
    per_device, parts = {axis_name: ValueState.OWN}, {axis_name: ValueState.SPLIT}
    # A device's cotangents belong to its part of the row; they are not partial sums.
    inputs = assert_cotangent_sharding(inputs, parts, dim=1)
    change = delta_rule_map(*inputs[1:], segments=segments, target=target)
    written, transfer = assert_sharding((change.written, change.transfer), per_device)
    goes_on = None
    if segments is not None:
        last: Array = shift_right(segments[:, -1:], axis_name)  # pyright: ignore[reportAssignmentType]
        goes_on = ((segments[:, 0] == last[:, 0]) & (segments[:, 0] != 0))[:, None, None, None]
        transfer = jnp.where(goes_on, transfer, 0.0)
    all_written: Array = all_gather_sum(written[None], (axis_name,), 0)  # pyright: ignore[reportAssignmentType]
    transfers: Array = all_gather_sum(transfer[None], (axis_name,), 0)  # pyright: ignore[reportAssignmentType]
    before = _state_before(all_written, transfers, lax.axis_index(axis_name), axis_size)
    if goes_on is not None:
        before = jnp.where(goes_on, before, 0.0)
    before = assert_cotangent_sharding(before, per_device)
    y = delta_rule(inputs, state=before, segments=segments, target=target).y
    return assert_sharding(y, parts, dim=1)


def _state_before(
    written: Float[Array, "device batch heads key_dim value_dim"],
    transfers: Float[Array, "device batch heads key_dim key_dim"],
    here: Array,
    count: int,
) -> Float[Array, "batch heads key_dim value_dim"]:
    """Compose the maps of the devices before `here`."""
    state = jnp.zeros_like(written[0])
    for device in range(count - 1):
        # b batch, h head, m and n key dim, p value dim
        after = written[device] + jnp.einsum("bhmn,bhnp->bhmp", transfers[device], state)
        state = jnp.where(device < here, after, state)
    return state
