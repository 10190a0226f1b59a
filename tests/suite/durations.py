"""Measure each test: wall seconds, and CPU seconds of this process and its children."""

import json
import os
import resource
from pathlib import Path
from time import perf_counter

import pytest

_PHASES = ("setup", "call", "teardown")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that names the file to write."""
    parser.addoption("--write-durations", metavar="FILE", help="write each test's seconds to FILE (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    """Collect durations in the process that receives all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--write-durations")), "panax-durations")


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and the children it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Attach to each report the CPU seconds since the previous report of this process."""
    report = yield
    now = cpu_seconds()
    report.cpu_seconds = now - _last[0]
    _last[0] = now
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid, location):
    """Count from the test's start: what collection took belongs to no test."""
    _last[0] = cpu_seconds()


_last = [0.0]


class Durations:
    """Seconds of each test: wall and CPU, its set-up and teardown included."""

    def __init__(self, path: str | None):
        self.path = path
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.begun = perf_counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix("tests/")
        self.wall[name] = self.wall.get(name, 0.0) + report.duration
        self.cpu[name] = self.cpu.get(name, 0.0) + getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        if self.path:
            rows = {name: [round(self.wall[name], 3), round(self.cpu[name], 3)] for name in sorted(self.wall)}
            temporary = Path(f"{self.path}.{os.getpid()}")
            temporary.write_text(json.dumps(rows, indent=0))
            temporary.replace(self.path)
