"""`panax at`, on a run of the tiny recipe: figures, a page, and what if."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from panax.cli.main import main


@pytest.fixture(scope="module")
def folder(undisturbed):
    return undisturbed[0].prepared.folder


def test_figures_and_page(folder, tmp_path, capsys):
    """The run's settings are rebuilt from its files alone; a step between two records is verified by the next one."""
    page = tmp_path / "step.html"
    flags = ["--without-row", "1", "--set", "step.clip_norm=0.05", "--output", str(page), "--json"]
    assert main(["at", folder, "27", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verified"] and {each["step"] for each in shown["comparisons"]} == {30}
    assert shown["tapped_ulps"] == 0
    assert [each["path"] for each in shown["modules"] if each["phase"] == "forward"] == [
        "embedding",
        *(f"layers.{layer}/{part}" for layer in range(2) for part in ("attention", "feed_forward")),
        "final_norm",
    ]
    assert abs(1 - sum(shown["rows"]["shares"])) <= shown["rows"]["bound"] < 1e-3
    (outcome,) = shown["what_if"]
    assert outcome["change"] == "step.clip_norm: 1.0 -> 0.05; without row 1"
    assert outcome["after"]["tokens"] == shown["scalars"]["tokens"] - 64
    text = page.read_text()
    assert "layers.1/feed_forward" in text and "equal to the bit" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "clip_norm"], "expected SETTING=VALUE"),
        (["--clip-norm", "1"], "follow --recipe"),
        (["--rows", "many"], "--rows"),
    ],
)
def test_refused_flags(folder, flags, message, capsys):
    assert main(["at", folder, "27", *flags]) == 2
    assert message in capsys.readouterr().err


def test_branch(folder, tmp_path, capsys):
    """The parent's list of checkpoints names the branch; its settings differ by the flag alone."""
    made = tmp_path / "slower"
    flags = ["--at", "25", "--name", "slower", "--directory", str(made), "--set", "optimizer.schedule.peak=0.001"]
    assert main(["branch", folder, *flags, "--no-train"]) == 0
    assert sorted(path.name for path in made.rglob("*") if path.is_file()) == ["origin.json"]
    capsys.readouterr()
    assert main(["checkpoint", "ls", folder]) == 0
    assert "kept for slower" in " ".join(capsys.readouterr().out.split())
    assert main(["checkpoint", "rm", f"{folder}/checkpoints/step_00000025"]) == 4
    assert "is the beginning of slower" in " ".join(capsys.readouterr().err.split())
    assert main(["branch", folder, *flags, "--no-train", "--set", "seed=3"]) == 4
    assert "random bits" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_interrupted(folder):
    """Ctrl-C ends a replay with its exit code; the run's folder stays as it was."""
    before = {path: os.stat(os.path.join(folder, path)).st_mtime_ns for path in os.listdir(folder)}
    with subprocess.Popen([sys.executable, "-m", "panax", "at", folder, "27"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"replaying" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130
    assert before == {path: os.stat(os.path.join(folder, path)).st_mtime_ns for path in os.listdir(folder)}
