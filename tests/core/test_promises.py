"""What messages promise is there: commands, flags, settings, classes with their arguments, and pages, in all strings of `src`."""

import ast
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from panax.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

PARTS = {"checkpoint": ("ls", "verify", "diff", "convert", "rm"), "data": ("show",), "find": ("lr", "batch")}
RECIPES = ("quickstart", "vit_digits", "dlrm_flights", "ppo_cartpole", "sac_pendulum", "sasrec_ml100k")
"""Recipes that set, together, all settings that messages name."""

OTHERS_FLAGS = {
    "panax/cli/flag_aliases.py": "what other trainers call their flags",
    "panax/metrics/page/": "colors of a page",
    "panax/cluster/engines/": "flags of sbatch, srun, mpirun, kubectl and ray",
    "--api-group": "of kubectl",
    "--buckets": "short for --data.buckets",
    "--data.corpus.text": "of a corpus of records, which no recipe has",
    "--local-dir": "of Hugging Face's `hf download`",
    "--logdir": "of tensorboard",
    "--no-deps": "of pip",
    "--no-optional-locks": "of git",
    "--porcelain": "of git",
    "--query-gpu": "of nvidia-smi",
    "--submission": "given by Panax itself to a job that it submits",
    "--worker": "given by Panax itself to a process of a comparison",
    "--xla_": "of XLA",
}
NO_COMMANDS = {"panax agent": "who speaks", "panax probe": "who speaks"}
OTHERS_CLASSES = {
    "Net": "a user's own model",
    "Linear": "of PyTorch",
    "Box": "of Gymnasium",
    "Discrete": "of Gymnasium",
}
OTHERS_SETTINGS = {"core.fsmonitor": "of git", "glibc.malloc.hugetlb": "of the C library"}


def strings_of(source: str) -> Iterator[str]:
    """All strings but docstrings; what an f-string computes is a zero byte."""
    tree = ast.parse(source)
    left_out = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


@functools.cache
def all_strings() -> tuple[tuple[str, str], ...]:
    """(file, string) of all of `src`."""
    return tuple(
        (str(path.relative_to(SOURCE)), text)
        for path in sorted(SOURCE.rglob("*.py"))
        for text in strings_of(path.read_text(encoding="utf-8"))
    )


def found(pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    for file, text in all_strings():
        for match in re.finditer(pattern, text):
            yield file, match


@functools.cache
def known_flags() -> frozenset[str]:
    """Flags and settings of all commands, from what their help says; those of install.py."""
    promised = [
        (),
        *((command,) for command in COMMANDS),
        *((command, part) for command, parts in PARTS.items() for part in parts),
        *(("train", recipe) for recipe in RECIPES),
    ]
    said = io.StringIO()
    for arguments in promised:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
    said.write((ROOT / "install.py").read_text(encoding="utf-8"))
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*", said.getvalue()))


def test_every_flag_is_there():
    lost = []
    count = 0
    for file, match in found(r"(?<![\w-])--[a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)*(?![\w.-]*\0)"):
        flag = match[0]
        count += 1
        if flag not in known_flags() and not any(
            flag.startswith(each) or file.startswith(each) for each in OTHERS_FLAGS
        ):
            lost.append((file, flag))
    assert not lost and count > 300


def test_every_command_is_there():
    lost = []
    for file, match in found(r"\bpanax ([a-z]+)(?: ([a-z]+)\b)?"):
        command, part = match.groups()
        if (
            command not in COMMANDS
            and f"panax {command}" not in NO_COMMANDS
            and re.search(rf"`panax {command}|panax {command} \0", match.string)
        ):
            lost.append((file, match[0]))
        if command in PARTS and part and part not in PARTS[command]:
            lost.append((file, match[0]))
    assert not lost


def test_every_page_is_there():
    pages = {(file, match[0]) for file, match in found(r"\b(?:docs|requirements|benchmarks|recipes)/[\w./-]+\.\w+")}
    assert len(pages) >= 3 and not [each for each in pages if not (ROOT / each[1]).is_file()]


@functools.cache
def arguments_of_classes() -> dict[str, frozenset[str]]:
    """Of each class of `src`: what its instances are made with, those of its bases included."""
    fields_of_class: dict[str, tuple[set[str], list[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    fields |= {argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)}
            before = fields_of_class.get(node.name, (set(), []))
            bases = [ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases]
            fields_of_class[node.name] = (before[0] | fields, before[1] + bases)

    def of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        fields, bases = fields_of_class.get(name, (set(), []))
        return fields.union(*(of(base, seen | {name}) for base in bases if base not in seen))

    return {name: frozenset(of(name)) for name in fields_of_class}


def test_every_class_takes_what_is_written_for_it():
    lost = []
    for file, match in found(r"\b([A-Z]\w+)\(((?:[^()]|\([^()]*\))*)"):
        name, inside = match.groups()
        keywords = re.findall(r"(?:^|[,(] ?)([a-z_]+)=", re.sub(r"\([^()]*\)", "", inside))
        if not keywords or name in OTHERS_CLASSES:
            continue
        takes = arguments_of_classes().get(name)
        if takes is None or not takes.issuperset(keywords):
            lost.append((file, match[0]))
    assert not lost


def test_every_setting_is_there():
    """A path of settings is a flag of some recipe, and each name in it is one of a class."""
    fields = frozenset().union(*arguments_of_classes().values())
    lost = [
        (file, match[1])
        for file, match in found(r"(?<![\w./\"'])([a-z_]+(?:\.[a-z_]+)+)=")
        if not set(match[1].split(".")) <= fields and match[1] not in OTHERS_SETTINGS
    ]
    assert not lost


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("give --step.nothing 3", test_every_flag_is_there),
        ("see `panax nothing`", test_every_command_is_there),
        ("panax checkpoint show STEP", test_every_command_is_there),
        ("see docs/nothing.md", test_every_page_is_there),
        ("write EarlyStopping(nothing=3)", test_every_class_takes_what_is_written_for_it),
        ("write Nothing(step=3)", test_every_class_takes_what_is_written_for_it),
        ("step.nothing=3 has no effect", test_every_setting_is_there),
    ],
)
def test_a_promise_that_is_not_kept_would_be_found(text, test, monkeypatch):
    monkeypatch.setitem(globals(), "all_strings", lambda: (("planted.py", text),))
    with pytest.raises(AssertionError, match=r"planted.py.*(nothing|show|Nothing)"):
        test()


def test_strings_are_those_of_messages_and_not_of_docstrings():
    assert list(strings_of("raise ValueError(f'{1} see docs/none.md')")) == ["\0 see docs/none.md"]
    assert not list(strings_of('def f():\n    """See docs/none.md."""\n'))
