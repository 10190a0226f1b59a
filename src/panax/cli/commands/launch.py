"""`panax launch`: the flags for the location of a job; all others are those of `panax train`."""

import argparse
import dataclasses
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cluster.engines import ENGINES, Engine, Resources, make_engine
from ...cluster.job import STANDBY_COMMAND, Job, RestartPolicy, Stragglers, filter_environment
from ...cluster.launcher import LOCAL
from ...cluster.launcher import launch as launched
from ...cluster.supervisor.diagnosis import Cause
from ...cluster.supervisor.view import AS_SAID, View
from ...core.errors import LaunchError, PanaxError, RecipeError, suggest_name
from ...system import children, json_reader
from .islands import launch_islands

USAGE = """\
usage: panax launch RECIPE --processes N [--on ENGINE] [flags of panax train]

Starts N processes, follows them, and starts them again from the last checkpoint
when one fails. Ctrl-C saves and ends all of them. In the run's folder, job/ has
the output of each process; `panax status RUN` shows its state.

  --processes N     in all, the same number on each node (1)
  --devices D       of each process; on CPU they are simulated
  --on ENGINE       local, ray, slurm, mpi or kubernetes (local)
  --nodes M         machines (1)
  --check           measure the hardware in these processes first; stop where
                    something is odd (--check=warn: warn, and train)
  --dry-run         print what would be started or submitted, and end
  --port P          of JAX's coordinator (any that is free)
  --max-restarts R  then give up (20)
  --max-without-progress F  failures in a row, none of which came further than
                    the one before; then give up (3)
  --stall-seconds S without a step, until it counts as hanging (300)
  --start-seconds S the same before the first step, while a state is restored
                    or a program compiled (1800)
  --save-seconds S  for the save when the job is stopped (600)
  --replace-seconds S  for a lost node to come back; then the job continues
                    without it, and takes it in again at a later save (5)
  --min-nodes M     the fewest that it continues with (1)
  --stragglers P    a node that is slower than the others: warn warns, cordon
                    takes it out at a later save too, ignore does neither (warn)
  --slow-factor F   a node is slow if it takes F times as long as others (1.5)
  --slow-probes N   in N measurements in a row (3)
  --no-spares       keep no processes that wait for a restart
  --quiet           show nothing but how it ended
  --islands I       I jobs, each with these flags, which train by themselves
                    and meet after --comms.local-steps; one that is lost stops
                    no other. --island K starts one of them alone

for engines, as each of them needs; docs/launch/index.md lists which
  --accelerator cpu|gpu|tpu   --cpus C   --memory 64G   --time HH:MM:SS
  --partition P --account A --constraint F --array 0-3          Slurm
  --hosts a,b                                                   MPI
  --image I --namespace N --claim C --mount /runs --queue Q
  --node-selector KEY=VALUE                                     Kubernetes
  --env NAME (a variable that nodes get too)   --address A (the supervisor's)
"""

LAUNCH_FLAGS = (
    "max_restarts",
    "max_without_progress",
    "stall_seconds",
    "start_seconds",
    "save_seconds",
    "replace_seconds",
    "min_nodes",
    "stragglers",
    "slow_factor",
    "slow_probes",
)
"""Fields of the policy that are flags."""

DRY_RUN, ISLANDS, ISLAND = "--dry-run", "--islands", "--island"

SUBMISSION = "--submission"
"""Flag that Panax itself passes to a job that an engine may start again: --fresh only applies to its first
start."""

PROBE_SECONDS = 600.0


def launch(arguments: Sequence[str]) -> int:
    """Start a job according to the flags, and monitor it; or submit it to an engine's queue."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0].startswith("-"):
        raise RecipeError(f"expected `panax launch RECIPE`, and got {arguments[0]}; the recipe comes first")
    options, rest = split_flags(arguments[1:])
    if options.islands is not None or options.island is not None:
        return _islands(options, arguments, rest)
    if "--help" in rest or "-h" in rest:
        print(USAGE)
        return subprocess.run([sys.executable, "-m", "panax", "train", arguments[0], "--help"], check=False).returncode
    resources = read_resources(options)
    policy = RestartPolicy(**{name: getattr(options, name) for name in LAUNCH_FLAGS})
    engine = None if options.on == LOCAL else make_engine(options.on, resources)
    if engine is None:
        resources.check_used(LOCAL, frozenset({"nodes", "processes", "devices"}))
    else:
        if not options.dry_run:
            engine.check()
        policy = dataclasses.replace(policy, agents_seconds=engine.agents_seconds)
    train = (arguments[0], *rest)
    facts = probe(train)
    job = Job(
        arguments=train,
        folder=Path(facts["folder"]),
        name=facts["name"],
        num_steps=facts["num_steps"],
        processes=options.processes,
        nodes=options.nodes,
        devices=options.devices if options.accelerator == "cpu" else None,
        port=options.port,
        spare=() if options.no_spares else STANDBY_COMMAND,
        policy=policy,
        submission=options.submission,
    )
    if options.dry_run:
        print(_submission(job, engine, arguments))
        return 0
    if engine is not None and engine.is_queued():
        return _submit(job, engine, arguments, options.on)
    view = View(job.num_steps, quiet=options.quiet)
    return _report_end(launched(job, engine, name=options.on, view=view), job, view)


def _islands(options: argparse.Namespace, arguments: Sequence[str], recipe_flags: Sequence[str]) -> int:
    """Start islands, each by this command without the flags for islands."""
    if options.islands is None:
        raise LaunchError(f"{ISLAND} {options.island} is one of several: give their number, as in {ISLANDS} 4")
    if options.dry_run or options.submission or options.processes != 1 or options.nodes != 1:
        raise LaunchError(f"{ISLANDS} {options.islands}: an island is one process, with the devices of --devices")
    flags, skips_next = [], False
    for flag in arguments[1:]:
        name, equals, _ = flag.partition("=")
        if skips_next:
            skips_next = False
        elif name in (ISLANDS, ISLAND):
            skips_next = not equals
        else:
            flags.append(flag)
    # With an island's settings: an error is reported once, before any is started.
    store_flags = (
        []
        if any(flag.partition("=")[0] == "--comms.islands.store" for flag in recipe_flags)
        else ["--comms.islands.store", "."]
    )
    facts = probe((arguments[0], *recipe_flags, "--comms.islands.count", str(options.islands), *store_flags))
    return launch_islands(arguments[0], flags, Path(facts["folder"]), options.islands, options.island)


def probe(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the run's folder, name and steps, computed in another process, since computing them imports jax.

    Raises:
        PanaxError: The recipe or its flags can't be used; the message has been printed.
    """
    command = [sys.executable, "-m", "panax.cli.probe", *arguments]
    try:
        result = children.run_command(command, PROBE_SECONDS)
    except TimeoutError as error:
        raise LaunchError(f"the recipe {arguments[0]!r} was not read within {PROBE_SECONDS:.0f} s") from error
    from ..probe import LINE_PREFIX

    *_, line = [each for each in result.output.splitlines() if each.startswith(LINE_PREFIX)] or [""]
    if result.code or not line:
        error_lines = result.errors.strip().splitlines()
        message = "\n".join(error_lines[_start_of_error(error_lines) :]).removeprefix(_ERROR)
        raise _ProbeError(message or f"the recipe {arguments[0]!r} could not be read", result.code or 2)
    sys.stderr.write(result.errors)
    return json_reader.parse(line.removeprefix(LINE_PREFIX), constants=True)


_ERROR = "panax: error: "


class _ProbeError(PanaxError):
    """Error reported by another process."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def _start_of_error(lines: Sequence[str]) -> int:
    return next((number for number, line in enumerate(lines) if line.startswith(_ERROR)), 0)


def split_flags(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the flags into flags of the launch and other flags."""
    parser = argparse.ArgumentParser(prog="panax launch", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--on", default=LOCAL)
    parser.add_argument(DRY_RUN, action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--no-spares", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument(ISLANDS, type=int)
    parser.add_argument(ISLAND, type=int)
    parser.add_argument(SUBMISSION, default="")
    for field in dataclasses.fields(Resources):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, tuple):
            parser.add_argument(flag, action="append", default=[])
        elif isinstance(field.default, str):
            parser.add_argument(flag, default=field.default)
        else:
            parser.add_argument(flag, type=int, default=field.default)
    for name in LAUNCH_FLAGS:
        default = getattr(RestartPolicy(), name)
        choices = [*Stragglers] if isinstance(default, Stragglers) else None
        kind = str if choices else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, choices=choices)
    try:
        options, rest = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise LaunchError(f"{error}; `panax launch --help` lists the flags") from error
    for field in dataclasses.fields(Resources):
        if isinstance(field.default, tuple):
            setattr(options, field.name, tuple(getattr(options, field.name)))
    if options.on not in (LOCAL, *ENGINES):
        raise LaunchError(f"--on {options.on}: there is no such engine; {suggest_name(options.on, (LOCAL, *ENGINES))}")
    if options.port is not None and not 0 < options.port < 65536:
        raise LaunchError(f"--port {options.port}; expected 1 to 65535")
    return options, rest


def read_resources(options: argparse.Namespace) -> Resources:
    """Return the resources that the flags request from an engine."""
    return Resources(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Resources)})


def _submission(job: Job, engine: Engine | None, arguments: Sequence[str]) -> str:
    if engine is not None:
        resubmitted = [each for each in arguments if each != DRY_RUN]
        return engine.render_submission(["launch", *resubmitted], job.folder)
    environment = {**filter_environment(), **job.environment()}
    variables = " ".join(
        f"{name}={shlex.quote(value)}" for name, value in environment.items() if name.startswith(("JAX", "XLA"))
    )
    coordinator = f"PANAX_COORDINATOR=127.0.0.1:{job.port or 'PORT'} PANAX_PROCESSES={job.processes}"
    return "\n".join(
        f"{coordinator} PANAX_PROCESS={index} {variables + ' ' if variables else ''}{shlex.join(job.command())}"
        for index in range(job.processes)
    )


def _submit(job: Job, engine: Engine, arguments: Sequence[str], name: str) -> int:
    job.place.mkdir(parents=True, exist_ok=True)
    number = engine.submit(["launch", *arguments, SUBMISSION, secrets.token_hex(8)], job.folder)
    run = os.path.relpath(job.folder)
    print(
        f"submitted to {name} as {number}\nwhen it runs: panax status {run}, panax logs {run} --follow, panax stop {run}"
    )
    return 0


def _report_end(code: int, job: Job, view: View) -> int:
    """Print why a job has failed, and the command that shows its logs; return its exit code."""
    if code == 0:
        return 0
    from ...cluster.supervisor.job_folder import STATUS, read_job_file

    end = read_job_file(job.place / STATUS).get("end", {})
    advice = f"\n{end['advice']}" if end.get("advice") else ""
    run = os.path.relpath(job.folder)
    kind = "panax" if code in (129, 130, 143) else "panax: error"
    message = end.get("message", "ended")
    if end.get("cause") == Cause.CHECK.value and view.has_shown(message):
        message = "the hardware check has failed, as shown above"
    elif view.has_shown(message):
        message = f"{end.get('cause') or 'the job has failed'}, {AS_SAID}"
    print(f"{kind}: {message}{advice}\nits output: panax logs {run}", file=sys.stderr)
    return code
