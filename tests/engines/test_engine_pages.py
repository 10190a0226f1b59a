"""The pages of the engines: commands print the output shown, and lists are complete."""

import argparse
import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from panax.cluster.engines import ENGINES, Resources, make_engine
from panax.cluster.engines.kubernetes import PORT, jobset_name
from panax.cluster.engines.resources import COMMON_RESOURCES

PAGES = Path(__file__).parents[2] / "docs/launch"

CONSOLE = re.compile(
    r"^```console\n\$ panax (launch [^\n]* --dry-run)\n(?:```\n[^`]*?^```text\n)?(.*?)^```$", re.MULTILINE | re.DOTALL
)
"""A command and its output: in its own block, or in the one after it."""
COMMAND = re.compile(r"^(?:\$ )?panax (launch (?:.*\\\n)*.*)$", re.MULTILINE)


def resources_of(words: list[str]) -> tuple[str, Resources]:
    """The engine and what is asked of it; flags that are no field are the run's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command")
    parser.add_argument("recipe")
    parser.add_argument("--on")
    parser.add_argument("--dry-run", action="store_true")
    for field in dataclasses.fields(Resources):
        kind = (
            {"action": "append"}
            if isinstance(field.default, tuple)
            else {"type": str if isinstance(field.default, str) else int}
        )
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **kind)
    block = vars(parser.parse_known_args(words)[0])
    return block["on"], Resources(**{field.name: block[field.name] for field in dataclasses.fields(Resources)})


@pytest.mark.parametrize("name", ENGINES)
def test_commands_are_of_the_page_s_engine(name, tmp_path):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    commands = COMMAND.findall(text)
    assert commands
    for command in commands:
        on, resources = resources_of(shlex.split(command.replace("\\\n", " ").partition(" > ")[0]))
        assert on == name
        make_engine(on, resources, environment={"PATH": str(tmp_path)})


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "kubernetes"])
def test_what_a_dry_run_is_shown_to_print(name, tmp_path, monkeypatch):
    (block,) = CONSOLE.findall((PAGES / f"{name}.md").read_text(encoding="utf-8"))
    command, shown = block
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/home/me/.venv/bin/python")
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me/models")
    words = shlex.split(command)
    agent = ("/home/me/.venv/bin/python", "-m", "panax.cluster.node.agent")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "LANG": "C.UTF-8", "HF_TOKEN": "x"}
    on, resources = resources_of(words)
    engine = make_engine(on, resources, agent=agent, environment=environment)
    printed = engine.render_submission([word for word in words if word != "--dry-run"], Path("runs/quickstart"))
    assert shown.strip() == printed.strip().replace(str(mpirun), "/usr/bin/mpirun")


def test_lines_that_kubernetes_is_shown_to_be_given():
    """In their order, with others between them where the page has dots."""
    text = (PAGES / "kubernetes.md").read_text(encoding="utf-8")
    on, resources = resources_of(
        words := shlex.split(COMMAND.findall(text)[0].replace("\\\n", " ").partition(" > ")[0])
    )
    engine = make_engine(on, resources, environment={"PATH": ""})
    printed = engine.render_submission([word for word in words if word != "--dry-run"], Path("runs/quickstart"))
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    parts = shown.strip().removesuffix("...").split("...\n")
    assert len(parts) > 2
    for part in parts:
        _, block, printed = printed.partition(part.strip("\n"))
        assert block, part


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_flags_that_are_listed_are_those_that_the_engine_takes(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    module = __import__(f"panax.cluster.engines.{name}", fromlist=["USED_RESOURCES"])
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `--"))
    listed = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", rows)}
    assert listed - COMMON_RESOURCES == module.USED_RESOURCES


def test_what_the_page_states_of_kubernetes():
    text = (PAGES / "kubernetes.md").read_text(encoding="utf-8")
    assert f"port {PORT} of" in text and f"generic {jobset_name(Path('runs/quickstart'))} " in text
