"""Single layers frozen, smoothed labels and a user's metrics: right on one device, and the same on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from panax.core import RecipeError, named_leaves
from panax.mesh import MeshShape, Placement, Rules
from panax.models import VitConfig, VitTask
from panax.train import CompiledStep, Program, StepConfig, evaluate_all
from panax.train.frozen_params import freeze

SMOOTHING = 0.2
FROZEN = ("layers.0", "layers.2.attention")


def cross_entropy(scores, targets, weights):
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets)


def smoothed(scores, targets, weights):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, scores.shape[-1]), SMOOTHING)
    return optax.softmax_cross_entropy(scores, labels)


def among_early_targets(scores, targets, weights):
    """A mean over some of the targets alone."""
    return jnp.argmax(scores, axis=-1) == targets, weights * (targets < 10).astype(weights.dtype)


@functools.cache
def trained(**mesh):
    """(parameters before, after 3 steps, the first step's scalars, the evaluation before) on a mesh."""
    model = dataclasses.replace(tiny.CONFIG, dropout=0.0)
    metrics = {"own": cross_entropy, "smoothed": smoothed, "early": among_early_targets}
    task = tiny.task(label_smoothing=SMOOTHING, metrics=metrics)
    # As many micro-batches as the most stages of a mesh.
    program = Program.create(
        dataclasses.replace(task, model=model),
        tiny.ADAMW,
        num_steps=3,
        frozen=FROZEN,
        config=StepConfig(micro_batches=4),
    )
    size = int(np.prod(list(mesh.values()) or [1]))
    step = CompiledStep(program, Placement.create(MeshShape(**mesh), Rules(), jax.devices()[:size]), tiny.AXES)
    state = step.init(0)
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
    evaluation = evaluate_all(step, state, [tiny.batch(0)])
    scalars = []
    for number in range(3):
        state, result = step(state, step.put(tiny.batch(number)))
        scalars.append({name: float(value) for name, value in result.items()})
    return before, {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}, scalars, evaluation


def test_frozen_layers_rest_bit_by_bit_and_the_others_train():
    before, after, _, _ = trained()
    # Windows (8, 0) and three layers: one stack of a period of two, and one of a single layer.
    assert before["stacks.0.blocks.0.attention.w_k"].shape[0] == 1
    for name, value in before.items():
        frozen = name.startswith("stacks.0.blocks.0.") or name.startswith("stacks.1.blocks.0.attention.")
        assert np.array_equal(value, after[name]) == frozen, name


def test_labels_are_smoothed_in_training_alone_and_metrics_are_the_users():
    _, _, scalars, evaluation = trained()
    assert evaluation["own"] == pytest.approx(evaluation["loss/cross_entropy"], rel=1e-5)
    assert scalars[0]["loss/cross_entropy"] == pytest.approx(evaluation["smoothed"], rel=1e-5)
    assert evaluation["smoothed"] > evaluation["own"] + 1e-4
    assert 0 <= evaluation["early"] <= 1 and "own" not in scalars[0]


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "context": 2, "tensor": 2},
        pytest.param({"stage": 3, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"replica": 2, "fsdp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_are_the_same_on_a_mesh(mesh):
    many, one = trained(**mesh), trained()
    for name, value in one[1].items():
        np.testing.assert_allclose(many[1][name], value, rtol=2e-3, atol=2e-4, err_msg=name)
        assert np.array_equal(many[0][name], many[1][name]) == np.array_equal(one[0][name], value), name
    for here, there in zip(one[2], many[2]):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
    assert many[2][0]["gradient_norm"] == pytest.approx(one[2][0]["gradient_norm"], rel=1e-4)
    assert many[3] == pytest.approx(one[3], rel=1e-5, abs=1e-6)


PARAMS = {"a": np.zeros((4, 2)), "b": np.zeros(3), "c": np.zeros((4,))}
LAYERS = {layer: {"w.x": ("a", layer), "w.y": ("c", layer)} for layer in range(4)}


def test_what_a_prefix_may_be():
    def frozen(*prefixes):
        return freeze(PARAMS, prefixes, (), LAYERS)

    assert frozen("a") == ({"a": False, "b": True, "c": True}, None)
    assert frozen("layers.1.w.x", "layers.3.w.x")[1] == {"a": frozenset({1, 3})}
    assert frozen("layers.0-2")[1] == {"a": frozenset({0, 1, 2}), "c": frozenset({0, 1, 2})}
    # All layers of an array: no gradient and no moments for it.
    assert frozen("layers.0-3.w.x") == ({"a": False, "b": True, "c": True}, None)
    for prefix, message in (
        ("layers.4", "frozen: 'layers.4': the model has the layers 0 to 3"),
        ("layers.2-1", "the model has the layers 0 to 3"),
        ("layers.1.v", "matches no parameter; layer 1 has w.x, w.y"),
        ("layer.1", "matches no parameter; the first ones are a, b, c; single layers are layers.0"),
    ):
        with pytest.raises(RecipeError, match=message):
            frozen(prefix)
    with pytest.raises(RecipeError, match="every parameter is frozen"):
        frozen("layers.0-3", "b")


def test_vision_transformers_name_their_layers_too():
    task = VitTask(model=VitConfig(image_size=8, patch=4, embed=16, num_layers=3, heads=2, ffn=32, num_classes=4))
    params = jax.eval_shape(task.init, jax.random.key(0))[0]
    layers = task.layer_parameters(params)
    assert list(layers) == [0, 1, 2] and all(row == layer for layer in layers for _, row in layers[layer].values())
    assert all(name in named_leaves(params) for name, _ in layers[1].values())


def test_a_metric_that_is_a_mean_already_or_has_a_taken_name_is_refused():
    with pytest.raises(RecipeError, match=r"task.metrics has 'accuracy', which the task measures itself"):
        tiny.task(metrics={"accuracy": cross_entropy})
    task = tiny.task(metrics={"mean": lambda scores, targets, weights: scores.mean()})
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    batch = tiny.batch() | {"row": np.arange(tiny.ROWS)}
    with pytest.raises(
        RecipeError, match=r"task.metrics\['mean'\] gives values of the shape \(\).*leave the mean to the task"
    ):
        jax.eval_shape(lambda *arguments: task.loss(*arguments, False), params, state, batch, jax.random.key(0))
    with pytest.raises(RecipeError, match=r"label_smoothing=1\.0"):
        tiny.task(label_smoothing=1.0)
