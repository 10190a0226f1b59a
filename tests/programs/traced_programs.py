"""The programs of the golden runs and of every recipe, and the hashes of them that were recorded."""

import contextlib
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import golden_agent_recipes
import golden_agents
import golden_layouts
import golden_optimizers
import golden_recommender_recipes
import golden_sums
import golden_tables
import golden_text_recipes
import jax
import recommending
from canonical import hash_traced
from growing import keyed_batch

from panax.kernels.compute_dtype import AUTO
from panax.kernels.cpu.choice import CpuKernels, use_temporarily
from panax.run.sketch import sketch_step
from panax.train import CompiledStep

RECORDED = Path(__file__).with_name("hashes.txt")
STEPS = {
    "layouts": (golden_layouts.MESHES, golden_layouts.step_for, lambda name: golden_layouts.batch(0)),
    "optimizers": (golden_optimizers.OPTIMIZERS, golden_optimizers.step_for, lambda name: golden_optimizers.batch(0)),
    "sums": (golden_sums.COMMS, golden_sums.step_for, lambda name: golden_sums.batch(0)),
    "tables": (
        [*golden_tables.OPTIMIZERS, "growing"],
        golden_tables.step_for,
        lambda name: keyed_batch(0) if name == "growing" else recommending.batch_of(0),
    ),
    "agents": (golden_agents.AGENTS, golden_agents.step_for, golden_agents.batch_for),
}
"""Group to the names of its runs, their steps, and a batch of each."""

RECIPES = golden_text_recipes.RECIPES | golden_recommender_recipes.RECIPES | golden_agent_recipes.RECIPES


def names() -> list[str]:
    return [f"{group}/{name}" for group, (members, *_) in STEPS.items() for name in members] + [
        f"recipes/{name}" for name in RECIPES
    ]


def hashes_of(name: str) -> dict[str, str]:
    """Trace the programs of a golden run or a recipe, with XLA's kernels: the name of each, and its hash."""
    group, _, member = name.partition("/")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_temporarily(CpuKernels()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # Of meshes that suit no network.
        # gymnax mixes dtypes and ranks.
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        step, batch = _recipe_step(member, folder) if group == "recipes" else _golden_step(group, member)
        return {f"{name} {part}": hash_traced(traced, **options) for part, traced, options in _programs(step, batch)}


def _golden_step(group: str, member: str) -> tuple[CompiledStep, Mapping[str, Any]]:
    _, step_for, batch_for = STEPS[group]
    return step_for(member), batch_for(member)


def _recipe_step(name: str, folder: Path) -> tuple[CompiledStep, Mapping[str, Any]]:
    """The step of a recipe on one device; the recommenders are small, as reading their data takes a minute."""
    made = RECIPES[name]
    if name in golden_recommender_recipes.RECIPES:
        experiment = golden_recommender_recipes.small(name, folder)
    else:
        experiment = (made[0] if isinstance(made, tuple) else made)()
    if experiment.task.compute_dtype == AUTO:
        # It depends on the processor.
        experiment = dataclasses.replace(experiment, task=experiment.task.with_compute_dtype("bfloat16"))
    sketch = sketch_step(experiment, jax.devices()[:1], lambda line: None)
    return sketch.step, sketch.batch()


def _programs(step: CompiledStep, batch: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The programs of a step, each with how its arguments are read."""
    yield "step", step.trace(batch), {"shardings": step.shardings}
    yield "evaluation", step.trace_evaluation(batch), {}
    if step.program.transformation.renewal is not None:
        yield "renewal", step.trace_renewal(), {"shardings": step.shardings.optimizer_state}
    if step.program.abstract.replicas is not None:
        yield "outer sync", step.trace_outer_sync(), {"shardings": step.shardings}
    yield "initial state", step.trace_init(), {"state_argument": None, "shardings": step.shardings}


def read_recorded() -> tuple[str, dict[str, str]]:
    """Return the version of JAX and the hashes that were recorded."""
    first, *lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# jax "), dict(line.rsplit(" ", 1) for line in lines)


def write_recorded(hashes: Mapping[str, str]) -> None:
    lines = [f"# jax {jax.__version__}", *(f"{name} {hashed}" for name, hashed in sorted(hashes.items()))]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")
