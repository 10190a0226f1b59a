"""Standby worker: it has imported the modules for training, and becomes the worker that its agent requests.

    python -m panax.cli.standby

Until then it initializes no device; it ends silently if it is never needed.
"""  # fmt: skip

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from ..cluster.node.standby import parse_order
from ..cluster.node.worker import install_guards, write_stacks_on_signal
from ..job.start_time import start_run_clock
from ..system.allocator import keep_freed_memory, restart_with_huge_pages
from .main import main as panax
from .plugins import skip_absent_plugins, suppress_plugin_warnings

PRELOADED_MODULES = (
    "panax.cli.commands.train",
    "panax.models",
    "panax.metrics.tensorboard",
    "panax.checkpoint.memory",
    "jax.experimental.multihost_utils",
)
"""Modules that a run imports before its first step."""


def main() -> int:
    restart_with_huge_pages()
    install_guards()
    keep_freed_memory()
    skip_absent_plugins()
    with suppress_plugin_warnings():
        for name in PRELOADED_MODULES:
            importlib.import_module(name)
    order = receive_order()
    if order is None:
        return 0
    become(order)
    return panax(order["arguments"])


def receive_order() -> dict[str, Any] | None:
    """Read the agent's order; None if the agent does not need this process."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return None
        line += chunk
    return parse_order(line)


def become(order: Mapping[str, Any]) -> None:
    """Adopt the environment, the log and the start time of the worker that this process becomes."""
    _redirect(order["log"])
    os.environ.update(order["environment"])
    write_stacks_on_signal(order["stacks"])
    start_run_clock()


def _redirect(log: str) -> None:
    """Redirect all output to the log, and standard input to the null device."""
    null, log_file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(null, 0)
    for number in (1, 2):
        os.dup2(log_file, number)
    for number in (null, log_file):
        os.close(number)


if __name__ == "__main__":
    sys.exit(main())
