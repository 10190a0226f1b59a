"""Classes and vectors of texts: against definitions in NumPy, on every layout, and that they learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawing import drawn

from panax.core import RecipeError
from panax.layers.moe.moe_config import MoE
from panax.models import TextClassifierTask, TextEmbedderTask
from panax.models.heads.pooling import pooling_weights
from panax.testing import check_task

DENSE = dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(0,), dropout=0.0, logit_soft_cap=None)
EXPERTS = dataclasses.replace(DENSE, feed_forward=MoE(experts=4, active=2, ffn=16, balance=0.1))
ROWS, LENGTH, CLASSES = 8, 16, 3


def texts(name: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, LENGTH + 1, (ROWS, 1))
    prefix = f"{name}_" if name else ""
    return {
        f"{prefix}tokens": rng.integers(0, DENSE.vocab_size, (ROWS, LENGTH)).astype(np.int32),
        f"{prefix}segment": (np.arange(LENGTH)[None] < lengths).astype(np.int32),
    }


def labeled() -> dict[str, np.ndarray]:
    mask = np.ones(ROWS, np.float32)
    mask[-1] = 0.0
    return {**texts(), "label": np.arange(ROWS, dtype=np.int32) % CLASSES, "loss_mask": mask}


def pairs() -> dict[str, np.ndarray]:
    return {**texts(), **texts("positive", 1), "loss_mask": labeled()["loss_mask"]}


TASKS = {
    "classes": (TextClassifierTask(model=DENSE, classes=CLASSES, label_smoothing=0.1), labeled()),
    "classes, mean, experts": (TextClassifierTask(model=EXPERTS, classes=CLASSES, pooling="mean"), labeled()),
    "vectors": (TextEmbedderTask(model=DENSE, dims=(8, 16), both_ways=True), pairs()),
}


LAYOUTS = {
    "two": ({"fsdp": 2, "tensor": 2}, {"replica": 2, "expert": 2}),
    "four": ({"tensor": 4}, {"replica": 2, "fsdp": 2}, {"fsdp": 4}, {"expert": 2, "tensor": 2}),
}


@pytest.mark.parametrize("layouts", ["two", pytest.param("four", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TASKS)
def test_trains_like_one_device(name: str, layouts: str) -> None:
    task, batch = TASKS[name]
    possible = tuple(layout for layout in LAYOUTS[layouts] if layout.keys() <= task.mesh_axes)
    report = check_task(task, batch, layouts=possible)
    assert len(report.compared) == len(possible) > 0, report.left_out


def on_device(batch):
    return {name: jnp.asarray(value) for name, value in batch.items()} | {"row": jnp.arange(ROWS)}


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(task, params, batch):
    context = task.context(batch, jax.random.key(0), False)
    tokens = jnp.concatenate([batch[name] for name, _ in task.text_leaves])
    return params.decoder(tokens, context, dtype=jnp.float32)[0]


def hidden(task, params, batch):
    """Final hidden states of all texts of a batch, position by position."""
    return np.asarray(hidden_states(task, params, on_device(batch)))


@functools.partial(jax.jit, static_argnums=0)
def evaluate(task, params, state, batch):
    return task.loss(params, state, batch, jax.random.key(0), False)


def evaluated(task, params, state, batch):
    return evaluate(task, params, state, on_device(batch))


@pytest.mark.parametrize("pooling", ["last", "first", "mean"])
def test_classes_are_scored_by_the_definition(pooling: str) -> None:
    task, batch = dataclasses.replace(TASKS["classes"][0], pooling=pooling), labeled()
    params, state = drawn(task.init)
    states, real = hidden(task, params, batch), batch["segment"] > 0
    ends = real.sum(axis=1) - 1
    rows = {
        "last": states[np.arange(ROWS), ends],
        "first": states[:, 0],
        "mean": np.stack([row[keep].mean(axis=0) for row, keep in zip(states, real, strict=True)]),
    }[pooling]
    scores = rows @ np.asarray(params.head.w) + np.asarray(params.head.b)
    log = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    wanted = -(log[np.arange(ROWS), batch["label"]] * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    result = evaluated(task, params, state, batch)
    assert float(result.losses["cross_entropy"].mean) == pytest.approx(wanted, rel=1e-5)


def test_a_vector_is_compared_with_all_positive_texts() -> None:
    task, batch = TASKS["vectors"]
    params, state = drawn(task.init)
    states, real = hidden(task, params, batch), np.concatenate([batch["segment"], batch["positive_segment"]]) > 0
    last = states[np.arange(2 * ROWS), real.sum(axis=1) - 1]
    total, mask = 0.0, batch["loss_mask"]
    for dim in (8, 16, DENSE.embed):
        unit = last[:, :dim] / np.linalg.norm(last[:, :dim], axis=1, keepdims=True)
        for ones, others in ((unit[:ROWS], unit[ROWS:]), (unit[ROWS:], unit[:ROWS])):
            scores = ones @ others.T / task.temperature
            # The last pair is padding: a negative for nobody but itself.
            scores[:-1, -1] = -np.inf
            each = np.log(np.exp(scores).sum(axis=1)) - np.diag(scores)
            total += (each * mask).sum() / mask.sum() / 6
    assert float(evaluated(task, params, state, batch).losses["in_batch"].mean) == pytest.approx(total, rel=1e-5)


def test_padding_changes_nothing() -> None:
    """Other tokens there, and padding before the text or after it."""
    for name in ("classes", "vectors"):
        task, batch = TASKS[name]
        params, state = drawn(task.init)
        expected = evaluated(task, params, state, batch)
        other = dict(batch)
        for tokens, segment in task.text_leaves:
            other[tokens] = np.where(batch[segment] > 0, batch[tokens], 5).astype(np.int32)
        actual = evaluated(task, params, state, other)
        for loss in expected.losses:
            assert float(actual.losses[loss].mean) == float(expected.losses[loss].mean)


def test_weights_of_a_row_without_text_are_zeros() -> None:
    valid = jnp.asarray([[False, False], [True, False]])
    for pooling in ("last", "first", "mean"):
        np.testing.assert_array_equal(pooling_weights(valid, pooling), [[0.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextClassifierTask(model=DENSE, classes=-1), "classes=-1; expected a positive number, or 0"),
        (
            lambda: TextClassifierTask(model=DENSE, classes=2, label_smoothing=1.0),
            r"label_smoothing=1.0; expected a share",
        ),
        (lambda: TextEmbedderTask(model=DENSE, temperature=0.0), "temperature=0.0; expected a positive number"),
        (lambda: TextEmbedderTask(model=DENSE, dims=(32,)), r"dims=\(32,\); expected lengths below the vector's"),
        (lambda: TextEmbedderTask(model=EXPERTS), "has experts, which text vectors are not trained with"),
    ],
)
def test_settings_without_meaning_are_refused(make, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()
