"""Grouped products against dense ones of as many FLOPs, `jax.lax.ragged_dot`, and PyTorch's on the CPU.

The same rows for all columns: sorted by group, balanced (each row picks a group at random) or skewed (half of the rows in one
group, the others at random). JAX and PyTorch run in a process each; the rounds are interleaved, and the device is waited for
before each clock. Results are asserted to equal the dense products of their groups before anything is timed.

    python benchmarks/grouped.py [--rounds 9] [--groups 8,64] [--dtype float32]
    python benchmarks/grouped.py --platform gpu --dtype bfloat16 --rows 32768 --k 4096 --n 14336 --columns dense,grouped
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

KINDS = ("product", "transposed", "outer")
COLUMNS = ("dense", "grouped", "ragged_dot", "torch loop", "torch grouped_mm")

# It takes seconds.
ROUNDS_OF_RAGGED_DOT = 2

# Of the largest value: sums of 512 to 8192 products, in float32 throughout; bfloat16 operands are the same for all columns, and
# results of 8 bits are compared.
SAME = {"float32": 1e-5, "bfloat16": 2e-2}


def sizes_of(options, groups: int, skewed: bool):
    import numpy as np

    random = np.random.default_rng(0)
    chosen = random.integers(0, groups, options.rows)
    if skewed:
        chosen[: options.rows // 2] = groups // 2
    return np.bincount(chosen, minlength=groups)


def arrays(options, groups: int):
    import numpy as np

    random = np.random.default_rng(1)
    shapes = ((options.rows, options.k), (options.rows, options.n), (groups, options.k, options.n))
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def jax_columns(options, groups: int, skewed: bool) -> dict:
    """Functions without arguments, by kind and column, and what they make of the first group's rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from panax.core import Target
    from panax.kernels.grouped.grouped_matmul import (
        Groups,
        aligned_row_count,
        choose_tile,
        grouped_outer,
        grouped_product,
    )

    sizes, (x, y, w) = sizes_of(options, groups, skewed), arrays(options, groups)
    tile = choose_tile(Target(options.platform), rows=options.rows, groups=groups)
    layout = Groups(sizes=jnp.asarray(sizes, jnp.int32), rows=aligned_row_count(options.rows, groups, tile), tile=tile)
    place = np.concatenate([start + np.arange(size) for start, size in zip(np.asarray(layout.starts), sizes)])

    def aligned(a):
        out = np.zeros((layout.rows, a.shape[1]), np.float32)
        out[place] = a
        return jnp.asarray(out, options.dtype)

    x_tiles, y_tiles = aligned(x), aligned(y)
    x, y, w = (jnp.asarray(a, options.dtype) for a in (x, y, w))
    packed = jnp.asarray(sizes, jnp.int32)
    on = {"target": Target(options.platform)}
    first, count = int(np.argmax(sizes > 0)), int(sizes[sizes > 0][0])

    def contract(a, b, dims, out=options.dtype):
        return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32).astype(out)

    def ragged(a, b, of_rows, of_matrix, ragged_dim, group_dim):
        dims = jax.lax.RaggedDotDimensionNumbers((((of_rows,), (of_matrix,)), ((), ())), (ragged_dim,), group_dim)
        return jax.lax.ragged_dot_general(a, b, packed, dims, preferred_element_type=jnp.float32)

    programs = {
        ("product", "dense"): (lambda x, w: contract(x, w, ((1,), (0,))), x, w[first]),
        ("product", "grouped"): (lambda x, w, g: grouped_product(x, w, g, **on), x_tiles, w, layout),
        ("product", "ragged_dot"): (lambda x, w: ragged(x, w, 1, 1, 0, (0,)).astype(x.dtype), x, w),
        ("transposed", "dense"): (lambda y, w: contract(y, w, ((1,), (1,))), y, w[first]),
        ("transposed", "grouped"): (
            lambda y, w, g: grouped_product(y, w, g, **on, transposed=True), y_tiles, w, layout),
        ("transposed", "ragged_dot"): (lambda y, w: ragged(y, w, 1, 2, 0, (0,)).astype(y.dtype), y, w),
        ("outer", "dense"): (lambda x, y: contract(x, y, ((0,), (0,)), jnp.float32), x, y),
        ("outer", "grouped"): (lambda x, y, g: grouped_outer(x, y, g, **on), x_tiles, y_tiles, layout),
        ("outer", "ragged_dot"): (lambda x, y: ragged(x, y, 0, 0, 0, ()), x, y),
    }  # fmt: skip
    found = {}
    for (kind, column), (function, *inputs) in programs.items():
        if column not in options.columns:
            continue
        run = jax.jit(function)
        result = jax.block_until_ready(run(*inputs))
        if column == "dense" and kind == "outer":
            result = contract(x[:count], y[:count], ((0,), (0,)), jnp.float32)[None]
        sample = result[:1] if kind == "outer" and column == "dense" else result[first : first + 1]
        start = int(layout.starts[first]) if column == "grouped" else 0
        sample = sample if kind == "outer" else result[start : start + count]
        found[kind, column] = (
            lambda run=run, inputs=inputs: jax.block_until_ready(run(*inputs)),
            np.asarray(sample, np.float32),
        )
    return found


def torch_columns(options, groups: int, skewed: bool) -> dict:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    sizes = sizes_of(options, groups, skewed)
    x, y, w = (torch.from_numpy(a).to(getattr(torch, options.dtype)) for a in arrays(options, groups))
    ends = torch.from_numpy(sizes.cumsum()).to(torch.int32)
    pieces, first = sizes.tolist(), int((sizes > 0).argmax())

    def loop(a, matrices):
        return torch.cat([rows @ matrix for rows, matrix in zip(a.split(pieces), matrices)])

    def outer():
        return torch.stack([a.T @ b for a, b in zip(x.split(pieces), y.split(pieces))])

    programs = {
        ("product", "torch loop"): lambda: loop(x, w),
        ("product", "torch grouped_mm"): lambda: torch._grouped_mm(x, w, offs=ends),
        ("transposed", "torch loop"): lambda: loop(y, w.mT),
        ("transposed", "torch grouped_mm"): lambda: torch._grouped_mm(y, w.mT, offs=ends),
        ("outer", "torch loop"): outer,
        ("outer", "torch grouped_mm"): lambda: torch._grouped_mm(x.T, y, offs=ends),
    }
    found = {}
    for (kind, column), run in programs.items():
        if column in options.columns:
            sample = run()[first : first + 1] if kind == "outer" else run()[: pieces[first]]
            found[kind, column] = run, sample.float().numpy()
    return found


def worker(options) -> None:
    """Say which columns there are, save what they make, then answer each line with the seconds of that column."""
    from panax.system.allocator import keep_freed_memory

    keep_freed_memory()  # as `panax train` does; for PyTorch too
    import numpy as np

    make = jax_columns if options.worker == "jax" else torch_columns
    found = make(options, int(options.groups), options.skewed)
    keys = ["/".join(key) for key in found]
    np.savez(options.samples, **{key: sample for key, (_, sample) in zip(keys, found.values())})
    print(json.dumps(keys), flush=True)
    runs = {key: run for key, (run, _) in zip(keys, found.values())}
    for line in sys.stdin:
        run = runs[line.strip()]
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)


def compare(options, groups: int, skewed: bool, directory: str) -> None:
    import numpy as np

    frameworks = ["jax"] if options.platform != "cpu" else ["jax", "torch"]
    workers, samples, where = {}, {}, {}
    for name in frameworks:
        path = os.path.join(directory, f"{name}.npz")
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker", name, "--samples", path]
        command += ["--groups", str(groups), *(["--skewed"] if skewed else [])]
        workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for key in json.loads(workers[name].stdout.readline()):
            where[key] = workers[name]
        samples |= np.load(path)
    for key, sample in samples.items():
        truth = samples[f"{key.split('/')[0]}/dense"]
        worst = float(np.abs(sample - truth).max() / np.abs(truth).max())
        assert worst <= SAME[options.dtype], f"{key} is off by {worst:.1e}"
    times: dict[str, list[dict]] = {key: [] for key in where}
    for i in range(options.rounds):
        for key, process in where.items():
            if "ragged_dot" in key and i >= ROUNDS_OF_RAGGED_DOT:
                continue
            process.stdin.write(key + "\n")
            process.stdin.flush()
            times[key].append(json.loads(process.stdout.readline()))
    for process in workers.values():
        process.stdin.close()
        process.wait()
    print(f"\n{groups} groups, {'half of the rows in one' if skewed else 'balanced'}, {options.dtype}")
    flops = 2 * options.rows * options.k * options.n
    for kind in KINDS:
        dense = {unit: statistics.median(t[unit] for t in times[f"{kind}/dense"]) for unit in ("wall", "cpu")}
        for column in options.columns:
            if f"{kind}/{column}" in times:
                taken = times[f"{kind}/{column}"]
                wall, cpu = (statistics.median(t[unit] for t in taken) for unit in ("wall", "cpu"))
                spread = f"[{min(t['wall'] for t in taken) * 1e3:.1f} .. {max(t['wall'] for t in taken) * 1e3:.1f}]"
                print(
                    f"  {kind:10} {column:16} {wall * 1e3:8.1f} ms {spread:20} cpu {cpu * 1e3:8.1f} ms {flops / wall / 1e9:7.0f} "
                    f"GF/s   of the dense rate: {dense['wall'] / wall:.2f}, by CPU seconds {dense['cpu'] / max(cpu, 1e-9):.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--groups", default="8,64")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--n", type=int, default=1408)
    parser.add_argument("--columns", type=lambda text: text.split(","), default=list(COLUMNS))
    parser.add_argument("--worker")
    parser.add_argument("--samples")
    parser.add_argument("--skewed", action="store_true")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    import importlib.metadata as metadata
    import tempfile

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "torch"))
    print(
        f"{versions}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.rows} rows of {options.k} by {options.n}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for groups in options.groups.split(","):
            for skewed in (False, True):
                compare(options, int(groups), skewed, directory)
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
