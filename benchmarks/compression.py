"""What compressed reductions cost: held-out loss with the same seeds, or the time of a step.

    python benchmarks/compression.py [--folder DIR] [--seeds 3] [--steps 400] [--only KIND]
    python benchmarks/compression.py --quickstart        the quickstart's own model, batch and 550 steps
    python benchmarks/compression.py --time [--rounds 15]        on a machine that does nothing else

A decoder of 0.1 million parameters learns the quickstart's text on four simulated replicas. A seed is that of the weights and of
the order of the data, the same for all kinds, so differences are paired: their mean over seeds is shown with twice its standard
error, in percent of the loss of float32 sums. Each training that ends is a line of trained.jsonl: the same command resumes.

`--time` takes steps of all kinds in turn on eight simulated devices, and shows the median of each round's ratio to float32 sums.
Devices share the machine's cores and its memory, so what is seen is the work of codes, and nothing of a slow network.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

PLAIN, ALONE = "float32", "sign, without feedback"
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "bfloat16": {"compress": "bfloat16"},
    "int8": {"compress": "int8"},
    "float8": {"compress": "float8"},
    "int4": {"compress": "int4"},
    "int4, by chance": {"compress": "int4", "rounding": "stochastic"},
    "sign": {"compress": "sign"},
    ALONE: {"compress": "sign", "error_feedback": False},
    "float32, one step late": {"delayed": True},
    "float32, one step late, not corrected": {"delayed": True, "delay_correction": False},
    "int8, one step late": {"delayed": True, "compress": "int8"},
    "float32 after 25 local steps": {"local_steps": 25},
    "int4 after 25 local steps": {"local_steps": 25, "compress": "int4"},
}
"""Settings of `Comms`."""

BY_SGD = {
    "float32, SGD": {},
    "int8, SGD": {"compress": "int8"},
    "sign, SGD": {"compress": "sign"},
    "sign, without feedback, SGD": {"compress": "sign", "error_feedback": False},
}
"""The same by SGD without momentum and without clipping, for which the feedback of signs is made (arXiv:1901.09847)."""

KINDS |= BY_SGD

ROWS, REPLICAS = 8, 4


def experiment_of(kind: str, seed: int, steps: int, *, quickstart: bool = False) -> Any:
    import warnings

    from paired import small_experiment

    from panax.comms import Comms
    from panax.mesh import MeshShape
    from panax.optim import Sgd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of signs without feedback, which are meant here
        comms = Comms(**KINDS[kind])
    more = {"comms": comms, "mesh": MeshShape(replica=REPLICAS, fsdp=1)}
    if not quickstart:
        found = small_experiment(seed, steps, ROWS, {}, {}, **more)
        if kind in BY_SGD:
            schedule = dataclasses.replace(found.optimizer.schedule, peak=0.5)
            clipped = dataclasses.replace(found.step, clip_norm=None)
            found = dataclasses.replace(found, optimizer=Sgd(schedule=schedule, momentum=0.0), step=clipped)
        return found
    from panax_recipes.quickstart import quickstart as recipe

    found = recipe()
    data = dataclasses.replace(found.data, seed=seed)
    return dataclasses.replace(found, data=data, num_steps=steps, hooks=(), **more)


def table(records: list[dict[str, Any]], steps: int) -> str:
    """What was trained so far, in Markdown."""
    from paired import Difference

    losses = {(each["kind"], each["seed"]): each for each in records if each["steps"] == steps}
    lines = ["| gradients travel as | held-out loss | against float32, % | seeds |", "|---|---|---|---|"]
    for kind in KINDS:
        seeds = [seed for each, seed in losses if each == kind]
        if not seeds:
            continue
        mean = statistics.fmean(losses[kind, seed]["loss"] for seed in seeds)
        plain = "float32, SGD" if kind in BY_SGD else PLAIN
        against = "" if kind == plain else str(Difference.between(kind, plain, losses))
        lines.append(f"| {kind} | {mean:.4f} | {against} | {len(seeds)} |")
    return "\n".join(lines)


def times(rounds: int) -> str:
    """Milliseconds of a step of each kind, in Markdown."""
    import warnings

    import jax
    import numpy as np

    from panax.comms import Comms
    from panax.mesh import MeshShape, Placement
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW
    from panax.train import CompiledStep, Program

    model = DecoderConfig(vocab_size=1024, max_length=128, embed=256, num_layers=4, heads=4, ffn=704)
    placement = Placement.create(MeshShape(replica=4, fsdp=2))
    axes = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
    tokens = np.random.default_rng(0).integers(0, 1024, (16, 129)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((16, 128), np.float32)}
    steps, states, found = {}, {}, {kind: [] for kind in KINDS}
    for kind, settings in KINDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = Program.create(DecoderTask(model=model), AdamW(), num_steps=1000, comms=Comms(**settings))
        steps[kind] = CompiledStep(program, placement, axes)
        states[kind], _ = steps[kind](steps[kind].init(0), steps[kind].put(batch))
    for _ in range(rounds):
        for kind, step in steps.items():
            sent = step.put(batch)
            jax.block_until_ready((states[kind], sent))
            began = time.perf_counter()
            states[kind], _ = step(states[kind], sent)
            jax.block_until_ready(states[kind])
            found[kind].append(time.perf_counter() - began)
    lines = ["| gradients travel as | ms of a step | against float32 |", "|---|---|---|"]
    for kind, seconds in found.items():
        ratio = statistics.median(ours / plain for ours, plain in zip(seconds, found[PLAIN]))
        lines.append(f"| {kind} | {statistics.median(seconds) * 1e3:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/compression"), help="where trained.jsonl lies")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--steps", type=int, help="updates of each training (400; of --quickstart 550)")
    parser.add_argument(
        "--quickstart", action="store_true", help="train the quickstart's model in place of a smaller one"
    )
    parser.add_argument("--only", action="append", choices=list(KINDS), help="a kind; may be given again")
    parser.add_argument("--time", action="store_true", help="measure steps instead")
    parser.add_argument("--rounds", type=int, default=15, help="of --time")
    given = parser.parse_args()
    steps = given.steps or (550 if given.quickstart else 400)
    if given.seeds < 1 or steps < 20 or given.rounds < 1:
        parser.error("expected at least 1 seed, 20 steps and 1 round")
    devices = 8 if given.time else REPLICAS
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"

    from panax.system.allocator import keep_freed_memory

    keep_freed_memory()
    if given.time:
        print(times(given.rounds))
        return
    from paired import train_all

    experiments = functools.partial(experiment_of, quickstart=given.quickstart)
    print(table(train_all(given.folder, given.only or KINDS, PLAIN, given.seeds, steps, experiments), steps))


if __name__ == "__main__":
    main()
