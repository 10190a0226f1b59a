"""`panax inspect`: what a recipe is and what a step of it will take, before anything runs."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ..core import DataFacts, Task, pair_axes
from ..core.errors import RecipeError
from ..data import BytePairTokenizer, TextData
from ..data.source import TEXT_AXES
from ..kernels import choose_by_timing
from ..mesh import Placement
from ..metrics.console import WIDTH, fitted, plain_console
from ..plan import Hardware, TooLarge, parse_target, plan_step, target_devices, text_batch, walk_step
from ..plan.report import plan_lines, size, walk_lines
from ..presets import with_blank_images
from ..run import Experiment
from ..run.automatic import with_chosen_mesh
from ..run.description import describe
from ..run.no_data import lacks_data
from ..run.prepare import make_program, prepare
from ..train.compiled import CompiledStep, needs_of
from .overrides import asks_for_help, experiment_from
from .plugins import start_jax, unsaid
from .recipes import built_in

Say = Callable[[str], None]

SETTINGS = "--settings"

HELP = """\
  --data PATH...    read these files, folders or globs of text
  --target h100x64  for devices that are not here (v5p-128, ...)
  --no-compile      as far as tracing tells, in a second or two
  --settings        all settings too, with what was left open filled in
  --mesh auto       choose the layout over the devices
"""

LESS = "Shard over more devices (--mesh.fsdp), or use --task.remat full, more --step.micro-batches or a smaller --data.batch-size"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is inspected.

    Attributes:
        task: With what the recipe left open filled in.
        batch: Shapes of a training batch.
        target: What it is compiled for; None for the attached devices.
    """

    experiment: Experiment
    task: Task
    step: Any
    batch: Callable[[], dict[str, Any]]
    sequence_length: int | None
    target: Hardware | None = None


def inspect(arguments: Sequence[str]) -> int:
    """Print parameters, layout, bytes, FLOPs, settings, and the communication and memory of one compiled step."""
    if asks_for_help(arguments, "inspect", HELP):
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise RecipeError(f"expected `panax inspect RECIPE`; the recipes are {', '.join(sorted(built_in()))}")
    console = plain_console()

    def say(line: str) -> None:
        console.print(fitted(line), style="dim")

    warnings.showwarning = lambda message, *_: _warn(console, str(message))
    with_settings = SETTINGS in arguments
    rest, target, compiles = own_flags([each for each in arguments if each != SETTINGS])
    if target is None:
        experiment = experiment_from(rest, "inspect")
        start_jax()
        subject = _attached(experiment, say)
    else:
        with unsaid():
            devices = target_devices(target)
        subject = _elsewhere(experiment_from(rest, "inspect"), target, devices, say)
    print_parameters(subject, console)
    if isinstance(subject.step, CompiledStep):
        batch = subject.batch()
        print_walk(subject, batch, console)
        if compiles:
            print_step(subject, batch, console)
    if with_settings:
        console.print("settings")
        console.print_json(json.dumps(describe(_resolved(subject))))
    return 0


def own_flags(arguments: Sequence[str]) -> tuple[list[str], Hardware | None, bool]:
    """The arguments without `--target` and `--no-compile`, and what those say."""
    rest, target, compiles = [], None, True
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == "--target":
            target = parse_target(value if equals else next(remaining, ""))
        elif argument == "--no-compile":
            compiles = False
        else:
            rest.append(argument)
    return rest, target, compiles


def _attached(experiment: Experiment, say: Say) -> Subject:
    if lacks_data(experiment) is not None:
        if isinstance(experiment.data, TextData):
            choose_by_timing()
            return _elsewhere(experiment, None, jax.devices(), say)
        experiment = with_blank_images(experiment)
    prepared = prepare(experiment, say)
    source = prepared.data.train
    data = experiment.data

    def batch() -> dict[str, Any]:
        return text_batch(data) if isinstance(data, TextData) else dict(next(source.batches()).batch)

    return Subject(experiment, prepared.task, prepared.step, batch, prepared.data.facts.sequence_length)


def _elsewhere(experiment: Experiment, target: Hardware | None, devices: list[Any], say: Say) -> Subject:
    """For a target, or without data: text is not tokenised, since its batches' shapes are known, and a vocabulary is the task's
    or the tokenizer's."""
    data = experiment.data
    if not isinstance(data, TextData):
        experiment = experiment if lacks_data(experiment) is None else with_blank_images(experiment)
        prepared = prepare(experiment, say, devices)
        return Subject(
            experiment,
            prepared.task,
            prepared.step,
            lambda: dict(next(prepared.data.train.batches()).batch),
            None,
            target,
        )
    try:
        task = experiment.task.adapted(DataFacts(None, data.sequence_length))
    except RecipeError:
        if not isinstance(data.tokenizer, BytePairTokenizer):
            raise
        say(f"the corpus is not read: the vocabulary is taken as its tokenizer's most, {data.tokenizer.vocab_size}")
        task = experiment.task.adapted(DataFacts(data.tokenizer.vocab_size, data.sequence_length))
    axes = TEXT_AXES
    experiment, task = with_chosen_mesh(
        experiment,
        task,
        make_program,
        lambda: text_batch(data),
        axes,
        devices,
        say,
        None if target is None else target.memory_bytes,
        None if target is None else target.devices_per_fast_domain,
    )
    program = make_program(experiment, task)
    placement = Placement.create(experiment.mesh, experiment.rules, devices, needs_of(program))
    step = CompiledStep(program, placement, axes)
    return Subject(experiment, task, step, lambda: text_batch(data), data.sequence_length, target)


def print_parameters(subject: Subject, console: Console) -> None:
    """Print the parameter table, the mesh, bytes and FLOPs."""
    step = subject.step
    program = step.program
    placement = getattr(step, "placement", None) or Placement.create(devices=jax.devices()[:1])
    table = _table(program.abstract.params, program.axes.params, step.shardings.params, program.trainable)
    for number, line in enumerate(table):
        console.print(line, style="" if number else "bold", no_wrap=True)
    mesh = " ".join(f"{axis}={size}" for axis, size in placement.sizes.items() if size > 1) or "one device"
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract.params))
    console.print(f"mesh           {mesh}{f' of {subject.target.name}' if subject.target else ''}")
    console.print(f"number         {total:,} parameters")
    for name, tree, shardings in (
        ("parameters", program.abstract.params, step.shardings.params),
        ("optimizer", program.abstract.optimizer_state, step.shardings.optimizer_state),
    ):
        whole, each = _bytes(tree, shardings)
        console.print(f"{name:14} {size(whole)}, {size(each)} on each device")
    flops = subject.task.flops_per_token(subject.sequence_length) if subject.sequence_length else None
    of = "a token's"
    if flops is None:
        flops, of = subject.task.flops_per_example(), f"one of the {subject.task.unit}'"
    if flops is not None:
        console.print(f"compute        {flops:,.0f} FLOPs for {of} forward and backward pass")


def print_walk(subject: Subject, batch: dict[str, Any], console: Console) -> None:
    """Trace the training step; print what it will take, as far as its trace tells."""
    if not subject.task.names_axes and subject.step.placement.devices.size > 1:
        console.print("traced         no: XLA partitions this task's program, so that only the compiled step tells")
        return
    for line in walk_lines(walk_step(subject.step, batch), _memory_limit(subject)):
        console.print(_fitted(line), highlight=False, markup=False, soft_wrap=True)


def print_step(subject: Subject, batch: dict[str, Any], console: Console) -> None:
    """Compile the training step; print its memory and its communication, and warn if it does not fit."""
    try:
        plan = plan_step(subject.step, batch)
    except TooLarge as error:
        _warn(console, f"{_name(subject)} can't hold the step: {error} {LESS}")
        return
    for line in subject.step.kernels_taken:
        console.print(_fitted(f"kernel         {line}"), highlight=False, markup=False, soft_wrap=True)
    limit = _memory_limit(subject)
    for line in plan_lines(plan, limit, _name(subject)):
        console.print(_fitted(line), highlight=False, markup=False, soft_wrap=True)
    if limit and plan.memory.total > limit:
        _warn(
            console,
            f"the step does not fit: {size(plan.memory.total)} on each device, where there are {size(limit)}. {LESS}",
        )


def _fitted(line: str) -> str:
    """A line behind its name; a table's own lines stay."""
    return line if line.startswith("  ") else fitted(line, 15)


def _name(subject: Subject) -> str:
    if subject.target is not None:
        return subject.target.name
    devices = subject.step.placement.devices.devices
    return f"{devices.size} x {devices.flat[0].device_kind}"


def _memory_limit(subject: Subject) -> int | None:
    if subject.target is not None:
        return subject.target.memory_bytes
    statistics = subject.step.placement.devices.devices.flat[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def _warn(console: Console, message: str) -> None:
    console.print(fitted(f"warning: {message}"), style="bold yellow", highlight=False, markup=False, soft_wrap=True)


def _resolved(subject: Subject) -> dict[str, Any]:
    experiment = subject.experiment
    return {field: getattr(experiment, field) for field in experiment.__dataclass_fields__ if field != "task"} | {
        "task": subject.task
    }


def _table(params: Any, axes: Any, shardings: Any, trainable: Any) -> list[str]:
    """Two lines for each parameter: its name and bytes, and its axes with the mesh axes that split them. Names are never cut."""
    lines = [_row("parameter", "bytes", "on each device")]
    places = jax.tree.leaves(shardings)
    for (name, leaf, leaf_axes), place, free in zip(pair_axes(params, axes), places, jax.tree.leaves(trainable)):
        spec = [*getattr(place, "spec", ()), *(None,) * leaf.ndim]
        dims = [
            f"{axis or '-'} {length}" + (f" ({'·'.join((part,) if isinstance(part, str) else part)})" if part else "")
            for axis, length, part in zip(leaf_axes, leaf.shape, spec)
        ]
        whole, each = _leaf_bytes(leaf.shape, leaf.dtype), _leaf_bytes(place.shard_shape(leaf.shape), leaf.dtype)
        lines += _row(name if free else f"{name} (frozen)", size(whole), size(each)).splitlines()
        lines += fitted(f"  {' x '.join(dims) or 'one number'}", 4).splitlines()
    return lines


def _row(name: str, whole: str, each: str) -> str:
    numbers = f"{whole:>10} {each:>14}"
    return (
        f"{name:{WIDTH - len(numbers)}}{numbers}" if len(name) < WIDTH - len(numbers) else f"{name}\n{numbers:>{WIDTH}}"
    )


def _leaf_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _bytes(tree: Any, shardings: Any) -> tuple[int, int]:
    whole = each = 0
    for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        whole += _leaf_bytes(leaf.shape, leaf.dtype)
        each += _leaf_bytes(place.shard_shape(leaf.shape), leaf.dtype)
    return whole, each
