"""Rename identifiers of the project, or bring a script outside it up to date.

    python -m tools.renames apply LIST.csv       renames in this tree, and adds the list to docs/renames.csv
    python -m tools.renames move LIST.csv        moves modules, and adds the list to docs/renames.csv
    python -m tools.renames script FILE...       applies docs/renames.csv to scripts, in place

A list has the columns of `docs/renames.csv`. Rows that can't be applied are printed, and the others go through.
"""

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .lazy import rewrite_lazy_tables
from .moves import move_modules
from .scripts import rewrite_script, rewrite_settings
from .server import LanguageServer, apply_edits, language_server, whole_workspace
from .table import Rename, merge, read_table, write_table
from .text import SUFFIXES, definitions, rewrite_own_doctests, rewrite_text

ROOT = Path(__file__).resolve().parents[2]
TABLE = "docs/renames.csv"
SOURCES = ("src", "tests", "benchmarks", "recipes", "examples", "wheels")
DATED = ("benchmarks/results", "docs/decisions", "docs/renames.csv", "tools/renames", "tests/tools")
"""Records of what was; they keep the names of their day."""

WARM_UP_TRIES = 60
"""Answers to wait for, a second each."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.renames", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apply").add_argument("list", type=Path)
    commands.add_parser("move").add_argument("list", type=Path)
    commands.add_parser("script").add_argument("files", type=Path, nargs="+")
    chosen = parser.parse_args()
    if chosen.command == "script":
        table = read_table(ROOT / TABLE)
        for path in chosen.files:
            rewrite = rewrite_script if path.suffix == ".py" else rewrite_settings
            path.write_text(rewrite(path.read_text("utf-8"), table), "utf-8")
        return 0
    if chosen.command == "move":
        moves = read_table(chosen.list)
        print("\n".join(move_modules(ROOT, moves, [*text_files(ROOT), *_build_files(ROOT)])))
        table = ROOT / TABLE
        write_table(table, merge(read_table(table), moves))
        return 0
    return apply(read_table(chosen.list), ROOT)


def apply(renames: list[Rename], root: Path) -> int:
    """Rename in a tree, and add what was renamed to its table; the exit code says whether each row was applied."""
    sources = sorted((root / "src").rglob("*.py"))
    done: list[Rename] = []
    refused: list[str] = []
    before = definitions(sources)
    with whole_workspace(root, SOURCES), language_server(root) as server:
        _warm_up(server, root, renames)
        for rename in renames:
            taken = rename.kind == "name" and rename.new_name[0].isupper() and before[rename.new_name]
            reason = f"{rename.new_name} is defined already" if taken else _rename(server, root, rename)
            if reason:
                refused.append(f"{rename.kind} {rename.old}: {reason}")
            else:
                done.append(rename)
    after = definitions(sources)
    unique = {r.old_name for r in done if before[r.old_name] == 1 and not after[r.old_name]}
    for path in text_files(root):
        text = path.read_text("utf-8")
        changed = rewrite_text(text, done, unique, path.suffix)
        if path.is_relative_to(root / "src") and path.suffix == ".py":
            module = ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")
            changed = rewrite_own_doctests(changed, module, done)
            if path.name == "__init__.py":
                changed = rewrite_lazy_tables(changed, module, done)
        if changed != text:
            path.write_text(changed, "utf-8")
    table = root / TABLE
    write_table(table, merge(read_table(table) if table.exists() else [], done))
    left = ", ".join(sorted({r.old_name for r in done} - unique)) or "none"
    print(f"{len(done)} renamed; names left as they are in text, since several things have them: {left}")
    gone = {r.old_name for r in done if r.kind == "member" and not after[r.old_name]}
    print("\n".join((*refused, *_undecided(root, gone))))
    return 1 if refused else 0


def _undecided(root: Path, gone: set[str]) -> Iterator[str]:
    """Attributes of objects without a known type that still have an old name: to be looked at."""
    for path in text_files(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in gone:
                yield f"{path.relative_to(root)}:{node.lineno}: .{node.attr} of an object without a known type"


def text_files(root: Path) -> list[Path]:
    """Files of the project that name identifiers, without its records."""
    command = ("git", "ls-files", "-z", "-co", "--exclude-standard")
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    living = (name for name in names if name.endswith(SUFFIXES) and not name.startswith(DATED))
    return [root / name for name in living if (root / name).is_file() and "CHANGELOG" not in name]


def _build_files(root: Path) -> list[Path]:
    """Files that build, test and document the project, and have other endings than `text_files` asks for."""
    patterns = (".ci/run", "containers/*", "docs/**/*.yaml", "tests/**/*.yaml", "tests/**/*.json")
    return [
        path
        for pattern in patterns
        for path in sorted(root.glob(pattern))
        if path.is_file() and path.suffix not in SUFFIXES
    ]


def _warm_up(server: LanguageServer, root: Path, renames: list[Rename]) -> None:
    """Wait until the server has read the whole workspace: its first answers are about the opened file alone."""
    places = (place for rename in renames if (place := _place(root, rename)) is not None)
    first = next(places, None)
    if first is None:
        return
    counts = [0]
    for _ in range(WARM_UP_TRIES):
        counts.append(len(server.rename(*first, "renamed_to_warm_up")))
        if len(counts) > 3 and len(set(counts[-3:])) == 1:
            return
        time.sleep(1)
    raise RuntimeError(f"the language server's answers do not settle: {counts[1:]} files")


def _rename(server: LanguageServer, root: Path, rename: Rename) -> str:
    """Apply one row; returns why it can't be, or nothing."""
    if rename.kind == "module":
        return "modules are moved with git"
    place = _place(root, rename)
    if place is None:
        return "not defined there"
    if _place(root, rename._replace(old=f"{rename.old.rpartition('.')[0]}.{rename.new_name}")) is not None:
        return f"{rename.new_name} is there already"
    edits = server.rename(*place, rename.new_name)
    if not edits:
        return "the language server renames nothing"
    apply_edits(edits)
    server.changed(list(edits))
    return ""


def _place(root: Path, rename: Rename) -> tuple[Path, int, int] | None:
    """File, line and column, from 0, of the definition of a row's old name."""
    module, _, name = rename.old.rpartition(".")
    names = [name]
    path = _file(root, module)
    if path is None and rename.kind == "member":
        module, _, holder = module.rpartition(".")
        path, names = _file(root, module), [holder, name]
    found = None if path is None else _definition(path, names)
    return None if path is None or found is None else (path, *found)


def _file(root: Path, module: str) -> Path | None:
    base = root / "src" / Path(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _definition(path: Path, names: list[str]) -> tuple[int, int] | None:
    """Line and column, from 0, of where a module or class binds a name."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    body: list[ast.stmt] = ast.parse(text).body
    for name in names[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    name = names[-1]
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            line = node.lineno - 1
            return line, lines[line].index(name, node.col_offset + len("def "))
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                return target.lineno - 1, target.col_offset
    return None


if __name__ == "__main__":
    sys.exit(main())
