"""A weight that is not a plain array: a frozen base in int8 with a scale for each row, and an adapter of low rank beside it."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from panax.core import Evaluation, Loss, Task
from panax.spmd import GatherSpec, contract, contract_gathered, local_sequence, sum_over_sequence
from panax.spmd.collectives import all_gather, gather_dims, reduce_scatter

EMBED, FFN, RANK, ROWS, LENGTH = 32, 64, 4, 8, 16


class LowRank(eqx.Module):
    """`scale · base + a · b`.

    Attributes:
        base: (rows, columns) in int8, frozen; it travels as int8.
        scale: (rows,), frozen.
        a: (rows, rank).
        b: (rank, columns).
    """

    base: Any
    scale: Any
    a: Any
    b: Any

    @property
    def dtype(self) -> Any:
        return self.a.dtype

    def gather(self, to: GatherSpec) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rows, columns = to.gathers
        base = gather_dims(self.base, to.gathers).astype(to.dtype)
        scale = all_gather(self.scale, rows, 0).astype(to.dtype)
        a, b = all_gather(self.a, rows, 0), all_gather(self.b, columns, 1)
        value = base * scale[:, None] + jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(to.dtype)
        return value, (a, b)

    def reduce_grad(self, to: GatherSpec, kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> "LowRank":
        rows, columns = to.gathers
        a, b = kept
        gradient = gradient.astype(self.dtype)
        d_a, d_b = jnp.matmul(gradient, b.T), jnp.matmul(a.T, gradient)
        return LowRank(None, None, reduce_scatter(d_a, rows, 0), reduce_scatter(d_b, columns, 1))


@dataclasses.dataclass(frozen=True)
class Adapted(Task):
    """A feed-forward layer with a residual, fitted to random rows; its first matrix is a `LowRank`."""

    dtype: Any = jnp.float32
    mesh_axes = frozenset({"replica", "fsdp", "tensor"})
    names_axes = True
    frozen_parameters = ("up.base", "up.scale")

    def init(self, key):
        keys = jax.random.split(key, 4)
        up = LowRank(
            base=jax.random.randint(keys[0], (EMBED, FFN), -127, 128, jnp.int8),
            scale=jnp.full((EMBED,), 0.01) * jnp.arange(1.0, 1.0 + EMBED) / EMBED,
            a=0.1 * jax.random.normal(keys[1], (EMBED, RANK)),
            b=0.1 * jax.random.normal(keys[2], (RANK, FFN)),
        )
        return {"down": 0.1 * jax.random.normal(keys[3], (FFN, EMBED)), "up": up}, {}

    def parameter_axes(self, params):
        up = LowRank(("embed", "ffn"), ("embed",), ("embed", None), (None, "ffn"))
        return {"down": ("ffn", "embed"), "up": up}

    def loss(self, params, state, batch, key, train):
        x, y = (local_sequence(batch[name]) for name in ("x", "y"))
        (up,) = contract_gathered(
            x.astype(self.dtype), ("batch seq embed, embed ffn -> batch seq ffn", params["up"]), out_dtype=jnp.float32
        )
        hidden = jnp.tanh(up).astype(self.dtype)
        down = contract("batch seq ffn, ffn embed -> batch seq embed", hidden, params["down"])
        error = x + down.astype(jnp.float32) - y
        total = sum_over_sequence(jnp.sum(error * error))
        weight = jnp.float32(batch["x"].shape[0] * batch["x"].shape[1])
        return Evaluation({"squares": Loss(total, weight)}, state, {})


AXES = {"x": ("batch", "seq", None), "y": ("batch", "seq", None)}


def batch() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(7))
    return {name: jax.device_get(jax.random.normal(key, (ROWS, LENGTH, EMBED))) for name, key in zip("xy", keys)}
