"""Nothing in Panax unpickles, evaluates or loads what could run code: found in the syntax of every file, however it is spelt."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"read_pickle", "unsafe_load", "full_load"}
UNSAFE = {"allow_pickle": True, "weights_only": False, "trust_remote_code": True}


def unpickling(text: str) -> Iterator[str]:
    """Calls in a source that could unpickle or run their input, with their lines."""
    for node in ast.walk(ast.parse(text)):
        problem = None
        if isinstance(node, ast.Import):
            problem = next((alias.name for alias in node.names if alias.name.split(".")[0] in MODULES), None)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            problem = node.module if (node.module or "").split(".")[0] in MODULES else None
        elif isinstance(node, ast.Call):
            problem = _call(node)
        if problem:
            yield f"line {getattr(node, 'lineno', 0)}: {problem}"


def _call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    if isinstance(node.func, ast.Name) and name in CALLS:
        return name
    if name == "importlib.import_module" and node.args and isinstance(node.args[0], ast.Constant):
        return name if str(node.args[0].value).split(".")[0] in MODULES else None
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg in UNSAFE and value is UNSAFE[keyword.arg]:
            return f"{name}({keyword.arg}={value})"
    if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in node.keywords):
        return "torch.load without weights_only=True"
    if name == "yaml.load":
        return name
    return name if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS else None


@pytest.mark.parametrize("folder", ["src", "recipes", "benchmarks"])
def test_no_file_unpickles(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{path.relative_to(ROOT)}, {each}" for path in files for each in unpickling(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import joblib.parallel", "eval(x)", "exec(text)",
        "np.load(f, allow_pickle=True)", "torch.load(f)", "torch.load(f, weights_only=False)", "pd.read_pickle(f)",
        "yaml.load(f)",
        "__import__('pickle')", "importlib.import_module('pickle')", "AutoModel.from_pretrained(d, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_finds_each_way(text):
    assert list(unpickling(f"def f():\n    {text}\n"))


@pytest.mark.parametrize(
    "text", ["torch.load(f, weights_only=True)", "np.load(f)", "model.eval()", "re.compile(p)", "from .pickle import x"]
)
def test_leaves_the_rest_alone(text):
    assert not list(unpickling(f"def f():\n    {text}\n"))
