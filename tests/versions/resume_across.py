"""A run that is saved under one JAX resumes under another, in both directions.

    python tests/versions/resume_across.py --oldest .ci/venv/bin/python --newest .ci/newest-venv/bin/python

Both interpreters need Panax installed. Each direction trains a small decoder for half of its steps under one and resumes it under
the other. The parameters must be equal bit by bit to those of a run that was not interrupted, or close to them. Whenever the JAX
version has changed, the log must have the line that says what may differ.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, HALF = 8, 4
# Rounding of float32, grown over eight steps of AdamW; another batch, another mask of dropout or lost moments make 1e-2.
TOLERANCE = 1e-4
LINE = re.compile(r"^changed since that checkpoint: .*jax (\S+) -> ([^\s,;]+).*may differ", re.MULTILINE)
WORDS = (
    "a",
    "the",
    "step",
    "mesh",
    "weight",
    "layer",
    "token",
    "batch",
    "loss",
    "sum",
    "shard",
    "gradient",
    "head",
    "scale",
)


def train(folder: Path, name: str, steps: int) -> None:
    """Train the run `name` to `steps`, from wherever it was; write its parameters and its last loss beside it."""
    import jax
    import numpy as np

    from panax import Experiment, fit
    from panax.checkpoint import CheckpointConfig
    from panax.core import named_leaves
    from panax.data import BytePairTokenizer, TextData, TextFiles
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW, Schedule

    experiment = Experiment(
        name=name,
        directory=str(folder / name),
        task=DecoderTask(
            model=DecoderConfig(max_length=32, embed=32, num_layers=2, heads=2, ffn=64, windows=(0,), dropout=0.1)
        ),
        data=TextData(
            corpus=TextFiles(paths=(str(folder / "corpus"),), pattern="*.txt"),
            tokenizer=BytePairTokenizer(vocab_size=300),
            sequence_length=32,
            batch_size=8,
            cache_dir=str(folder / "cache"),
        ),
        optimizer=AdamW(schedule=Schedule(peak=6e-3, decay="constant")),
        num_steps=steps,
        checkpoint=CheckpointConfig(every=HALF),
        log_every=1,
    )
    result = fit(experiment, say=lambda line: print(line, flush=True))
    assert result.step == steps
    arrays = {each: np.asarray(leaf) for each, leaf in named_leaves(result.state.params).items()}
    np.savez(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps({"jax": jax.__version__}))


def run(python: str, folder: Path, name: str, steps: int) -> tuple[str, str]:
    """Run `train` in an interpreter; return (its JAX version, its output)."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PANAX_CPU_KERNELS": "xla",
        "PANAX_CACHE": str(folder / "cache"),
    }
    command = [python, __file__, "--train", name, "--steps", str(steps), "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} under {python} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads((folder / f"{name}.json").read_text())["jax"], done.stdout


def difference(folder: Path, one: str, other: str) -> float:
    """The largest difference of two runs' parameters, as a share of the largest value of its array."""
    import numpy as np

    with np.load(folder / f"{one}.npz") as left, np.load(folder / f"{other}.npz") as right:
        assert sorted(left.files) == sorted(right.files), "the runs have other parameters"
        return max(float(np.abs(left[n] - right[n]).max() / max(float(np.abs(right[n]).max()), 1e-30)) for n in left)


def check(folder: Path, before: str, after: str) -> str:
    """Resume under `after` what was saved under `before`; a verdict in one line, or exit."""
    name = f"resumed-{len(list(folder.glob('resumed-*.npz')))}"
    old, _ = run(before, folder, name, HALF)
    new, said = run(after, folder, name, STEPS)
    if f"resuming from step {HALF} of {STEPS}" not in said:
        sys.exit(f"the run of jax {old} was not resumed under jax {new}:\n{said}")
    lines = LINE.findall(said)
    if lines != [(old, new)] * (old != new):
        sys.exit(f"resumed under jax {new} from jax {old}, the log should say so in one line, and has {lines}:\n{said}")
    off = {whole: difference(folder, name, whole) for whole in ("whole-oldest", "whole-newest")}
    nearest = min(off, key=lambda whole: off[whole])
    if not off[nearest] < TOLERANCE:
        sys.exit(f"jax {old} -> {new}: the resumed run is {off} away from uninterrupted ones, more than {TOLERANCE}")
    how = "bitwise" if off[nearest] == 0 else f"up to {off[nearest]:.1e}, and the log says what may differ"
    return f"saved under jax {old}, resumed under jax {new}: equal to the {nearest.partition('-')[2]}'s own run {how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oldest", help="the interpreter with the oldest JAX")
    parser.add_argument("--newest", help="the interpreter with the newest JAX")
    for flag in ("--train", "--steps", "--folder"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Path(options.folder), options.train, int(options.steps))
        return
    if not (options.oldest and options.newest):
        parser.error("both --oldest and --newest are needed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "corpus").mkdir()
        drawn = random.Random(0)
        for number in range(4):
            text = " ".join(drawn.choice(WORDS) for _ in range(1000))
            (folder / "corpus" / f"{number}.txt").write_text(text)
        for kind in ("oldest", "newest"):
            run(getattr(options, kind), folder, f"whole-{kind}", STEPS)
        for before, after in ((options.oldest, options.newest), (options.newest, options.oldest)):
            print(check(folder, before, after), flush=True)


if __name__ == "__main__":
    main()
