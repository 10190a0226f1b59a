"""A training step of unmodified PyTorch models: PyTorch eager, torch.compile, and the model adapted.

    python benchmarks/adapters_torch.py [--models llama vit] [--rounds 5] [--dtype float32] [--json results.json]

Each column is a process of its own; they take turns, so that the machine's load is the same for all. A step is a forward, a
backward and an update by SGD on a batch that is there already. Before anything is timed, the losses of the first steps are
compared (dropout is set to 0 for that: PyTorch draws other masks). Peaks are of a whole process, its libraries included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = ("eager", "compile", "panax")
STEPS_A_TURN = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="small")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--columns", nargs="*", default=COLUMNS)
    parser.add_argument("--json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker, arguments.size, arguments.dtype)
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import zoo

    results = []
    for name in arguments.models or zoo.MODELS:
        row = measure(name, arguments)
        results.append(row)
        print(line(row), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1))


def measure(name: str, arguments: argparse.Namespace) -> dict:
    workers, ready = {}, {}
    for column in sorted(arguments.columns, key=lambda column: column != "panax"):
        command = [
            sys.executable,
            __file__,
            "--worker",
            name,
            column,
            "--size",
            arguments.size,
            "--dtype",
            arguments.dtype,
        ]
        workers[column] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if column == "panax":
            # Alone: how long it takes to adapt is reported.
            ready[column] = json.loads(workers[column].stdout.readline())
    for column, worker in workers.items():
        if column not in ready:
            ready[column] = json.loads(worker.stdout.readline())
    times: dict[str, list[float]] = {column: [] for column in workers}
    for _ in range(arguments.rounds):
        for column, worker in workers.items():
            worker.stdin.write("go\n")
            worker.stdin.flush()
            times[column].append(json.loads(worker.stdout.readline()))
    peaks = {}
    for column, worker in workers.items():
        worker.stdin.close()
        peaks[column] = json.loads(worker.stdout.readline())
        worker.wait()
    return {
        "model": name,
        "peak_bytes": peaks,
        "load": os.getloadavg()[0],
        "seconds": {column: statistics.median(times[column]) for column in arguments.columns},
        "spread": {column: max(found) - min(found) for column, found in times.items()},
        "prepare": {column: found["prepare"] for column, found in ready.items()},
        "adapt": ready.get("panax", {}).get("adapt"),
        "losses": {column: found["losses"] for column, found in ready.items()},
    }


def line(row: dict) -> str:
    seconds = row["seconds"]
    ours = seconds.get("panax")
    first = next(iter(row["losses"].values()))
    apart = max(abs(a - b) / abs(b) for losses in row["losses"].values() for a, b in zip(losses, first))
    cells = [f"{row['model']:13}", f"apart {apart:.0e}"]
    cells += [f"{column} {value * 1000:.0f} ms" for column, value in seconds.items()]
    if ours is not None:
        cells += [f"ours/{column} {ours / value:.2f}" for column, value in seconds.items() if column != "panax"]
        cells.append(f"adapt {row['adapt']:.1f} s")
    cells += [f"{column} {peak / 2**20:.0f} MiB" for column, peak in row["peak_bytes"].items()]
    return "  ".join(cells)


def work(name: str, column: str, size: str, dtype: str) -> None:
    """Prepare a column, say how long that took and the first losses, then take steps when told."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import zoo

    module, loss, batch = zoo.build(name, size)
    without_dropout(module)
    run, prepared = (panax_step if column == "panax" else torch_step)(module, loss, batch, column, dtype)
    losses = [run() for _ in range(3)]
    print(json.dumps({**prepared, "losses": losses}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            run()
        print(json.dumps((time.perf_counter() - start) / STEPS_A_TURN), flush=True)
    print(json.dumps(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), flush=True)


def without_dropout(module) -> None:
    import torch

    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout", "drop_prob", "layerdrop"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)


def torch_step(module, loss, batch, column: str, dtype: str):
    import torch
    import zoo

    module.train()
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    compute = zoo.loss_of(loss)
    start = time.perf_counter()
    compiled = torch.compile(compute) if column == "compile" else compute

    def run() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            value = compiled(module, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return float(value.detach())

    run()
    seconds = time.perf_counter() - start
    return run, {"prepare": seconds}


def panax_step(module, loss, batch, column: str, dtype: str):
    import jax
    import optax

    import panax
    from panax.data.loading.iterable import as_batch
    from panax.optim import Optax
    from panax.train import StepConfig

    start = time.perf_counter()
    adapted = panax.adapters.torch.task(module, loss, batch, compute_dtype=dtype)
    adapt = time.perf_counter() - start
    step = panax.compile_step(
        adapted,
        batch,
        Optax(transformation=optax.sgd(1e-3)),
        config=StepConfig(clip_norm=None),
        devices=jax.devices()[:1],
    )
    state = step.init()
    held = step.compiled.put(as_batch(batch))

    def run() -> float:
        nonlocal state
        state, scalars = step.compiled(state, held)
        return float(scalars["loss"])

    run()
    return run, {"prepare": time.perf_counter() - start, "adapt": adapt}


if __name__ == "__main__":
    main()
