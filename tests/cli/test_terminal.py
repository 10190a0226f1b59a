"""Terminal output: help for every command, lines of 80 columns, no traceback if the reader closes the pipe; imports."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_recipe
from rich.cells import cell_len

from panax.cli.main import COMMANDS, TRAINING_COMMANDS, main
from panax.metrics.console import wrap_line

RECIPE = str(Path(tiny_recipe.__file__))
CHECKPOINT = ("ls", "verify", "diff", "convert", "rm")
HELPS = [
    (),
    *((name,) for name in COMMANDS),
    *(("checkpoint", name) for name in CHECKPOINT),
    ("data", "show"),
    ("find", "lr"),
    ("find", "batch"),
    *((name, recipe) for name in ("train", "inspect") for recipe in ("quickstart", "vit_digits", "preset:llama3_8b")),
]


def fits(text: str) -> bool:
    return max(map(cell_len, text.splitlines())) <= 80


@pytest.mark.parametrize("arguments", HELPS, ids=lambda arguments: " ".join(arguments) or "panax")
def test_every_help_exits_with_0_and_fits(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code = main([*arguments, "--help"])
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    assert code == 0 and not out.err and out.out.count("\n") > 2 and fits(out.out)


def test_reports_fit(run_of, monkeypatch, capsys):
    folder = run_of(6)
    trained = capsys.readouterr().out
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PANAX_CACHE", str(folder / "cache"))
    # But for the line of a step's loss, which has a test of its own.
    other_lines = [line for line in trained.splitlines() if "  loss " not in line]
    assert len(other_lines) > 5 and fits("\n".join(other_lines))
    steps = sorted(each.name for each in Path("runs/tiny/checkpoints").glob("step_*"))
    one, two = (f"runs/tiny/checkpoints/{name}" for name in steps[-2:])
    for arguments, code in (
        (("checkpoint", "ls", "runs/tiny"), 0),
        (("checkpoint", "ls", one), 0),
        (("checkpoint", "verify", "runs/tiny"), 0),
        (("checkpoint", "diff", one, two), 1),
        (("inspect", RECIPE, "--mesh.fsdp", "4", "--mesh.tensor", "2", "--no-compile"), 0),
        (("inspect", "preset:llama3_8b", "--mesh.fsdp", "8", "--target", "h100x8", "--no-compile"), 0),
    ):
        assert main(list(arguments)) == code
        out = capsys.readouterr()
        assert fits(out.out), arguments


def test_lines_are_broken_between_words_and_names_are_whole():
    path = "a/" * 50
    assert wrap_line(f"saved in {path} now", 3) == f"saved in\n   {path}\n   now"
    assert wrap_line("one\ntwo") == "one\ntwo" and wrap_line("") == ""


@pytest.mark.parametrize("arguments", [("--help",), ("recipes",), ("inspect", RECIPE, "--no-compile")])
def test_a_pipe_that_closes_is_no_traceback(arguments, tmp_path):
    """As `panax ... | head -1`: the reader takes a line at most, and goes."""
    program = [sys.executable, "-m", "panax", *arguments]
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    said = running.stderr.read().decode()
    running.stderr.close()
    assert running.wait(120) in (1, 141)
    assert "Traceback" not in said and "Exception ignored" not in said and "BrokenPipe" not in said


HEAVY = (
    "jax",
    "jaxlib",
    "numpy",
    "equinox",
    "optax",
    "rich",
    "tyro",
    "tokenizers",
    "obstore",
    "safetensors",
    "panax_compare",
)


@pytest.mark.parametrize(
    "code",
    ["import panax", "from panax.cli.main import main; assert main(['--help']) == 0", "import panax.core.errors"],
)
def test_nothing_heavy_is_imported_before_it_is_used(code):
    """`import panax` and `panax --help` take a tenth of a second of a processor: a prompt that completes names imports it."""
    look = f"import sys; {code}; print(sorted(set({HEAVY!r}) & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_heavy_import_would_be_seen():
    look = f"import sys; import panax.models; print(sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert "jax" in done.stdout and "numpy" in done.stdout


@pytest.mark.parametrize("command", TRAINING_COMMANDS)
def test_the_allocator_is_configured_before_any_thread_begins(command):
    """With a thread begun before, glibc gives memory back after each call of a program: a step took half as long again."""
    code = (
        "import os, threading\n"
        "import panax.cli.main as main\n"
        "seen = []\n"
        "main.keep_freed_memory = lambda: seen.append(threading.active_count())\n"
        "main._command = lambda name: lambda arguments: seen.append(threading.active_count()) or 0\n"
        f"assert main.main([{command!r}, 'x']) == 0\n"
        "assert seen[0] == 1, seen\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_modules_are_imported_without_looking_for_garbage_which_is_on_again_afterwards():
    code = (
        "import gc, sys\n"
        "import panax.cli.main as main\n"
        "seen = []\n"
        "main._command = lambda name: lambda arguments: seen.append((gc.isenabled(), gc.get_freeze_count() > 0)) or 0\n"
        "sys.argv = ['panax', 'report', 'x']\n"
        "assert main.main(['report', 'x']) == 0 and main.main() == 0\n"
        "assert seen == [(True, False), (True, True)], seen\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
