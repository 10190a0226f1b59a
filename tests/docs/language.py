"""Counts of departures from the house language, over docstrings and messages of the sources, and docstrings of tests.

    python tests/docs/language.py        prints each count and its ceiling

Ceilings only fall: whoever lowers a count lowers its ceiling in `tests/docs/language.toml`.
"""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CEILINGS = tomllib.loads((Path(__file__).parent / "language.toml").read_text("utf-8"))

PHRASES = {
    "what is ...": r"\bwhat (?:is|it|are|a|the)\b",
    "where it ...": r"\bwhere (?:it|there|they|a|one)\b",
    "whose": r"\bwhose\b",
    "is no, is none": r"(?<!there )\bis (?:no|none)\b",
    "told, said": r"\b(?:tells?|told|says?|said)\b",
    "unless told": r"\bunless (?:it is )?told\b",
    "anew": r"\banew\b",
    "of one's own": r"\bof one's own\b",
    "goes on": r"\bgo(?:es)? on\b",
    "British spelling": r"(?:optim|quant|normal|initial|token|serial|general|material|synchron|util|organ)is(?:e|ed|ing|ation)\b"
    r"|(?:col|behavi|neighb)our|catalogue|modelling|labelled",
}

NOUNS = frozenset(CEILINGS.pop("nouns").split())
"""Words in -ing and -ed that the field uses as nouns, or that name a library: files may have them."""

VERBS = frozenset(CEILINGS.pop("verbs").split())

ENTRY_POINTS = frozenset(CEILINGS.pop("entry_points").split())
"""Public functions with more than MAX_PARAMETERS parameters, of which all but the first few are settings by keyword."""

MAX_PARAMETERS, MAX_POSITIONAL = 7, 5

BRITISH = re.compile(
    r"optimis|quantis|normalis|initialis|tokenis|serialis|generalis|materialis|synchronis|parallelis(?!m)|colour|behaviour|centre"
)
VAGUE = frozenset({"found", "whole", "own", "taken", "given", "most"})
"""Local names that don't say what they hold, allowed in functions of fewer than SHORT lines."""

SHORT = 8

PARTICIPLE = re.compile(r"^(?!need$|seed$|feed$|speed$|embed$|shed$|exceed$)[a-z]+ed$")


class Text(NamedTuple):
    """A docstring or message, with its location."""

    place: str
    text: str


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of every source file."""
    return {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a source file: walking through a tree is what these counts take their time for."""
    return tuple(ast.walk(trees()[path]))


def docstrings() -> Iterator[Text]:
    """Every string that stands as a statement: docstrings, and those under attributes and constants; without doctests."""
    for path in trees():
        for node in nodes(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                prose = re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", node.value.value, flags=re.M)
                yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", prose)


@cache
def definitions_in_tests() -> tuple[tuple[Path, ast.Module | ast.ClassDef | ast.FunctionDef], ...]:
    """Modules, classes and functions of the test files, with their files: statements only, since all nodes are many."""
    definitions = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                definitions.append((path, node))
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return tuple(definitions)


def docstrings_of_tests() -> Iterator[Text]:
    """The docstrings of the test files."""
    for path, node in definitions_in_tests():
        yield Text(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or "")


def british_tests() -> set[str]:
    """Names of functions and classes of the test files in British spelling."""
    names = {node.name for _, node in definitions_in_tests() if not isinstance(node, ast.Module)}
    return {name for name in names if BRITISH.search(name.lower())}


def messages() -> Iterator[Text]:
    """Strings of several words in the code: errors, warnings, notes, help texts. A part that is joined to others is one text."""
    for path in trees():
        held = {
            id(node.value)
            for node in nodes(path)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        inner = {id(part) for node in nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                text = " ".join(part for part in parts if isinstance(part, str))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | held:
                text = node.value
            else:
                continue
            if text.count(" ") >= 2:
                yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", text)


def phrases(texts: Iterator[Text]) -> Counter[str]:
    """How often each phrase occurs."""
    counts: Counter[str] = Counter(dict.fromkeys(PHRASES, 0))
    for text in texts:
        for name, pattern in PHRASES.items():
            counts[name] += len(re.findall(pattern, text.text, flags=re.I))
    return counts


def public_classes() -> dict[str, list[str]]:
    """Files of each public class name."""
    classes = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path.relative_to(ROOT)))
    return classes


def identifiers() -> set[str]:
    """Names that are defined in the sources: functions, classes, arguments, attributes and variables."""
    names: set[str] = set()
    for path in trees():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def british() -> set[str]:
    """Identifiers in British spelling."""
    return {name for name in identifiers() if BRITISH.search(name.lower())}


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions of modules, with their dotted path."""
    for path, tree in trees().items():
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}", node


def silent_exports() -> Iterator[str]:
    """Functions and classes that a package exports and that have no docstring."""
    for path, tree in trees().items():
        if path.name != "__init__.py":
            continue
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
                continue
            source = trees().get(path.parent / (node.module.replace(".", "/") + ".py"))
            names = {alias.name for alias in node.names}
            for item in source.body if source else ():
                if (
                    isinstance(item, ast.FunctionDef | ast.ClassDef)
                    and item.name in names
                    and not ast.get_docstring(item)
                ):
                    yield f"{path.parent.relative_to(ROOT)}/{node.module}.{item.name}"


def vague_locals() -> set[str]:
    """Functions of more than a few lines with a local name that says nothing, and that name."""
    vague = set()
    for path in trees():
        stored = [(name, line) for node in nodes(path) for name, line in stored_name(node) if name in VAGUE]
        for function in nodes(path) if stored else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            body = function.body[1:] if ast.get_docstring(function) else function.body
            end = function.end_lineno or 0
            if not body or end - body[0].lineno < SHORT:
                continue
            for name, line in stored:
                if function.lineno <= line <= end:
                    vague.add(f"{path.relative_to(ROOT)}: {function.name}: {name}")
    return vague


def stored_name(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The name that a node gives to an argument or a variable, with its line."""
    if isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno


def long_signatures() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions with more parameters than one remembers, `path:name`: a value with a name is missing there.

    Those that take what another party hands over are not among them: the lowering of an operator has that operator's
    signature (`register_lowering`), a Pallas kernel (`kernel`) a reference for each array.
    """
    long = {}
    for path in trees():
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "kernel":
                continue
            mirrors = any("register_lowering(" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not mirrors and len(positional(node)) + len(node.args.kwonlyargs) > MAX_PARAMETERS:
                long[f"{path.relative_to(ROOT)}:{node.name}"] = node
    return long


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Parameters that a caller may pass by position, without the object or class of a method."""
    return [arg for arg in (*function.args.posonlyargs, *function.args.args) if arg.arg not in ("self", "cls")]


def unnamed_values() -> Counter[str]:
    """How many functions of each file have too many parameters and are no entry point."""
    return Counter(name.partition(":")[0] for name in long_signatures() if name not in ENTRY_POINTS)


def bare_participles() -> set[str]:
    """Public functions that one participle alone names."""
    return {path for path, node in public_functions() if PARTICIPLE.match(node.name)}


def participle_files() -> set[str]:
    """Source files that a participle names, alone or as its last word."""
    words = {str(path.relative_to(ROOT)): path.stem.rpartition("_")[2] for path in SOURCES}
    return {path for path, word in words.items() if word.endswith(("ing", "ed")) and word not in NOUNS}


def crowded_folders() -> dict[str, int]:
    """Folders of sources and tests that hold more than 20 files."""
    folders = Counter(
        str(path.parent.relative_to(ROOT))
        for top in ("src", "tests")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {folder: count for folder, count in folders.items() if count > 20}


def counts() -> dict[str, dict[str, int]]:
    """All that has a ceiling, by the tables of `language.toml`."""
    return {
        "docstrings": dict(phrases(docstrings())),
        "messages": dict(phrases(messages())),
        "tests": {**phrases(docstrings_of_tests()), "british": len(british_tests())},
        "identifiers": {
            "british": len(british()),
            "participles": len(bare_participles()),
            "vague": len(vague_locals()),
        },
        "files": {"participles": len(participle_files())},
        "folders": crowded_folders(),
        "signatures": dict(unnamed_values()),
    }


def verbs() -> float:
    """The share of functions' docstrings that begin with a verb in the imperative, by their first word."""
    first = [
        (ast.get_docstring(node) or "").split(" ")[0]
        for path in trees()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    ]
    return sum(word in VERBS for word in first) / len(first)


def main() -> int:
    """Print the counts."""
    for table, values in counts().items():
        for name, count in values.items():
            print(f"{table:12} {name:40} {count:6} of {CEILINGS[table].get(name, 0)}")
    print(f"{'docstrings':12} {'functions that begin with a verb':40} {verbs():6.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
