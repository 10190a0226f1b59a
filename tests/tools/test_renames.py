"""The renaming tool: its output for text, tables and scripts; the tree against its table."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tools.renames as package  # noqa: E402
from tools.renames import server  # noqa: E402
from tools.renames.__main__ import apply  # noqa: E402
from tools.renames.lazy import rewrite_lazy_tables  # noqa: E402
from tools.renames.moves import TextMoves, move_modules  # noqa: E402
from tools.renames.scripts import rewrite_script  # noqa: E402
from tools.renames.table import Rename, forward, merge, read_table, write_table  # noqa: E402
from tools.renames.text import rewrite_text  # noqa: E402

KEPT = Rename("name", "panax.optim.on_shards.Kept", "panax.optim.on_shards.StateSpec")


def test_every_old_name_is_gone_and_every_new_one_is_there():
    renames = read_table(ROOT / "docs" / "renames.csv")
    assert len(renames) > 300
    wrong = []
    for rename in renames:
        if rename.kind == "name":
            defined = _defined(rename.new.rpartition(".")[0])
            if rename.new_name not in defined:
                wrong.append(f"{rename.new} does not exist")
            if rename.old.rpartition(".")[0] == rename.new.rpartition(".")[0] and rename.old_name in defined:
                wrong.append(f"{rename.old} still exists")
    assert not wrong


def test_a_script_takes_imports_uses_and_dotted_paths():
    text = (
        "import panax.optim.on_shards\n"
        "from panax.optim.on_shards import Kept, Other\n"
        "from panax.optim import Kept as Slot\n"
        "é = panax.optim.on_shards.Kept.like(Kept.x)\n"
        "kept = 'Kept'\n"
    )
    assert rewrite_script(text, [KEPT]) == (
        "import panax.optim.on_shards\n"
        "from panax.optim.on_shards import StateSpec, Other\n"
        "from panax.optim import StateSpec as Slot\n"
        "é = panax.optim.on_shards.StateSpec.like(StateSpec.x)\n"
        "kept = 'Kept'\n"
    )


def test_a_name_that_two_modules_had_is_not_guessed():
    other = Rename("name", "panax.optim.other.Kept", "panax.optim.other.Slot")
    text = "from panax.optim import Kept\n"
    assert rewrite_script(text, [KEPT, other]) == text


def test_a_module_that_moves_takes_its_names_along():
    moved = Rename("module", "panax.optim.on_shards", "panax.optim.sharded.optimizer")
    table = merge([KEPT], [moved])
    assert rewrite_script("from panax.optim.on_shards import Kept\n", table) == (
        "from panax.optim.sharded.optimizer import StateSpec\n"
    )
    assert forward("panax.optim.on_shards.Untouched", table) == "panax.optim.sharded.optimizer.Untouched"


def test_renaming_back_leaves_no_line():
    assert merge([KEPT], [Rename("name", KEPT.new, KEPT.old)]) == []


def test_text_takes_code_and_leaves_prose():
    text = '"""Kept in mind: `Kept.like`, and\n\n    >>> Kept(1)\n"""\nsetattr(on_shards, "Kept", 1)  # Kept\n'
    assert rewrite_text(text, [KEPT], {"Kept"}, ".py") == (
        '"""Kept in mind: `StateSpec.like`, and\n\n    >>> StateSpec(1)\n"""\nsetattr(on_shards, "StateSpec", 1)  # Kept\n'
    )
    page = "Kept by `Kept`.\n\n```python\nKept()\n```\n"
    assert rewrite_text(page, [KEPT], {"Kept"}, ".md") == "Kept by `StateSpec`.\n\n```python\nStateSpec()\n```\n"
    assert rewrite_text(page, [KEPT], set(), ".md") == page


def test_tables_of_lazy_imports():
    text = 'lazily(__name__, {"on_shards": ("Kept", "Other"), "other": ("Kept",)})'
    expected = 'lazily(__name__, {"on_shards": ("StateSpec", "Other"), "other": ("Kept",)})'
    assert rewrite_lazy_tables(text, "panax.optim", [KEPT]) == expected


def test_edits_count_in_utf16(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("x = '𝄞', Kept, Kept\n", "utf-8")
    server.apply_edits({path: [((0, 10), (0, 14), "Spec"), ((0, 16), (0, 20), "Spec")]})
    assert path.read_text("utf-8") == "x = '𝄞', Spec, Spec\n"


@pytest.mark.parametrize("line", ["class,panax.a.B,C", "name,panax.a.B,C-D", "name,B,C", "name,panax.a.B,"])
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "list.csv"
    path.write_text(f"kind,old,new\n{line}\n", "utf-8")
    with pytest.raises(ValueError, match=":2: "):
        read_table(path)


def test_a_table_is_read_as_it_was_written(tmp_path):
    renames = [KEPT, Rename("module", "panax.a", "panax.b"), Rename("member", "panax.a.B.c", "panax.a.B.d")]
    write_table(tmp_path / "t.csv", renames)
    assert read_table(tmp_path / "t.csv") == sorted(renames)


def test_the_examples_of_the_tool():
    attempted = 0
    for module in pkgutil.iter_modules(package.__path__, "tools.renames."):
        result = doctest.testmod(importlib.import_module(module.name))
        attempted += result.attempted
        assert result.failed == 0, module.name
    assert attempted >= 4


def test_a_tree_is_renamed_with_its_text_and_what_can_not_be_is_reported(tmp_path, capsys):
    files = {
        "docs/page.md": "`Kept` holds it.\n\n```python\nfrom pack import Kept\n```\n",
        "src/pack/__init__.py": '"""A package."""\n\nfrom .store import Kept\n\n__all__ = ["Kept"]\n',
        "src/pack/store.py": (
            '"""Stores."""\n\n\nclass Kept:\n    """A `Kept` value."""\n\n    def given(self) -> int:\n        return 1\n\n\n'
            'def found() -> Kept:\n    """Find one.\n\n    >>> found().given()\n    1\n    """\n    return Kept()\n'
        ),
        "src/pack/use.py": (
            "from pack.store import Kept, found\n\nfound = found\nvalue: Kept = Kept()\nnumber = value.given()\n"
            "\n\ndef of(each):\n    return each.given()\n"
        ),
        "tests/test_it.py": "from pack import Kept\n\n\ndef test_it():\n    assert Kept().given() == 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(("git", "init", "-q", tmp_path), check=True)
    renames = [
        Rename("name", "pack.store.Kept", "pack.store.Slot"),
        Rename("member", "pack.store.Slot.given", "pack.store.Slot.read"),
        Rename("name", "pack.store.gone", "pack.store.here"),
    ]
    assert apply(renames, tmp_path) == 1
    told = capsys.readouterr().out
    assert "name pack.store.gone: not defined there" in told
    assert "src/pack/use.py:9: .given of an object without a known type" in told
    assert "class Slot" in (tmp_path / "src/pack/store.py").read_text()
    assert "A `Slot` value" in (tmp_path / "src/pack/store.py").read_text()
    assert (tmp_path / "src/pack/__init__.py").read_text().endswith('__all__ = ["Slot"]\n')
    assert "number = value.read()" in (tmp_path / "src/pack/use.py").read_text()
    assert "Slot().read() == 1" in (tmp_path / "tests/test_it.py").read_text()
    assert (tmp_path / "docs/page.md").read_text() == files["docs/page.md"].replace("Kept", "Slot")
    assert len(read_table(tmp_path / "docs/renames.csv")) == 2
    assert not (tmp_path / "pyrightconfig.json").exists()


def _defined(module: str) -> set[str]:
    base = ROOT / "src" / Path(*module.split("."))
    path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    if path is None:
        return set()
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.fixture
def moving(tmp_path):
    """A tree of two packages under git, of which modules are moved."""
    files = {
        "src/p/__init__.py": 'from q import lazily\nget = lazily("p", {"a": ("X",), "c": ("y",)})\nfrom .c import c\n',
        "src/p/a.py": '"""`p.b.B`, p/b.py, b.py"""\nfrom . import b\nfrom .b import (\n    B,  # kept\n)\n\nX = b.B, B\n',
        "src/p/b.py": "from .c import c\nfrom p import a as a\n\n\nclass B: ...\n",
        "src/p/c.py": "def c(): ...\n",
        "src/q/__init__.py": "lazily = dict\n",
        "tests/test_p.py": (
            "import p.b\nimport p.b as short\nfrom p import a, c\nfrom p.c import c as d\n\n"
            "é = p.b.B, a.b.B, short.B, c(), p.c()\n"
            "patch('p.b.B', 'p.c', 'from p import b')\n"
        ),
        "page.md": "`p.b.B` in src/p/b.py and p.cc, x/p/b.py\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    for command in (("init", "-q"), ("add", "-A")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_modules_move_with_everything_that_names_them(moving):
    moves = [
        Rename("module", "p.a", "p.inner.first"),
        Rename("module", "p.b", "p.inner.b"),
        Rename("module", "p.c", "p.c.c"),
    ]
    remarks = move_modules(moving, moves, [path for path in moving.rglob("*.*") if path.suffix in (".py", ".md")])

    def text(name: str) -> str:
        return (moving / name).read_text("utf-8")

    assert text("src/p/inner/first.py") == (
        '"""`p.inner.b.B`, p/inner/b.py, b.py"""\nfrom . import b\nfrom .b import (\n    B,  # kept\n)\n\nX = b.B, B\n'
    )
    assert text("src/p/inner/b.py") == "from ..c.c import c\nfrom p.inner import first as first\n\n\nclass B: ...\n"
    assert text("src/p/c/c.py") == "def c(): ...\n"
    assert text("src/p/__init__.py") == (
        'from q import lazily\nget = lazily("p", {"inner.first": ("X",), "c.c": ("y",)})\nfrom .c.c import c\n'
    )
    assert text("tests/test_p.py") == (
        "import p.inner.b\nimport p.inner.b as short\nfrom p.inner import first\nfrom p import c\nfrom p.c.c import c as d\n\n"
        "é = p.inner.b.B, first.b.B, short.B, c(), p.c()\n"
        "patch('p.inner.b.B', 'p.c', 'from p import b')\n"
    )
    assert text("page.md") == "`p.inner.b.B` in src/p/inner/b.py and p.cc, x/p/b.py\n"
    assert remarks == [
        "src/p/c: has no __init__.py yet",
        "src/p/inner: has no __init__.py yet",
        "tests/test_p.py: from p import b: is p.inner.b now",
    ]


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([Rename("module", "p.a", "p.b")], "several modules would be p.b"),
        ([Rename("module", "p.x", "p.y")], "not modules of this tree: p.x"),
        ([Rename("name", "p.a", "p.y")], "not modules of this tree: p.a"),
    ],
)
def test_moves_that_can_not_be_made_change_nothing(moving, moves, message):
    before = sorted((path, path.read_bytes()) for path in moving.rglob("*.py"))
    with pytest.raises(ValueError, match=message):
        move_modules(moving, moves, [path for path, _ in before])
    assert sorted((path, path.read_bytes()) for path in moving.rglob("*.py")) == before


def test_files_are_named_from_their_room_on():
    moves = TextMoves(
        {"panax.data.loader": "panax.data.loading.prefetch"}, frozenset({"panax.data.loader"}), frozenset()
    )
    old = '"/panax/data/loader.py" src/panax/data/loader.py data/loader.py x/data/loader.py'
    new = (
        '"/panax/data/loading/prefetch.py" src/panax/data/loading/prefetch.py data/loading/prefetch.py x/data/loader.py'
    )
    assert moves.rewrite(old) == new
