"""Deleting and listing goes through `system/files.py`, which knows links; elsewhere only with a stated reason."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "panax"
ROOMS = ("cluster", "stores", "data", "checkpoint", "comms", "environments", "job", "system")

FUNCTIONS = {
    *(f"os.{name}" for name in ("walk", "listdir", "scandir", "remove", "unlink", "rename", "rmdir", "removedirs")),
    "shutil.rmtree",
    "shutil.move",
}
METHODS = {"unlink", "rmdir", "iterdir", "rglob"}

EXCEPTIONS = {
    "system/files.py": "the module itself",
    "system/replacement.py": "its own temporary file, if it could not be completed",
    "system/owned_dir.py": "asks whether a folder is empty",
    "job/cpu_scheduling.py": "lists /proc; nothing is deleted",
    "cluster/supervisor/job_folder.py": "files of fixed names in a job's own folder, which unlinks a link as one",
    "cluster/node/worker_process.py": "an empty file of stacks, likewise",
    "stores/local.py": "its own temporary files, folders that rmdir finds empty, and lists, which follow links to be read",
    "data/text/paths.py": "asks whether a user's folder holds anything",
    "data/files/skipped_files.py": "lists what a user's folder holds beside what is read; nothing is deleted",
    "data/text/corpus.py": "lists a user's own texts; nothing is deleted",
    "data/tables/click_arrays.py": "lists a user's own arrays; nothing is deleted",
    "data/files/file_cache.py": "files of the cache's own, by names of digests, which unlinks a link as one",
    "checkpoint/memory_folder.py": "looks into folders that carry its mark, with lstat",
}


def calls_in(source: str) -> list[int]:
    """The lines on which something is deleted, moved or listed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in FUNCTIONS or (node.func.attr in METHODS and not called.startswith("os.")):
                found.append(node.lineno)
    return found


def test_only_the_module_deletes_and_lists():
    found = {
        str(path.relative_to(SOURCE)): lines
        for room in ROOMS
        for path in (SOURCE / room).rglob("*.py")
        if (lines := calls_in(path.read_text(encoding="utf-8")))
    }
    assert found.keys() - EXCEPTIONS.keys() == set(), found
    assert EXCEPTIONS.keys() <= found.keys(), "an exception that is not needed any more"


def test_no_tree_is_removed_by_the_standard_library_anywhere():
    for path in SOURCE.parent.rglob("*.py"):
        assert "shutil.rmtree(" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    "planted",
    [
        "shutil.rmtree(folder)",
        "os.walk(folder)",
        "path.unlink()",
        "folder.iterdir()",
        "os.rename(a, b)",
        "(a / b).rmdir()",
    ],
)
def test_a_call_elsewhere_is_seen(planted):
    assert calls_in(f"def f():\n    {planted}\n") == [2]


def test_a_tilde_is_expanded_by_one_function_which_takes_names_of_nobody():
    for path in SOURCE.parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ".expanduser()" not in text and "Path.home()" not in text, path
        assert "os.path.expanduser" not in text or path.name == "files.py", path


ONE_MECHANISM = {
    "os.replace(": {"system/replacement.py", "adapters/huggingface/export.py", "adapters/huggingface/gguf/writer.py"},
    "fcntl.flock(": {"system/lock.py"},
    "os.killpg(": {"system/children.py"},
    "os.waitid(": {"system/children.py"},
}
"""A call, and the only modules with it; the files of weights are as large as their model, and a flush would stall its disk."""


@pytest.mark.parametrize("call", ONE_MECHANISM)
def test_files_are_replaced_and_locked_and_processes_ended_by_one_module(call):
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if call in path.read_text(encoding="utf-8")}
    assert found == ONE_MECHANISM[call]
