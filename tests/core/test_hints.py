"""What messages name is there: every dotted name of Panax in a string of `src` can be imported."""

import ast
import importlib
import os
import re
from pathlib import Path

import pytest

from panax.core.task import ADAPTERS, Task
from panax.system.files import apply_umask

SOURCE = Path(__file__).parents[2] / "src"
NO_NAMES = {"panax.run_id": "a tag of MLflow"}


def resolves(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def names_in(source: str) -> set[str]:
    """Dotted names in strings that are no docstrings."""
    tree = ast.parse(source)
    parts = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, parts) and node.body]
    described = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described
        for name in re.findall(r"\bpanax(?:_compare)?(?:\.[A-Za-z_]\w*)+", node.value)
    }


def test_every_name_in_a_message_is_there():
    found = set().union(*(names_in(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")))
    assert len(found) > 10 and not [name for name in sorted(found - NO_NAMES.keys()) if not resolves(name)]
    assert names_in('"""panax.doc"""\nx = "call panax.no.such(1)"') == {"panax.no.such"} and not resolves(
        "panax.no.such"
    )


@pytest.mark.parametrize("library", ADAPTERS)
def test_the_error_for_another_librarys_model_names_its_adapter(library):
    model = type("Model", (), {"__module__": f"{library}.models"})()
    hint = Task.hint_for(type("Mine", (type(model),), {"__module__": "mine"})())
    assert hint is not None
    module, _, name = re.findall(r"panax\.adapters\.(\w+)(\.)(\w+)", hint)[0]
    source = SOURCE / "panax" / "adapters"
    path = source / f"{module}.py" if (source / f"{module}.py").is_file() else source / module / "task.py"
    assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.M)
    assert Task.hint_for(3) is None and Task.hint_for(type("Model", (), {"__module__": "torchish.nn"})()) is None


def test_a_file_of_a_library_gets_the_usual_mode(tmp_path):
    before = os.umask(0o027)
    try:
        (tmp_path / "file").touch(mode=0o600)
        apply_umask(tmp_path / "file")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
