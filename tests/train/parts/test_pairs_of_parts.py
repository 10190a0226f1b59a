"""Each pair of features of a step trains alike on every mesh, or is refused by an error that names both."""

import dataclasses
import itertools
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_parts import GradientNoise, ReportedTeacher

from panax.comms import Comms
from panax.core import Evaluation, Loss, RecipeError, Task, named_leaves
from panax.layers import embedding_bag
from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Schedule, ScheduleFreeAdamW
from panax.spmd import contract, contract_gathered, local_sequence, sum_over_sequence
from panax.train import CompiledStep, Program, StepConfig, StepPart

STEPS, ROWS, LENGTH, EMBED, FFN, IDS = 4, 8, 4, 64, 256, 32
"""Large enough to be cut into quantization blocks on each mesh."""

CONSTANT = Schedule(peak=0.02, decay="constant", warmup_steps=0)
MESHES = (MeshShape(replica=2, fsdp=2), MeshShape(replica=2, fsdp=1, tensor=2))
"""Both have two replicas: the result of some features depends on their number."""

MESHES_OF_TABLES = (MESHES[0], MeshShape(replica=1, fsdp=4))

AXES = {"x": ("batch", "seq", None), "y": ("batch", "seq", None), "ids": ("batch", None)}


@dataclasses.dataclass(frozen=True)
class Layers(Task):
    """Two stacked feed-forward layers with residuals, fitted to random rows; their input also has bags of a table's rows.

    Attributes:
        scales: True to scale the loss, as a task in float16 does.
        has_table: True to add the bags.
    """

    scales: bool = False
    has_table: bool = False
    mesh_axes = frozenset({"replica", "fsdp", "tensor"})
    names_axes = True

    @property
    def scales_loss(self) -> bool:
        return self.scales

    def init(self, key: jax.Array) -> Any:
        draw = jax.random.normal(key, (2, 2, EMBED, FFN))
        table = {"table": 0.1 * jax.random.normal(key, (IDS, EMBED))} if self.has_table else {}
        return {"down": draw[1].swapaxes(1, 2) / FFN, **table, "w": draw[0] / EMBED**0.5}, {}

    def parameter_axes(self, params: Any) -> Any:
        table = {"table": ("row", "row_width")} if self.has_table else {}
        return {"down": ("layer", "ffn", "embed"), **table, "w": ("layer", "embed", "ffn")}

    def row_ids(self, batch: Any) -> Any:
        return {"table": batch["ids"]} if self.has_table else {}

    def layer_parameters(self, params: Any) -> Mapping[int, Mapping[str, tuple[str, int]]]:
        return {layer: {name: (name, layer) for name in ("down", "w")} for layer in range(2)}

    def loss(self, params: Any, state: Any, batch: Any, key: Any, train: bool) -> Evaluation:
        x, y = (local_sequence(batch[name]) for name in ("x", "y"))
        if self.has_table:
            x = x + embedding_bag(params["table"], batch["ids"])[:, None]
        for layer in range(2):
            w, down = (params[name][layer] for name in ("w", "down"))
            (up,) = contract_gathered(x, ("batch seq embed, embed ffn -> batch seq ffn", w))
            x = x + contract("batch seq ffn, ffn embed -> batch seq embed", jnp.tanh(up), down)
        total = sum_over_sequence(jnp.sum((x - y) ** 2))
        return Evaluation({"squares": Loss(total, jnp.float32(y.shape[0] * LENGTH * EMBED))}, state, {})


@dataclasses.dataclass(frozen=True)
class Feature:
    """Settings of a feature.

    Attributes:
        words: Words of which an error that refuses it has one.
        of_replicas: True if its result depends on the number of replicas.
        table: True for a table of rows, which is trained on meshes without a tensor axis.
        tolerance: Relative tolerance of losses between meshes; larger where values are rounded to few bits.
    """

    words: tuple[str, ...]
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    comms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Any = None
    frozen: tuple[str, ...] = ()
    parts: tuple[StepPart, ...] = ()
    scales: bool = False
    of_replicas: bool = False
    table: bool = False
    tolerance: float = 1e-5


FEATURES = {
    "frozen layer": Feature(("frozen",), frozen=("layers.0",)),
    "norm": Feature(("clip_norm",), step={"clip_norm": 0.05}),
    "layers' norms": Feature(("clip_layer_norm",), step={"clip_layer_norm": 0.02, "clip_ratio": 0.01}),
    "spikes": Feature(("spike_factor",), step={"spike_factor": 1.05}),
    "average": Feature(("ema_decay", "average"), step={"ema_decay": 0.9}),
    "schedule-free": Feature(("ScheduleFreeAdamW", "average"), optimizer=ScheduleFreeAdamW(schedule=CONSTANT)),
    "micro-batches": Feature(("micro_batches",), step={"micro_batches": 2}),
    "loss scale": Feature(("loss_scale", "float16"), step={"loss_scale": 2.0**10}, scales=True),
    "int8": Feature(("comms",), comms={"compress": "int8"}, of_replicas=True, tolerance=2e-3),
    "delayed": Feature(("comms",), comms={"delayed": True}, of_replicas=True),
    "local steps": Feature(("comms",), comms={"local_steps": 2}, of_replicas=True),
    "noise": Feature(("gradient_noise",), parts=(GradientNoise(0.001),)),
    "table": Feature(("table",), table=True),
    "state of its own": Feature(("teacher",), parts=(ReportedTeacher(),)),
}
PAIRS = list(itertools.combinations(FEATURES, 2))
COVERING = list(zip(FEATURES, [*list(FEATURES)[1:], next(iter(FEATURES))], strict=True))
"""Pairs in which each feature appears twice."""

PAGE = Path(__file__).parents[3] / "docs" / "extending" / "step-part.md"
BEGIN, END = "<!-- begin: pairs -->", "<!-- end: pairs -->"


def sets_of_six() -> list[tuple[str, ...]]:
    """Random sets of six features, none of which refuses another; together they contain almost all triples."""
    rng = np.random.default_rng(5)
    refused = {pair for pair in PAIRS if refusal(features_of(pair))}
    drawn = (
        tuple(sorted(rng.permutation(list(FEATURES))[:6].tolist(), key=list(FEATURES).index)) for _ in itertools.count()
    )
    return list(itertools.islice((six for six in drawn if not refused & set(itertools.combinations(six, 2))), 24))


def features_of(names: tuple[str, ...]) -> tuple[Feature, ...]:
    return tuple(FEATURES[name] for name in names)


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = {name: rng.standard_normal((ROWS, LENGTH, EMBED), np.float32) for name in "xy"}
    return {**rows, "ids": rng.integers(0, IDS, (ROWS, 3)).astype(np.int32)}


def compiled(features: tuple[Feature, ...], mesh: MeshShape | None) -> CompiledStep:
    settings = {name: value for feature in features for name, value in feature.step.items()}
    comms = {name: value for feature in features for name, value in feature.comms.items()}
    optimizers = [feature.optimizer for feature in features if feature.optimizer is not None]
    program = Program.create(
        Layers(any(feature.scales for feature in features), any(feature.table for feature in features)),
        optimizers[0] if optimizers else AdamW(schedule=CONSTANT, epsilon=1e-4),
        num_steps=STEPS + 1,
        config=StepConfig(**{"clip_norm": None, **settings}),
        frozen=tuple(name for feature in features for name in feature.frozen),
        comms=Comms(**comms),
        parts=tuple(part for feature in features for part in feature.parts),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of meshes that suit no network.
        count = 4 if mesh else 1
        placement = Placement.create(mesh or MeshShape(replica=1, fsdp=1), devices=jax.devices()[:count])
        return CompiledStep(program, placement, AXES)


def trained(features: tuple[Feature, ...], mesh: MeshShape | None) -> tuple[list[float], dict[str, np.ndarray]]:
    step = compiled(features, mesh)
    state, losses = step.init(0), []
    for number in range(STEPS):
        state, scalars = step(state, step.put(batch(number)))
        losses.append(float(scalars["loss"]))
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(state.eval_params).items()}
    return losses, params


def refusal(features: tuple[Feature, ...]) -> str:
    """Return the error that refuses a pair; empty if it trains."""
    try:
        compiled(features, MESHES[0])
    except RecipeError as error:
        return str(error)
    return ""


def check_trains_alike(features: tuple[Feature, ...]) -> None:
    """Train on both meshes and, if no feature depends on the number of replicas, on one device."""
    tolerance = max(feature.tolerance for feature in features)
    first, second = MESHES_OF_TABLES if any(feature.table for feature in features) else MESHES
    losses, params = trained(features, first)
    assert np.isfinite(losses).all() and len(set(losses)) == STEPS
    others = [second] if any(feature.of_replicas for feature in features) else [second, None]
    for mesh in others:
        theirs, their_params = trained(features, mesh)
        np.testing.assert_allclose(theirs, losses, rtol=tolerance, err_msg=str(mesh))
        for name, leaf in params.items():
            distance = np.linalg.norm(their_params[name] - leaf) / np.linalg.norm(leaf)
            assert distance <= 10 * tolerance, f"{mesh}: {name} differs by {distance:.2g}"


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=pytest.mark.full if {pair, pair[::-1]} & {*COVERING} else pytest.mark.slow)
        for pair in PAIRS
    ],
    ids=" and ".join,
)
def test_a_pair_trains_alike_on_every_mesh_or_is_refused(pair: tuple[str, str]) -> None:
    features = features_of(pair)
    if error := refusal(features):
        for name, feature in zip(pair, features, strict=True):
            assert any(word in error for word in feature.words), f"{name} is not named: {error}"
        return
    check_trains_alike(features)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_six_features_train_alike_on_every_mesh(number: int) -> None:
    check_trains_alike(features_of(sets_of_six()[number]))


@pytest.mark.slow
def test_sets_of_six_contain_almost_all_triples_that_train() -> None:
    refused = {pair for pair in PAIRS if refusal(features_of(pair))}
    triples = [
        triple for triple in itertools.combinations(FEATURES, 3) if not refused & set(itertools.combinations(triple, 2))
    ]
    contained = {triple for six in sets_of_six() for triple in itertools.combinations(six, 3)}
    assert len(contained & set(triples)) >= 0.75 * len(triples), (len(contained), len(triples))


def matrix() -> str:
    """The page's part about pairs: their number, and those that are refused."""
    errors = {pair: refusal(features_of(pair)) for pair in PAIRS}
    refused = {pair: error for pair, error in errors.items() if error}
    trained_pairs = len(PAIRS) - len(refused)
    text = (
        f"Of the {len(PAIRS)} pairs of {len(FEATURES)} features ({', '.join(FEATURES)}), {trained_pairs} train, alike on two "
        "meshes, and on one device unless the number of replicas matters. The others are refused:"
    )
    lines = [
        BEGIN,
        textwrap.fill(text, 130),
        "",
        "| pair | error |",
        "|---|---|",
        *(f"| {' and '.join(pair)} | `{error}` |" for pair, error in refused.items()),
        END,
    ]
    return "\n".join(lines)


@pytest.mark.full
def test_the_page_lists_the_refused_pairs() -> None:
    """`python tests/train/parts/test_pairs_of_parts.py` writes it again."""
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == matrix()


@pytest.mark.full
def test_a_frozen_layer_rests_in_every_pair() -> None:
    frozen = FEATURES["frozen layer"]
    first = np.asarray(compiled((frozen,), None).init(0).params["w"])
    for name in ("average", "schedule-free", "norm"):
        _, params = trained((frozen, FEATURES[name]), None)
        np.testing.assert_array_equal(params["w"][0], first[0], err_msg=name)
        assert (params["w"][1] != first[1]).any()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page[: page.index(BEGIN)] + matrix() + page[page.index(END) + len(END) :], encoding="utf-8")
