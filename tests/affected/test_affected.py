"""The tests that a change affects: found by imports, chosen within a budget, run by one command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from affected_tests import affected_files, fill_budget
from changed_files import Changes, changes_since
from import_graph import ImportGraph
from recorded_times import RecordedTimes

COMMAND = Path(__file__).parent
ROOT = COMMAND.parents[1]

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['tests', 'src']\n",
    "docs/page.md": "text",
    "src/panax/__init__.py": "",
    "src/panax/core/__init__.py": (
        "from .lazy import lazy_getattr\nfrom .eager import early\n"
        "_WHERE = {'task': ('Task',), 'errors': ('suggest_name',)}\n__getattr__ = lazy_getattr(__name__, _WHERE)\n"
    ),
    "src/panax/core/lazy.py": (ROOT / "src/panax/core/lazy.py").read_text(encoding="utf-8"),
    "src/panax/core/eager.py": "early = 1\n",
    "src/panax/core/task.py": "class Task: ...\n",
    "src/panax/core/errors.py": "def suggest_name(): ...\n",
    "src/panax/train/__init__.py": "from .step import step\n",
    "src/panax/train/step.py": "def step():\n    from ..core import Task\n    return Task\n",
    "tests/tiny.py": "from panax.core.eager import early\n",
    "tests/core/test_task.py": "from panax.core import Task\ndef test_a(): ...\n",
    "tests/core/test_errors.py": "from panax import core\ndef test_a(): core.suggest_name()\n",
    "tests/train/test_step.py": (
        "import pytest\nfrom panax.train import step\ndef test_a(): ...\n@pytest.mark.slow\ndef test_b(): ...\n"
    ),
    "tests/train/test_tiny.py": "import tiny\ndef test_a(): ...\n",
    "tests/train/worker.py": "import panax.core.task\n",
    "tests/train/test_worker.py": "def test_a(): print('worker.py')\n",
    "tests/docs/test_pages.py": "def test_a(): ...\n",
}


@pytest.fixture
def repository(tmp_path):
    """A small repository with one commit."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(root, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "--no-gpg-sign", "-m", "a commit")


def affected(root, changed=(), deleted=(), **options):
    graph = ImportGraph(root, deleted)
    changes = Changes("", tuple(changed), tuple(deleted))
    files = affected_files(graph, changes, RecordedTimes.read(root), **options)
    return {file.path.removeprefix("tests/"): file.distance for file in files}


def run(root, *options):
    return subprocess.run(
        [sys.executable, COMMAND, "--root", root, *options], capture_output=True, text=True, timeout=120
    )


def test_a_lazily_exported_module_affects_those_who_use_its_names(repository):
    found = affected(repository, ["src/panax/core/task.py"])
    assert found == {
        "core/test_task.py": 0.5,
        "train/test_worker.py": 2.0,
        "train/test_step.py": 2.0,
        "core/test_errors.py": 3.0,
    }


def test_an_attribute_chain_is_an_import(repository):
    assert affected(repository, ["src/panax/core/errors.py"])["core/test_errors.py"] == 0.5


def test_a_test_helper_affects_its_importers(repository):
    assert affected(repository, ["tests/tiny.py"]) == {"train/test_tiny.py": 1.0}
    assert affected(repository, ["src/panax/core/eager.py"])["train/test_tiny.py"] == 2.0


def test_a_changed_test_comes_first_and_pages_affect_the_tests_of_pages(repository):
    found = affected(repository, ["tests/core/test_task.py", "docs/page.md"])
    assert found == {"core/test_task.py": 0.0, "docs/test_pages.py": 1.0}


def test_a_deleted_module_affects_those_who_still_import_it(repository):
    (repository / "src/panax/core/task.py").unlink()
    changes = changes_since(repository, "HEAD")
    assert changes.changed == () and changes.deleted == ("src/panax/core/task.py",)
    assert affected(repository, deleted=changes.deleted)["core/test_task.py"] == 0.5


def test_a_file_that_does_not_parse_is_named_and_its_importers_run(repository):
    (repository / "src/panax/core/task.py").write_text("class Task(:\n")
    graph = ImportGraph(repository)
    assert list(graph.broken) == ["src/panax/core/task.py"]
    assert affected(repository, ["src/panax/core/task.py"])["core/test_task.py"] == 0.5
    (repository / "tests/core/test_errors.py").write_text("def test_a(:\n")
    assert affected(repository, ["tests/core/test_errors.py"]) == {"core/test_errors.py": 0.0}


def test_changes_are_committed_uncommitted_and_untracked_ones(repository):
    (repository / "a.py").write_text("")
    commit(repository)
    (repository / "src/panax/core/eager.py").write_text("early = 2\n")
    (repository / "tests/new.py").write_text("")
    assert changes_since(repository).changed == ("a.py", "src/panax/core/eager.py", "tests/new.py")
    assert changes_since(repository, "HEAD").changed == ("src/panax/core/eager.py", "tests/new.py")


def test_a_budget_is_filled_nearest_first_from_recorded_durations(repository):
    durations = {
        "train/test_tiny.py::test_a": [70, 70],
        "train/test_step.py::test_a[1]": [50, 50],
        "train/test_step.py::test_a[2]": [90, 90],
        "train/test_worker.py::test_a": [20, 20],
        "core/test_task.py::test_a": [5, 5],
        "core/test_errors.py::test_a": [5, 5],
    }
    (repository / "tests/durations.json").write_text(json.dumps(durations))
    changes = Changes("", ("src/panax/core/eager.py", "src/panax/train/step.py", "src/panax/core/task.py"), ())
    files = affected_files(ImportGraph(repository), changes, RecordedTimes.read(repository))
    chosen = fill_budget(files, 80.0, workers=2)
    # 60 s for each of the two workers: the file of 70 s is left out, of another only the shorter case fits.
    names = [case.name for file in chosen for case in file.cases]
    assert "train/test_step.py::test_a[1]" in names and "core/test_task.py::test_a" in names
    assert not {"train/test_step.py::test_a[2]", "train/test_tiny.py::test_a"} & set(names)
    assert sum(file.seconds for file in chosen) <= 120
    assert "train/test_step.py::test_b" not in {case.name for file in files for case in file.cases}


def test_cases_of_slower_tiers_are_left_out_unless_asked_for(repository):
    (repository / "tests/tiers.toml").write_text(
        '[full]\n"train/test_tiny.py" = ["*"]\n[slow]\n"train/test_worker.py" = ["test_a[1]", "test_b"]\n'
    )
    (repository / "tests/durations.json").write_text(
        '{"train/test_worker.py::test_a[1]": [99, 9], "train/test_worker.py::test_a[2]": [40, 9]}'
    )
    default, every = RecordedTimes.read(repository), RecordedTimes.read(repository, all_tiers=True)
    assert default.cases("train/test_tiny.py::test_a") == default.cases("train/test_worker.py::test_b") == []
    assert [case.seconds for case in default.cases("train/test_worker.py::test_a")] == [40.0]
    assert len(every.cases("train/test_worker.py::test_a")) == 2 and every.cases("train/test_tiny.py::test_a")
    # Short cases are not recorded.
    assert default.cases("train/test_step.py::test_a")[0].seconds < 1


def test_durations_of_another_form_are_refused(repository):
    (repository / "tests/durations.json").write_text('{"a": 1}')
    answer = run(repository, "HEAD")
    assert answer.returncode == 2 and "[wall seconds, CPU seconds]" in answer.stderr


def test_the_command_runs_what_it_lists(repository):
    answer = run(repository, "HEAD")
    assert answer.returncode == 0 and "no test is affected" in answer.stdout
    (repository / "src/panax/core/task.py").write_text("class Task:\n    x = 1\n")
    (repository / "tests/train/test_step.py").write_text("def test_a(): ...\n")
    git(repository, "add", "-A")
    answer = run(repository, "HEAD", "--list")
    assert (
        answer.returncode == 0 and "tests/core/test_task.py (1 tests): imports src/panax/core/task.py" in answer.stdout
    )
    answer = run(repository, "HEAD", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert answer.returncode == 0 and "4 passed" in answer.stdout, answer.stdout + answer.stderr
    answer = run(repository, "no-such-commit")
    assert answer.returncode == 2 and "no-such-commit" in answer.stderr


@pytest.mark.slow
def test_the_tests_of_this_repository_are_found():
    graph = ImportGraph(ROOT)
    assert not graph.broken
    importers = graph.importers()
    assert "tests/optim/test_on_shards.py" in importers["src/panax/optim/matrix/muon.py"]
    assert len([path for path in importers["tests/tiny.py"] if path.startswith("tests/")]) > 5
    # The command line's modules are imported by name.
    assert "src/panax/cli/main.py" in importers["src/panax/cli/commands/inspect.py"]
