"""`panax status`, `logs`, `stop`, `cordon`, `uncordon`: commands for a run, based on the files in its folder;
here for launched runs."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...cluster.node.worker_process import log_path
from ...cluster.supervisor.job_folder import (
    JOB,
    STALE_SECONDS,
    STATUS,
    STOP,
    job_folder_path,
    read_findings,
    read_incidents,
    read_job_file,
)
from ...cluster.supervisor.job_layout import JobShapes, read_cordoned
from ...cluster.supervisor.job_layout import cordon as taken_out
from ...cluster.supervisor.job_layout import uncordon as put_back
from ...core.errors import LaunchError
from ...core.sanitize import make_printable
from ..parser import Parser
from ..tails import follow, print_escaped, read_last_lines
from . import plain_runs

FOLLOW_SECONDS = 0.5
WAIT_SECONDS = 660.0
"""Time for a stopped job to save and end."""


ABOUT = {
    "status": "Show the state of a run, or why it ended.",
    "logs": "Show the output of a run, or of a launched run's processes.",
    "stop": "Save a run, in all its processes at one step, and end it.",
    "cordon": "Take nodes out of a launched run: it continues without them from its next save.",
    "uncordon": "Put nodes back that were taken out of a launched run: it takes them in at its next save.",
}


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's flags."""
    parser = Parser(prog=f"panax {command}", description=ABOUT[command])
    parser.add_argument("run", help="its folder: runs/NAME")
    if command == "logs":
        parser.add_argument("--process", type=int, help="of one process alone; without it, of each, its last lines")
        parser.add_argument("--lines", type=int, default=20, help="the last ones of each (%(default)s)")
        parser.add_argument("--follow", action="store_true", help="and new lines, until the job ends")
    if command in ("cordon", "uncordon"):
        parser.add_argument("nodes", nargs="+", metavar="NODE", help="a number of the job's, or a host's name")
    if command == "cordon":
        parser.add_argument("--why", default="by hand", help="for `panax status` and the report")
    return parser


def status(arguments: Sequence[str]) -> int:
    """Print the state of a launched run, or why it has ended."""
    run = parser_of("status").parse_args(arguments).run
    if plain_runs.is_plain(run):
        return plain_runs.status(run)
    place = job_folder_path(run)
    job, now = read_job_file(place / JOB), time.time()
    if not (place / STATUS).is_file():
        print_escaped(f"{job['name']}: launched {_ago(now - job['began'])} ago; nothing is known yet")
        return 0
    job_status = read_job_file(place / STATUS)
    end = job_status.get("end")
    step = (
        f"step {job_status['step']:,} of {job_status['num_steps']:,}"
        if job_status["step"] >= 0
        else "before the first step"
    )
    is_abandoned = end is None and not is_followed(place, job_status)
    state = "no longer supervised" if is_abandoned else job_status["state"]
    print_escaped(f"{job['name']}: {state}, {step}, after {_ago(job_status['seconds'])}")
    print_escaped(f"  {job['command']}")
    # Goodput is printed below, from the ledger.
    reported = {name: value for name, value in job_status.get("values", {}).items() if not name.startswith("goodput/")}
    values = {name.rpartition("/")[2]: value for name, value in reported.items()}
    figures = [f"{name} {value:,.4g}" for name, value in values.items()]
    if isinstance(job_status.get("goodput"), float):
        figures.append(f"goodput {job_status['goodput']:.0%}")
    print_escaped("  " + ", ".join([*figures, f"restarts {job_status['restarts']}"]))
    if end is not None:
        print_escaped(f"  ended with exit code {end['exit_code']}: {end['message']}")
        if end.get("advice"):
            print_escaped(f"  {end['advice']}")
    elif is_abandoned:
        print_escaped(
            f"  the supervisor has not written for {_ago(now - job_status['at'])}; the same `panax launch` resumes the run"
        )
    nodes = job_status.get("nodes", {})
    if nodes and len(nodes["running"]) < nodes["of"]:
        print_escaped(f"  on {len(nodes['running'])} of {nodes['of']} nodes: {nodes['layout']}")
    for node, why in read_cordoned(place).items():
        still = " from the next save on; it runs until then" if node in nodes.get("running", ()) else ""
        print_escaped(f"  node {node} is taken out{still}: {why}")
    for one in job_status["processes"]:
        ended = "" if one["exit_code"] is None else f", exit code {one['exit_code']}"
        print_escaped(f"  process {one['process']} on {one['host']}: {one['phase']}, step {one['step']}{ended}")
    for message in job_status.get("slow", ()):
        print_escaped(f"  slow now: {message}")
    for one in read_findings(place):
        print_escaped(f"  at step {one['step']}: {one['kind']}: {one['message']}")
    for one in read_incidents(place):
        print_escaped(f"  incident at step {one['step']}: {one['cause']}: {one['message']}")
        parts = ("detect", "teardown", "restart", "restore", "first_step")
        seconds = [f"{part.replace('_', ' ')} {one[part]:.1f}" for part in parts if one.get(part) is not None]
        if seconds:
            print_escaped(f"    seconds: {', '.join(seconds)}")
    return 0


def logs(arguments: Sequence[str]) -> int:
    """Print the output of a launched run's processes."""
    options = parser_of("logs").parse_args(arguments)
    if options.lines < 1:
        raise LaunchError(f"--lines {options.lines}; expected at least 1")
    if plain_runs.is_plain(options.run):
        if options.process:
            raise LaunchError(f"--process {options.process}: the run was not launched, and has one log, of process 0")
        return plain_runs.logs(options.run, options.lines, following=options.follow)
    place = job_folder_path(options.run)
    count = int(read_job_file(place / JOB)["processes"])
    if options.process is not None and not 0 <= options.process < count:
        raise LaunchError(f"--process {options.process}: the job has {count}, from 0 to {count - 1}")
    indices = range(count) if options.process is None else [options.process]
    offsets: dict[int, int] = {}
    for process in indices:
        path = log_path(place, process)
        lines, offsets[process] = read_last_lines(path, options.lines)
        if options.process is None:
            print(f"== process {process}: {path}")
        print("\n".join(map(make_printable, lines)))
    while options.follow:
        sys.stdout.flush()
        over = _has_ended(place)
        for process in indices:
            mark = process if len(offsets) > 1 else None
            offsets[process] = follow(log_path(place, process), offsets[process], mark, last=over)
        if over:
            break
        time.sleep(FOLLOW_SECONDS)
    return 0


def stop(arguments: Sequence[str]) -> int:
    """Make a launched run save at one step in all processes, and end."""
    run = parser_of("stop").parse_args(arguments).run
    if plain_runs.is_plain(run):
        return plain_runs.stop(run, WAIT_SECONDS)
    place = job_folder_path(run)
    job_status = _status(place)
    if "end" in job_status:
        raise LaunchError(f"the job has ended already: {job_status['end']['message']}")
    if not is_followed(place, job_status):
        raise LaunchError("no supervisor follows this job any more: it has ended, or its host is gone")
    (place / STOP).touch()
    print("asked it to save and to end; waiting for that", flush=True)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        job_status = _status(place)
        if "end" in job_status:
            print_escaped(f"ended: {job_status['end']['message']}")
            return 0
        time.sleep(FOLLOW_SECONDS)
    raise LaunchError(f"the job has not ended within {WAIT_SECONDS:.0f} s; see `panax status`, and its host")


def cordon(arguments: Sequence[str]) -> int:
    """Take nodes out of a launched run."""
    asked = parser_of("cordon").parse_args(arguments)
    place, numbers, total = _nodes(asked)
    taken_out(JobShapes.from_folder(place), place, numbers, asked.why, total=total)
    print(f"node {', '.join(map(str, numbers))}: out of the job from its next save; back by `panax uncordon`")
    return 0


def uncordon(arguments: Sequence[str]) -> int:
    """Put nodes back into a launched run."""
    asked = parser_of("uncordon").parse_args(arguments)
    place, numbers, total = _nodes(asked)
    put_back(place, numbers, total=total)
    print(f"node {', '.join(map(str, numbers))}: in the job again from its next save")
    return 0


def _nodes(options: argparse.Namespace) -> tuple[Path, list[int], int]:
    """Return the folder of the job's files, the selected nodes, and the number of nodes.

    Raises:
        LaunchError: The job has ended, or none of its processes runs on a named host.
    """
    folder = job_folder_path(options.run)
    job_status, job = _status(folder), read_job_file(folder / JOB)
    if "end" in job_status:
        raise LaunchError(f"the job has ended: {job_status['end']['message']}")
    hosts: dict[str, list[int]] = {}
    for process in job_status.get("processes", ()):
        hosts.setdefault(process["host"], []).append(process["node"])
    numbers: set[int] = set()
    for node in options.nodes:
        if not node.isdecimal() and node not in hosts:
            raise LaunchError(
                f"no process of the job runs on {node!r}; its hosts are {', '.join(sorted(hosts)) or 'none yet'}"
            )
        numbers |= {int(node)} if node.isdecimal() else {*hosts[node]}
    return folder, sorted(numbers), int(job["nodes"])


def _status(folder: Path) -> dict[str, Any]:
    return (
        read_job_file(folder / STATUS) if (folder / STATUS).is_file() else {"at": read_job_file(folder / JOB)["began"]}
    )


def is_followed(folder: Path, last_status: Mapping[str, Any], seconds: float = STALE_SECONDS / 2) -> bool:
    """Return True if a supervisor writes a job's status: it is recent, or changes while observed.

    The writing host's clock may differ: a status that looks old, or from the future, is observed for a while.
    """
    if abs(time.time() - last_status.get("at", 0.0)) <= STALE_SECONDS:
        return True
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(FOLLOW_SECONDS)
        if _status(folder) != last_status:
            return True
    return False


def _has_ended(folder: Path) -> bool:
    job_status = _status(folder)
    return "end" in job_status or not is_followed(folder, job_status)


def _ago(seconds: float) -> str:
    """Format a duration.

    >>> [_ago(5.0), _ago(125.0), _ago(7300.0)]
    ['5 s', '2 min 5 s', '2 h 1 min']
    """
    seconds = max(seconds, 0)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
