"""The container files: what they copy is there, what they run works, and what they end with is small and not root."""

import fnmatch
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from pages import ROOT

FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT"}
DIGEST = "sha256:" + "0a" * 32
GIVEN = re.compile(r"[\w./:-]+@sha256:[0-9a-f]{64}")


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a file, each with what it is given in one line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, given) for word, _, given in (line.partition(" ") for line in whole if line)]


def of(path: Path, name: str) -> list[str]:
    return [given for word, given in instructions(path) if word == name]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


def test_there_is_one_for_each_kind_of_device():
    assert [name_of(path) for path in FILES] == ["cpu", "cuda", "tpu"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_it_is_linted(path):
    done = subprocess.run([Path(sys.executable).parent / "hadolint", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_its_image_is_pinned_and_not_root(path):
    assert {word for word, _ in instructions(path)} == INSTRUCTIONS
    assert of(path, "FROM") == ["${BASE} AS build", "${BASE}"]
    first, again = of(path, "ARG")
    # The vendor's image has no default: its digest is looked up by who builds.
    assert first == "BASE" if path.name == "cuda.Dockerfile" else GIVEN.fullmatch(first.removeprefix("BASE="))
    assert again == "BASE"
    (user,) = of(path, "USER")
    assert all(int(part) > 0 for part in user.split(":"))
    # Signals reach panax itself, where no shell stands before it.
    assert of(path, "ENTRYPOINT") == ['["panax"]']
    assert "PYTHONUNBUFFERED=1" in of(path, "ENV")[0]
    assert instructions(path)[-1][0] == "ENTRYPOINT"
    text = path.read_text(encoding="utf-8").lower()
    assert not any(word in text for word in ("://", "index-url", "token", "password", "apt-get"))
    assert text.count("pip install") + text.count("python install") == text.count("--no-cache-dir")


@pytest.mark.parametrize("path", FILES, ids=name_of)
@pytest.mark.parametrize(
    ("base", "code"),
    [
        (f"registry.example/python@{DIGEST}", 0),
        (f"registry.example:5000/python:3.12@{DIGEST}", 0),
        ("registry.example/python:3.12", 2),
        (f"registry.example/python@{DIGEST[:-1]}", 2),
        ("", 2),
    ],
)
def test_a_tag_without_a_digest_is_refused(path, base, code):
    done = subprocess.run(["sh", "-c", of(path, "RUN")[0]], env={"BASE": base}, capture_output=True, text=True)
    assert done.returncode == code
    assert code == 0 or f"BASE={base}: expected NAME@sha256:DIGEST" in done.stderr


def copied(path: Path) -> list[str]:
    """What a file takes from the clone."""
    return [name for given in of(path, "COPY") if not given.startswith("--from") for name in given.split()[:-1]]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_it_copies_is_in_the_clone_and_let_through(path):
    rules = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert rules[0] == "*"
    through = [rule[1:] for rule in rules if rule.startswith("!")]
    for name in copied(path):
        assert (ROOT / name).exists(), name
        assert any(name == rule or name.startswith(f"{rule}/") for rule in through), name
    # Nothing else is let through.
    assert set(through) == {name for each in FILES for name in copied(each)}
    assert not any(fnmatch.fnmatch(name, rule) for name in (".git", ".venv", "runs", ".env") for rule in through)


def test_the_vendor_s_jax_stays(tmp_path):
    """Requirements without jax and what it is built on are the others, whole."""
    (command, *_) = of(ROOT / "containers/cuda.Dockerfile", "RUN")[1].split(" && ")
    shutil.copy(ROOT / "requirements/run.txt", tmp_path / "all.txt")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    every, run_files = ((tmp_path / name).read_text(encoding="utf-8") for name in ("all.txt", "run.txt"))

    def blocks(text: str) -> set[str]:
        return set(re.findall(r"^[^ #\n].*(?:\n .*)*", text, re.MULTILINE))

    gone = {block.partition("==")[0] for block in blocks(every) - blocks(run_files)}
    assert gone == {"jax", "jaxlib", "ml-dtypes", "numpy", "opt-einsum", "scipy"}
    assert blocks(run_files) < blocks(every)


@pytest.mark.slow
def test_what_the_file_for_cpus_runs_works(tmp_path):
    """Its commands in order, in a folder with what it copies; pip fetches as it is configured here."""
    path, source, environment = ROOT / "containers/cpu.Dockerfile", tmp_path / "src", tmp_path / "opt/panax"
    for name in copied(path):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    tools = tmp_path / "base"
    venv.create(tools, symlinks=True)
    for command in of(path, "RUN")[1:-1]:
        command = command.replace("/opt/panax", str(environment)).replace("python3 ", f"{tools}/bin/python3 ")
        subprocess.run(
            ["sh", "-ec", command], cwd=source, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, check=True
        )
    shutil.rmtree(source)
    done = subprocess.run(
        [environment / "bin/panax", "recipes"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "quickstart" in done.stdout
