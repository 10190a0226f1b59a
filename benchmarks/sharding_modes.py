"""Manual, explicit or automatic sharding, by the bytes that a step puts on the wire: AOT-compiled for 64 H100s, no GPU needed.

One feed-forward stack of a Llama-8B layer's shape, over fsdp=64 and over replica=2 x fsdp=32, written three ways with the same
mathematics: as this project's `contract` (one manual program, own backward pass); as plain einsums on explicit axes; and as plain
einsums under automatic axes with constraints. Then the whole step of Llama 3 8B as this project runs it. Bytes are counted in the
compiled programs, loops multiplied out.

    pip install 'panax-jax[aot]'
    JAX_PLATFORMS=cpu python benchmarks/sharding_modes.py
"""

import collections
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from panax.mesh import MESH_AXES, MeshShape, Placement
from panax.models import PRESETS, DecoderTask
from panax.optim import AdamW
from panax.parallel import rematerialize
from panax.plan import parse_target, plan_step, target_devices
from panax.plan.collectives import count_collectives
from panax.spmd import contract
from panax.spmd.collectives import all_reduce
from panax.train import CompiledStep, Program

LAYERS, EMBED, FFN, ROWS, LENGTH, DEVICES = 4, 4096, 14336, 64, 2048, 64
DATA = ("replica", "fsdp")
STORED = {"up": P(None, "fsdp"), "down": P(None, None, "fsdp")}
SHAPES = {"up": (LAYERS, EMBED, FFN), "down": (LAYERS, FFN, EMBED)}

Loss = Callable[[Any, jax.Array], jax.Array]


def sent(text: str, sizes: Mapping[str, int]) -> dict[str, float]:
    """Megabytes by kind, axes and dtype that one device sends."""
    totals: collections.Counter = collections.Counter()
    for found in count_collectives(text, sizes):
        totals[f"{found.kind} over {'·'.join(found.axes)} {found.dtype}"] += found.wire_bytes * found.times / 1e6
    return {kind: megabytes for kind, megabytes in totals.items() if megabytes >= 1}


def model(params: Any, x: jax.Array, up: Callable, down: Callable, remat: Any) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + down(jax.nn.silu(up(x, p["up"])), p["down"]), None

    x, _ = jax.lax.scan(rematerialize(layer, remat), x, params)
    return (x.astype(jnp.float32) ** 2).sum()


def accumulated(loss: Loss, params: Any, xs: jax.Array) -> Any:
    """Gradients summed over micro-batches, the leading axis of `xs`."""

    def one(sums: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), xs)[0]


def manual(placement: Placement, remat: Any) -> Callable:
    up = functools.partial(contract, "batch seq embed, embed ffn -> batch seq ffn")
    down = functools.partial(contract, "batch seq ffn, ffn embed -> batch seq embed")

    def gradients(params: Any, xs: jax.Array) -> Any:
        found = accumulated(lambda params, x: model(params, x, up, down, remat), params, xs)
        return all_reduce(found, tuple(axis for axis in ("replica",) if placement.sizes[axis] > 1))

    specs = (STORED, P(None, DATA))
    mapped = jax.shard_map(gradients, mesh=placement.mesh, in_specs=specs, out_specs=STORED, check_vma=False)

    def run(params: Any, xs: jax.Array) -> Any:
        with placement.activate():
            return mapped(params, xs)

    return run


def explicit(remat: Any) -> Callable:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.reshard(w.astype(x.dtype), P(None, None))
        return jnp.einsum("bse,ef->bsf", x, whole, out_sharding=P(DATA, None, None))

    return functools.partial(accumulated, lambda params, x: model(params, x, product, product, remat))


def automatic(mesh: Mesh, remat: Any) -> Callable:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(w.astype(x.dtype), NamedSharding(mesh, P(None, None)))
        product = jnp.einsum("bse,ef->bsf", x, whole)
        return jax.lax.with_sharding_constraint(product, NamedSharding(mesh, P(DATA)))

    return functools.partial(accumulated, lambda params, x: model(params, x, product, product, remat))


def variants(placement: Placement, remat: Any) -> Iterator[tuple[str, Mesh, Callable]]:
    explicit_mesh = Mesh(placement.devices.devices, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))
    yield "contract, manual", placement.mesh, manual(placement, remat)
    yield "plain einsum, explicit axes", explicit_mesh, explicit(remat)
    yield "plain einsum, automatic axes", placement.mesh, automatic(placement.mesh, remat)


def compare(devices: list[Any], replica: int, micro_batches: int, remat: Any) -> None:
    fsdp = DEVICES // replica
    placement = Placement.create(MeshShape(replica=replica, fsdp=fsdp), devices=devices)
    weights = 2 * EMBED * FFN * LAYERS / 1e6
    each = weights * micro_batches * (fsdp - 1) / fsdp
    once = f", all-reduce f32 {2 * 4 * weights / fsdp * (replica - 1) / replica:.0f}" if replica > 1 else ""
    print(
        f"\nreplica {replica}, micro-batches {micro_batches}, remat {remat}: the least of ZeRO-3 with float32 reductions, MB: "
        f"all-gather bf16 {2 * 2 * each:.0f}, reduce-scatter f32 {4 * each:.0f}{once}"
    )
    for name, mesh, run in variants(placement, remat):
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, STORED[name]))
            for name, shape in SHAPES.items()
        }
        sharding = NamedSharding(mesh, P(None, DATA))
        xs = jax.ShapeDtypeStruct((micro_batches, ROWS, LENGTH, EMBED), jnp.bfloat16, sharding=sharding)
        with jax.set_mesh(mesh):
            out = {name: leaf.sharding for name, leaf in params.items()}
            try:
                compiled = jax.jit(run, out_shardings=out).lower(params, xs).compile()
            except Exception as error:  # a variant that this JAX refuses is a finding too
                print(f"  {name:30} refused: {str(error).splitlines()[0][:120]}")
                continue
        totals = sent(compiled.as_text(), placement.sizes)
        temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**30
        each = ", ".join(f"{kind} {megabytes:.0f}" for kind, megabytes in sorted(totals.items()))
        print(f"  {name:30} {sum(totals.values()):8.0f} MB   temporaries {temporaries:5.2f} GiB   {each}")


def whole_step(devices: list[Any]) -> None:
    """Llama 3 8B, 64 rows of 8,192 packed tokens."""
    task = DecoderTask(model=PRESETS["llama3_8b"], compute_dtype="bfloat16", remat="full")
    program = Program.create(task, AdamW(), num_steps=1000)
    leaves = {
        "tokens": np.int32,
        "targets": np.int32,
        "loss_mask": np.float32,
        "segment": np.int32,
        "position": np.int32,
    }
    step = CompiledStep(
        program, Placement.create(MeshShape(fsdp=DEVICES), devices=devices), dict.fromkeys(leaves, ("batch", "seq"))
    )
    start = time.perf_counter()
    plan = plan_step(step, {name: jax.ShapeDtypeStruct((64, 8192), dtype) for name, dtype in leaves.items()})
    seconds = time.perf_counter() - start
    totals: collections.Counter = collections.Counter()
    for found in plan.collectives:
        totals[f"{found.kind} {found.dtype}"] += found.wire_bytes * found.times / 1e9
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params))
    print(f"\nLlama 3 8B ({parameters / 1e9:.2f} billion parameters), compiled in {seconds:.0f} s; GB:")
    print(
        "  " + ", ".join(f"{kind} {gigabytes:.2f}" for kind, gigabytes in sorted(totals.items()) if gigabytes > 0.005)
    )
    print(f"  temporaries {plan.memory.temporaries / 2**30:.1f} GiB, arguments {plan.memory.arguments / 2**30:.1f} GiB")


def main() -> None:
    devices = target_devices(parse_target(f"h100x{DEVICES}"))
    print(f"jax {jax.__version__}, {DEVICES} H100s (AOT), {LAYERS} layers of {EMBED} x {FFN}, bfloat16")
    for replica, micro_batches, remat in ((1, 1, "full"), (1, 1, "none"), (1, 4, "full"), (2, 4, "full")):
        compare(devices, replica, micro_batches, remat)
    whole_step(devices)


if __name__ == "__main__":
    main()
