"""`panax inspect`: a recipe's contents and the cost of a step, before anything runs."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ...comms.fragments import OuterSync
from ...core import Task, pair_axes
from ...core.errors import RecipeError
from ...data import TextData
from ...kernels import choose_by_timing
from ...mesh import Placement
from ...metrics.console import WIDTH, plain_console, wrap_line
from ...plan import (
    Hardware,
    ProgramTooLargeError,
    StepCost,
    parse_target,
    plan_step,
    target_devices,
    walk_step,
)
from ...plan.report import plan_lines, rare_lines, walk_lines
from ...plan.search.profile import (
    HardwareProfile,
    ProfileError,
    newest_profile,
    profile_in,
    profiles_folder,
    read_profile,
)
from ...plan.search.roofline import DataSheet, ProfileFigures, step_time, time_lines
from ...plan.tables import table_costs, table_lines
from ...plan.walk.walk import walk_agreement, walk_renewal
from ...run import Experiment
from ...run.blank_data import find_missing_data
from ...run.folder.description import serialize_config
from ...run.parts.answer_judges import find_second_models
from ...run.parts.frozen_model import FrozenModel
from ...run.preparation import first_batch, prepare
from ...run.sketch import sketch_step
from ...run.tools.reference import needs_reference
from ...system.terminal_text import format_bytes
from ...train.compiled_step import CompiledStep
from ..overrides import asks_for_help, experiment_from
from ..plugins import start_jax, suppress_plugin_warnings
from ..recipes import built_in_recipes
from ..step_locks import locked_arguments, make_lock, report_changes, write_lock

LogFn = Callable[[str], None]

SETTINGS = "--settings"

HARDWARE = "--hardware"
"""Flag for the file of a profile; `--profile` is a setting of runs."""

HELP = """\
  --data PATH...    read these files, folders or globs of text
  --lora RANK       with adapters of this rank beside a decoder's matrices
  --hardware FILE   a step's time from the profile of `panax check`
  --target h100x64  for devices that you don't have (v5p-128, ...)
  --no-compile      only what tracing shows, in a second or two
  --settings        all settings too, with open ones filled in
  --lock FILE       write the step's cost to a file, for a repository
  --check FILE      compare it with that file: what has changed, in words
                    (exit code 6); without RECIPE, the file's own
  --mesh auto       choose the layout over the devices
"""

TPU_KINDS = {"v5e": ("tpu v5 lite", "tpu v5e"), "v5p": ("tpu v5", "tpu v5p"), "v6e": ("tpu v6 lite", "tpu v6e")}
"""JAX's names of a target's devices, if they do not contain the target's kind."""

LESS = "Shard over more devices (--mesh.fsdp), or use --task.remat full, more --step.micro-batches or a smaller --data.batch-size"


@dataclasses.dataclass(frozen=True)
class Subject:
    """Subject of the inspection.

    Attributes:
        task: The task, with the recipe's open settings filled in.
        batch: Shapes of a training batch.
        target: Hardware that the step is compiled for; None for the attached devices.
        models: Further models beside the one that is trained, by the setting that names each.
    """

    experiment: Experiment
    task: Task
    step: Any
    batch: Callable[[], dict[str, Any]]
    sequence_length: int | None
    target: Hardware | None = None
    models: Mapping[str, FrozenModel] = dataclasses.field(default_factory=dict)

    @property
    def model_bytes(self) -> int:
        """Return the bytes of the further models' weights on each device."""
        return sum(
            _bytes(model.step.program.abstract.params, model.step.shardings.params)[1] for model in self.models.values()
        )


def inspect(arguments: Sequence[str]) -> int:
    """Print parameters, layout, bytes, FLOPs, settings, and the communication and memory of one compiled
    step."""
    if asks_for_help(arguments, "inspect", HELP):
        return 0
    arguments, lock, check = split_lock_flags(arguments)
    if check is not None and not arguments:
        arguments = locked_arguments(check)
    if not arguments or arguments[0].startswith("-"):
        raise RecipeError(f"expected `panax inspect RECIPE`; the recipes are {', '.join(sorted(built_in_recipes()))}")
    console = plain_console()

    def say(line: str) -> None:
        console.print(wrap_line(line), style="dim")

    warnings.showwarning = lambda message, *_: _warn(console, str(message))
    with_settings = SETTINGS in arguments
    rest, target, compiles, profile = split_flags([each for each in arguments if each != SETTINGS])
    measurements = None if profile is None else (read_profile(profile), Path(profile))
    if target is None:
        experiment = experiment_from(rest, "inspect")
        start_jax()
        subject = _attached(experiment, say)
    else:
        with suppress_plugin_warnings():
            devices = target_devices(target)
        subject = _sketch_subject(experiment_from(rest, "inspect"), target, devices, say)
    if measurements is not None:
        _check_profile(subject, *measurements)
    if lock is not None or check is not None:
        return _lock(subject, arguments, lock, check)
    print_parameters(subject, console)
    if isinstance(subject.step, CompiledStep):
        batch = subject.batch()
        for line in table_lines(table_costs(subject.step, batch)):
            console.print(_wrap_row(line), highlight=False, markup=False, soft_wrap=True)
        print_walk(subject, batch, console, measurements)
        if compiles:
            print_step(subject, batch, console)
    if with_settings:
        console.print("settings")
        console.print_json(json.dumps(serialize_config(_resolved(subject))))
    return 0


def split_lock_flags(arguments: Sequence[str]) -> tuple[list[str], str | None, str | None]:
    """Return the arguments without `--lock` and `--check`, and the files of these flags.

    Raises:
        RecipeError: Both are given, or one without a file.
    """
    rest, files = [], dict.fromkeys(("--lock", "--check"))
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name not in files:
            rest.append(argument)
            continue
        files[name] = value if equals else next(remaining, "")
        if not files[name]:
            raise RecipeError(f"{name} needs a file, such as {name} step.lock.json")
    lock, check = files.values()
    if lock is not None and check is not None:
        raise RecipeError("--lock writes the file that --check reads; pass one of them")
    return rest, lock, check


def _lock(subject: Subject, arguments: Sequence[str], lock: str | None, check: str | None) -> int:
    """Write the lock of a step, or compare the step with one; return an exit code."""
    step = subject.step
    if not isinstance(step, CompiledStep) or (not subject.task.names_axes and step.placement.devices.size > 1):
        raise RecipeError(
            f"the communication of {arguments[0]} is not known from a trace, since XLA partitions its program; a lock is of "
            f"steps with named axes, or on one device"
        )
    abstract, shardings = step.program.abstract, step.shardings
    state_bytes = {
        "parameters": _bytes(abstract.params, shardings.params)[1],
        "optimizer": _bytes(abstract.optimizer_state, shardings.optimizer_state)[1],
    }
    made = make_lock(arguments, step, subject.batch(), state_bytes)
    if lock is not None:
        print(write_lock(made, lock))
        return 0
    assert check is not None
    lines, code = report_changes(made, check)
    print("\n".join(lines))
    return code


def split_flags(arguments: Sequence[str]) -> tuple[list[str], Hardware | None, bool, str | None]:
    """Return the arguments without `--target`, `--no-compile` and `--hardware`, and the values of these flags."""
    rest, target, compiles, profile = [], None, True, None
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == "--target":
            target = parse_target(value if equals else next(remaining, ""))
        elif name == HARDWARE:
            profile = value if equals else next(remaining, "")
        elif argument == "--no-compile":
            compiles = False
        else:
            rest.append(argument)
    return rest, target, compiles, profile


def _attached(experiment: Experiment, say: LogFn) -> Subject:
    if needs_reference(experiment):
        choose_by_timing()
        return _sketch_subject(experiment, None, jax.devices(), say)
    if (blank := find_missing_data(experiment)) is not None:
        if isinstance(experiment.data, TextData):
            choose_by_timing()
            return _sketch_subject(experiment, None, jax.devices(), say)
        experiment = blank.fill(experiment)
    prepared = prepare(experiment, say)
    length = prepared.data.facts.sequence_length
    models = find_second_models(prepared)
    return Subject(experiment, prepared.task, prepared.step, lambda: first_batch(prepared), length, models=models)


def _sketch_subject(experiment: Experiment, target: Hardware | None, devices: list[Any], say: LogFn) -> Subject:
    """Build the subject for a target, or without data: text is not tokenized, since its batches' shapes are
    known, and the vocabulary is the task's or the tokenizer's."""
    sketch = sketch_step(
        experiment,
        devices,
        say,
        None if target is None else target.memory_bytes,
        None if target is None else target.devices_per_fast_domain,
    )
    return Subject(
        sketch.experiment, sketch.task, sketch.step, sketch.batch, sketch.sequence_length, target, sketch.models
    )


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
        total_bytes, bytes_per_device = _bytes(tree, shardings)
        console.print(f"{name:14} {format_bytes(total_bytes)}, {format_bytes(bytes_per_device)} on each device")
    for line in _kinds(program.abstract.optimizer_state, step.shardings.optimizer_state, total):
        console.print(line, highlight=False)
    for name in ("owed", "delayed"):
        buffers, leaf_shardings = getattr(program.abstract, name), getattr(step.shardings, name)
        if buffers is not None:
            total_bytes, bytes_per_device = _bytes(buffers, leaf_shardings)
            console.print(f"{name:14} {format_bytes(total_bytes)}, {format_bytes(bytes_per_device)} on each device")
    for name, model in subject.models.items():
        total_bytes, bytes_per_device = _bytes(model.step.program.abstract.params, model.step.shardings.params)
        console.print(
            f"{name:14} {model.source.init}: {format_bytes(total_bytes)}, {format_bytes(bytes_per_device)} on each device",
            soft_wrap=True,
        )
    description = program.comms.describe()
    if description is not None:
        console.print(description)
    flops = subject.task.flops_per_token(subject.sequence_length) if subject.sequence_length else None
    subject_text = "a token's"
    if flops is None:
        flops, subject_text = subject.task.flops_per_example(), f"one of the {subject.task.unit}'"
    if flops is not None:
        console.print(f"compute        {flops:,.0f} FLOPs for {subject_text} forward and backward pass")


def print_walk(
    subject: Subject, batch: dict[str, Any], console: Console, profile: tuple[HardwareProfile, Path] | None = None
) -> None:
    """Trace the training step; print its cost, as far as it is known from the trace.

    Args:
        profile: Measurements of the hardware, with their file; None to search for them.
    """
    if not subject.task.names_axes and subject.step.placement.devices.size > 1:
        console.print("traced         no: XLA partitions this task's program, so that only the compiled step shows it")
        return
    cost = walk_step(subject.step, batch)
    lines = [*walk_lines(cost, _memory_limit(subject)), *_times(subject, cost, profile)]
    renewal, renewed = subject.step.program.transformation.renewal, walk_renewal(subject.step)
    if renewal is not None and renewed is not None:
        lines += rare_lines("renewal", renewed, renewal.description)
    comms = subject.step.program.comms
    # After the first steps, and before the last one, it is always a part.
    for part in range(comms.fragments):
        agreement = walk_agreement(subject.step, OuterSync((part,), (part,)))
        if agreement is not None:
            part_text = "" if comms.fragments == 1 else f" of part {part + 1} of {comms.fragments}"
            lines += rare_lines("agreement", agreement, f"after every {comms.local_steps} steps{part_text}")
    for line in lines:
        console.print(_wrap_row(line), highlight=False, markup=False, soft_wrap=True)


def _times(subject: Subject, cost: StepCost, measurements: tuple[HardwareProfile, Path] | None) -> list[str]:
    """Format a step's time by the devices' measurements, else by their data sheets; empty without either."""
    placement, target = subject.step.placement, subject.target
    if measurements is None and target is None:
        folders = [profile_in(subject.experiment.folder), *sorted(profiles_folder().glob("*.json"))]
        measurements = newest_profile(placement.devices.devices.flat[0].device_kind, placement.sizes, folders)
    if measurements is not None:
        profile, path = measurements
        source = f"measurements of {profile.made[:10]} on {len(profile.places)} x {profile.device_kind}: {path}"
        return time_lines(step_time(cost, ProfileFigures(profile, placement.sizes)), source)
    if target is None:
        return []
    source = (
        f"the data sheet of {target.kind}, which no program reaches; pass --hardware FILE, which `panax check` makes"
    )
    return time_lines(step_time(cost, DataSheet(target, placement.sizes)), source)


def _check_profile(subject: Subject, profile: HardwareProfile, path: Path) -> None:
    """Check that a profile was measured on the kind of device for which a step is compiled."""
    if subject.target is None:
        kind = subject.step.placement.devices.devices.flat[0].device_kind
        fits = kind == profile.device_kind
    else:
        kind = subject.target.kind
        fits = kind in profile.device_kind.lower() or profile.device_kind.lower() in TPU_KINDS.get(kind, ())
    if not fits:
        raise ProfileError(
            f"{path} is the profile of {profile.device_kind}, and the step is for {kind}; run `panax check` there, or "
            f"remove {HARDWARE}"
        )


def print_step(subject: Subject, batch: dict[str, Any], console: Console) -> None:
    """Compile the training step; print its memory and its communication, and warn if it does not fit."""
    try:
        plan = plan_step(subject.step, batch)
    except ProgramTooLargeError as error:
        _warn(console, f"{_name(subject)} can't hold the step: {error} {LESS}")
        return
    for line in subject.step.kernels_used:
        console.print(_wrap_row(f"kernel         {line}"), highlight=False, markup=False, soft_wrap=True)
    limit = _memory_limit(subject)
    for line in plan_lines(plan, limit, _name(subject)):
        console.print(_wrap_row(line), highlight=False, markup=False, soft_wrap=True)
    total = plan.memory.total + subject.model_bytes
    if subject.models:
        console.print(f"with models    {format_bytes(total)} on each device: the step, and {', '.join(subject.models)}")
    if limit and total > limit:
        _warn(
            console,
            f"the step does not fit: {format_bytes(total)} on each device, which has {format_bytes(limit)}. {LESS}",
        )


def _wrap_row(line: str) -> str:
    """Wrap a line, indented after its name; lines of tables are not changed."""
    return line if line.startswith("  ") else wrap_line(line, 15)


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
    console.print(wrap_line(f"warning: {message}"), style="bold yellow", highlight=False, markup=False, soft_wrap=True)


def _resolved(subject: Subject) -> dict[str, Any]:
    experiment = subject.experiment
    return {field: getattr(experiment, field) for field in experiment.__dataclass_fields__ if field != "task"} | {
        "task": subject.task
    }


def _table(params: Any, axes: Any, shardings: Any, trainable: Any) -> list[str]:
    """Format two lines for each parameter: its name and bytes, and its axes with the mesh axes that shard
    them. Names are never truncated."""
    lines = [_row("parameter", "bytes", "on each device")]
    sharding_leaves = jax.tree.leaves(shardings)
    for (name, leaf, leaf_axes), sharding, free in zip(
        pair_axes(params, axes), sharding_leaves, jax.tree.leaves(trainable)
    ):
        spec = [*getattr(sharding, "spec", ()), *(None,) * leaf.ndim]
        dims = [
            f"{axis or '-'} {length}" + (f" ({'·'.join((part,) if isinstance(part, str) else part)})" if part else "")
            for axis, length, part in zip(leaf_axes, leaf.shape, spec)
        ]
        total_bytes, bytes_per_device = (
            _leaf_bytes(leaf.shape, leaf.dtype),
            _leaf_bytes(sharding.shard_shape(leaf.shape), leaf.dtype),
        )
        lines += _row(
            name if free else f"{name} (frozen)", format_bytes(total_bytes), format_bytes(bytes_per_device)
        ).splitlines()
        lines += wrap_line(f"  {' x '.join(dims) or 'one number'}", 4).splitlines()
    return lines


def _kinds(state: Any, shardings: Any, parameters: int) -> list[str]:
    """Format a line for each kind of state of a sharded optimizer: its bytes, its dtypes, and its bytes per
    parameter."""
    lines = []
    for kind, kind_state in state.items() if isinstance(state, Mapping) else ():
        total_bytes, bytes_per_device = _bytes(kind_state, shardings[kind])
        types = " and ".join(dict.fromkeys(leaf.dtype.name for leaf in jax.tree.leaves(kind_state)))
        if isinstance(kind_state, Mapping):
            bytes_per_parameter = total_bytes / max(1, parameters)
            lines.append(
                f"  {kind:12} {format_bytes(total_bytes)}, {format_bytes(bytes_per_device)} on each: "
                f"{types}, {bytes_per_parameter:.2f} bytes a parameter"
            )
    return lines


def _row(name: str, total_bytes: str, each: str) -> str:
    numbers = f"{total_bytes:>10} {each:>14}"
    return (
        f"{name:{WIDTH - len(numbers)}}{numbers}" if len(name) < WIDTH - len(numbers) else f"{name}\n{numbers:>{WIDTH}}"
    )


def _leaf_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _bytes(tree: Any, shardings: Any) -> tuple[int, int]:
    total_bytes = bytes_per_device = 0
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        total_bytes += _leaf_bytes(leaf.shape, leaf.dtype)
        bytes_per_device += _leaf_bytes(sharding.shard_shape(leaf.shape), leaf.dtype)
    return total_bytes, bytes_per_device
