"""Identifiers in docstrings, comments, Markdown and string literals, which no language server sees."""

import re
from collections import Counter
from pathlib import Path

from .table import Rename

SUFFIXES = (".py", ".md", ".toml", ".csv", ".sh", ".c", ".h")


def rewrite_text(text: str, renames: list[Rename], unique: set[str], suffix: str) -> str:
    """Put new names where text names old ones.

    Replaced are dotted paths; names of classes in backticks or code, where only one class had that name; and of other names what
    backticks hold whole, where only one thing had that name.

    Args:
        unique: Names that one thing alone had, and nothing has any more.
        suffix: Of the file.
    """
    table = {rename.old: rename.new for rename in renames}
    if table:
        dotted = re.compile(
            r"\b(?:" + "|".join(re.escape(old) for old in sorted(table, key=len, reverse=True)) + r")\b(?!\.py)"
        )
        text = dotted.sub(lambda match: table[match.group()], text)
    for rename in renames:
        module, _, name = rename.old.rpartition(".")
        if f'"{name}"' not in text:
            continue
        patch = re.compile(rf"(setattr\(\s*(?:[\w.]+\.)?{module.rpartition('.')[2]},\s*\"){name}\"")
        text = patch.sub(lambda match, new=rename.new_name: f'{match[1]}{new}"', text)
    names = {r.old_name: r.new_name for r in renames if r.kind != "module" and r.old_name in unique}
    if not names:
        return text
    classes = {old: new for old, new in names.items() if old[0].isupper() and not old.isupper()}
    if classes:
        any_class = re.compile(r"(?<![\w/])(?:" + "|".join(map(re.escape, classes)) + r")(?![\w/])")

        def in_code(match: re.Match[str]) -> str:
            return any_class.sub(lambda name: classes[name.group()], match.group())

        quoted_or_doctest = r"`[^`\n]+`|^\s*(?:>>>|\.\.\.) .*$" if suffix == ".py" else r"`[^`\n]+`"
        text = re.sub(quoted_or_doctest, in_code, text, flags=re.M)
        if suffix == ".md":
            text = re.sub(r"^```.*?^```", in_code, text, flags=re.M | re.S)
    patched = re.compile(r"(setattr\([^\n\"]*\")(" + "|".join(map(re.escape, names)) + r")\"")
    text = patched.sub(lambda match: f'{match[1]}{names[match[2]]}"', text)
    quoted = re.compile(r"`(" + "|".join(map(re.escape, names)) + r")(\([^`\n]*\))?`")
    return quoted.sub(lambda match: f"`{names[match[1]]}{match[2] or ''}`", text)


def rewrite_own_doctests(text: str, module: str, renames: list[Rename]) -> str:
    """Put new names into the examples of the module that defines what they name.

    >>> rewrite_own_doctests("    >>> found(1), a.found(2)", "p.a", [Rename("name", "p.a.found", "p.a.find")])
    '    >>> find(1), a.found(2)'
    """
    names = {r.old_name: r.new_name for r in renames if r.kind == "name" and r.new.rpartition(".")[0] == module}
    if not names:
        return text
    called = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?=\()")
    return re.sub(
        r"^\s*(?:>>>|\.\.\.) .*$",
        lambda line: called.sub(lambda match: names[match[1]], line.group()),
        text,
        flags=re.M,
    )


def definitions(files: list[Path]) -> Counter[str]:
    """How many definitions each identifier has: classes, functions, constants and fields."""
    pattern = re.compile(r"^\s*(?:class|def|async def)\s+(\w+)|^(?:    )?(\w+)\s*(?::[^=\n]+)?(?:=|$)", re.M)
    counts: Counter[str] = Counter()
    for path in files:
        counts.update(first or second for first, second in pattern.findall(path.read_text("utf-8")))
    return counts
