"""This decoder's train step against the same model in PyTorch, on CPU: eager and torch.compile, float32 and bfloat16.

The same random weights (through Hugging Face's layout), the same batches, AdamW, clipping at 1. Every column runs in a process
of its own; the rounds are interleaved, one column steps while the others sleep, and the device is waited for before each clock.
Losses of the first steps are asserted equal before anything is timed.

    python benchmarks/decoder_cpu.py [--rounds 12] [--columns panax,eager,compile] [--precision f32,bf16]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

VOCAB, EMBED, LAYERS, HEADS, KV_HEADS, FFN = 8192, 512, 6, 8, 4, 1408
ROWS, LENGTH, WARM = 8, 256, 4

# Losses near ln(8192) = 9.01. Float32 columns differ by rounding alone; in bfloat16 each framework rounds elsewhere.
SAME_LOSS = {"f32": 1e-4, "bf16": 2e-2}


def batches(count: int):
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(count)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def panax_task(precision: str):
    from panax.models import DecoderConfig, DecoderTask

    config = DecoderConfig(
        vocab_size=VOCAB,
        max_length=LENGTH,
        embed=EMBED,
        num_layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        ffn=FFN,
        tied=True,
    )
    return DecoderTask(model=config, compute_dtype="float32" if precision == "f32" else "bfloat16")


def panax_column(precision: str, directory: str):
    from panax.system.allocator import keep_freed_memory

    keep_freed_memory()  # as `panax train` does
    import jax
    import numpy as np

    from panax.adapters.huggingface import load
    from panax.mesh import Placement
    from panax.optim import AdamW, Schedule
    from panax.train import CompiledStep, Program

    axes = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
    optimizer = AdamW(schedule=Schedule(peak=1e-3, decay="constant"), weight_decay=0.0)
    step = CompiledStep(Program.create(panax_task(precision), optimizer, num_steps=1000), Placement.create(), axes)
    state = step.init(0)
    import dataclasses

    state = dataclasses.replace(state, params=load(directory, step.program.task, state.params))

    def one(batch) -> float:
        nonlocal state
        tokens, targets = batch
        leaves = {"tokens": tokens, "targets": targets, "loss_mask": np.ones(tokens.shape, np.float32)}
        state, scalars = step(state, step.put(leaves))
        jax.block_until_ready(state)
        return float(scalars["loss"])

    return one


def torch_column(precision: str, directory: str, compiled: bool):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )

    def forward(tokens, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    run = torch.compile(forward) if compiled else forward

    def one(batch) -> float:
        tokens, targets = (torch.from_numpy(part).long() for part in batch)
        optimizer.zero_grad(set_to_none=True)
        loss = run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return one


def worker(column: str, precision: str, directory: str) -> None:
    """Answer each line on standard input with one step's seconds, CPU seconds and loss."""
    one = (
        panax_column(precision, directory)
        if column == "panax"
        else torch_column(precision, directory, column == "compile")
    )
    pool = batches(8)
    losses = [one(batch) for batch in pool[:WARM]]
    print(json.dumps(losses), flush=True)
    for i, _ in enumerate(sys.stdin):
        cpu, wall = time.process_time(), time.perf_counter()
        one(pool[(WARM + i) % len(pool)])
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)


def save_weights(directory: str) -> None:
    """Random weights, once, for all columns."""
    code = (
        "import jax, sys; sys.path.insert(0, sys.argv[2]); import decoder_cpu as b\n"
        "from panax.adapters.huggingface import save\n"
        "task = b.panax_task('f32')\n"
        "save(sys.argv[1], jax.jit(task.init)(jax.random.key(0))[0])\n"
    )
    subprocess.run([sys.executable, "-c", code, directory, os.path.dirname(os.path.abspath(__file__))], check=True)


def flops_per_step() -> float:
    weights = LAYERS * (EMBED * EMBED // HEADS * (2 * HEADS + 2 * KV_HEADS) + 3 * EMBED * FFN) + EMBED * VOCAB
    return ROWS * LENGTH * 6 * (weights + 2 * EMBED * LAYERS * (LENGTH + 1) / 2)


def compare(precision: str, columns: list[str], rounds: int, directory: str) -> None:
    workers, losses = {}, {}
    for column in columns:
        workers[column] = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", column, "--precision", precision, "--directory", directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        losses[column] = json.loads(workers[column].stdout.readline())
    reference = losses[columns[0]]
    for column, values in losses.items():
        worst = max(abs(a - b) for a, b in zip(values, reference))
        assert worst <= SAME_LOSS[precision], f"{column} is not the same work: losses {values} against {reference}"
    times: dict[str, list[dict]] = {column: [] for column in columns}
    for _ in range(rounds):
        for column, process in workers.items():
            process.stdin.write("step\n")
            process.stdin.flush()
            times[column].append(json.loads(process.stdout.readline()))
    for process in workers.values():
        process.stdin.close()
        process.wait()
    print(f"\n{precision}: losses {', '.join(f'{loss:.4f}' for loss in reference)} (equal to {SAME_LOSS[precision]})")
    best = (
        min(statistics.median(t["wall"] for t in times[c]) for c in columns if c != "panax")
        if len(columns) > 1
        else None
    )
    for column in columns:
        walls = [t["wall"] for t in times[column]]
        middle = statistics.median(walls)
        line = f"  {column:8} {middle * 1e3:7.0f} ms  [{min(walls) * 1e3:.0f} .. {max(walls) * 1e3:.0f}]"
        cpu = statistics.median(t["cpu"] for t in times[column])
        line += f"  cpu {cpu * 1e3:6.0f} ms  {flops_per_step() / middle / 1e9:5.0f} GF/s"
        if column == "panax" and best:
            line += f"   ratio to the best PyTorch column {middle / best:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--columns", default="panax,eager,compile")
    parser.add_argument("--precision", default="f32,bf16")
    parser.add_argument("--worker")
    parser.add_argument("--directory")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.precision, options.directory)
        return
    import importlib.metadata as metadata

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "torch", "transformers"))
    print(f"{versions}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {LAYERS} layers of {EMBED}, vocabulary {VOCAB}, "
          f"{ROWS} x {LENGTH} tokens, {flops_per_step() / 1e9:.0f} GFLOP a step")  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        save_weights(directory)
        for precision in options.precision.split(","):
            compare(precision, options.columns.split(","), options.rounds, directory)
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
