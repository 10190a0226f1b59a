"""A collective that stands still or is cut off is reported with its kind, its mesh axis and its hosts."""

import dataclasses
from typing import Any

import pytest

from panax.cluster.supervisor.collective_facts import CollectiveFacts, parse_collective_kind, parse_peers
from panax.cluster.supervisor.diagnosis import Cause, WorkerExit, diagnose, diagnose_hang

INSIDE = 'Current thread 0x1 (most recent call first):\n  File "/x/jax/_src/array.py", line 1 in _value'
ELSEWHERE = 'Current thread 0x1 (most recent call first):\n  File "/x/hooks.py", line 1 in after_step'
SQUARE = {0: {"fsdp": [0, 1], "replica": [0, 2]}, 1: {"fsdp": [0, 1], "replica": [1, 3]},
          2: {"fsdp": [2, 3], "replica": [0, 2]}, 3: {"fsdp": [2, 3], "replica": [1, 3]}}  # fmt: skip


@dataclasses.dataclass
class Told:
    process: int
    host: str
    facts: dict[str, Any]


def told(kinds: list, groups: dict[int, dict[str, list[int]]], **addresses: str) -> CollectiveFacts:
    return CollectiveFacts.of(
        [
            Told(
                process, f"host{'ABCD'[process]}", {"groups": met, "collectives": kinds, "address": f"10.0.0.{process}"}
            )
            for process, met in groups.items()
        ]
    )


def test_a_process_that_all_others_wait_for():
    ring = {process: {"fsdp": [0, 1, 2, 3]} for process in range(4)}
    found = told([["all-gather", ["fsdp"]], ["reduce-scatter", ["fsdp"]]], ring)
    stacks = {0: INSIDE, 1: INSIDE, 2: "", 3: INSIDE}
    diagnosis = diagnose_hang(2, "hostC", 300.0, "steps", stacks, (), found)
    assert diagnosis.cause is Cause.HANG and diagnosis.message == (
        "process 2 on hostC has made no progress for 300 s in the phase 'steps': it hangs and does not show its stacks; "
        "processes 0, 1, 3 wait for it in an all-gather or reduce-scatter over fsdp (hostA, hostB, hostC, hostD)"
    )


def test_the_one_that_does_not_wait_is_named_with_its_own_host():
    found = told([["all-reduce", ["replica"]], ["all-gather", ["fsdp"]]], SQUARE)
    diagnosis = diagnose_hang(0, "hostA", 9.0, "steps", {0: INSIDE, 1: INSIDE, 2: INSIDE, 3: ELSEWHERE}, (), found)
    assert diagnosis.process == 3 and diagnosis.message.startswith("process 3 on hostD has made no progress")
    assert "an all-reduce over replica (hostB, hostD), or an all-gather over fsdp (hostC, hostD)" in diagnosis.message


def test_processes_that_all_stand_in_collectives():
    found = told([["all-reduce", ["replica", "fsdp"]]], SQUARE)
    diagnosis = diagnose_hang(1, "hostB", 9.0, "steps", dict.fromkeys(range(4), INSIDE), (), found)
    assert diagnosis.cause is Cause.COLLECTIVE
    assert diagnosis.message.endswith(
        "all processes wait inside a computation, an all-reduce over replica and fsdp (hostA, hostB, hostC, hostD)"
    )


def test_unknown_figures_are_not_reported():
    diagnosis = diagnose_hang(1, "hostB", 9.0, "steps", {0: INSIDE, 1: ""}, (), CollectiveFacts())
    assert diagnosis.message.endswith("it hangs and does not show its stacks")
    before = diagnose_hang(1, "hostB", 9.0, "compile", {0: INSIDE, 1: ""}, (), told([["all-gather", ["fsdp"]]], SQUARE))
    assert "all-gather" not in before.message


def test_a_peer_that_is_lost_is_reported_with_the_collective_and_its_host():
    found = told([["all-reduce", ["replica"]], ["all-gather", ["fsdp"]]], SQUARE)
    message = "FAILED_PRECONDITION: Gloo all-gather failed: Connection closed by peer [10.0.0.3]:4242"
    ends = [WorkerExit(2, "hostC", 1, 1.0, {"kinds": ["XlaRuntimeError"], "message": message, "exit_code": 1})]
    diagnosis = diagnose(ends, found)
    assert diagnosis.cause is Cause.PEER
    assert diagnosis.message.endswith("it was in an all-gather over fsdp (hostC, hostD); the peer is hostD (process 3)")


HEARTBEATS = [
    "F1123 14:35:04.610979    3423 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
    "This most likely indicates that another task died; see the other task logs for more details. absl::Status: UNAVAILABLE: The "
    "following tasks are unhealthy (stopped sending heartbeats):",
    "2",
    "The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction) to debug.",
]
"""Output of jax 0.10 in processes with a peer that was stopped by SIGSTOP, 90 seconds later."""


def test_a_process_that_is_stopped_is_named_though_the_others_end():
    ring = {process: {"fsdp": [0, 1, 2, 3]} for process in range(4)}
    facts = told([["all-gather", ["fsdp"]], ["reduce-scatter", ["fsdp"]]], ring)
    ends = [WorkerExit(process, "x", -6, 1.0, None, HEARTBEATS) for process in (0, 1, 3)]
    diagnosis = diagnose(ends, facts)
    assert (diagnosis.cause, diagnosis.process) == (Cause.HANG, 2) and diagnosis.message == (
        "process 2 on hostC stopped answering: it is suspended, or its host or network is gone; processes 0, 1, "
        "3 wait for it in an "
        "all-gather or reduce-scatter over fsdp (hostA, hostB, hostC, hostD)"
    )
    killed = WorkerExit(2, "hostC", -9, 0.5)
    assert diagnose([*ends, killed], facts).message == "process 2 on hostC was killed by SIGKILL"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("all-gather", "Gloo AllGather failed: [.../tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:438"),
        ("reduce-scatter", "Gloo ReduceScatter failed: [.../tcp/pair.cc:538] Read error [10.0.0.7]:14765: Connection reset"),
        ("all-reduce", "Gloo all-reduce failed: [.../tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:15548"),
        ("collective-permute", "Gloo collective permute failed: [.../tcp/pair.cc:538] Read error [10.0.0.7]:1: Connection reset"),
        ("all-to-all", "Gloo all-to-all failed: [.../tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:6832"),
    ],
)  # fmt: skip
def test_what_gloo_states(kind, message):
    """As jax 0.10.2 raised it after a peer was killed."""
    assert (parse_collective_kind(message), parse_peers(message)) == (kind, ["10.0.0.7"])


def test_words_of_libraries():
    assert parse_collective_kind("Collective permute stuck") == "collective-permute"
    assert (
        parse_collective_kind("reduce_scatter before all_gather") == "reduce-scatter"
        and parse_collective_kind("nothing") == ""
    )
    assert parse_peers("Connection reset by peer [fe80::1]:22") == ["fe80::1"]
    assert parse_peers("at 2026-11-23T10:11:12 version 1.2.3") == []
