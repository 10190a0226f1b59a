"""The rooms that serve every model know none: no import of layers or models, no name of a logical axis or of a parameter."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import panax
from panax.core import named_leaves
from panax.core.params.logical import LOGICAL_AXES
from panax.mesh import MESH_AXES
from panax.models import PRESETS, VIT_PRESETS, DecoderTask, VitTask

SOURCE = Path(panax.__file__).parent
GENERAL = ("core", "spmd", "mesh", "parallel", "train", "plan", "metrics", "run")
MODELS = ("layers", "models")

ENGLISH = {
    ("core/batch_checks.py", "experts"): "a leaf of batches from rollouts, which rooms of rollouts and of models both name",
    ("core/batch_checks.py", "row"): "a leaf of every batch: each row's number in it",
    ("metrics/heat_map.py", "b"): "a letter",
    ("metrics/heat_map.py", "w"): "a letter",
    ("metrics/services.py", "w"): "how a file is opened",
    ("metrics/report/curves.py", "d"): "how an array keeps its numbers",
    ("metrics/report/origin.py", "environment"): "variables of a process",
    ("metrics/report/origin.py", "seed"): "a run's setting",
    ("metrics/goodput.py", "d"): "days",
    ("run/tools/sweep.py", "w"): "how a file is opened",
    ("metrics/tensorboard.py", "experts"): "a group of figures in TensorBoard",
    ("parallel/remat.py", "attention"): "what attention gives, which models mark for rematerialization",
    ("parallel/context_choice.py", "sinks"): "a keyword of the kernels: scores without a value",
    ("parallel/ring.py", "attention"): "a kind of work in the registry of kernels",
    ("metrics/heat_map.py", "d"): "a letter that is drawn",
    ("parallel/ring_chunks.py", "blocks"): "a keyword of the kernels: which blocks a mask leaves",
    ("plan/search/auto.py", "experts"): "a kind of mesh: its axis `expert` is used",
    ("run/experiment.py", "class"): "of Python",
    ("train/loss_scaling.py", "scale"): "what a loss is multiplied by",
    ("spmd/__init__.py", "bias"): "a file of this room",
    ("spmd/composite/low_rank.py", "b"): "the second factor of a matrix of low rank",
    ("spmd/composite/low_rank.py", "magnitude"): "norms of columns, and their axis, which this file adds",
    ("spmd/composite/low_rank.py", "rank"): "the axis between its factors, which this file adds to a weight's own",
    ("spmd/sharding_marks.py", "shared"): "a state: each device has a share",
}
"""Words of other meanings; (file, word) to what it means there."""


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Names of logical axes, and of all that parameters of the published models are named by: one of each family's sizes."""
    families = {name.partition("_")[0]: model for name, model in PRESETS.items()}
    tasks = [*(DecoderTask(model=model) for model in families.values()), VitTask(model=VIT_PRESETS["vit_b16"])]
    found = set(LOGICAL_AXES) - set(MESH_AXES)
    for task in tasks:
        params, state = jax.eval_shape(task.init, jax.random.key(0))
        found |= {part for name in named_leaves((params, state)) for part in name.split(".") if not part.isdigit()}
    return found


def imports(tree: ast.AST, room: str) -> Iterator[tuple[int, str]]:
    """What of layers and models is imported anywhere in a file of `room`: by statement, or by a call with the module's name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is this room, two are the package; deeper files of a room have one dot more.
            depth = room.count("/") + 1
            above = {0: "", depth + 1: "panax."}.get(node.level)
            if above is not None:
                module = above + (node.module or "")
                names = [module, *(f"{module.rstrip('.')}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        for name in names:
            parts = name.split(".")
            if parts[0] == "panax" and len(parts) > 1 and parts[1] in MODELS and all(p.isidentifier() for p in parts):
                yield node.lineno, name


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string outside of docstrings. An annotation of one dimension, `Float[Array, " seq"]`, begins with a space."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def found_in(text: str, place: str, words: set[str]) -> list[tuple[str, str]]:
    """(file, name) of what a file should not hold."""
    tree, room = ast.parse(text), str(Path(place).parent)
    return [(place, name) for _, name in (*imports(tree, room), *(s for s in strings(tree) if s[1] in words))]


def test_general_rooms_know_no_model(words):
    results = {
        item
        for room in GENERAL
        for path in sorted((SOURCE / room).rglob("*.py"))
        for item in found_in(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix(), words)
    }
    assert len(words) > 60 and {"kv_heads", "w_kv_up", "router", "router_bias"} <= words
    assert results - ENGLISH.keys() == set(), "ask for a role or a trait (core/params/logical.py) instead"
    assert ENGLISH.keys() - results == set(), "these exemptions are not needed any more"


@pytest.mark.parametrize(
    "line, name",
    [
        ("from ..layers import MoE", "panax.layers"),
        ("from ..models.decoder.model import Decoder", "panax.models.decoder.model"),
        ("from .. import models", "panax.models"),
        ("from panax import layers", "panax.layers"),
        ("import panax.models.vision.vit", "panax.models.vision.vit"),
        ("def late():\n    from ..models import Vit", "panax.models"),
        ("if TYPE_CHECKING:\n    from ..layers import Norm", "panax.layers"),
        ("importlib.import_module('panax.models.vision.vit')", "panax.models.vision.vit"),
        ("if name == 'router': pass", "router"),
        ("split = 'kv_heads' in axes", "kv_heads"),
        ("dim = axes.index('seq')", "seq"),
        ("rules.get('embed', ())", "embed"),
        ("rules['vocab'] = ()", "vocab"),
        ("for logical in ('heads', 'other'): pass", "heads"),
        ("match name:\n    case 'w_q': pass", "w_q"),
        ("getattr(block, 'feed_forward')", "feed_forward"),
        ("text = f'{x}' + f'batch'", "batch"),
    ],
)
def test_each_violation_is_found(line, name, words):
    assert ("train/some.py", name) in found_in(line, "train/some.py", words)


def test_what_is_allowed_is_not_found(words):
    text = '"""router"""\nfrom .layers import scan\nfrom ..spmd import contract\nif axis == "expert":\n    "heads"\n'
    assert found_in(text, "parallel/some.py", words) == []
    assert found_in("from ...layers import Norm", "spmd/checking/some.py", words)[0][1] == "panax.layers"
    assert found_in("from ..layers import scan_layers", "spmd/checking/some.py", words) == []
