"""The loop's wall time per step against the bare compiled step's, on the quickstart, in one run, blocks interleaved.

    python benchmarks/loop_overhead.py [--blocks 5] [--steps 20] [--hooks]

The bare block calls the compiled step on batches that are already there and waits once, at its end. The loop's block is what
`panax train` does between two evaluations: data, dispatch, scalars a step late, console, JSONL and TensorBoard. With `--hooks`,
the loop with four hooks and a CSV tracker is measured against the loop without: the goal is below 0.5 % of a step.
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

from panax.hooks import EarlyStopping, Hook, TargetReached, TimeLimit
from panax.metrics import ConsoleTracker, CsvTracker
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, prepare
from panax.run.loop import Run
from panax.run.recovery.checkpointing import CheckpointSchedule
from panax.run.recovery.interrupt import SignalHandler
from panax.run.reporting.history import read_history
from panax.run.reporting.report import RunReporter
from panax.run.start import RunStart, open_folder
from panax_recipes.quickstart import quickstart


class Reads(Hook):
    """What most hooks do: look at the latest values, and log one now and then."""

    def after_step(self, run):
        if run.values.get("train/loss", 0.0) > 0.0 and run.step % 10 == 0:
            run.log({"mine/step": run.step})


HOOKS = (
    Reads(),
    EarlyStopping(metric="train/loss", patience=10**6),
    TargetReached(target=0.0, metric="train/loss"),
    TimeLimit(hours=9.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hooks", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink:
        base = dataclasses.replace(
            quickstart(),
            directory=folder,
            evaluate=EvaluateConfig(every=0),
            num_steps=options.steps,
            optimizer=AdamW(schedule=Schedule(decay="constant")),
            hooks=(),
        )
        prepared = prepare(dataclasses.replace(base, checkpoint=dataclasses.replace(base.checkpoint, every=0)))
        # The loop alone is timed: no evaluation, no save.
        prepared = dataclasses.replace(prepared, data=dataclasses.replace(prepared.data, held_out=None))
        hooked = dataclasses.replace(
            prepared, experiment=dataclasses.replace(prepared.experiment, hooks=HOOKS, trackers=(CsvTracker(),))
        )
        step = prepared.step
        source = prepared.data.train.batches()
        ready = [step.put(next(source).batch) for _ in range(options.steps)]
        state, _ = step(step.init(0), ready[0])
        ratios, cpu_ratios, first_seconds, second_seconds = [], [], [], []
        tracker = ConsoleTracker(Console(file=sink))
        with open_folder(prepared, lambda line: None) as checkpointer:
            checkpointer.save = lambda *arguments, **options: False  # saving is not part of a step
            keeper = CheckpointSchedule(prepared.experiment.checkpoint, checkpointer, None)

            def bare(state):
                for batch in ready:
                    state, _ = step(state, batch)
                return state

            def loop(state, prepared=prepared):
                with contextlib.closing(RunReporter(prepared, 0, (tracker,), lambda line: None)) as report:
                    run = Run(
                        prepared, RunStart(state, 0, None, None), keeper, report, SignalHandler(), lambda line: None
                    )
                    for batch in run:
                        run.after_step(run.take_step(batch))
                    return run.finish().state

            def loop_with_hooks(state):
                return loop(state, hooked)

            first, second = (loop, loop_with_hooks) if options.hooks else (bare, loop)
            for block in range(options.blocks):
                seconds, cpu = {}, {}
                # In turns, each going first as often as the other.
                for work in (first, second) if block % 2 == 0 else (second, first):
                    start, cpu_start = time.perf_counter(), time.process_time()
                    state = jax.block_until_ready(work(state))
                    seconds[work], cpu[work] = time.perf_counter() - start, time.process_time() - cpu_start
                ratios.append(seconds[second] / seconds[first])
                cpu_ratios.append(cpu[second] / cpu[first])
                first_seconds.append(seconds[first] / options.steps)
                second_seconds.append(seconds[second] / options.steps)
        rows = read_history(folder)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{first.__name__} {statistics.median(first_seconds) * 1e3:.1f} ms, "
        f"{second.__name__} {statistics.median(second_seconds) * 1e3:.1f} ms a step"
    )
    print(
        "ratios "
        + " ".join(f"{ratio:.3f}" for ratio in ratios)
        + f"; median {statistics.median(ratios):.4f} (goal {1.005 if options.hooks else 1.02})"
    )
    print(f"processor time: median ratio {statistics.median(cpu_ratios):.4f}")
    if options.hooks:
        shares = [row["seconds/hooks"] / row["seconds/step"] for row in rows if "seconds/hooks" in row]
        print(f"hooks' own part of a step: {statistics.median(shares):.3%}, the most {max(shares):.3%}")


if __name__ == "__main__":
    main()
