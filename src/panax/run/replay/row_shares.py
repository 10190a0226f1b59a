"""Each row's share of a step's gradient: its inner product with the whole gradient, over the square of that one's norm."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...core import Task, TrainState, total_loss
from ...core.layout.layout import use_global_arrays
from ...core.layout.target import device_target
from ...core.measures import Losses
from ...kernels import use_kernels
from ...train import Program
from ...train.precision import use_matmul_precision
from ...train.update import prepare_batch


@dataclasses.dataclass(frozen=True)
class RowShares:
    """Each row's share of the gradient of a step's loss.

    Attributes:
        shares: By row. They sum to 1 if the loss is a sum over rows.
        norms: The norm of each row's part of the gradient.
        losses: Each row's part of the loss.
        norm: The norm of the whole gradient.
        bound: How far the sum may be from 1 by rounding alone.
    """

    shares: tuple[float, ...]
    norms: tuple[float, ...]
    losses: tuple[float, ...]
    norm: float
    bound: float

    @property
    def coupled(self) -> float:
        """Return the part of the gradient that is of no single row: 1 minus the sum of the shares. Beyond `bound` it shows that
        rows are read together, as by a batch norm, negatives within a batch, or a balance of experts."""
        return 1.0 - math.fsum(self.shares)

    @property
    def is_additive(self) -> bool:
        return abs(self.coupled) <= self.bound


def measure_row_shares(program: Program, state: TrainState, batch: Mapping[str, Any], max_rows: int) -> RowShares | str:
    """Compute the gradient of each row alone, divided by the weights of the whole batch; or return why it can't be.

    One row after another is replayed on one device, without the mesh of the run.

    Args:
        max_rows: Maximum number of rows.
    """
    task = program.task
    device = jax.devices()[0]
    state, batch = jax.device_put((_host(state), dict(jax.device_get(dict(batch)))), device)
    state, batch = program.first_update_inputs(state, batch)
    prepared = prepare_batch(task, batch).batch
    rows = len(next(iter(prepared.values())))
    if rows > max_rows:
        return f"the batch has {rows:,} rows, and shares are computed of at most {max_rows:,} (--rows)"
    free, frozen = eqx.partition(state.params, program.trainable)

    def losses_of(free: Any, batch: Any) -> Losses:
        return task.loss(eqx.combine(free, frozen), state.model_state, batch, state.step_key, True).losses

    def whole(free: Any, batch: Any) -> Any:
        weights = {name: loss.weight for name, loss in losses_of(free, batch).items()}
        return jax.value_and_grad(lambda each: total_loss(losses_of(each, batch), weights))(free), weights

    def one(free: Any, gradient: Any, weights: Any, row: Any) -> Any:
        alone = jax.tree.map(lambda leaf: leaf[None], row)
        loss, part = jax.value_and_grad(lambda each: total_loss(losses_of(each, alone), weights))(free)
        return loss, _inner(part, gradient), _inner(part, part)

    def shares(free: Any, batch: Any) -> Any:
        (_, gradient), weights = whole(free, batch)
        per_row = jax.lax.map(lambda row: one(free, gradient, weights, row), batch)
        return _inner(gradient, gradient), per_row

    with use_kernels(program.kernels.names), use_global_arrays(), use_matmul_precision(task, device_target(device)):
        square, (losses, inner, squares) = jax.device_get(jax.jit(shares)(free, prepared))
    if not (np.isfinite(square) and square > 0):
        return f"the square of the gradient's norm is {float(square):.4g}, so rows have no share of it"
    return RowShares(
        tuple(float(each) / float(square) for each in inner),
        tuple(math.sqrt(max(float(each), 0.0)) for each in squares),
        tuple(map(float, losses)),
        math.sqrt(float(square)),
        sum_bound(task, squares, float(square), sum(leaf.size for leaf in jax.tree.leaves(free))),
    )


def sum_bound(task: Task, squares: Any, square: float, parameters: int) -> float:
    """Return how far the shares' sum may be from 1: the gradients of rows are rounded in the dtype that the task computes in,
    each relative to its own norm, and inner products are sums of `parameters` terms in float32.

    The sum of all rows' norms over the whole norm is the condition of the sum; each factor of eps is one rounding of a
    gradient's chain of sums, which grows with the logarithm of its length.
    """
    dtype = jnp.dtype(task.compute_dtype if task.compute_dtype in ("bfloat16", "float16") else "float32")
    eps = float(jnp.finfo(dtype).eps)
    condition = math.fsum(math.sqrt(max(float(each), 0.0)) for each in squares) / math.sqrt(square)
    depth = 4 * math.log2(max(parameters, 2)) * (1 + math.log2(len(squares) + 1))
    return max(condition, 1.0) * depth * eps


def _inner(first: Any, second: Any) -> jax.Array:
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), first, second)
    return jnp.stack(jax.tree.leaves(products)).sum()


def _host(state: TrainState) -> TrainState:
    """Return a state without the auxiliary parts that a loss does not read, so that it fits one device."""
    return dataclasses.replace(state, optimizer_state=(), averaged=None, owed=None, delayed=None)
