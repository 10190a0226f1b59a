"""Planted faults: their kinds and places, and the command's report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planting import KINDS, Fault, candidates, draw

COMMAND = Path(__file__).parent


def planted(text, kind=None):
    """Each variant of a text, by kind."""
    return [fault.plant(text) for fault in candidates("a.py", text) if kind in (None, fault.kind)]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("sign", "y = a + b", ["y = a - b"]),
        ("sign", "y = (a) - (b * c)", ["y = (a) + (b * c)"]),
        ("sign", "y = -x", ["y = +x"]),
        ("sign", "y = -1", []),
        ("axis", "y = x.sum(axis=0)", ["y = x.sum(axis=1)"]),
        ("axis", "y = x.sum(-1)", ["y = x.sum(0)"]),
        ("axis", "y = jnp.sum(x, 1)", ["y = jnp.sum(x, 0)"]),
        ("axis", "y = jnp.concatenate([a, b], axis=axis)", []),
        ("off_by_one", "y = a < b", ["y = a <= b"]),
        ("off_by_one", "y = range(1, n)", ["y = range(2, n)"]),
        ("off_by_one", "y = n + 1", ["y = n + 2"]),
        ("off_by_one", "y = x[:, 2:]", ["y = x[:, 3:]"]),
        ("off_by_one", "y = 1e-6 + x", []),
        ("reduction", "y = lax.psum(x, 'fsdp')", ["y = (x)"]),
        ("reduction", "y = jax.lax.pmean(f(x), axes)", ["y = (f(x))"]),
        ("reduction", "y = (a * b).sum(axis=-1) + c", ["y = (a * b) + c"]),
        ("reduction", "y = shard.mean(x, dims)", ["y = (x)"]),
        ("reduction", "y = sum(x)", []),
    ],
)
def test_a_kind_changes_its_text(kind, text, expected):
    assert planted(text, kind) == expected


@pytest.mark.parametrize(
    "text",
    [
        'def f(x: Array[n + 1] = None) -> Array[n - 1]:\n    """a + b, x.sum(axis=0)"""',
        "def f(x):\n    raise ValueError(n + 1)",
        "def f(x):\n    if x < 1:\n        raise ValueError(x)",
        "assert x < 1",
        "y = f'{n + 1}'",
        "y = 'a' + b",
        "warnings.warn(n + 1)",
        "x: Array[n + 1]",
        "@mark(n + 1)\ndef f(): ...",
        "def f(:",
    ],
)
def test_nothing_is_planted_where_no_run_looks(text):
    assert planted(text) == []


def test_offsets_are_characters_and_the_rest_of_the_file_stays():
    text = '"""ä."""\n\nx = "ö" if a < b else c\n\x0cy = a + (\n    # b\n    c\n)\n'
    assert planted(text) == [text.replace("a < b", "a <= b")]
    fault = candidates("a.py", text)[0]
    with pytest.raises(ValueError, match="drawn for another version"):
        fault.plant("x = 1\n" + text)


def test_drawing_is_repeatable_and_takes_kinds_in_turn():
    text = "\n".join(f"y{i} = lax.psum(x + {i % 7}, 'a') - jnp.sum(z, axis=0)" for i in range(30))
    sources = {"b.py": text, "a.py": text}
    drawn = draw(sources, 12, 3)
    assert drawn == draw(dict(reversed(sources.items())), 12, 3) != draw(sources, 12, 4)
    assert [fault.kind for fault in drawn] == list(KINDS) * 3 and len(set(drawn)) == 12
    assert len(draw({"a.py": "y = a + b\nz = a - b"}, 20, 0)) == 2


@pytest.fixture
def repository(tmp_path):
    """A repository with one room, of which the tests look at one of two functions."""
    root = tmp_path / "repository"
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['tests', 'src']\n",
        "src/panax/__init__.py": "",
        "src/panax/maths/__init__.py": "",
        "src/panax/maths/sums.py": "def add(a, b):\n    return a + b\n\n\ndef take(a, b):\n    return a - b\n",
        "tests/maths/test_sums.py": "from panax.maths.sums import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def git(root, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "--no-gpg-sign", "-m", "a commit")


def run(root, *options):
    environment = dict(os.environ, TMPDIR=str(root.parent))
    return subprocess.run(
        [sys.executable, str(COMMAND), "--root", str(root), "--workers", "1", *options],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip


def test_faults_are_found_survive_and_meet_another_suite(repository):
    written = repository.parent / "faults.json"
    answer = run(repository, "--write", str(written))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "| maths | 2 | 1 | 1 |" in answer.stdout
    values = json.loads(written.read_text())
    by = {fault["line"]: (fault["result"], fault["by"]) for fault in values["faults"]}
    assert by == {2: ("found", "maths/test_sums.py::test_add"), 6: ("survived", "")}
    # A suite of a later commit, with a test of the other function and one that always fails.
    test = "from panax.maths.sums import take\ndef test_take(): assert take(2, 1) == 1\ndef test_no(): assert 0\n"
    (repository / "tests/maths/test_sums.py").write_text(test)
    commit(repository)
    answer = run(repository, "--replay", str(written), "--tests-of", "HEAD", "--write", str(written))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "fails without any fault, and was left out: maths/test_sums.py::test_no" in answer.stdout
    by = {fault["line"]: (fault["result"], fault["by"]) for fault in json.loads(written.read_text())["faults"]}
    assert by == {2: ("survived", ""), 6: ("found", "maths/test_sums.py::test_take")}
    assert not list(repository.parent.glob("panax-*"))
    status = subprocess.run(["git", "status", "--short"], cwd=repository, capture_output=True, text=True)
    assert status.stdout == ""


def test_an_import_that_breaks_and_a_file_of_another_version_are_reported(repository):
    fault = Fault("src/panax/maths/sums.py", "sign", 1, 0, "def", "raise")
    misfit = Fault("src/panax/maths/sums.py", "sign", 1, 5, "+", "-")
    written = repository.parent / "faults.json"
    rows = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in (fault, misfit)]
    written.write_text(json.dumps({"commit": "HEAD", "faults": rows}))
    answer = run(repository, "--replay", str(written))
    assert "broken at import by tests/maths/test_sums.py" in answer.stdout, answer.stdout + answer.stderr
    assert "does not fit" in answer.stdout


def test_what_is_not_understood_is_refused(repository):
    answer = run(repository, "--room", "math")
    assert answer.returncode == 2 and "'math' is not a room of src/panax; did you mean 'maths'?" in answer.stderr
    (repository.parent / "other.json").write_text("[]")
    answer = run(repository, "--replay", str(repository.parent / "other.json"))
    assert answer.returncode == 2 and "was not written by --write" in answer.stderr
