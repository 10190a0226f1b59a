"""Moves of modules: files, imports of every form, dotted paths and file paths in text."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from .imports import Edit, ImportRewriter, apply, imported_from, line_starts
from .lazy import rewrite_lazy_keys
from .table import Rename, forward


def move_modules(root: Path, moves: list[Rename], texts: list[Path]) -> list[str]:
    """Move modules and whole packages of `src` and everything that names them; returns what a person must look at.

    Args:
        root: Of the tree, under git.
        moves: Renames of kind `module`; a package carries along what it holds.
        texts: Files that may name modules.

    Raises:
        ValueError: Two modules would have one path, or a row is not of a module; nothing was moved.
    """
    source = root / "src"
    files = {_dotted(path, source): path for path in sorted(source.rglob("*.py"))}
    table = {name: forward(name, moves) for name in files}
    if unknown := sorted(move.old for move in moves if move.kind != "module" or move.old not in files):
        raise ValueError(f"not modules of this tree: {', '.join(unknown)}; nothing was moved")
    if doubled := sorted(name for name, count in Counter(table.values()).items() if count > 1):
        raise ValueError(f"several modules would be {', '.join(doubled)}; nothing was moved")
    changed = {old: new for old, new in table.items() if old != new}
    functions = _functions_named_like_modules(files)
    in_text = TextMoves(changed, frozenset(files), functions)
    remarks: set[str] = set()
    rewritten: dict[Path, str] = {}
    for path in texts:
        text, name = path.read_text("utf-8"), path.relative_to(root)
        if path.suffix == ".py":
            module = _dotted(path, source) if path.is_relative_to(source) else ""
            result, read = _in_strings_and_comments(text, in_text)
            rewriter = ImportRewriter(result, module, path.name == "__init__.py", table, functions)
            result = rewriter.rewrite()
            remarks |= {f"{name}: {remark}" for remark in (*read, *rewriter.remarks)}
            if path.name == "__init__.py" and module:
                result = rewrite_lazy_keys(result, module, table)
            if module in changed and re.search(r"__file__|__package__", text):
                remarks.add(f"{name}: reads where it stands")
        else:
            result = in_text.rewrite(text)
            remarks |= {f"{name}: {remark}" for remark in in_text.imports(text)}
        if result != text:
            rewritten[path] = result
    for path, text in rewritten.items():
        path.write_text(text, "utf-8")
    for old, new in changed.items():
        target = source / _file(new, files[old].name == "__init__.py")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", files[old], target], cwd=root, check=True)
    folders = {folder for new in changed.values() for folder in (source / _file(new, False)).parents}
    inner = (folder for folder in folders if folder.is_relative_to(source) and folder != source)
    remarks |= {f"{f.relative_to(root)}: has no __init__.py yet" for f in inner if not (f / "__init__.py").exists()}
    return sorted(remarks)


def _dotted(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(module: str, package: bool) -> Path:
    path = Path(*module.split("."))
    return path / "__init__.py" if package else path.with_suffix(".py")


def _functions_named_like_modules(files: Mapping[str, Path]) -> frozenset[str]:
    """Return the paths that are a module and also an export of its package, as `kernels.attention`: imports mean the export."""
    names: set[str] = set()
    for module, path in files.items():
        if path.name == "__init__.py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (base := imported_from(node, module)) in files
                    and base != module
                ):
                    names |= {f"{module}.{alias.asname or alias.name}" for alias in node.names}
    return frozenset(names & set(files))


def _in_strings_and_comments(text: str, moves: "TextMoves") -> tuple[str, list[str]]:
    """Rewrite what a Python file holds besides code; also returns imports in its strings that were not rewritten."""
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    starts = [start for start, _ in line_starts(text)]
    edits: set[Edit] = set()
    remarks: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            edits.add(Edit(start, end, moves.rewrite(text[start:end])))
            remarks += moves.imports(text[start:end])
    return apply(text, edits), remarks


class TextMoves:
    """New paths for text: dotted paths of modules, and names of files from their room on."""

    def __init__(self, changed: Mapping[str, str], modules: frozenset[str], functions: frozenset[str]) -> None:
        self.changed, self.modules, self.functions = changed, modules, functions
        tops = "|".join(sorted({re.escape(name.partition(".")[0]) for name in changed}))
        self.dotted = re.compile(rf"\b(?:{tops})(?:\.[A-Za-z_]\w*)+")
        self.imported = re.compile(rf"from ((?:{tops})[.\w]*) import ([\w, ]+)")
        self.files = dict(_file_names(changed))
        self.file = re.compile(
            rf"((?<![\w/.-])(?:src/)?(?:panax/)?|/panax/)({'|'.join(map(re.escape, self.files))})(?![\w/])"
        )

    def rewrite(self, text: str) -> str:
        """Put new paths where text has old ones."""
        text = self.dotted.sub(self._forward, text)
        return self.file.sub(lambda match: match[1] + self.files[match[2]], text)

    def imports(self, text: str) -> Iterator[str]:
        """Yield imports in text that take a moved module out of its package by name; they are not rewritten."""
        for match in self.imported.finditer(text):
            for name in match[2].replace(",", " ").split():
                full = f"{match[1]}.{name}"
                if full in self.changed and full not in self.functions:
                    yield f"{match.group()}: is {self.changed[full]} now"

    def _forward(self, match: re.Match[str]) -> str:
        parts = match.group().split(".")
        for count in range(len(parts), 1, -1):
            prefix = ".".join(parts[:count])
            if prefix in self.modules:
                is_function = prefix in self.functions and count == len(parts)
                return match.group() if is_function else ".".join((self.changed.get(prefix, prefix), *parts[count:]))
        return match.group()


def _file_names(changed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the old and new file name of each module, from its room on, longest first."""
    for old, new in sorted(changed.items(), key=lambda pair: -len(pair[0])):
        before, after = (name.removeprefix("panax.").replace(".", "/") for name in (old, new))
        yield f"{before}.py", f"{after}.py"
