"""README from top to bottom, in order, in one folder, as a reader would: every command and every block of Python."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT, fences

import panax
from panax.cli.main import main

README = ROOT / "README.md"

LEFT_OUT = {
    "python3 install.py": "there is an environment",
    "python3 install.py test": "there is an environment",
    ".venv/bin/pytest": "what runs this test",
}
"""Commands that are not run, and why."""

SMALL = "--data docs/models/m*.md --data.tokenizer.vocab-size 300 --data.batch-size 8 --task.model.num-layers 1"
AT_ONCE = "--optimizer.schedule.warmup-steps 0"

SHORTER = {
    "train quickstart": f"{SMALL} --num-steps 2 {AT_ONCE} --evaluate.every 0",
    "inspect quickstart --mesh.replica 2 --mesh.fsdp 4": f"{SMALL} --no-compile",
    "train story.py": f"--num-steps 4 {AT_ONCE}",
    "train story.py --name wide --task.model.embed 128 --task.compute-dtype bfloat16": f"--num-steps 2 {AT_ONCE}",
}
"""What is added to a `panax` command, so that it takes seconds: fewer steps, layers and texts."""


def typed(text: str, language: str) -> Iterator[str]:
    """The commands of a block in their order; in a console block only what stands after a `$`."""
    for line in text.replace("\\\n", " ").splitlines():
        if language == "bash" or line.startswith("$ "):
            yield from line.removeprefix("$ ").split(" && ")


def run(command: str, ran: list[str]) -> None:
    if command in LEFT_OUT:
        return
    words = shlex.split(command)
    while re.fullmatch("[A-Z_]+=.*", words[0]):
        # Eight simulated devices are what the tests have.
        assert words[0] == "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        del words[0]
    if words[0] not in ("panax", ".venv/bin/panax"):
        subprocess.run(command, shell=True, check=True)
        return
    arguments = shlex.join(words[1:])
    # A page shows what a command prints where another page tells to type it.
    if arguments not in ran:
        assert main([*words[1:], *shlex.split(SHORTER.get(arguments, ""))]) == 0, command
        ran.append(arguments)


def test_readme_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    ran: list[str] = []
    for block in fences(README):
        if block.language in ("bash", "console"):
            for command in typed(block.text, block.language):
                run(command, ran)
        elif block.language == "python":
            # Each in a new Python, which knows nothing of another block; one that begins with a file's name is that file.
            if named := re.match(r"# (\w+\.py)\n", block.text):
                Path(named.group(1)).write_text(block.text, encoding="utf-8")
            code = compile("\n" * (block.line - 1) + block.text, str(README), "exec")
            exec(code, {"__name__": "__main__"})
    assert SHORTER.keys() == set(ran), "README's commands have changed"
    out = capsys.readouterr().out
    assert "panax generate runs/quickstart" in out and "fsdp=4" in out
    assert {path.name for path in Path("runs").iterdir()} == {"quickstart", "story", "wide", "short"}
    assert panax.load("runs/wide").task.compute_dtype == "bfloat16"
    del sys.modules["story"]
