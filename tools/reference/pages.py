"""Exports as Markdown: one page for each room, and an index with every name."""

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from .collect import TOP, Export

FOLDER = Path("docs") / "reference"

HEAD = "Generated from the sources by `python -m tools.reference`; edit the docstrings, not this page.\n"

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
"""Headings in docstrings that are followed by a list."""

_ITEM = re.compile(r"^([\w*`., ]+?): (.*)$")


def pages(packages: dict[str, list[Export]]) -> dict[str, str]:
    """Return the text of each page by its file's name: a room's packages share one."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        rooms[_room(package)].append(package)
    links = _type_links(packages)
    written = {
        f"{room}.md": _page(room, {name: packages[name] for name in names}, links) for room, names in rooms.items()
    }
    return written | {"index.md": _index(packages)}


def _type_links(packages: dict[str, list[Export]]) -> dict[str, str]:
    """Return links to exported classes by name: to the entry in the package nearest to the top, of those that export it."""
    links: dict[str, str] = {}
    for package in sorted(packages, key=lambda name: name.count("."), reverse=True):
        for each in packages[package]:
            if isinstance(each.node, ast.ClassDef):
                links[each.name] = f"[`{each.name}`]({_room(package)}.md#{anchor(each)})"
    return links


def _room(package: str) -> str:
    return package.split(".")[1] if "." in package else package


def _page(room: str, packages: dict[str, list[Export]], links: dict[str, str]) -> str:
    title = TOP if room == TOP else f"{TOP}.{room}"
    parts = [f"# `{title}`\n\n{HEAD}"]
    for package, exports in packages.items():
        if package != title:
            parts.append(f"## `{package}`\n")
        level = "##" if package == title else "###"
        parts += [_entry(each, links, level) for each in exports]
    return "\n".join(parts)


def _index(packages: dict[str, list[Export]]) -> str:
    lines = [
        "# API reference\n",
        HEAD,
        "Every name that a package exports, by package.\n",
        "| package | names |",
        "|---|---|",
    ]
    for package, exports in packages.items():
        page = f"{_room(package)}.md"
        names = ", ".join(f"[`{each.name}`]({page}#{anchor(each)})" for each in exports)
        lines.append(f"| [`{package}`]({page}) | {names} |")
    return "\n".join(lines) + "\n"


def anchor(export: Export) -> str:
    """Return the anchor of an entry, the same whatever renders the page."""
    return f"{export.package}.{export.name}".replace(".", "-").lower()


def _entry(export: Export, links: dict[str, str], level: str) -> str:
    lines = [f'<a id="{anchor(export)}"></a>\n', f"{level} `{export.name}`\n"]
    form = signature(export)
    if form:
        lines.append(f"```text\n{form}\n```\n")
    types = [links[word] for word in dict.fromkeys(re.findall(r"\w+", form)) if word in links and word != export.name]
    if types:
        lines.append(f"Types: {', '.join(types)}\n")
    lines += _prose(export.doc)
    if isinstance(export.node, ast.ClassDef):
        lines += _methods(export.node, export.inherited)
    lines.append(f"Source: `{export.module}`\n")
    return "\n".join(lines)


def signature(export: Export) -> str:
    """Return a definition as a caller writes it, one argument per line if it is long."""
    node = export.node
    if isinstance(node, ast.FunctionDef):
        return _call(node.name, node.args, node.returns)
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                return _call(node.name, each.args, None, drop=1)
        return _fields(node)
    if node is None:
        return ""
    text = ast.unparse(node)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _fields(node: ast.ClassDef) -> str:
    """Return a class's annotated fields as arguments."""
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign) and not _private(each.target)]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    return "\n    ".join([f"{head}:", *fields]) if fields else head


def _private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _call(name: str, arguments: ast.arguments, returns: ast.expr | None, drop: int = 0) -> str:
    kept = ast.arguments(
        arguments.posonlyargs[drop:] if arguments.posonlyargs else [],
        arguments.args if arguments.posonlyargs else arguments.args[drop:],
        arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults, arguments.kwarg, arguments.defaults,
    )  # fmt: skip
    text = ast.unparse(kept)
    end = f" -> {ast.unparse(returns)}" if returns is not None else ""
    if len(text) + len(name) + len(end) <= 100:
        return f"{name}({text}){end}"
    lines = ",\n    ".join(_split_arguments(text))
    return f"{name}(\n    {lines},\n){end}"


def _split_arguments(text: str) -> Iterator[str]:
    """Split at commas outside of brackets and quotes."""
    depth, begin, quote = 0, 0, ""
    for index, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:index].strip()
            begin = index + 1
    yield text[begin:].strip()


def _methods(node: ast.ClassDef, inherited: Sequence[ast.FunctionDef]) -> list[str]:
    """Return the public methods and properties that have a docstring, with its first paragraph, inherited ones last."""
    found: dict[str, str] = {}
    for each in (*node.body, *inherited):
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and (doc := ast.get_docstring(each)):
            found.setdefault(each.name, f"- `{each.name}`: {_first_paragraph(doc)}")
    return ["Methods and properties:\n", *found.values(), ""] if found else []


def _first_paragraph(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split())


def _prose(doc: str) -> list[str]:
    """Return a docstring as Markdown: sections as lists, examples as code."""
    lines: list[str] = []
    for paragraph in textwrap.dedent(doc).strip().split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head.strip() in SECTIONS and rest:
            lines += [f"{head.strip()}\n", *_items(rest.split("\n")), ""]
        elif paragraph.lstrip().startswith(">>>"):
            lines.append(f"```pycon\n{paragraph}\n```\n")
        elif paragraph:
            lines.append(f"{paragraph}\n")
    return lines


def _items(lines: Sequence[str]) -> Iterator[str]:
    """Yield the items of a section as list items; deeper lines continue the one before."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    for line in lines:
        match = _ITEM.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        yield f"- `{match[1].strip('`')}`: {match[2]}" if match else f"  {line.strip()}"
