"""Large blocks are mapped in huge pages, if need be after a restart of the program, which happens once and loses nothing."""

import os
import subprocess
import sys

import pytest

from panax.system import allocator
from panax.system.allocator import (
    HUGE_PAGES_TUNABLE,
    TUNABLES,
    huge_page_environment,
    huge_page_mode,
    keep_freed_memory,
)

CHOICES = {"always": "[always] madvise never", "madvise": "always [madvise] never", "never": "always madvise [never]"}


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Makes this a machine without accelerators, with a glibc that can ask, and huge pages for whom it says."""

    def become(choice: str) -> None:
        file = tmp_path / "enabled"
        file.write_text(CHOICES[choice] + "\n")
        monkeypatch.setattr(allocator, "HUGE_PAGES", file)

    monkeypatch.setattr(allocator, "ACCELERATORS", ())
    monkeypatch.setattr(allocator, "_can_request_huge_pages", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    return become


@pytest.mark.parametrize("choice", CHOICES)
def test_who_gets_huge_pages(system, choice):
    system(choice)
    assert huge_page_mode() == choice


def test_a_system_that_does_not_state_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "HUGE_PAGES", tmp_path / "absent")
    assert huge_page_mode() == "never" and huge_page_environment({}) == {}


def test_what_a_process_is_started_with(system, monkeypatch):
    system("madvise")
    assert huge_page_environment({}) == {TUNABLES: HUGE_PAGES_TUNABLE}
    other = "glibc.malloc.check=3"
    assert huge_page_environment({TUNABLES: other}) == {TUNABLES: f"{other}:{HUGE_PAGES_TUNABLE}"}
    for held in (HUGE_PAGES_TUNABLE, "glibc.malloc.hugetlb=0"):
        assert huge_page_environment({TUNABLES: held}) == {}, "once, and not against the user's own"
    for choice in ("always", "never"):
        system(choice)
        assert huge_page_environment({}) == {}
    system("madvise")
    monkeypatch.setattr(allocator, "_can_request_huge_pages", lambda: False)
    assert huge_page_environment({}) == {}


PROGRAM = """
import os, sys
from pathlib import Path
from panax.system import allocator
allocator.HUGE_PAGES = Path(sys.argv[1])
allocator.ACCELERATORS = ()
allocator._can_request_huge_pages = lambda: True
print(os.getpid(), flush=True)
allocator.restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], sys.flags.utf8_mode, sys.stdin.read(), allocator.keep_freed_memory())
"""


def run(tmp_path, choice: str, **environment: str) -> list[str]:
    file, program = tmp_path / "enabled", tmp_path / "program.py"
    file.write_text(CHOICES[choice] + "\n")
    program.write_text(PROGRAM)
    command = [sys.executable, "-X", "utf8", str(program), str(file), "a b", "--c"]
    variables = {**{name: value for name, value in os.environ.items() if name != TUNABLES}, **environment}
    done = subprocess.run(command, input="read", capture_output=True, text=True, env=variables, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is of Linux")
def test_a_program_starts_again_once_as_the_same_process(tmp_path):
    first, second, last = run(tmp_path, "madvise")
    assert first == second, "the same process"
    assert last == f"{HUGE_PAGES_TUNABLE} ['a b', '--c'] 1 read True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is of Linux")
@pytest.mark.parametrize(
    "choice, held", [("never", {}), ("always", {}), ("madvise", {TUNABLES: "glibc.malloc.hugetlb=0"})]
)
def test_a_program_that_need_not_does_not(tmp_path, choice, held):
    _, last = run(tmp_path, choice, **held)
    assert last == f"{held.get(TUNABLES)} ['a b', '--c'] 1 read True"


def test_only_large_temporaries_are_mapped_and_only_in_huge_pages(system, monkeypatch):
    seconds = []

    class Glibc:
        def mallopt(self, option, value):
            seconds.append((option, value))
            return 1

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Glibc())
    monkeypatch.setattr(allocator, "_keeps", False)
    system("always")
    assert not allocator.prepare_allocator(allocator.LARGE_BYTES), "nothing was set before"
    assert keep_freed_memory()
    before = len(seconds)
    assert not allocator.prepare_allocator(allocator.LARGE_BYTES - 1)
    system("never")
    assert not allocator.prepare_allocator(allocator.LARGE_BYTES) and len(seconds) == before
    system("madvise")
    monkeypatch.setenv(TUNABLES, HUGE_PAGES_TUNABLE)
    assert allocator.prepare_allocator(allocator.LARGE_BYTES)
    assert seconds[before:] == [
        (allocator.M_MMAP_MAX, allocator.MAPPED_BLOCKS),
        (allocator.M_MMAP_THRESHOLD, allocator.MAPPED_BYTES),
    ]


def test_on_a_machine_with_an_accelerator_nothing_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "ACCELERATORS", (str(tmp_path),))
    assert not keep_freed_memory() and huge_page_environment({}) == {}
