"""Rename identifiers of the project, or bring a script outside it up to date.

    python -m tools.renames apply LIST.csv       renames in this tree, and adds the list to docs/renames.csv
    python -m tools.renames script FILE...       applies docs/renames.csv to scripts, in place

A list has the columns of `docs/renames.csv`. Rows that can't be applied are printed, and the others go through.
"""

import argparse
import ast
import subprocess
import sys
import time
from pathlib import Path

from .lazy import rewrite_lazy_tables
from .scripts import rewrite_script
from .server import LanguageServer, apply_edits, language_server, whole_workspace
from .table import Rename, merge, read_table, write_table
from .text import SUFFIXES, definitions, rewrite_own_doctests, rewrite_text

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "renames.csv"
SOURCES = ("src", "tests", "benchmarks", "recipes", "examples", "wheels")
DATED = ("benchmarks/results", "docs/decisions", "docs/renames.csv", "tools/renames")
"""Records of what was; they keep the names of their day."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.renames", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apply").add_argument("list", type=Path)
    commands.add_parser("script").add_argument("files", type=Path, nargs="+")
    chosen = parser.parse_args()
    if chosen.command == "script":
        table = read_table(TABLE)
        for path in chosen.files:
            path.write_text(rewrite_script(path.read_text("utf-8"), table), "utf-8")
        return 0
    return apply(read_table(chosen.list))


def apply(renames: list[Rename]) -> int:
    """Rename in this tree; the exit code says whether each row was applied."""
    done: list[Rename] = []
    refused: list[str] = []
    before = definitions(sorted((ROOT / "src").rglob("*.py")))
    with whole_workspace(ROOT, SOURCES), language_server(ROOT) as server:
        _warm_up(server)
        for rename in renames:
            taken = rename.kind == "name" and rename.new_name[0].isupper() and before[rename.new_name]
            reason = f"{rename.new_name} is defined already" if taken else _rename(server, rename)
            if reason:
                refused.append(f"{rename.kind} {rename.old}: {reason}")
            else:
                done.append(rename)
    after = definitions(sorted((ROOT / "src").rglob("*.py")))
    unique = {r.old_name for r in done if before[r.old_name] == 1 and not after[r.old_name]}
    for path in text_files():
        text = path.read_text("utf-8")
        changed = rewrite_text(text, done, unique, path.suffix)
        if path.is_relative_to(ROOT / "src") and path.suffix == ".py":
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            changed = rewrite_own_doctests(changed, ".".join(parts).removesuffix(".__init__"), done)
        if path.name == "__init__.py" and path.is_relative_to(ROOT / "src"):
            package = ".".join(path.parent.relative_to(ROOT / "src").parts)
            changed = rewrite_lazy_tables(changed, package, done)
        if changed != text:
            path.write_text(changed, "utf-8")
    write_table(TABLE, merge(read_table(TABLE) if TABLE.exists() else [], done))
    print(f"{len(done)} renamed; names in text left as they are, since several things have them: ", end="")
    print(", ".join(sorted({r.old_name for r in done} - unique)) or "none")
    print("\n".join(refused))
    return 1 if refused else 0


def text_files() -> list[Path]:
    """Files of the project that name identifiers, without its records."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "-co", "--exclude-standard"), cwd=ROOT, capture_output=True, check=True
    )
    names = listed.stdout.decode().split("\0")
    kept = (name for name in names if name.endswith(SUFFIXES) and not name.startswith(DATED))
    return [ROOT / name for name in kept if (ROOT / name).is_file() and "CHANGELOG" not in name]


def _warm_up(server: LanguageServer) -> None:
    """Wait until the server has the whole workspace: before, it answers with the opened file alone."""
    path = ROOT / "src/panax/core/errors.py"
    line, column = _definition(path, ["RecipeError"]) or (0, 0)
    for _ in range(60):
        if len(server.rename(path, line, column, "RecipeErrorX")) > 20:
            return
        time.sleep(1)
    raise RuntimeError("the language server does not see the workspace")


def _rename(server: LanguageServer, rename: Rename) -> str:
    """Apply one row; returns why it can't be, or nothing."""
    if rename.kind == "module":
        return "modules are moved with git"
    module, holder = rename.old.rpartition(".")[0], []
    path = _file(module)
    if path is None and rename.kind == "member":
        module, _, name = module.rpartition(".")
        path, holder = _file(module), [name]
    if path is None:
        return "no such module"
    found = _definition(path, [*holder, rename.old_name])
    if found is None:
        return f"{path.relative_to(ROOT)} defines no {rename.old_name}"
    if _definition(path, [*holder, rename.new_name]) is not None:
        return f"{path.relative_to(ROOT)} has a {rename.new_name} already"
    edits = server.rename(path, *found, rename.new_name)
    if not edits:
        return "the language server renames nothing"
    apply_edits(edits)
    server.changed(list(edits))
    return ""


def _file(module: str) -> Path | None:
    base = ROOT / "src" / Path(*module.split("."))
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
