"""Programs of which every byte on the wire is known beforehand, for any mesh with the axes a, b and c."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS = 64, 512
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def apply(kind: str, axis: str | tuple[str, ...], x: jax.Array) -> jax.Array:
    """One collective on a device's block; the result has the block's shape, and a tanh holds the compiler off its neighbors."""
    n = lax.axis_size(axis)
    if kind == "all-gather":
        y = lax.all_gather(x, axis, axis=0, tiled=True).reshape(n, ROWS, COLUMNS)
        weights = jnp.arange(n, dtype=x.dtype)[:, None, None]
        return jnp.tanh(jnp.tanh(y + weights).sum(0))
    if kind == "reduce-scatter":
        part = jnp.tanh(lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True))
        return jnp.concatenate([part + jnp.asarray(i, x.dtype) for i in range(n)])
    if kind == "all-reduce":
        return jnp.tanh(lax.psum(x, axis))
    if kind == "all-to-all":
        return jnp.tanh(lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True).reshape(ROWS, COLUMNS))
    assert kind == "collective-permute" and isinstance(axis, str)
    return jnp.tanh(lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]))


def known(kind: str, members: int, dtype: Any = jnp.float32) -> tuple[int, int]:
    """(bytes of the whole array, bytes that a device sends in one execution), by theory."""
    block = ROWS * COLUMNS * jnp.dtype(dtype).itemsize
    if kind == "all-gather":
        return block * members, block * (members - 1)
    sent = {
        "reduce-scatter": block * (members - 1) // members,
        "all-reduce": 2 * block * (members - 1) // members,
        "all-to-all": block * (members - 1) // members,
        "collective-permute": block,
    }
    return block, sent[kind]


def lowered(mesh: Mesh, steps: Sequence[tuple[str, Any]], loops: Sequence[int] = (), dtype: Any = jnp.float32) -> Any:
    """The steps one after another inside nested scans of the given lengths, on every device's own block."""

    def body(x: jax.Array, lengths: Sequence[int]) -> jax.Array:
        if lengths:
            return lax.scan(lambda carry, _: (body(carry, lengths[1:]), None), x, None, length=lengths[0])[0]
        for kind, axis in steps:
            with jax.named_scope(f"part_{kind}"):
                x = apply(kind, axis, x)
        return x

    spec = P(mesh.axis_names, None)
    run = jax.shard_map(lambda x: body(x, loops), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shape = (ROWS * mesh.size, COLUMNS)
    return jax.jit(run).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)))


def sharded_stack(mesh: Mesh, *, layers: int, embed: int, ffn: int, rows: int, length: int, micro: int) -> Any:
    """Gradients of a stack of feed-forward layers: weights sharded over a and b, sequence parallelism over c, micro-batches.

    Weights travel as bfloat16, gradients as float32; each layer is recomputed in its backward pass.
    """
    data = ("a", "b")

    @jax.custom_vjp
    def weight(w: jax.Array) -> jax.Array:
        return lax.all_gather(w.astype(jnp.bfloat16), data, axis=0, tiled=True)

    def weight_back(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (lax.psum_scatter(g.astype(jnp.float32), data, scatter_dimension=0, tiled=True),)

    weight.defvjp(lambda w: (weight(w), None), weight_back)

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "c", axis=1, tiled=True)

    @jax.custom_vjp
    def scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, "c", scatter_dimension=1, tiled=True)

    gather.defvjp(lambda x: (gather(x), None), lambda _, g: (scatter(g),))
    scatter.defvjp(lambda x: (scatter(x), None), lambda _, g: (gather(g),))

    def loss(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
            up, down = weight(p["up"]), weight(p["down"])
            with jax.named_scope("feed_forward"):
                hidden = jax.nn.silu(jnp.einsum("bse,ef->bsf", gather(x), up))
                return x + scatter(jnp.einsum("bsf,fe->bse", hidden, down)), None

        x, _ = lax.scan(jax.checkpoint(layer), x, params)
        return (x.astype(jnp.float32) ** 2).mean()

    def run(params: Mapping[str, jax.Array], xs: jax.Array) -> Any:
        def one(sums: Any, x: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)), None

        return lax.scan(one, jax.tree.map(jnp.zeros_like, params), xs)[0]

    specs = {"up": P(None, data, "c"), "down": P(None, ("c", "a", "b"), None)}
    shapes = {"up": (layers, embed, ffn), "down": (layers, ffn, embed)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    spec = P(None, data, "c", None)
    xs = jax.ShapeDtypeStruct((micro, rows, length, embed), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, spec), out_specs=specs, check_vma=False)).lower(
        params, xs
    )
