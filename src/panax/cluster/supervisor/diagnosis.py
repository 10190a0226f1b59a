"""Why a job's processes ended: from their exit codes, the errors that they told, their last lines and their stacks."""

import dataclasses
import enum
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ...system.signals import signal_name
from .collective_facts import CollectiveFacts, parse_collective_kind, parse_peers


class Cause(enum.Enum):
    """The kinds of ends; the value is what a person reads."""

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
        """Whether the same job, started again, may well go on: what it is told to do is not at fault."""
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
"""Causes of which, before a first step on fewer nodes, the layout may be at fault."""

TERMINATION_CAUSES = (Cause.KILLED, Cause.LOST_HOST)
"""Causes of which, in a job that is told to end, that may be the reason."""

ADVICE = {
    Cause.USER: "change what the message says, and launch again",
    Cause.CHECK: "do what each finding says, or leave its host out, and launch again; --check=warn trains all the same",
    Cause.DATA: "mend or leave out that data, and launch again",
    Cause.NON_FINITE: "look at the curves before that step; a lower rate, clipping or other data may help",
    Cause.OUT_OF_MEMORY: "use more --step.micro-batches, --task.remat full, a smaller batch, or shard over more devices",
    Cause.HOST_MEMORY: "give the processes more memory, or start fewer on a host",
    Cause.DEVICE: "look at the device's own log (dmesg, nvidia-smi -q), and leave the host out if it comes again",
    Cause.STORE: "see that the checkpoints' place can be reached, may be written and has room",
    Cause.LOST_HOST: "see the engine's own log for that host",
    Cause.KILLED: "see who ended the process: a person, the engine, or the kernel (dmesg)",
    Cause.CRASHED: "the last lines and stacks are in its log; a wrong kernel or driver is likely",
    Cause.HANG: "the stacks show where it stands",
    Cause.COLLECTIVE: "all processes wait for each other: look for the one whose stacks differ, and at the network",
    Cause.MISMATCH: "a hook, a loader or other code of yours calls JAX over all devices in some processes alone, as under "
    "`if jax.process_index() == 0`: call it in every process, or on arrays of the host",
    Cause.STALLED_DATA: "the stacks show which source does not answer",
    Cause.PEER: "see the network between the hosts",
    Cause.MISSING: "see what the missing ones said, and that hosts reach each other; PANAX_JOIN_SECONDS gives them more time",
    Cause.CHANGED: "nothing: nodes have come back, or were taken out of the job",
    Cause.EXCEPTION: "mend the program; `panax logs RUN` has the traceback's end, --traceback all of it",
}
"""What to do about each."""

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
"""The types of errors that a worker tells, most special first."""

DATA_WAIT_FILES = ("/panax/run/feed.py", "/panax/data/loader.py")
"""Files in which the main thread waits for a batch."""

_TRACES = ("/jax/_src/interpreters/partial_eval.py", "/jax/_src/interpreters/mlir.py")
"""Files of jax in which a program is traced and lowered: nobody is waited for there."""

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
"""Parts of what processes say whose peer has gone: an effect, not the cause."""

_MISMATCH = ("distributed collective mismatch",)
"""Parts of the error of a process whose collective does not match that of its peers."""

_WELL = "[Gloo] Rank "
"""How lines begin that Gloo writes while all goes well: "[Gloo] Rank 0 is connected to 3 peer ranks ..."."""

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
    """The end of one worker.

    Attributes:
        code: Its exit code; negative: the signal that ended it; None: its host has gone with it.
        at: When its agent saw it, in seconds since the epoch.
        error: What it told of the error that ended it: kinds, message, exit_code.
        tail: Its last lines.
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
    """Why a job's processes ended.

    Attributes:
        message: In one sentence or two, with the process and its host.
        process: The one it began with.
        exit_code: For the command, where the job is given up.
        tail: That process's last lines.
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
    """The first cause among the ends of several workers: errors that follow from a peer's end come last.

    Args:
        collectives: Those of the job's step.

    >>> killed = WorkerExit(1, "a", -9, 2.0)
    >>> follows = WorkerExit(0, "a", 1, 1.0, {"kinds": ["XlaRuntimeError"], "message": "Gloo: Connection closed by peer"})
    >>> diagnose([follows, killed]).message
    'process 1 on a was killed by SIGKILL'
    """
    found = [(_of(end), end) for end in ends if end.code != 0]
    assert found, "a failed job has a worker that failed"
    if all(cause is Cause.PEER for cause, _ in found) and (silent := _silent(ends, collectives or CollectiveFacts())):
        return silent
    # A process that ends because its peer has gone may be seen first; one that was ended by nobody tells most.
    found.sort(key=lambda pair: (pair[0] is Cause.PEER, pair[0] is Cause.KILLED and pair[1].at, pair[1].at))
    cause, end = found[0]
    where = _where(end, collectives) if cause is Cause.PEER and collectives is not None else ""
    return Diagnosis(cause, _message(cause, end) + where, end.process, _exit_code(end), end.tail)


_SILENT = re.compile(r"stopped sending heartbeats\)?:?((?:\s+(?:/job:\S+task:)?\d+\b,?)+)")
"""What JAX's coordination service says of processes that don't answer: it ends all others with these words."""


def _silent(ends: Sequence[WorkerExit], collectives: CollectiveFacts) -> Diagnosis | None:
    """That a process which has not ended answers no more: it is stopped, or its host or network is; None where nobody says so."""
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
            said = f"{who} stopped answering: it is held, or its host or network is gone" + (
                f"; {waits}" if waits else ""
            )
            return Diagnosis(Cause.HANG, said, first, _exit_code(end), end.tail)
    return None


def _where(end: WorkerExit, collectives: CollectiveFacts) -> str:
    """In which collective, with which hosts, a process has lost a peer, as far as the library's words and the step tell."""
    said = str((end.error or {}).get("message") or "") or "\n".join(end.tail)
    kind = parse_collective_kind(said)
    found = collectives.around(end.process, kind) or collectives.around(end.process)
    peers = [collectives.addresses[peer] for peer in parse_peers(said) if peer in collectives.addresses]
    lost = f"; the peer is {', '.join(peers)}" if peers else ""
    return f"; it stood in {', or '.join(found)}{lost}" if found else lost


def diagnose_hang(
    process: int,
    host: str,
    seconds: float,
    phase: str,
    stacks: Mapping[int, str],
    tail: Sequence[str],
    collectives: CollectiveFacts | None = None,
) -> Diagnosis:
    """What the stacks of a job without progress tell.

    Args:
        process: The one that has come least far.
        stacks: Each process's, as faulthandler writes them; empty where a process wrote none.
        collectives: Those of the job's step.
    """
    collectives = collectives or CollectiveFacts()
    kinds = {index: _of_stacks(text) for index, text in stacks.items()}
    cause = kinds.get(process, Cause.HANG)
    if cause is Cause.COLLECTIVE:
        # Somebody who does not wait with the others is what they wait for.
        other = next((index for index, kind in kinds.items() if kind is not Cause.COLLECTIVE), None)
        if other is not None:
            process, host, cause = other, collectives.hosts.get(other, host), kinds[other]
    what = {
        Cause.COLLECTIVE: "all processes wait inside a computation",
        Cause.STALLED_DATA: "it waits for data",
        Cause.HANG: "it hangs" + ("" if stacks.get(process) else " and does not show its stacks"),
    }[cause]
    if phase == "steps":
        waiting = [index for index, kind in kinds.items() if kind is Cause.COLLECTIVE]
        where = collectives.stands(process) if cause is Cause.COLLECTIVE else collectives.waits(process, waiting)
        what += f", {where}" if where and cause is Cause.COLLECTIVE else f"; {where}" if where else ""
    message = f"process {process} on {host} has made no progress for {seconds:.0f} s in the phase {phase!r}: {what}"
    return Diagnosis(cause, message, process, 6, stacks.get(process, "").splitlines() or tail)


def _of(end: WorkerExit) -> Cause:
    if end.code is None:
        return Cause.LOST_HOST
    if end.out_of_memory:
        return Cause.HOST_MEMORY
    # A process that told its error has written of other things too, as of peers that end at the same time.
    said = (
        str(end.error.get("message") or "")
        if end.error
        else "\n".join(line for line in end.tail if not line.startswith(_WELL))
    )
    kinds = (end.error or {}).get("kinds") or ()
    for kind in kinds:
        if kind in _OF_KIND:
            return _OF_KIND[kind]
    if "RESOURCE_EXHAUSTED" in said and end.error:
        return Cause.OUT_OF_MEMORY
    if any(part in said for part in _DEVICE):
        return Cause.DEVICE
    if any(part in said for part in _MISMATCH):
        return Cause.MISMATCH
    if any(part in said for part in _PEER) and end.code != -signal.SIGKILL:
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
        return f"{who} was killed by the kernel for want of memory"
    if cause is Cause.MISMATCH:
        return f"{who} stood in another collective than the other processes"
    if end.error and end.error.get("message"):
        return f"{who}: {end.error['message']}"
    if end.code is not None and end.code < 0:
        return f"{who} was killed by {signal_name(-end.code)}"
    last = next((line for line in reversed(end.tail) if line.strip()), "")
    return f"{who} ended with exit code {end.code}" + (f": {last.strip()[:300]}" if last else "")


def _exit_code(end: WorkerExit) -> int:
    told = end.error.get("exit_code") if end.error else None
    if type(told) is int and 0 < told < 256:
        return told
    return end.code if end.code is not None and end.code > 0 else 6


def _of_stacks(text: str) -> Cause:
    """What the main thread does: faulthandler writes the most recent call first, and the current thread last."""
    main = text.rpartition("Current thread ")[2] if "Current thread " in text else text
    lines = [line for line in main.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return Cause.HANG
    if any(part in line for part in DATA_WAIT_FILES for line in lines):
        return Cause.STALLED_DATA
    traces = any(part in line for part in _TRACES for line in lines)
    inside = not traces and ("/jax/" in lines[0] or "/jaxlib/" in lines[0])
    return Cause.COLLECTIVE if inside else Cause.HANG
