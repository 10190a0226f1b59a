"""The policy that the threads of a process on CPU run by."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")

PROGRAM = """
import os, threading, warnings
from panax.core.scheduling import run_in_batches

def started():
    ready, found = threading.Event(), []
    def body():
        found.append(threading.get_native_id())
        ready.wait()
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    while not found:
        pass
    return found[0]

names = {{os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}}
usual, idle = started(), started()
os.sched_setscheduler(idle, os.SCHED_IDLE, os.sched_param(0))
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run_in_batches()
later = started()
print(*(names[os.sched_getscheduler(thread)] for thread in (os.getpid(), usual, idle, later)))
print(*(str(each.message) for each in caught))
"""


def ran(before: str = "") -> list[str]:
    code = textwrap.dedent(PROGRAM.format(before=before))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_threads_that_are_and_come_run_in_batches_and_other_policies_stay():
    assert ran() == ["batch batch idle batch", ""]


def test_a_system_that_refuses_is_a_warning():
    refuses = """
def refuse(*arguments):
    raise PermissionError(1, "Operation not permitted")
os.sched_setscheduler = refuse
"""
    policies, warned = ran(refuses)
    assert policies == "other other idle other"
    assert "Operation not permitted" in warned and "more slowly" in warned


def test_a_system_without_the_policy_is_left_alone():
    assert ran("del os.SCHED_BATCH") == ["other other idle other", ""]
