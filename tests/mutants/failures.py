"""A pytest plugin: append the names of failed tests, and of files that can't be imported, to a file."""

import os

import pytest

FILE = "PANAX_FAILURES"
"""Environment variable with the path of that file."""

IMPORT = "import: "
"""Begins the line of a file that can't be imported."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _append(f"{IMPORT}{report.nodeid}")


def _append(line: str) -> None:
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
