"""State-space scan over rows sharded along a context axis, in contiguous order.

Every device scans its part of each row from a zero state. The final states are then gathered, with the decay
of an earlier state over each part. From these, each device computes the state before its first position and
adds that state's contribution to its output. The scan is linear, so this is exact. A device sends its final
states, which have head_dim * state elements per head and row, whatever the length of its part.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.kernels.state_space.state_space import ScanInputs, initial_state_output, state_space_scan
from panax.spmd.linear import all_gather_sum, shift_right
from panax.spmd.sharding_marks import ValueState, assert_cotangent_sharding, assert_sharding


def scan_over_devices(
    inputs: ScanInputs,
    segments: Int[Array, "batch seq"] | None,
    *,
    axis_name: str,
    axis_size: int,
    target: Target,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute the output of `state_space_scan` over whole rows, of which this device holds its contiguous
    part.

    Must be called with `axis_name` manual. Sent by each device: n-1 times its final states and decays in
    float32, forward and backward.

    Args:
        segments: Of the local positions; 0 is padding.
        axis_name: The mesh axis that shards rows.
        axis_size: Number of devices along it.
    """
    per_device, parts = {axis_name: ValueState.OWN}, {axis_name: ValueState.SPLIT}
    # A device's cotangents belong to its part of the row; they are not partial sums.
    x, dt, b, c = assert_cotangent_sharding((inputs.x, inputs.dt, inputs.b, inputs.c), parts, dim=1)
    a = assert_cotangent_sharding(inputs.a, {axis_name: ValueState.PARTIAL})
    scan = state_space_scan(ScanInputs(x, dt, a, b, c), segments=segments, target=target)
    state, decay = assert_sharding((scan.state, scan.decay), per_device)
    y = assert_sharding(scan.y, parts, dim=1)
    # Where a document ends, nothing is carried over: neither through this device (`decay`) nor into it (`before`).
    continues = None
    if segments is not None:
        last: Array = shift_right(segments[:, -1:], axis_name)  # pyright: ignore[reportAssignmentType]
        continues = (segments[:, 0] == last[:, 0]) & (segments[:, 0] != 0)
        decay = jnp.where(continues[:, None], decay, 0.0)
    states: Array = all_gather_sum(state[None], (axis_name,), 0)  # pyright: ignore[reportAssignmentType]
    decays: Array = all_gather_sum(decay[None], (axis_name,), 0)  # pyright: ignore[reportAssignmentType]
    # d device, b batch, h head, p head_dim, n state
    before = jnp.einsum("dbh,dbhpn->bhpn", _weights(decays, lax.axis_index(axis_name), axis_size), states)
    if continues is not None:
        before = jnp.where(continues[:, None, None, None], before, 0.0)
    before = assert_cotangent_sharding(before, per_device)
    carried = assert_sharding(initial_state_output(dt, a, c, before, segments), parts, dim=1)
    return (y.astype(carried.dtype) + carried).astype(y.dtype)


def _weights(decays: Float[Array, "device batch heads"], here: Array, count: int) -> Float[Array, "device batch heads"]:
    """Return the factor with which each device's final state reaches the first position of device `here`: 0
    for later devices."""
    # d: device, b: batch, h: head in the caller's einsum. Walk backward from `here`, accumulating decay.
    left, weights = jnp.ones_like(decays[0]), []
    for device in reversed(range(count)):
        earlier = device < here
        weights.append(jnp.where(earlier, left, 0.0))
        left = jnp.where(earlier, left * decays[device], left)
    return jnp.stack(weights[::-1])
