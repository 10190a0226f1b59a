"""The API reference: every exported name, from the sources as they are."""

from pathlib import Path

import pytest
from tools.reference.__main__ import ROOT, outdated
from tools.reference.collect import Export, collect
from tools.reference.pages import FOLDER, anchor, pages


@pytest.fixture(scope="module")
def exports_of() -> dict[str, list[Export]]:
    """The exports of each package."""
    return collect(ROOT / "src")


def test_pages_are_up_to_date():
    assert [path.name for path in outdated(ROOT)] == [], "run `python -m tools.reference`"


def test_every_exported_name_is_found_and_documented(exports_of):
    silent = [f"{package}.{each.name}" for package, exports in exports_of.items() for each in exports if not each.doc]
    assert silent == []


def test_every_name_has_an_entry_and_the_index_leads_to_it(exports_of):
    index = (ROOT / FOLDER / "index.md").read_text("utf-8")
    for package, exports in exports_of.items():
        room = package.split(".")[1] if "." in package else package
        page = (ROOT / FOLDER / f"{room}.md").read_text("utf-8")
        for each in exports:
            assert f'<a id="{anchor(each)}"></a>' in page and f"({room}.md#{anchor(each)})" in index


def test_methods_of_bases_without_an_entry_are_listed(exports_of):
    """Of a batch's way to the devices, which `CompiledStep` inherits; `CsvTracker` inherits from an exported class."""
    written = pages(exports_of)
    (step,) = [each for each in exports_of["panax.train"] if each.name == "CompiledStep"]
    assert {"put", "held_rows", "row_multiple"} <= {method.name for method in step.inherited}
    assert "- `put`: Transfer a batch to the devices" in written["train.md"]
    (tracker,) = [each for each in exports_of["panax.metrics"] if each.name == "CsvTracker"]
    assert tracker.inherited == ()


def test_names_are_followed_through_re_exports(tmp_path: Path):
    package = tmp_path / "panax" / "room"
    package.mkdir(parents=True)
    (tmp_path / "panax" / "__init__.py").write_text('from .room import Layer as Layer\n__all__ = ["Layer", "room"]\n')
    (package / "__init__.py").write_text(
        '"""A room."""\nfrom .layer import Layer\n__all__ = ["Layer", "LIMIT"]\nLIMIT = 3\n"""Most."""\n'
    )
    (package / "layer.py").write_text(
        'class Layer:\n    """A layer.\n\n    Args:\n        width: Its width,\n            in elements.\n    """\n\n'
        '    def __init__(self, width: int = 3):\n        pass\n\n    def grow(self):\n        """Widen it."""\n'
    )  # fmt: skip
    written = pages(collect(tmp_path))
    assert set(written) == {"index.md", "panax.md", "room.md"}
    assert "Layer(width: int=3)" in written["panax.md"] and "Source: `panax.room.layer`" in written["panax.md"]
    assert "- `width`: Its width,\n  in elements." in written["room.md"] and "- `grow`: Widen it." in written["room.md"]
    assert "LIMIT = 3" in written["room.md"] and "Most." in written["room.md"]
