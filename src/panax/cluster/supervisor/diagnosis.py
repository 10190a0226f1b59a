"""Diagnosis of a job's end: from its processes' exit codes, reported errors, last lines and stacks."""

import dataclasses
import enum
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ...system.signals import signal_name
from .collective_facts import CollectiveFacts, parse_collective_kind, parse_peers


class Cause(enum.Enum):
    """Causes of a job's end; the value is the text for users."""

    USER = "user error"
    CHECK = "hardware check"
    DATA = "data error"
    NON_FINITE = "training error"
    OUT_OF_MEMORY = "out of device memory"
    HOST_MEMORY = "out of host memory"
    DEVICE = "device error"
    STORE = "storage error"
    LOST_HOST = "lost host"
    KILLED = "killed"
    CRASHED = "crashed"
    HANG = "hang"
    COLLECTIVE = "stuck collective"
    MISMATCH = "different collectives"
    STALLED_DATA = "stalled data"
    PEER = "lost connection to a peer"
    MISSING = "processes did not join"
    EXCEPTION = "exception"
    CHANGED = "new layout"

    @property
    def is_retried(self) -> bool:
        """Return True if the same job may succeed when started again: its settings are not at fault."""
        return self not in (
            Cause.USER,
            Cause.CHECK,
            Cause.DATA,
            Cause.NON_FINITE,
            Cause.OUT_OF_MEMORY,
            Cause.MISMATCH,
            Cause.MISSING,
            Cause.EXCEPTION,
        )


LAYOUT_CAUSES = (Cause.USER, Cause.OUT_OF_MEMORY, Cause.EXCEPTION)
"""Causes that may be due to the layout, if they occur before a first step on fewer nodes."""

TERMINATION_CAUSES = (Cause.KILLED, Cause.LOST_HOST)
"""Causes that may be due to a stop request, in a job that was asked to end."""

ADVICE = {
    Cause.USER: "correct it as the message describes, and launch again",
    Cause.CHECK: "follow the advice of each finding, or remove its host, and launch again; --check=warn still trains",
    Cause.DATA: "repair or remove that data, and launch again",
    Cause.NON_FINITE: "look at the curves before that step; a lower rate, clipping or other data may help",
    Cause.OUT_OF_MEMORY: "use more --step.micro-batches, --task.remat full, a smaller batch, or shard over more devices",
    Cause.HOST_MEMORY: "give the processes more memory, or start fewer on a host",
    Cause.DEVICE: "look at the device's own log (dmesg, nvidia-smi -q), and remove the host if it happens again",
    Cause.STORE: "check that the checkpoint store can be reached, may be written and has room",
    Cause.LOST_HOST: "check the engine's own log for that host",
    Cause.KILLED: "find out who ended the process: a user, the engine, or the kernel (dmesg)",
    Cause.CRASHED: "the last lines and stacks are in its log; a wrong kernel or driver is likely",
    Cause.HANG: "the stacks show the calls in which it hangs",
    Cause.COLLECTIVE: "all processes wait for each other: look for the one with different stacks, and at the network",
    Cause.MISMATCH: "a hook, a loader or other code of yours calls JAX over all devices in some processes alone, as under "
    "`if jax.process_index() == 0`: call it in every process, or on arrays of the host",
    Cause.STALLED_DATA: "the stacks show which source does not answer",
    Cause.PEER: "check the network between the hosts",
    Cause.MISSING: "check their logs, and that hosts reach each other; PANAX_JOIN_SECONDS gives them more time",
    Cause.CHANGED: "nothing: nodes have come back, or were taken out of the job",
    Cause.EXCEPTION: "fix the program; `panax logs RUN` has the traceback's end, --traceback all of it",
}
"""Advice for each cause."""

_OF_KIND = {
    "CheckError": Cause.CHECK,
    "DataError": Cause.DATA,
    "StoreError": Cause.STORE,
    "JoinError": Cause.MISSING,
    "HookError": Cause.EXCEPTION,
    "TrainingError": Cause.NON_FINITE,
    "PanaxError": Cause.USER,
    "MemoryError": Cause.OUT_OF_MEMORY,
}
"""Types of errors that a worker reports, most specific first."""

DATA_WAIT_FILES = ("/panax/run/feed.py", "/panax/data/loading/prefetch.py")
"""Files in which the main thread waits for a batch."""

_TRACES = ("/jax/_src/interpreters/partial_eval.py", "/jax/_src/interpreters/mlir.py")
"""Files of jax that trace and lower a program: no other process is waited for there."""

_PEER = (
    "Gloo",
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "coordination service",
    "CoordinationService",
    "distributed service detected fatal errors",
    "remote tasks",
    "heartbeat timeout",
    "NCCL operation",
    "ncclRemoteError",
)
"""Fragments of the output of processes with a lost peer: an effect, not the cause."""

_MISMATCH = ("distributed collective mismatch",)
"""Fragments of the error of a process with a collective that does not match that of its peers."""

_WELL = "[Gloo] Rank "
"""Prefix of lines that Gloo writes in normal operation: "[Gloo] Rank 0 is connected to 3 peer ranks ..."."""

_DEVICE = (
    "CUDA_ERROR",
    "CUDNN",
    "cudaError",
    "uncorrectable ECC",
    "XID",
    "TPU device",
    "hardware error",
    "device lost",
)


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """End of one worker.

    Attributes:
        code: Its exit code; negative: the signal that ended it; None: lost together with its host.
        at: Time at which its agent noticed the end, in seconds since the epoch.
        error: The error that ended it, as reported: kinds, message, exit_code.
        tail: Last lines of the worker's output.
    """

    process: int
    host: str
    code: int | None
    at: float
    error: Mapping[str, Any] | None = None
    tail: Sequence[str] = ()
    out_of_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Reason for the end of a job's processes.

    Attributes:
        message: One or two sentences, with the process and its host.
        process: The process that failed first.
        exit_code: Exit code of the command, if the job is given up.
        tail: Last lines of that process's output.
    """

    cause: Cause
    message: str
    process: int
    exit_code: int
    tail: Sequence[str] = ()

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


def diagnose(ends: Sequence[WorkerExit], collectives: CollectiveFacts | None = None) -> Diagnosis:
    """Find the first cause among the ends of several workers: errors that follow from a peer's end are
    considered last.

    Args:
        collectives: Collectives of the job's step.

    >>> killed = WorkerExit(1, "a", -9, 2.0)
    >>> follows = WorkerExit(0, "a", 1, 1.0, {"kinds": ["XlaRuntimeError"], "message": "Gloo: Connection closed by peer"})
    >>> diagnose([follows, killed]).message
    'process 1 on a was killed by SIGKILL'
    """
    failures = [(_of(end), end) for end in ends if end.code != 0]
    assert failures, "a failed job has a worker that failed"
    if all(cause is Cause.PEER for cause, _ in failures) and (
        silent := _diagnose_silent_process(ends, collectives or CollectiveFacts())
    ):
        return silent
    # A process that ends because its peer has gone may be seen first; one that ended by itself is most
    # informative.
    failures.sort(key=lambda pair: (pair[0] is Cause.PEER, pair[0] is Cause.KILLED and pair[1].at, pair[1].at))
    cause, end = failures[0]
    location = _describe_location(end, collectives) if cause is Cause.PEER and collectives is not None else ""
    return Diagnosis(cause, _message(cause, end) + location, end.process, _exit_code(end), end.tail)


_SILENT = re.compile(r"stopped sending heartbeats\)?:?((?:\s+(?:/job:\S+task:)?\d+\b,?)+)")
"""Message of JAX's coordination service about processes that don't answer: it ends all others with it."""


def _diagnose_silent_process(ends: Sequence[WorkerExit], collectives: CollectiveFacts) -> Diagnosis | None:
    """Diagnose a process that is alive but does not answer, since it is stopped, or its host or network is down;
    None if no worker reported such a process."""
    for end in ends:
        named = _SILENT.search("\n".join([*end.tail, str((end.error or {}).get("message") or "")]))
        if named is None:
            continue
        silent = sorted(
            {int(each) for each in re.findall(r"(\d+)\b,?(?:\s|$)", named.group(1))} - {e.process for e in ends}
        )
        if silent:
            first = silent[0]
            others = [f"process {each} on {collectives.hosts.get(each, '?')}" for each in silent[1:]]
            who = f"process {first} on {collectives.hosts.get(first, '?')}{''.join(f', {each}' for each in others)}"
            waits = collectives.waits(first, [each.process for each in ends])
            message = f"{who} stopped answering: it is suspended, or its host or network is gone" + (
                f"; {waits}" if waits else ""
            )
            return Diagnosis(Cause.HANG, message, first, _exit_code(end), end.tail)
    return None


def _describe_location(end: WorkerExit, collectives: CollectiveFacts) -> str:
    """Describe the collective in which a process lost a peer, and its hosts, as far as the error and the step's
    collectives show."""
    text = str((end.error or {}).get("message") or "") or "\n".join(end.tail)
    kind = parse_collective_kind(text)
    collective_texts = collectives.around(end.process, kind) or collectives.around(end.process)
    peers = [collectives.addresses[peer] for peer in parse_peers(text) if peer in collectives.addresses]
    lost = f"; the peer is {', '.join(peers)}" if peers else ""
    return f"; it was in {', or '.join(collective_texts)}{lost}" if collective_texts else lost


def diagnose_hang(
    process: int,
    host: str,
    seconds: float,
    phase: str,
    stacks: Mapping[int, str],
    tail: Sequence[str],
    collectives: CollectiveFacts | None = None,
) -> Diagnosis:
    """Diagnose a job without progress from its processes' stacks.

    Args:
        process: The process with the least progress.
        stacks: Stacks of each process, as faulthandler writes them; empty if a process wrote none.
        collectives: Collectives of the job's step.
    """
    collectives = collectives or CollectiveFacts()
    kinds = {index: _classify_stacks(text) for index, text in stacks.items()}
    cause = kinds.get(process, Cause.HANG)
    if cause is Cause.COLLECTIVE:
        # A process outside the collective is the one that the others wait for.
        other = next((index for index, kind in kinds.items() if kind is not Cause.COLLECTIVE), None)
        if other is not None:
            process, host, cause = other, collectives.hosts.get(other, host), kinds[other]
    state = {
        Cause.COLLECTIVE: "all processes wait inside a computation",
        Cause.STALLED_DATA: "it waits for data",
        Cause.HANG: "it hangs" + ("" if stacks.get(process) else " and does not show its stacks"),
    }[cause]
    if phase == "steps":
        waiting = [index for index, kind in kinds.items() if kind is Cause.COLLECTIVE]
        collective_text = (
            collectives.stands(process) if cause is Cause.COLLECTIVE else collectives.waits(process, waiting)
        )
        state += (
            f", {collective_text}"
            if collective_text and cause is Cause.COLLECTIVE
            else f"; {collective_text}"
            if collective_text
            else ""
        )
    message = f"process {process} on {host} has made no progress for {seconds:.0f} s in the phase {phase!r}: {state}"
    return Diagnosis(cause, message, process, 6, stacks.get(process, "").splitlines() or tail)


def _of(end: WorkerExit) -> Cause:
    if end.code is None:
        return Cause.LOST_HOST
    if end.out_of_memory:
        return Cause.HOST_MEMORY
    # A process that reported its error may also have logged other events, such as peers that end at the same
    # time.
    text = (
        str(end.error.get("message") or "")
        if end.error
        else "\n".join(line for line in end.tail if not line.startswith(_WELL))
    )
    kinds = (end.error or {}).get("kinds") or ()
    for kind in kinds:
        if kind in _OF_KIND:
            return _OF_KIND[kind]
    if "RESOURCE_EXHAUSTED" in text and end.error:
        return Cause.OUT_OF_MEMORY
    if any(part in text for part in _DEVICE):
        return Cause.DEVICE
    if any(part in text for part in _MISMATCH):
        return Cause.MISMATCH
    if any(part in text for part in _PEER) and end.code != -signal.SIGKILL:
        return Cause.PEER
    if end.error:
        return Cause.STORE if "OSError" in kinds else Cause.EXCEPTION
    if end.code < 0:
        return Cause.KILLED if -end.code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else Cause.CRASHED
    return Cause.USER if end.code == 2 else Cause.CRASHED


def _message(cause: Cause, end: WorkerExit) -> str:
    who = f"process {end.process} on {end.host}"
    if cause is Cause.LOST_HOST:
        return f"{end.host} is gone, and process {end.process} with it"
    if cause is Cause.HOST_MEMORY:
        return f"{who} was killed by the kernel, since its host was out of memory"
    if cause is Cause.MISMATCH:
        return f"{who} was in another collective than the other processes"
    if end.error and end.error.get("message"):
        return f"{who}: {end.error['message']}"
    if end.code is not None and end.code < 0:
        return f"{who} was killed by {signal_name(-end.code)}"
    last = next((line for line in reversed(end.tail) if line.strip()), "")
    return f"{who} ended with exit code {end.code}" + (f": {last.strip()[:300]}" if last else "")


def _exit_code(end: WorkerExit) -> int:
    reported = end.error.get("exit_code") if end.error else None
    if type(reported) is int and 0 < reported < 256:
        return reported
    return end.code if end.code is not None and end.code > 0 else 6


def _classify_stacks(text: str) -> Cause:
    """Classify the state of the main thread: faulthandler writes the most recent call first, and the current
    thread last."""
    main = text.rpartition("Current thread ")[2] if "Current thread " in text else text
    lines = [line for line in main.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return Cause.HANG
    if any(part in line for part in DATA_WAIT_FILES for line in lines):
        return Cause.STALLED_DATA
    traces = any(part in line for part in _TRACES for line in lines)
    inside = not traces and ("/jax/" in lines[0] or "/jaxlib/" in lines[0])
    return Cause.COLLECTIVE if inside else Cause.HANG
