"""A mixture-of-experts layer, forward and backward, against a dense layer of as many active FLOPs and PyTorch's mixture.

Columns: `dense` is Panax's feed-forward layer of the width that a token's experts have together; `panax` the mixture, with its
router, its sorting and its gathers; `torch loop` and `torch grouped_mm` the same weights in `transformers`' Mixtral block by its
two implementations; `torch dense` the dense layer in PyTorch. All on the same tokens; outputs of the mixtures are asserted to be
equal first. Each framework runs in a process of its own, rounds are interleaved, and a clock is read when the result is there.

    python benchmarks/moe.py [--rounds 7] [--shapes 8x2x1408,64x2x1408,64x8x352] [--dtype float32]
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

COLUMNS = {"jax": ("dense", "panax"), "torch": ("torch dense", "torch loop", "torch grouped_mm")}

# Of the largest value: float32 sums of at most 1408 products, in another order.
SAME = {"float32": 1e-4, "bfloat16": 5e-2}


def weights(options):
    """Tokens, what the output's gradient is, and all matrices, from one seed."""
    import numpy as np

    random, d = np.random.default_rng(0), options.embed
    experts, _, ffn = options.shape

    def normal(*shape, fan):
        return random.standard_normal(shape, dtype=np.float32) / np.float32(fan) ** 0.5

    return {
        "x": normal(options.tokens, d, fan=1),
        "dy": normal(options.tokens, d, fan=1),
        "router": normal(d, experts, fan=d),
        "gate": normal(experts, d, ffn, fan=d),
        "up": normal(experts, d, ffn, fan=d),
        "down": normal(experts, ffn, d, fan=ffn),
    }


def jax_columns(options) -> dict:
    import jax
    import jax.numpy as jnp

    from panax.kernels import choose_by_timing
    from panax.layers import FeedForward, MixtureOfExperts, MoE, Tokens

    # As every run does at its start.
    choose_by_timing()
    experts, active, ffn = options.shape
    given = weights(options)
    x, dy = (jnp.asarray(given[name], options.dtype)[None] for name in ("x", "dy"))
    moe = MoE(experts=experts, active=active, ffn=ffn)
    key = jax.random.key(0)
    mixture = MixtureOfExperts.build(key, options.embed, ffn, moe, gated=True, activation="silu")
    names = {"w_gate": "gate", "w_up": "up", "w_down": "down"}
    mixture = dataclasses.replace(
        mixture,
        router=dataclasses.replace(mixture.router, w=jnp.asarray(given["router"])),
        experts=dataclasses.replace(
            mixture.experts, **{ours: jnp.asarray(given[theirs]) for ours, theirs in names.items()}
        ),
    )
    dense = FeedForward.build(key, options.embed, active * ffn, gated=True, bias=False, activation="silu")

    def step(forward):
        @jax.jit
        def run(layer, x, dy):
            y, pull = jax.vjp(forward, layer, x)
            return y, pull(dy)

        return run

    run_mixture, run_dense = step(lambda layer, x: layer(x, Tokens())[0]), step(lambda layer, x: layer(x))
    return {
        "panax": lambda: jax.block_until_ready(run_mixture(mixture, x, dy)),
        "dense": lambda: jax.block_until_ready(run_dense(dense, x, dy)),
    }


def torch_columns(options) -> dict:
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.set_num_threads(os.cpu_count() or 1)
    experts, active, ffn = options.shape
    given = {name: torch.from_numpy(value) for name, value in weights(options).items()}
    dtype = getattr(torch, options.dtype)
    x, dy = (given[name].to(dtype)[None] for name in ("x", "dy"))
    x.requires_grad_()

    def block(implementation):
        config = MixtralConfig(
            hidden_size=options.embed, intermediate_size=ffn, num_local_experts=experts, num_experts_per_tok=active
        )
        config._experts_implementation = implementation
        found = MixtralSparseMoeBlock(config)
        with torch.no_grad():
            found.gate.weight.copy_(given["router"].T)
            found.experts.gate_up_proj.copy_(torch.cat([given["gate"], given["up"]], dim=2).transpose(1, 2))
            found.experts.down_proj.copy_(given["down"].transpose(1, 2))
        return found.to(dtype)

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            wide = active * ffn
            self.gate, self.up = (torch.nn.Linear(options.embed, wide, bias=False, dtype=dtype) for _ in range(2))
            self.down = torch.nn.Linear(wide, options.embed, bias=False, dtype=dtype)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    def step(module):
        def run():
            module.zero_grad()
            x.grad = None
            y = module(x)
            y.backward(dy)
            return y.detach(), None

        return run

    return {
        "torch dense": step(Dense()),
        "torch loop": step(block("eager")),
        "torch grouped_mm": step(block("grouped_mm")),
    }


def worker(options) -> None:
    """Reads a column's name a line, runs it once, and writes the seconds."""
    columns = (jax_columns if options.worker == "jax" else torch_columns)(options)
    for line in sys.stdin:
        name, _, path = line.strip().partition("|")
        start, cpu = time.perf_counter(), time.process_time()
        y, _ = columns[name]()
        seconds = time.perf_counter() - start, time.process_time() - cpu
        if path:
            import numpy as np

            np.save(path, np.asarray(y.float() if options.worker == "torch" else y.astype("float32")))
        print(json.dumps(seconds), flush=True)


def compare(options, directory: str) -> None:
    import numpy as np

    base = [sys.executable, __file__, "--one", "x".join(map(str, options.shape)), "--dtype", options.dtype]
    base += ["--tokens", str(options.tokens), "--embed", str(options.embed)]
    workers = {
        name: subprocess.Popen([*base, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in COLUMNS
    }

    def run(name: str, column: str, path: str = "") -> tuple[float, float]:
        process = workers[name]
        print(f"{column}|{path}", file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    found: dict[str, list] = {column: [] for columns in COLUMNS.values() for column in columns}
    for name, columns in COLUMNS.items():
        for column in columns:
            run(name, column, os.path.join(directory, f"{column}.npy"))
            run(name, column)
    ours = np.load(os.path.join(directory, "panax.npy"))
    for column in ("torch loop", "torch grouped_mm"):
        theirs = np.load(os.path.join(directory, f"{column}.npy"))
        distance = np.abs(ours - theirs).max() / np.abs(ours).max()
        assert distance <= SAME[options.dtype], (
            f"{column} is not the same work: {distance:.1e} of the largest value apart"
        )
    for _ in range(options.rounds):
        for name, columns in COLUMNS.items():
            for column in columns:
                found[column].append(run(name, column))
    for process in workers.values():
        process.stdin.close()
        process.wait()
    experts, active, ffn = options.shape
    flops = 3 * 3 * 2 * options.tokens * active * options.embed * ffn
    print(
        f"\n{experts} experts of width {ffn}, {active} active, {options.tokens} tokens of {options.embed}, {options.dtype}"
    )
    print("\n| column | ms (median) | spread | CPU ms | GFLOP/s | of dense |\n|---|---|---|---|---|---|")
    reference = statistics.median(seconds for seconds, _ in found["dense"])
    for column, measured in found.items():
        seconds = [wall for wall, _ in measured]
        middle, cpu = statistics.median(seconds), statistics.median(cpu for _, cpu in measured)
        spread = (max(seconds) - min(seconds)) / middle
        print(
            f"| {column} | {middle * 1e3:.0f} | {spread:.0%} | {cpu * 1e3:.0f} | {flops / middle / 1e9:.0f} | "
            f"{reference / middle:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", default="8x2x1408,64x2x1408,64x8x352", help="experts x active x width, with commas")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--embed", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--worker", choices=tuple(COLUMNS), help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.shape = tuple(map(int, options.one.split("x")))
        worker(options)
        return
    import tempfile

    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as directory:
        for shape in options.shapes.split(","):
            options.shape = tuple(map(int, shape.split("x")))
            compare(options, directory)


if __name__ == "__main__":
    main()
