"""How fast and how well agents train, beside PPO in one jitted function and stable-baselines3.

    python benchmarks/reinforcement.py cartpole --seeds 5       Panax's recipe, one function (PureJaxRL's form), stable-baselines3
    python benchmarks/reinforcement.py seeds                    one seed and three at once
    python benchmarks/reinforcement.py recipe ppo_pendulum --seeds 3

Each figure comes from a process of its own with empty caches of compiled programs; columns take turns. Seconds are of the
whole process: imports, compilation, training, and with Panax its evaluations and checkpoints, but no films. Figures are
written into `--directory` at once, and a table is printed in the end. stable-baselines3 is fetched into a folder of its own
below `--directory`, and runs on the torch of this environment; the one function needs gymnax (jax<0.12).
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS = 100_000
WITH_SB3 = ("stable-baselines3==2.9.2", "gymnasium==1.3.0", "cloudpickle", "farama-notifications")

Figures = dict[str, float]


def of_recipe(name: str, seed: int) -> Figures:
    """A recipe's run, in this process."""
    import panax
    from panax.hooks import Hook, Running

    reached: list[tuple[float, int]] = []

    class Watch(Hook):
        def after_evaluation(self, run: Running, evaluation: Mapping[str, float]) -> None:
            if evaluation["return"] >= 475 and not reached:
                reached.append((time.time(), run.step))

    begun = float(os.environ["BENCHMARK_BEGUN"])
    experiment = getattr(importlib.import_module(f"panax_recipes.{name}"), name)()
    task: Any = experiment.task
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        result = panax.fit(dataclasses.replace(experiment, seed=seed, directory=folder, hooks=(Watch(),)))
        ended = time.time()
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [value for row in rows for key, value in row.items() if key.endswith("environment steps_per_second")]
    compiling = [row["goodput/compile_seconds"] for row in rows if "goodput/compile_seconds" in row]
    return {
        "seconds": ended - begun,
        "compile_seconds": compiling[-1],
        "steps_per_second": statistics.median(speeds[1:] or speeds),
        "steps": float(result.step * task.units_per_row * task.rows),
        "seconds_to_475": reached[0][0] - begun if reached else float("nan"),
        "steps_to_475": float(reached[0][1] * task.units_per_row * task.rows) if reached else float("nan"),
        "return": result.evaluation["return"],
        "return_ci95": result.evaluation["return_ci95"],
    }


def of_one_function(seed: int, steps: int) -> Figures:
    from ppo_one_function import measured

    begun = float(os.environ["BENCHMARK_BEGUN"])
    found = measured(seed, steps)
    return {**found, "seconds": time.time() - begun}


def of_sb3(seed: int, steps: int) -> Figures:
    """PPO with the settings of rl-baselines3-zoo for CartPole, on CPU as its documentation advises."""
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.evaluation import evaluate_policy  # pyright: ignore[reportMissingImports]

    begun = float(os.environ["BENCHMARK_BEGUN"])
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, seed=seed,
        device="cpu",
    )  # fmt: skip
    start = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - start
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 1, seed=seed + 1000), n_eval_episodes=20)
    return {
        "seconds": time.time() - begun,
        "compile_seconds": 0.0,
        "steps_per_second": model.num_timesteps / seconds,
        "return": float(mean),
    }


def of_seeds(seed: int, count: int) -> Figures:
    """Seconds of a step of `ppo_cartpole` with `count` runs side by side, compiled."""
    import jax
    import numpy as np

    from panax.agents import Seeds
    from panax.mesh import MeshShape, Placement
    from panax.train import CompiledStep, Program
    from panax_recipes.ppo_cartpole import ppo_cartpole

    experiment = ppo_cartpole()
    agent: Any = experiment.task
    task = Seeds(task=agent, count=count, clip_norm=0.5)
    config = dataclasses.replace(experiment.step, clip_norm=None)
    program = Program.create(task, experiment.optimizer, num_steps=experiment.num_steps, config=config)
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), {"row": ("batch",)})
    state, batch = step.init(seed), step.put({"row": np.arange(agent.rows, dtype=np.int32)})
    times = []
    for _ in range(12):
        start = time.perf_counter()
        state, scalars = step(state, batch)
        jax.block_until_ready(scalars)
        times.append(time.perf_counter() - start)
    return {"seconds_per_step": statistics.median(times[2:]), "compile_seconds": step.compile_seconds}


def sb3_folder(directory: Path) -> Path:
    """Where stable-baselines3 is, fetched the first time; without its dependencies, which this environment has."""
    folder = directory / "stable-baselines3"
    if not (folder / "stable_baselines3").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *WITH_SB3]
        subprocess.run(command, check=True)
    return folder


def asked(column: str, seed: int, directory: Path, *arguments: str) -> Figures:
    """One column's figures, of a process of its own with empty caches."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")])]
    if column == "sb3":
        paths.insert(0, str(sb3_folder(directory)))
    with tempfile.TemporaryDirectory() as caches:
        inside = {
            "PANAX_CACHE": caches,
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
            "PYTHONPATH": os.pathsep.join(paths),
            "BENCHMARK_BEGUN": str(time.time()),
        }
        command = [sys.executable, __file__, "column", column, "--seed", str(seed), *arguments]
        done = subprocess.run(command, env={**os.environ, **inside}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> None:
    file = options.directory / f"{options.work}{'-' + options.name if options.name else ''}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.work == "cartpole":
        columns = [("recipe", "ppo_cartpole"), ("one_function", ""), ("sb3", "")]
        if importlib.util.find_spec("gymnax") is None:
            print("gymnax is not installed (it needs jax<0.12): the column of one function is left out", flush=True)
            columns = [column for column in columns if column[0] != "one_function"]
    elif options.work == "seeds":
        columns = [("seeds", "1"), ("seeds", "3")]
    else:
        columns = [("recipe", options.name)]
    found: dict[str, list[Figures]] = {}
    for seed in range(options.seeds):
        # Turn by turn, each seed in another order.
        for column, name in columns[seed % len(columns) :] + columns[: seed % len(columns)]:
            figures = asked(column, seed, options.directory, "--name", name, "--steps", str(options.steps))
            line = {"column": column, "name": name, "seed": seed, **figures}
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(line, flush=True)
            found.setdefault(f"{column} {name}".strip(), []).append(figures)
    print(table(found))


def table(found: Mapping[str, list[Figures]]) -> str:
    """The median of each figure over seeds, with the worst return of all."""
    names = list(dict.fromkeys(name for every in found.values() for figures in every for name in figures))
    lines = ["| column | seeds | lowest return | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for column, every in found.items():
        lowest = min((figures["return"] for figures in every if "return" in figures), default=float("nan"))
        cells = [f"{statistics.median(f[name] for f in every):.4g}" if name in every[0] else "" for name in names]
        lines.append(f"| {column} | {len(every)} | {lowest:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def column(options: argparse.Namespace) -> None:
    if options.name == "recipe":
        found = of_recipe(options.of, options.seed)
    elif options.name == "one_function":
        found = of_one_function(options.seed, options.steps)
    elif options.name == "sb3":
        found = of_sb3(options.seed, options.steps)
    else:
        found = of_seeds(options.seed, int(options.of))
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("cartpole", "seeds", "recipe", "column"))
    parser.add_argument("name", nargs="?", default="", help="of a recipe, with `recipe`")
    parser.add_argument("--seeds", type=int, default=5, help="0, 1, ... up to so many")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the environments, where no recipe says")
    parser.add_argument("--directory", type=Path, default=Path("runs/reinforcement"), help="of figures and packages")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--name", dest="of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (column if options.work == "column" else measure)(options)


if __name__ == "__main__":
    main()
