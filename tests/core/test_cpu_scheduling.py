"""The policy that the threads of a process on CPU run by."""

import os
import subprocess
import sys
import textwrap

import pytest

from panax.job import cpu_scheduling as scheduling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")

PROGRAM = """
import os, threading, warnings
from panax.job import cpu_scheduling as scheduling

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
    scheduling.use_batch_policy_while_alone(1)
{after}
later = started()
print(*(names[os.sched_getscheduler(thread)] for thread in (os.getpid(), usual, idle, later)))
print(*(str(each.message) for each in caught))
"""


def ran(before: str = "", after: str = "") -> list[str]:
    code = textwrap.dedent(PROGRAM.format(before=before, after=textwrap.indent(after, "    ")))
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


SCRIPTED = """
found = iter([{shares}])
scheduling.CHECK_SECONDS = 0.02
scheduling.CoreLoad.shares = lambda self: next(found)
"""
WAIT = """
scheduling._watching.join(20)
"""


QUIET, BUSY, ASLEEP = "(0.5, 0.1), ", "(0.5, 0.4), ", "(0.1, 0.9), "


@pytest.mark.parametrize(
    "shares, policy",
    [
        (QUIET, "batch"),
        (BUSY * 2 + QUIET + BUSY * 2, "batch"),
        (BUSY * 3, "other"),
        (BUSY * 3 + QUIET, "batch"),
        (ASLEEP * 9, "batch"),
        (BUSY * 3 + "(0.1, 0.0), ", "other"),
    ],
    ids=["alone", "another program passed", "came", "and went", "while this one slept", "went while this one slept"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_policy_follows_what_other_programs_use(shares: str, policy: str):
    """The watching thread ends where the script does."""
    policies, _ = ran(SCRIPTED.format(shares=shares), WAIT)
    assert policies == f"{policy} {policy} idle {policy}"


OTHERS = """
import os, time
from panax.job import cpu_scheduling as scheduling
cores = scheduling.CoreLoad({sharing})
share = 0.0
end = time.monotonic() + 20
while time.monotonic() < end and not {until}:
    time.sleep(0.5)
    _, share = cores.shares()
print(share)
"""


def others(sharing: int, until: str, core: int) -> float:
    code = f"import os; os.sched_setaffinity(0, [{core}])\n" + OTHERS.format(sharing=sharing, until=until)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_another_program_on_the_same_core_is_seen():
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    try:
        assert others(1, "share > 0.5", core) > 0.5
    finally:
        busy.kill()
        busy.wait()


def test_processes_of_the_same_job_are_not_others(monkeypatch: pytest.MonkeyPatch):
    """Of ten seconds of its cores this process ran three, as did another of its job, and a stranger two."""
    counted = iter([(0.0, 0.0, 0.0), (8.0, 2.0, 3.0), (16.0, 4.0, 6.0)])
    monkeypatch.setattr(scheduling.CoreLoad, "_read_seconds", lambda self: next(counted))
    cores = scheduling.CoreLoad(2)
    assert cores.shares() == pytest.approx((0.3, 0.2))
    assert cores.shares() == pytest.approx((0.3, 0.2))


def test_cores_that_were_given_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert scheduling.processes_on_these_cores(4) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert scheduling.processes_on_these_cores(4) == 1
