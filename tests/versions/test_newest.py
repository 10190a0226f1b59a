"""The files that the tests of the newest JAX run by: their names are there, and nothing in them is of one machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKER, EXPRESSION, *TESTS = (ROOT / "tests/newest.txt").read_text(encoding="utf-8").splitlines()


def test_the_arguments_are_a_marker_and_tests():
    assert (MARKER, EXPRESSION) == ("-m", "not gpu and not tpu")
    assert TESTS and len(set(TESTS)) == len(TESTS)


@pytest.mark.parametrize("name", TESTS)
def test_every_test_that_is_named_is_there(name):
    path, _, function = name.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {function.partition('[')[0]}(" in text if function else "def test_" in text


def test_requirements_are_names_versions_and_hashes():
    text = (ROOT / "requirements/newest.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(
        re.fullmatch(r"[\w.-]+==\S+( ; [^\\]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines
    )
    (newest,) = re.findall(r"^jax==(\S+)", text, re.MULTILINE)
    allowed = re.search(r"the newest, ([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert allowed and newest == allowed[1], "the comment beside the range in pyproject.toml names another version"


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def newest_python(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the search with these programs and the system's tools alone."""
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "grep", "sort", "tail", "ls"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    command = [str(tools / "bash"), str(ROOT / ".ci/newest_python")]
    return subprocess.run(command, env={"PATH": f"{folder}:{tools}"}, capture_output=True, text=True, check=False)


def test_the_newest_python_that_starts_is_found(tmp_path):
    script(tmp_path, "python3.12", "echo '3.12.9 /here/python3.12'")
    script(tmp_path, "python3.13", "echo '3.13.10 /here/python3.13'")
    script(tmp_path, "python3.14", "exit 127")
    assert newest_python(tmp_path).stdout == "/here/python3.13\n"


def test_no_new_python_is_a_sentence(tmp_path):
    script(tmp_path, "python3.11", "exit 0")
    done = newest_python(tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("the newest JAX needs Python 3.12 or newer, and there is no python3.N above 3.11")
