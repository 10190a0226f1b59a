"""How fast and how well agents train, beside PureJaxRL and stable-baselines3.

    python benchmarks/reinforcement.py cartpole --seeds 5 --purejaxrl CLONE
    python benchmarks/reinforcement.py breakout --seeds 3 --purejaxrl CLONE
    python benchmarks/reinforcement.py seeds                    one seed and three at once: a step, and a whole run
    python benchmarks/reinforcement.py recipe ppo_pendulum --seeds 3

Each figure comes from a process of its own with empty caches of compiled programs; columns take turns. Seconds are of the
whole process: imports, compilation, training, and with Panax its evaluations and checkpoints, but no films. Figures are
written into `--directory` at once, and a table is printed in the end.

PureJaxRL is not in a registry: CLONE is a clone of its repository (github.com/luchris429/purejaxrl), whose `ppo.py` runs
unchanged in an environment of its own that is made below `--directory`: this jax, and of gymnax the last version whose
steps return what `ppo.py` expects. stable-baselines3 is fetched into a folder there, and runs on the torch of this environment.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS = 100_000
WITH_SB3 = ("stable-baselines3==2.9.2", "gymnasium==1.3.0", "cloudpickle", "farama-notifications")

PUREJAXRL: dict[str, Any] = {
    "UPDATE_EPOCHS": 4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5, "ANNEAL_LR": True, "NUM_STEPS": 128,
}  # fmt: skip
PUREJAXRL_OF: dict[str, dict[str, Any]] = {
    "cartpole": {"LR": 2.5e-4, "NUM_ENVS": 4, "NUM_MINIBATCHES": 4, "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1"},
    "breakout": {
        "LR": 5e-3, "NUM_ENVS": 64, "NUM_MINIBATCHES": 8, "ACTIVATION": "relu", "ENV_NAME": "Breakout-MinAtar"
    },
}  # fmt: skip
"""Its settings: of `ppo.py` for CartPole, of its example of MinAtar for Breakout."""
RECIPES = {"cartpole": "ppo_cartpole", "breakout": "ppo_breakout"}

Figures = dict[str, float]


def of_recipe(name: str, seed: int) -> Figures:
    """A recipe's run, in this process."""
    import panax
    from panax.hooks import Hook, RunView

    reached: list[tuple[float, int]] = []

    class Watch(Hook):
        def after_evaluation(self, run: RunView, evaluation: Mapping[str, float]) -> None:
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


def of_purejaxrl(clone: str, game: str, seed: int, steps: int) -> Figures:
    """PureJaxRL's own program with the figures it has for a game, nothing printed while it runs."""
    begun = float(os.environ["BENCHMARK_BEGUN"])
    sys.path.insert(0, clone)
    # `wrappers.py` imports it for an environment that is not asked for here.
    sys.modules["brax"] = types.SimpleNamespace(envs=None)  # pyright: ignore[reportArgumentType]
    import jax
    import numpy as np
    from purejaxrl.ppo import make_train  # pyright: ignore[reportMissingImports]

    config = {**PUREJAXRL, **PUREJAXRL_OF[game], "TOTAL_TIMESTEPS": steps}
    start = time.perf_counter()
    compiled = jax.jit(make_train(config)).lower(jax.random.PRNGKey(seed)).compile()
    compile_seconds = time.perf_counter() - start
    start = time.perf_counter()
    curve = jax.block_until_ready(compiled(jax.random.PRNGKey(seed)))["metrics"]
    running = time.perf_counter() - start
    ended, returned = (np.asarray(curve[name]) for name in ("returned_episode", "returned_episode_returns"))
    means = [float(values[done].mean()) for values, done in zip(returned, ended) if done.any()]
    per_update = config["NUM_ENVS"] * config["NUM_STEPS"]
    solved = [number for number, (v, d) in enumerate(zip(returned, ended), 1) if d.any() and v[d].mean() >= 475]
    return {
        "seconds": time.time() - begun,
        "compile_seconds": compile_seconds,
        "steps_per_second": len(ended) * per_update / running,
        "steps": float(len(ended) * per_update),
        "steps_to_475": float(solved[0] * per_update) if solved else float("nan"),
        "return": statistics.fmean(means[-20:]),
    }


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


def with_seeds(count: int) -> Any:
    """`ppo_cartpole`, as `count` runs side by side."""
    from panax.agents import Seeds
    from panax_recipes.ppo_cartpole import ppo_cartpole

    experiment = ppo_cartpole()
    agent: Any = experiment.task
    task = Seeds(task=agent, count=count, clip_norm=experiment.step.clip_norm)
    return dataclasses.replace(
        experiment, task=task, step=dataclasses.replace(experiment.step, clip_norm=None), hooks=()
    )


def of_a_step(seed: int, count: int) -> Figures:
    """Seconds of a step with `count` runs side by side, compiled."""
    import jax
    import numpy as np

    from panax.mesh import MeshShape, Placement
    from panax.train import CompiledStep, Program

    experiment = with_seeds(count)
    program = Program.create(
        experiment.task, experiment.optimizer, num_steps=experiment.num_steps, config=experiment.step
    )
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), {"row": ("batch",)})
    state, batch = step.init(seed), step.put({"row": np.arange(experiment.task.rows, dtype=np.int32)})
    times = []
    for _ in range(12):
        start = time.perf_counter()
        state, scalars = step(state, batch)
        jax.block_until_ready(scalars)
        times.append(time.perf_counter() - start)
    return {"seconds_per_step": statistics.median(times[2:]), "compile_seconds": step.compile_seconds}


def of_a_run(seed: int, count: int) -> Figures:
    """Seconds of a whole run with `count` side by side: imports, compilation, steps, evaluations, checkpoints."""
    import panax

    begun = float(os.environ["BENCHMARK_BEGUN"])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        result = panax.fit(dataclasses.replace(with_seeds(count), seed=seed, directory=folder))
    return {"seconds": time.time() - begun, "return": result.evaluation["return"]}


def sb3_folder(directory: Path) -> Path:
    """Where stable-baselines3 is, fetched the first time; without its dependencies, which this environment has."""
    folder = directory / "stable-baselines3"
    if not (folder / "stable_baselines3").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *WITH_SB3]
        subprocess.run(command, check=True)
    return folder


def purejaxrl_python(directory: Path) -> Path:
    """The interpreter of an environment with what PureJaxRL imports, and this jax."""
    folder = directory / "purejaxrl-environment"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        import jax

        needs = [f"jax=={jax.__version__}", "flax", "distrax", "gymnax==0.0.9", "optax"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *needs], check=True)
        (folder / "complete").touch()
    return python


def asked(column: str, seed: int, directory: Path, *arguments: str) -> Figures:
    """One column's figures, of a process of its own with empty caches."""
    python, paths = Path(sys.executable), [*filter(None, [os.environ.get("PYTHONPATH")])]
    if column == "sb3":
        paths.insert(0, str(sb3_folder(directory)))
    if column == "purejaxrl":
        python, paths = purejaxrl_python(directory), []
    with tempfile.TemporaryDirectory() as caches:
        inside = {
            "PANAX_CACHE": caches,
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
            "PYTHONPATH": os.pathsep.join(paths),
            "BENCHMARK_BEGUN": str(time.time()),
        }
        command = [str(python), __file__, "column", column, "--seed", str(seed), *arguments]
        done = subprocess.run(command, env={**os.environ, **inside}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def columns_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(column, what of it) of a work."""
    if options.work == "seeds":
        return [(column, count) for column in ("step", "run") for count in ("1", "3")]
    if options.work == "recipe":
        return [("recipe", options.name)]
    beside = [("purejaxrl", options.work)] if options.purejaxrl else []
    return [("recipe", RECIPES[options.work]), *beside, *([("sb3", "")] if options.work == "cartpole" else [])]


def measure(options: argparse.Namespace) -> None:
    file = options.directory / f"{options.work}{'-' + options.name if options.name else ''}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = columns_of(options)
    # Environments are made before anything is timed.
    if options.purejaxrl:
        purejaxrl_python(options.directory)
    found: dict[str, list[Figures]] = {}
    steps = options.steps or (999_424 if options.work == "breakout" else STEPS)
    for seed in range(options.seeds):
        # Turn by turn, each seed in another order.
        for column, name in columns[seed % len(columns) :] + columns[: seed % len(columns)]:
            arguments = ("--name", name, "--steps", str(steps), "--purejaxrl", options.purejaxrl)
            figures = asked(column, seed, options.directory, *arguments)
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
    elif options.name == "purejaxrl":
        found = of_purejaxrl(options.purejaxrl, options.of, options.seed, options.steps)
    elif options.name == "sb3":
        found = of_sb3(options.seed, options.steps)
    elif options.name == "step":
        found = of_a_step(options.seed, int(options.of))
    else:
        found = of_a_run(options.seed, int(options.of))
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("cartpole", "breakout", "seeds", "recipe", "column"))
    parser.add_argument("name", nargs="?", default="", help="of a recipe, with `recipe`")
    parser.add_argument("--seeds", type=int, default=5, help="0, 1, ... up to so many")
    parser.add_argument("--steps", type=int, default=0, help="of the environments, where no recipe says")
    parser.add_argument("--purejaxrl", default="", metavar="CLONE", help="a clone of PureJaxRL: its column beside")
    parser.add_argument("--directory", type=Path, default=Path("runs/reinforcement"), help="of figures and packages")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--name", dest="of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (column if options.work == "column" else measure)(options)


if __name__ == "__main__":
    main()
