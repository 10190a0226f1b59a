"""`panax check --full` on an accelerator that is here, run once; each of its parts is a test case."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 3600.0


def named(platform: str, expression: str) -> list[str]:
    """The parts that the check has on a platform, which need not be here.

    Args:
        expression: Of `pytest -m`: if it excludes the platform's tests, none are named, since that takes seconds.
    """
    if expression and not re.search(rf"(?<!not ){platform}\b", expression):
        return []
    from panax.core import Target
    from panax.preflight.full import cases

    return [str(case) for case in cases(target=Target(platform))]


def full_check(folder: Path, platform: str) -> dict[str, dict]:
    """The parts by their names, from a process that has the accelerator; the tests' own holds simulated CPUs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "panax", "check", "--full", "--json", "--output", str(folder / "page.md")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=folder, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout.strip():
        pytest.fail(f"the check ended with {done.returncode}: {done.stderr[-3000:]}")
    report = json.loads(done.stdout)["full"]
    if report["platform"] != platform:
        pytest.fail(f"there is a {platform}, and JAX computes on {report['platform']}: {done.stderr[-2000:]}")
    return {f"{part['group']}: {part['name']}": part for part in report["parts"]}


def judge(part: dict) -> None:
    """Pass, fail with the part's error, or skip with its reason."""
    if part["outcome"] == "left out":
        pytest.skip(part["why"])
    assert part["outcome"] == "passed", part["why"]
    assert part["figures"]
