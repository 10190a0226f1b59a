"""Session of a process in a run: ledger of its seconds, and facts of its environment, in the run's folder."""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ...compiling.cache import compilation_stats
from ...core.errors import PanaxError
from ...core.params.axes import named_leaves
from ...job.agreement import gather_texts, is_process_zero
from ...job.start_time import take_start_time
from ...metrics import BackgroundReporter
from ...metrics.energy import find_energy_meter
from ...metrics.goodput import describe_life, read_life
from ...metrics.ledger import Ledger
from ...system import children, files
from ...system.cpu_info import describe_processor
from ..folder.description import serialize_config
from ..opened_data import LogFn
from ..preparation import PreparedRun

SESSIONS_FILE = "sessions.jsonl"

CONTINUATION_VARIABLE = "PANAX_GOES_ON"
"""Environment variable that a supervisor sets if the session before ended only to get a new layout."""

_PACKAGES = (
    "panax-jax",
    "jax",
    "jaxlib",
    "numpy",
    "equinox",
    "optax",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
_GIT_SECONDS = 2.0
_MOST_ARRAYS = 200


@contextlib.contextmanager
def open_ledger(prepared: PreparedRun, say: LogFn) -> Iterator[Ledger]:
    """Open the ledger of this session; when it has ended, a line reports how the run's time was spent.

    Only the first process writes.
    """
    experiment = prepared.experiment
    folder = Path(prepared.folder) if is_process_zero() else None
    attempt = os.environ.get("PANAX_ATTEMPT", "")
    with contextlib.closing(
        BackgroundReporter(str(Path(prepared.folder) / "goodput.jsonl"), say, threaded=not experiment.debug)
    ) as lane:
        ledger = Ledger(
            folder,
            take_start_time(),
            attempt=int(attempt) if attempt.isdecimal() else 1,
            goes_on=os.environ.get(CONTINUATION_VARIABLE) == "1",
            compiled=lambda: compilation_stats().seconds,
            put=lane.put,
            energy=find_energy_meter(jax.local_devices()[0].platform) if is_process_zero() else None,
        )
        try:
            yield ledger
        except BaseException as error:
            # An error that is found before the first step is not a failure to recover from.
            outcome = "refused" if isinstance(error, PanaxError) and not ledger.has_begun else "error"
            ledger.close(f"{outcome}: {type(error).__name__}: {error}")
            raise
        ledger.close()
    if folder is not None:
        say(describe_life(read_life(folder)))


def record_facts(prepared: PreparedRun, run_id: str, step: int, lane: BackgroundReporter | None) -> None:
    """Add a line about this session to the run's folder: settings, layout, devices, hosts, versions. Every
    process calls it.

    No environment variable is recorded.

    Args:
        lane: Thread that writes it; None in all processes but the first.
    """
    hosts = gather_texts(socket.gethostname())
    if lane is None:
        return
    experiment, placement = prepared.experiment, getattr(prepared.step, "placement", None)
    devices = [jax.devices()[0]] if placement is None else list(placement.devices.devices.flat)
    params = named_leaves(prepared.step.program.abstract.params)
    shardings = named_leaves(prepared.step.shardings.params)
    facts = {
        "at": round(time.time(), 3),
        "run_id": run_id,
        "name": experiment.name,
        "first_step": step,
        "num_steps": experiment.num_steps,
        "command": _command(sys.argv),
        "settings": serialize_config(experiment),
        "mesh": {axis: size for axis, size in getattr(placement, "sizes", {}).items() if size > 1},
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
        "processes": jax.process_count(),
        "hosts": sorted(set(hosts)),
        "parameters": sum(leaf.size for leaf in params.values()),
        "layout": [
            f"{name} {list(leaf.shape)} {_split(shardings[name])}" for name, leaf in list(params.items())[:_MOST_ARRAYS]
        ],
        "versions": _versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{describe_processor().split(';')[0]}, {os.cpu_count()} threads",
    }
    lane.put(_write, Path(prepared.folder) / SESSIONS_FILE, facts)


def _command(words: Sequence[str]) -> list[str]:
    """Return the words that started this process, as a user types them; `python -m panax` is `panax`.

    >>> _command(["/opt/lib/python3.12/site-packages/panax/__main__.py", "train", "gpt2"])
    ['panax', 'train', 'gpt2']
    >>> _command(["/home/me/app/__main__.py", "--fast"])
    ['__main__.py', '--fast']
    """
    program = Path(words[0])
    module = program.parent.name == __name__.partition(".")[0] and program.name == "__main__.py"
    return ["panax" if module else program.name, *words[1:]]


def _split(sharding: Any) -> str:
    """Format the mesh axes over which an array is sharded."""
    axes = [axis for dim in getattr(sharding, "spec", ()) if dim for axis in ((dim,) if isinstance(dim, str) else dim)]
    return "split over " + ", ".join(axes) if axes else "whole"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    line = json.dumps({**facts, "git": _commit(Path.cwd())})
    files.append_lines(path, [line])


def _commit(folder: Path) -> dict[str, Any] | None:
    """Return a folder's commit, and whether files differ; None outside of a repository, or without git."""

    def git(*arguments: str) -> str:
        # Programs that a repository's settings would start must not run.
        command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
        result = children.run_command(command, _GIT_SECONDS)
        if result.code:
            raise OSError(result.errors)
        return result.output.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git("--no-optional-locks", "status", "--porcelain", "-uno"))}
    except OSError:  # TimeoutError too
        return None
