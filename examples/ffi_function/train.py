"""A C++ function in a model that trains, through JAX's foreign-function interface.

    python examples/ffi_function/train.py

It needs a C++17 compiler (g++, or what CXX names) and runs on a CPU; a CUDA function is registered the same way with
platform="CUDA". The function gives GELU and its derivative together, so the backward pass is one product. On a mesh each device
calls it on its own part, as `custom_partitioning` declares below: without it XLA would gather the whole array first.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.custom_partitioning import custom_partitioning

import panax
from panax.optim import Optax

SOURCE = Path(__file__).with_name("fused_gelu.cc")
TARGET = "panax_example_fused_gelu"


def build(folder):
    """Compile the function into a shared library in `folder`, and return its path."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"this example needs a C++17 compiler, and there is no {compiler}; install g++, or name one in CXX"
        )
    library = Path(folder) / "fused_gelu.so"
    command = [
        compiler,
        "-std=c++17",
        "-O3",
        "-shared",
        "-fPIC",
        f"-I{jax.ffi.include_dir()}",
        str(SOURCE),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{compiler} can't compile {SOURCE.name}:\n{done.stderr}")
    return library


@functools.cache
def register():
    """Make the function known to XLA."""
    with tempfile.TemporaryDirectory() as folder:
        handler = ctypes.CDLL(str(build(folder))).FusedGeluHandler
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def on_one_device(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tuple(jax.ffi.ffi_call(TARGET, (like, like))(x))


def partition(mesh, shapes, results):
    split = shapes[0].sharding
    return mesh, on_one_device, (split, split), (split,)


value_and_slope = custom_partitioning(on_one_device)
value_and_slope.def_partition(partition=partition, sharding_rule="... -> ..., ...")


@jax.custom_vjp
def fused_gelu(x):
    return value_and_slope(x)[0]


fused_gelu.defvjp(value_and_slope, lambda slope, gradient: (slope * gradient,))


class Net(eqx.Module):
    """Two layers around the function."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(8, 64, key=first), eqx.nn.Linear(64, 1, key=second)

    def __call__(self, x):
        return jax.vmap(self.down)(fused_gelu(jax.vmap(self.up)(x)))[:, 0]


def main(num_steps=60, mesh=None):
    """Train, and return the losses."""

    register()

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
