"""Explicit or automatic sharding, by the bytes that a step puts on the wire: AOT-compiled for 64 H100s, no GPU needed.

One feed-forward-and-attention-projection stack of a Llama-8B layer's shape, sharded over fsdp=64, written three ways with the
same mathematics: as this project's `contract` (explicit axes, own backward pass); as plain einsums on explicit axes; and as
plain einsums under automatic axes with constraints. Bytes are counted in the compiled program, loops multiplied out.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12    # the versions of jax
    JAX_PLATFORMS=cpu python benchmarks/sharding_modes.py
"""

import collections
import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from panax.core import contract
from panax.mesh import MESH_AXES, Placement, Rules
from panax.parallel import rematerialise

LAYERS, EMBED, FFN, ROWS, LENGTH, DEVICES = 4, 4096, 14336, 64, 2048, 64

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2}


def counted(text: str) -> dict[str, float]:
    """Megabytes by (collective, dtype) that one device sends and receives at least, loops multiplied by their trip count."""
    computations: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if (head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)) and " = " not in line.split("(")[0]:
            name = head.group(1)
            computations[name] = []
        elif name:
            computations[name].append(line)
    entry = next(m.group(1) for m in re.finditer(r"^ENTRY %?([\w.\-]+)", text, re.M))

    def walk(computation: str, times: int, totals: collections.Counter) -> None:
        for line in computations.get(computation, ()):
            found = re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(", line)
            if found:
                shapes = re.findall(r"(f32|bf16|s32|u32|pred|f16)\[([\d,]*)\]", found.group(1))
                sizes = [(dtype, BYTES[dtype] * functools.reduce(lambda a, b: a * int(b), filter(None, dims.split(",")), 1))
                         for dtype, dims in shapes]  # fmt: skip
                # A start op shows (operands, results): the whole array is the larger of the two, whichever side it is on.
                if found.group(3):
                    half = len(sizes) // 2
                    sizes = max(sizes[:half], sizes[half:], key=lambda part: sum(size for _, size in part)) or sizes
                scattered = found.group(2) == "reduce-scatter" and not found.group(3)
                for dtype, size in sizes:
                    factor = DEVICES if scattered else 2 if found.group(2) == "all-reduce" else 1
                    totals[f"{found.group(2)} {dtype}"] += times * size * factor * (DEVICES - 1) / DEVICES / 1e6
            loop = re.search(r"while\(.*body=%?([\w.\-]+)", line)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            if loop:
                walk(loop.group(1), times * (int(trips.group(1)) if trips else 1), totals)
            for called in re.findall(r"(?:calls|to_apply|async_wrapped)=%?([\w.\-]+)", line):
                if called in computations and called != computation:
                    walk(called, times, totals)

    totals: collections.Counter = collections.Counter()
    walk(entry, 1, totals)
    return dict(totals)


def explicit_contract(x, w):
    return contract("batch seq embed, embed ffn -> batch seq ffn", x, w)


def model(params, x, up, down, remat):
    def layer(x, p):
        return x + down(jax.nn.silu(up(x, p["up"])), p["down"]), None

    x, _ = jax.lax.scan(rematerialise(layer, remat), x, params)
    return (x.astype(jnp.float32) ** 2).mean()


def accumulated(loss, params, xs):
    def one(sums, x):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), xs)[0]


def variants(placement, auto_mesh, remat):
    """Name to (mesh context, loss, shardings on that mesh)."""
    rows, whole = P(("fsdp",)), P(None, None)

    def contract_loss(params, x):
        up = functools.partial(contract, "batch seq embed, embed ffn -> batch seq ffn")
        down = functools.partial(contract, "batch seq ffn, ffn embed -> batch seq embed")
        return model(params, x, up, down, remat)

    def plain_explicit(params, x):
        def product(x, w):
            return jnp.einsum(
                "bse,ef->bsf", x, jax.reshard(w.astype(x.dtype), whole), out_sharding=P(("fsdp",), None, None)
            )

        return model(params, x, product, product, remat)

    def plain_auto(params, x):
        constrain = jax.lax.with_sharding_constraint

        def product(x, w):
            w = constrain(w.astype(x.dtype), NamedSharding(auto_mesh, whole))
            return constrain(jnp.einsum("bse,ef->bsf", x, w), NamedSharding(auto_mesh, rows))

        return model(params, x, product, product, remat)

    yield "contract, explicit axes", placement.activate, placement.devices, contract_loss
    yield "plain einsum, explicit axes", placement.activate, placement.devices, plain_explicit
    yield "plain einsum, automatic axes", lambda: jax.set_mesh(auto_mesh), auto_mesh, plain_auto


def main() -> None:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="h100", target_config=H100, topology="1x8x8")
    import numpy as np

    grid = np.array(topology.devices)[:DEVICES].reshape(1, 1, DEVICES, 1, 1, 1)
    placement = Placement(Mesh(grid, MESH_AXES, axis_types=(AxisType.Explicit,) * 6), Rules())
    auto_mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 6)
    weights = 2 * EMBED * FFN * LAYERS
    print(f"jax {jax.__version__}, {DEVICES} H100s (AOT), fsdp={DEVICES}, {LAYERS} layers of {EMBED} x {FFN}, bfloat16")
    for micro, remat in ((1, "full"), (1, "none"), (4, "full")):
        least = {"all-gather bf16": micro * 2 * weights * 2 / 1e6, "reduce-scatter f32": micro * weights * 4 / 1e6}
        print(f"\nmicro-batches {micro}, remat {remat}: the least of ZeRO-3 with float32 reductions, MB: "
              + ", ".join(f"{k} {v * (DEVICES - 1) / DEVICES:.0f}" for k, v in least.items()))  # fmt: skip
        for name, activate, mesh, loss in variants(placement, auto_mesh, remat):
            params = {
                "up": jax.ShapeDtypeStruct(
                    (LAYERS, EMBED, FFN), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp"))
                ),
                "down": jax.ShapeDtypeStruct(
                    (LAYERS, FFN, EMBED), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "fsdp"))
                ),
            }
            lead = () if micro == 1 else (micro,)
            x = jax.ShapeDtypeStruct(
                (*lead, ROWS, LENGTH, EMBED),
                jnp.bfloat16,
                sharding=NamedSharding(mesh, P(*(None,) * len(lead), "fsdp")),
            )
            run = jax.grad(loss) if micro == 1 else functools.partial(accumulated, loss)
            with activate() or contextlib.nullcontext():
                try:
                    out = {name: leaf.sharding for name, leaf in params.items()}
                    compiled = jax.jit(run, out_shardings=out).lower(params, x).compile()
                except Exception as error:  # a variant that this JAX refuses is a finding too
                    print(f"  {name:30} refused: {str(error).splitlines()[0][:120]}")
                    continue
            totals = counted(compiled.as_text())
            memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
            print(f"  {name:30} {sum(totals.values()):8.0f} MB   temporaries {memory:5.2f} GiB   "
                  + ", ".join(f"{k} {v:.0f}" for k, v in sorted(totals.items())))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
