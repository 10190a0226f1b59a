"""The agent of a node: starts its workers, monitors them, and ends them when it ends. Run by `python -m
panax.cluster.node.agent`.

The engine starts an agent on each node, with the supervisor's address and the job's secret in the
environment. It does not import jax.
"""

import contextlib
import importlib.metadata
import os
import platform
import random
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ..engines.environment import SECRET, SUPERVISOR, node_number
from .accelerators import assign_gpus, list_visible_gpus
from .channel import Channel, HandshakeRefusedError, Message, PeerBusyError, connect_to_supervisor
from .standby import StandbyPool
from .worker_process import WorkerProcess

CONNECTION_VARIABLE = "PANAX_CONNECTION"
"""File descriptor of a connection that the supervisor has made itself, on this machine."""

CONNECT_SECONDS = 25.0
"""Time for the supervisor to start listening."""

BUSY_SECONDS = 300.0
"""Time for a listening supervisor to answer."""

RESTART_EXIT_CODE = 75
"""Exit code of an agent that was not asked to end: an engine may start it again, and none counts it as
completed."""

TICK_SECONDS = 0.5
STACKS_SECONDS = 1.0
"""Time for workers to write their stacks."""

PING_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Time without a message from a supervisor on another machine until it counts as gone: a network may fail
silently.

It is shorter than the time until the supervisor counts this host as lost (`nodes.SILENT_SECONDS`) and
restarts the job without it: by then, a disconnected worker no longer holds its run's folder, and writes
nothing.
"""

PACKAGES = ("panax-jax", "jax", "jaxlib", "equinox", "numpy")


class NodeAgent:
    """Agent that runs the workers of one node on behalf of the supervisor.

    It receives: `start` (workers), `spares` (to prepare), `signal`, `stacks`, `kill`, `port`, `end`. It
    sends: `hello`, `started`, `beat`, `lines` of the job's first process, `exit`, `stacks`, `port`, `notice`
    (a signal that it received itself).
    """

    def __init__(self, channel: Channel, secret: str):
        """Serve the supervisor at the other end of a channel.

        Args:
            secret: The job's secret, by which its workers authenticate each other before JAX joins them.
        """
        self._channel, self._secret = channel, secret
        self._children: dict[int, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)
        self._lifeline, self._held = os.pipe()
        self._beats: dict[int, Message] = {}
        self._noticed = ""
        self._spares = StandbyPool(self._lifeline)
        self._ended = False
        self._heard = self._pinged = time.monotonic()

    def run(self) -> bool:
        """Serve until the supervisor ends the agent, or is gone; then end all workers.

        Returns:
            True if the supervisor ended the agent.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            signal.signal(number, self._notice)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._channel.send(hello=collect_node_facts(self._channel))
        try:
            while not self._ended and not self._channel.closed:
                self._poll()
        finally:
            self._spares.close()
            self._kill()
        return self._ended

    def _poll(self) -> None:
        if self._channel.has_pending:
            self._channel.flush()
        is_busy = self._channel.has_pending or any(child.needs_polling for child in self._children.values())
        # Before the look: if this process is suspended after it, the supervisor has not been silent for that time.
        looked_at = time.monotonic()
        for key, _ in self._selector.select(0.05 if is_busy else TICK_SECONDS):
            if key.data is None:
                self._heard = time.monotonic()
                for message in self._channel.receive():
                    self._handle_message(message)
        self._ping(looked_at)
        if self._noticed:
            self._channel.send(notice=self._noticed)
            self._noticed = ""
        for index, child in list(self._children.items()):
            for beat in child.read_heartbeats():
                self._beat(index, beat)
            if child.first and (lines := child.read_new_lines()):
                self._channel.send(lines=lines)
            if child.silent:
                self._unwatch(child.pipe)
            if child.has_ended():
                self._report_exit(index, child)
        for index in list(self._beats):
            self._send_merged(index)

    def _ping(self, now: float) -> None:
        if now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self._channel.send(ping=True)
        # A local supervisor that is suspended (Ctrl-Z) resumes later, and its end is noticed at once.
        if self._channel.is_remote and now - self._heard > SILENT_SECONDS:
            self._channel.closed = True

    def _handle_message(self, message: Message) -> None:
        for kind, content in message.items():
            if kind == "start":
                self._start(content)
            elif kind == "signal":
                for child in self._children.values():
                    child.signal(signal.Signals[content])
            elif kind == "stacks":
                self._channel.send(stacks=self._stacks())
            elif kind == "kill":
                self._kill()
            elif kind == "spares":
                self._spares.refill(content["count"], content["command"], content["environment"])
            elif kind == "port":
                self._channel.send(port=find_free_port(content))
            elif kind == "end" and content == "again":
                # Not completed: an engine that starts the job again needs this node.
                self._channel.closed = True
            elif kind == "end":
                self._ended = True

    def _stacks(self) -> dict[str, str]:
        """Request the stacks of all workers at the same time and return them."""
        for child in self._children.values():
            child.request_stacks()
        time.sleep(STACKS_SECONDS)
        return {str(index): child.read_stacks() for index, child in self._children.items()}

    def _start(self, order: dict[str, Any]) -> None:
        """Start `count` workers with indices from `first`, out of `processes` in the job."""
        pids, gpus = {}, list_visible_gpus()
        for local in range(order["count"]):
            index = order["first"] + local
            environment = {
                "PANAX_COORDINATOR": order["coordinator"],
                "PANAX_PROCESSES": str(order["processes"]),
                "PANAX_PROCESS": str(index),
                "PANAX_LOCAL_PROCESS": str(local),
                "PANAX_LOCAL_PROCESSES": str(order["count"]),
                "PANAX_BIND": order["bind"],
                "PANAX_ATTEMPT": str(order["attempt"]),
                SECRET: self._secret,
                **assign_gpus(local, order["count"], gpus),
                **order["environment"],
            }
            try:
                child = WorkerProcess(
                    order["command"],
                    environment,
                    Path(order["folder"]),
                    index,
                    order["attempt"],
                    self._lifeline,
                    self._spares.take(),
                )
            except OSError as error:
                end = {
                    "process": index,
                    "attempt": order["attempt"],
                    "code": 126,
                    "tail": [f"can't be started: {error}"],
                }
                self._channel.send(exit=end)
                continue
            if child.without_log:
                self._channel.send(lines=[f"warning: {child.without_log}"])
            self._children[index] = child
            pids[str(index)] = child.pid
            for descriptor in child.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ, index)
        self._channel.send(started={"attempt": order["attempt"], "of": pids})

    def _beat(self, index: int, beat: Message) -> None:
        # Only beats that change a phase or end a worker are sent one by one; those before them are sent first, since
        # a step that arrives after the phase that follows it would return the worker to the phase `steps`.
        if any(name in beat for name in ("phase", "error", "facts")):
            self._send_merged(index)
            self._send_beat(index, beat)
        else:
            self._beats[index] = {**self._beats.get(index, {}), **beat}

    def _send_merged(self, index: int) -> None:
        if merged := self._beats.pop(index, None):
            self._send_beat(index, merged)

    def _send_beat(self, index: int, beat: Message) -> None:
        self._channel.send(beat={**beat, "process": index, "attempt": self._children[index].attempt})

    def _report_exit(self, index: int, child: WorkerProcess) -> None:
        for descriptor in child.descriptors:
            self._unwatch(descriptor)
        for beat in child.read_heartbeats():
            self._beat(index, beat)
        if child.first and (lines := child.read_new_lines(all_of_them=True)):
            self._channel.send(lines=lines)
        self._send_merged(index)
        self._channel.send(exit={"process": index, "attempt": child.attempt, "at": time.time(), **child.close()})
        del self._children[index]

    def _unwatch(self, descriptor: int) -> None:
        # Already unregistered once the worker has closed its end.
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()
        for index, child in list(self._children.items()):
            child.wait()
            self._report_exit(index, child)

    def _notice(self, number: int, frame: object) -> None:
        self._noticed = signal.Signals(number).name


def collect_node_facts(channel: Channel) -> dict[str, Any]:
    """Collect the facts of a node that the supervisor checks before it starts workers there."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "node": node_number(os.environ),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": count_usable_cpus(),
        "gpus": len(list_visible_gpus()),
        "address": channel.address,
        "versions": versions,
    }


def count_usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_free_port(address: str) -> int:
    """Return a port of an address that is currently unused."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as opened:
        opened.bind((address, 0))
        return opened.getsockname()[1]


def connect(secret: str) -> Channel:
    """Return the connection to the supervisor: inherited, or opened now with retries, since the supervisor may
    start to listen later.

    If many agents connect at once, the supervisor may be busy: the retries then last longer.

    Raises:
        OSError: No supervisor of this job listens at the address.
    """
    inherited = os.environ.pop(CONNECTION_VARIABLE, "")
    if inherited:
        os.set_inheritable(int(inherited), False)
        return Channel(socket.socket(fileno=int(inherited)))
    # Not inherited by workers.
    address = os.environ.pop(SUPERVISOR)
    began = time.monotonic()
    while True:
        try:
            return connect_to_supervisor(address, secret, 5.0)
        except HandshakeRefusedError:
            raise
        except OSError as error:
            patience = BUSY_SECONDS if isinstance(error, PeerBusyError | TimeoutError) else CONNECT_SECONDS
            if time.monotonic() - began > patience:
                raise
            # At random times, so that not all agents retry at the same moment.
            time.sleep(random.uniform(0.1, 0.5))


def main() -> int:
    secret = os.environ.pop(SECRET, "")
    if not secret or not (os.environ.get(CONNECTION_VARIABLE) or os.environ.get(SUPERVISOR)):
        print(
            f"panax agent: expected {SUPERVISOR} and {SECRET} in the environment; `panax launch` sets them",
            file=sys.stderr,
        )
        return 2
    try:
        channel = connect(secret)
    except OSError as error:
        print(f"panax agent: can't reach the supervisor: {error}", file=sys.stderr)
        return RESTART_EXIT_CODE
    return 0 if NodeAgent(channel, secret).run() else RESTART_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
