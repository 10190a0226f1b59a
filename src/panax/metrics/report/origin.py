"""Origin of a run: its layout, its environment, and how to reproduce it."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ..facts import RunFacts
from ..page.blocks import Block, Code, Fold, Paragraph, TextTable
from .formats import format_value
from .run_files import Facts, RunFiles, mapping, number, text

NO_SESSIONS = "is unknown: the run's folder has no sessions.jsonl, which older versions of Panax did not write"


def layout_blocks(run: RunFiles) -> Iterator[Block]:
    """Yield the mesh, and the layout of parameters on it."""
    facts = run.facts
    if not facts:
        yield Paragraph(f"The layout {NO_SESSIONS}.", faint=True)
        return
    mesh = mapping(facts, "mesh")
    rows = [("", "")]
    shape = ", ".join(f"{axis} {format_value(size)}" for axis, size in mesh.items()) or "one device"
    rows.append(("mesh", shape))
    parameters = number(facts, "parameters")
    if parameters is not None:
        rows.append(("parameters", f"{parameters:,.0f}"))
    earlier = [mapping(one, "mesh") for one in run.sessions[:-1]]
    if changed := [format_value(before) or "one device" for before in earlier if dict(before) != dict(mesh)]:
        rows.append(("mesh of earlier sessions", ", ".join(dict.fromkeys(changed))))
    yield TextTable(tuple(rows))
    lines = facts.get("layout")
    if isinstance(lines, list) and lines:
        yield Code("\n".join(str(line) for line in lines), title=f"Sharding of {len(lines):,} arrays on the mesh")


def read_environment(run: RunFiles) -> dict[str, str]:
    """Return a run's environment, by name."""
    facts = run.facts
    devices = mapping(facts, "devices")
    environment = {
        "devices": " x ".join(filter(None, (format_value(devices.get("count")), format_value(devices.get("kind"))))),
        "platform": format_value(devices.get("platform")),
        "processes": format_value(facts.get("processes")),
        "hosts": format_value(facts.get("hosts")),
        "processor": format_value(facts.get("processor")),
        "system": format_value(facts.get("system")),
        "Python": format_value(facts.get("python")),
        **{str(name): format_value(version) for name, version in mapping(facts, "versions").items()},
        "launched by": text(run.job, "engine"),
    }
    return {name: value for name, value in environment.items() if value}


def environment_blocks(run: RunFiles) -> Iterator[Block]:
    """Yield devices, hosts, versions."""
    environment = read_environment(run)
    if run.facts:
        yield TextTable((("", ""), *environment.items()))
    else:
        yield Paragraph(f"The environment {NO_SESSIONS}.", faint=True)
    variables = mapping(run.job, "environment")
    if variables:
        yield Fold(
            "Environment variables",
            (TextTable((("name", "value"), *((str(k), format_value(v)) for k, v in variables.items()))),),
        )


def read_settings(run: RunFiles) -> dict[str, str]:
    """Return the newest session's settings by their dotted names, as on the command line."""
    settings = mapping(run.facts, "settings")
    try:
        flat = RunFacts(run.name, "", str(run.folder), settings).flat()
    except RecursionError:
        return {}
    return {name: format_value(value) for name, value in flat.items()}


def reproduce_blocks(run: RunFiles) -> Iterator[Block]:
    """Yield the command, the settings with those of the command line first, the commit, the seed, the
    data."""
    facts = run.facts
    command = facts.get("command")
    if isinstance(command, list) and command:
        yield Code(f"$ {shlex.join(str(word) for word in command)}", "console")
    elif launched := text(run.job, "command"):
        yield Code(f"$ {launched}", "console")
    else:
        yield Paragraph(f"The command {NO_SESSIONS}.", faint=True)
    settings = read_settings(run)
    rows: list[tuple[str, str]] = [("", "")]
    if facts:
        rows.append(("commit", _commit(facts)))
        rows.append(("seed", settings.get("seed") or "not among the settings"))
        versions = mapping(facts, "versions")
        rows.append(("versions", format_value(versions)))
        rows.append(("run id", text(facts, "run_id") or "none"))
    rows.append(("folder", str(run.folder)))
    rows.append(("data", _data(run.account)))
    yield TextTable(tuple(rows))
    if settings:
        command_settings = _names_on_command_line(command if isinstance(command, list) else [])
        first = [(name, value) for name, value in settings.items() if _is_given(name, command_settings)]
        rest = [(name, value) for name, value in settings.items() if not _is_given(name, command_settings)]
        if first:
            yield Paragraph("Settings that the command gives:")
            yield TextTable((("setting", "value"), *first))
        yield Fold(
            f"{'The other' if first else 'All'} {len(rest):,} settings", (TextTable((("setting", "value"), *rest)),)
        )


def _commit(facts: Facts) -> str:
    git = mapping(facts, "git")
    commit = text(git, "commit")
    if not commit:
        return "unknown: the program was not run from a git checkout"
    return f"`{commit}`" + (", with changes that were not committed" if git.get("dirty") else "")


def _data(account: Mapping[str, Any]) -> str:
    parts = mapping(account, "parts")
    if not parts:
        return "no account: the run has not ended, or its source does not count its documents"
    lines = []
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            continue
        epochs, documents = number(part, "epochs"), number(part, "documents")
        label = f"{name}: " if name else ""
        lines.append(f"{label}{epochs or 0:.2f} epochs over {documents or 0:,.0f} documents")
    return format_value(lines) + f", after step {format_value(account.get('step'))}"


def _names_on_command_line(command: list[Any]) -> set[str]:
    """Return the dotted names of the settings on a command line."""
    return {
        str(word)[2:].partition("=")[0].replace("-", "_")
        for word in command
        if str(word).startswith("--") and len(str(word)) > 2
    }


def _is_given(name: str, command_settings: set[str]) -> bool:
    return name in command_settings or any(name.startswith(f"{one}.") for one in command_settings)
