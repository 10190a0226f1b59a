"""`panax check`: measure the hardware before it is used, and report anomalies."""

import argparse
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from ...core.errors import RecipeError
from ...job.agreement import is_process_zero
from ...job.join import join
from ...mesh import MeshShape
from ...mesh.rules import MESH_AXES
from ...metrics.console import plain_console, wrap_line
from ...preflight import Preflight
from ...preflight.full import part_lines
from ...preflight.report import format_figures, format_findings
from ...run import Experiment, check
from ...run.auto_mesh import LogFn
from ...run.tools.check import CheckError
from ..overrides import experiment_from
from ..plugins import start_jax

USAGE = """\
usage: panax check [RECIPE] [flags of panax train]

Measures each device, mesh axis, link, clock and disk, each host's versions,
compares them, and names anomalies. With a recipe: the mesh, collectives,
message sizes and disks of that run. Started in several processes, as `panax
train` is, it measures the links between them.

  --mesh.fsdp N ...  without a recipe: sizes of mesh axes (all along fsdp)
  --place PLACE      write to and read from this location too (repeatable)
  --save FILE        keep the profile there, in place of Panax's cache
  --strict           exit with 6 if there are findings
  --full             also, in one process and some minutes: every kernel against
                     its definition, steps on each kind of layout, a checkpoint,
                     a benchmark; one dated page about it. Exits with 1 if a
                     part fails
  --output FILE      that page (of --full; FILE must be new)
  --json             findings and all figures as JSON
"""


def check_hardware(arguments: Sequence[str]) -> int:
    """Measure, show figures and findings, and save the profile."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    options, rest = split_flags(arguments)
    experiment: Experiment | None = None
    mesh: MeshShape | None = None
    if rest and not rest[0].startswith("-"):
        experiment = experiment_from(rest, "check")
    else:
        mesh = _mesh(rest)
    with _redirect_library_output() if options.json else contextlib.nullcontext():
        join()
        start_jax()
        console = plain_console()
        console.quiet = not is_process_zero()
        with _show_progress(console, quiet=options.json) as say:
            result = check(
                experiment,
                mesh=mesh,
                places=options.place,
                save=options.save,
                full=options.full,
                output=options.output,
                say=say,
            )
    if is_process_zero():
        if options.json:
            print(result.to_json())
        else:
            show(result, console)
    if options.strict and result.findings:
        return CheckError.exit_code
    return 1 if result.full is not None and result.full.failed else 0


def split_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the flags into flags of the check itself and other flags."""
    parser = argparse.ArgumentParser(prog="panax check", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--place", action="append", default=[])
    parser.add_argument("--save")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--output")
    try:
        return parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise RecipeError(f"{error}; `panax check --help` lists the flags") from error


def _mesh(flags: Sequence[str]) -> MeshShape:
    parser = argparse.ArgumentParser(prog="panax check", add_help=False, allow_abbrev=False, exit_on_error=False)
    usual = MeshShape()
    for axis in MESH_AXES:
        parser.add_argument(f"--mesh.{axis}", dest=axis, type=int, default=getattr(usual, axis))
    try:
        options, strange = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise RecipeError(f"{error}; `panax check --help` lists the flags") from error
    if strange:
        raise RecipeError(
            f"{strange[0]} is not a flag of `panax check` without a recipe; put the recipe first: panax check RECIPE {strange[0]}"
        )
    return MeshShape(**vars(options))


@contextlib.contextmanager
def _redirect_library_output() -> Iterator[None]:
    """Redirect libraries' standard output, such as Gloo's connection messages, to standard error within the
    context."""
    try:
        saved_stdout = os.dup(1)
    except OSError:
        # Standard output is closed.
        yield
        return
    sys.stdout.flush()
    try:
        os.dup2(2, 1)
        try:
            yield
        finally:
            # C buffers lines if standard output is not a terminal.
            ctypes.CDLL(None).fflush(None)
            sys.stdout.flush()
            os.dup2(saved_stdout, 1)
    finally:
        os.close(saved_stdout)


@contextlib.contextmanager
def _show_progress(console: Console, *, quiet: bool) -> Iterator[LogFn]:
    """Show the current measurement in a temporary line; nothing without a terminal."""
    if quiet or console.quiet or not console.is_terminal:
        yield lambda line: None
        return
    with console.status("measuring") as status:
        yield lambda line: status.update(f"measuring {line}")


def show(result: Preflight, console: Console) -> None:
    """Show figures, then findings, then the path of the profile."""
    for line in format_figures(result.profile):
        console.print(line if line.startswith(" ") or len(line) <= console.width else wrap_line(line, 15))
    for number, line in enumerate(format_findings(result)):
        style = "bold yellow" if result.findings and number == 1 else "green" if not result.findings else None
        console.print(wrap_line(line, 11) if line.startswith("   ") else line, style=style)
    if result.full is not None:
        for line in part_lines(result.full):
            console.print(wrap_line(line, len(line) - len(line.lstrip()) or 15))
        console.print(f"\nfull check     {result.page}")
    if result.kept is not None:
        console.print(f"\nprofile        {result.kept}")
        console.print(
            "               panax inspect reads it for these devices; elsewhere: --hardware FILE", style="dim"
        )
    sys.stdout.flush()
