"""A custom Pallas kernel in a model that trains: RMS normalization, forward and backward, one block of rows at a time.

    python examples/pallas_kernel.py

On a GPU the kernels are compiled, by Triton; on a CPU Pallas interprets them. On a mesh each device runs them on its own rows, as
`custom_partitioning` declares below: without it XLA would gather the rows first.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec

import panax
from panax.core import current_target
from panax.optim import Optax

ROWS = 8
EPSILON = 1e-6


def forward_kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPSILON) * scale_ref[...][None, :]


def backward_kernel(x_ref, scale_ref, gradient_ref, x_gradient_ref, scale_share_ref):
    x, gradient = x_ref[...], gradient_ref[...]
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPSILON)
    scaled = gradient * scale_ref[...][None, :]
    x_gradient_ref[...] = inverse * (scaled - x * inverse**2 * jnp.mean(scaled * x, axis=1, keepdims=True))
    scale_share_ref[...] = gradient * x * inverse


def call(kernel, num_outputs, platform, x, scale, *rest):
    """Run a kernel over blocks of whole rows; `rest` and the outputs have the shape of `x`."""
    num_rows, width = x.shape
    rows = pl.BlockSpec((ROWS, width), lambda i: (i, 0))
    whole = pl.BlockSpec((width,), lambda i: (0,))
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * num_outputs,
        grid=(pl.cdiv(num_rows, ROWS),),
        in_specs=[rows, whole, *[rows] * len(rest)],
        out_specs=(rows,) * num_outputs,
        interpret=platform == "cpu",
        compiler_params=triton.CompilerParams() if platform == "gpu" else None,
    )(x, scale, *rest)


def by_rows(function, num_outputs, num_inputs):
    """Let each device of a mesh call `function` on the rows that it holds, with the scale whole."""
    partitioned = custom_partitioning(function, static_argnums=(0,))

    def partition(platform, mesh, shapes, results):
        rows = NamedSharding(mesh, PartitionSpec(shapes[0].sharding.spec[0] if shapes[0].sharding.spec else None, None))
        whole = NamedSharding(mesh, PartitionSpec(None))
        return mesh, partial(function, platform), (rows,) * num_outputs, (rows, whole, *(rows,) * (num_inputs - 2))

    inputs = ", ".join(["i j", "j", *["i j"] * (num_inputs - 2)])
    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{inputs} -> {', '.join(['i j'] * num_outputs)}",
        need_replication_factors=("j",),
    )
    return partitioned


forward = by_rows(partial(call, forward_kernel, 1), 1, 2)
backward = by_rows(partial(call, backward_kernel, 2), 2, 3)


@jax.custom_vjp
def rms_norm(x, scale):
    """`x / rms(x) * scale` over the last dimension of two."""
    return forward(current_target().platform, x, scale)[0]


def rms_norm_forward(x, scale):
    return rms_norm(x, scale), (x, scale)


def rms_norm_backward(kept, gradient):
    x_gradient, scale_shares = backward(current_target().platform, *kept, gradient)
    return x_gradient, scale_shares.sum(axis=0)


rms_norm.defvjp(rms_norm_forward, rms_norm_backward)


class Net(eqx.Module):
    """Two layers around the normalization."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: jax.Array

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(8, 64, key=first), eqx.nn.Linear(64, 1, key=second)
        self.scale = jnp.ones(64)

    def __call__(self, x):
        hidden = jax.nn.gelu(rms_norm(jax.vmap(self.up)(x), self.scale))
        return jax.vmap(self.down)(hidden)[:, 0]


def main(num_steps=60, mesh=None):
    """Train, and return the losses."""

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(64, 8)).astype(np.float32) for _ in range(num_steps)]
    batches = [{"x": x, "y": np.sin(x[:, 0]) * x[:, 1]} for x in batches]
    task = panax.adapters.equinox.task(lambda key: Net(key), loss)
    step = panax.compile_step(task, batches[0], Optax(transformation=optax.adam(1e-2)), mesh=mesh)
    state, losses = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
