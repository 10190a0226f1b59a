"""The loop's wall time per step against the bare compiled step's, on the quickstart, in one run, blocks interleaved.

    python benchmarks/loop_overhead.py [--blocks 5] [--steps 20]

The bare block calls the compiled step on batches that are already there and waits once, at its end. The loop's block is what
`panax train` does between two evaluations: data, dispatch, scalars a step late, console, JSONL and TensorBoard.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time

import jax
from rich.console import Console

from panax.metrics import ConsoleTracker
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, prepare
from panax.run.interrupt import Interrupt
from panax.run.keeping import Keeper
from panax.run.loop import run
from panax.run.report import Report
from panax.run.start import Start, open_folder
from panax_recipes.quickstart import quickstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink:
        base = dataclasses.replace(
            quickstart(),
            directory=folder,
            evaluate=EvaluateConfig(every=0),
            num_steps=options.steps,
            optimizer=AdamW(schedule=Schedule(decay="constant")),
        )
        prepared = prepare(dataclasses.replace(base, checkpoint=dataclasses.replace(base.checkpoint, every=0)))
        # The loop alone is timed: no evaluation, no save.
        prepared = dataclasses.replace(prepared, data=dataclasses.replace(prepared.data, held_out=None))
        step = prepared.step
        source = prepared.data.train.batches()
        ready = [step.put(next(source).batch) for _ in range(options.steps)]
        state, _ = step(step.init(0), ready[0])
        ratios, bare_seconds, loop_seconds = [], [], []
        tracker = ConsoleTracker(Console(file=sink))
        with open_folder(prepared, lambda line: None) as checkpointer:
            checkpointer.save = lambda *arguments, **options: False  # saving is not part of a step
            keeper = Keeper(prepared.experiment.checkpoint, checkpointer, None)
            for _ in range(options.blocks):
                jax.block_until_ready(state)
                start = time.perf_counter()
                for batch in ready:
                    state, _ = step(state, batch)
                jax.block_until_ready(state)
                bare = time.perf_counter() - start
                with contextlib.closing(Report(prepared, 0, (tracker,), lambda line: None)) as report:
                    start = time.perf_counter()
                    result = run(prepared, Start(state, 0, None, None), keeper, report, Interrupt())
                    jax.block_until_ready(result.state)
                    whole = time.perf_counter() - start
                state = result.state
                ratios.append(whole / bare)
                bare_seconds.append(bare / options.steps)
                loop_seconds.append(whole / options.steps)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"bare step {statistics.median(bare_seconds) * 1e3:.1f} ms, loop {statistics.median(loop_seconds) * 1e3:.1f} ms a step"
    )
    print(
        "ratios "
        + " ".join(f"{ratio:.3f}" for ratio in ratios)
        + f"; median {statistics.median(ratios):.3f} (goal 1.02)"
    )


if __name__ == "__main__":
    main()
