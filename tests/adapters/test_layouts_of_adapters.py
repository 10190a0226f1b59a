"""The layout of models that name no axes, and the values that a loss may return: the base of all adapters."""

import re

import jax
import jax.numpy as jnp
import pytest

from panax.adapters.adapted_task import AdaptedTask, Model
from panax.adapters.axis_names import read_names
from panax.adapters.extras import import_extra
from panax.adapters.heads import head_axes
from panax.adapters.layouts import automatic_axes, infer_axes
from panax.adapters.loss_call import call_loss
from panax.adapters.losses import read_loss
from panax.core import RecipeError
from panax.core.install_hints import install_command
from panax.mesh.rules import STORAGE, assign
from panax.optim.decay import uses_weight_decay

MESH = {"fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    "path, shape, kind, expected",
    [
        ("up.kernel", (64, 256), None, (("fsdp",), ("tensor",))),
        ("down_proj.kernel", (256, 64), None, (("tensor",), ("fsdp",))),
        ("fc1.weight", (256, 64), "out_in", (("tensor",), ("fsdp",))),
        ("fc2.weight", (64, 256), "out_in", (("fsdp",), ("tensor",))),
        ("wte.weight", (96, 64), "embedding", (("tensor",), ("fsdp",))),
        ("conv.kernel", (3, 3, 16, 32), "convolution_last", ((), (), ("fsdp",), ("tensor",))),
        ("conv.weight", (32, 16, 3, 3), "convolution_first", (("tensor",), ("fsdp",), (), ())),
        ("norm.scale", (64,), None, ((),)),
        ("odd.kernel", (7, 9), None, ((), ())),
        ("half.kernel", (6, 9), None, ((), ())),
    ],
)
def test_what_is_split_over_what(path, shape, kind, expected):
    assert assign(infer_axes(path, shape, kind), shape, STORAGE, MESH) == expected


def test_members_lie_on_the_expert_axis():
    axes = infer_axes("experts.w1", (8, 64, 256), "members_in_out")
    assert assign(axes, (8, 64, 256), STORAGE, {"expert": 4, "fsdp": 2}) == (("expert",), ("fsdp",), ())


def test_heads_are_what_attention_is_split_over():
    shapes = {"query.kernel": (64, 8, 4), "query.bias": (8, 4), "out.kernel": (8, 4, 64), "other.kernel": (64, 8, 4)}
    axes = head_axes(shapes)
    assert {name: assign(a, shapes[name], STORAGE, MESH) for name, a in axes.items()} == {
        "query.kernel": (("fsdp",), ("tensor",), ()),
        "query.bias": (("tensor",), ()),
        "out.kernel": (("tensor",), (), ("fsdp",)),
    }
    assert [uses_weight_decay(axes[name]) for name in ("query.kernel", "query.bias", "out.kernel")] == [
        True,
        False,
        True,
    ]


SHAPES = {"a.kernel": (8, 16), "b.kernel": (16, 8), "b.bias": (8,)}


def laid_out(sharding):
    return automatic_axes(SHAPES, lambda path: None, {}, sharding)


def test_the_first_pattern_that_matches_counts():
    axes = laid_out({"a.*": (None, "ffn"), "*.kernel": ("ffn", None)})
    assert (axes["a.kernel"], axes["b.kernel"], axes["b.bias"]) == ((None, "ffn"), ("ffn", None), (None,))


@pytest.mark.parametrize(
    "sharding, message",
    [
        ({"c.*": (None, None)}, r"sharding\['c.\*'\] matches no parameter"),
        ({"*": ("width", "features")}, r"has 2 axes, and b.bias has 1 dimensions \[8\]"),
        ({"a.kernel": ("width", "feature")}, r"names the axis 'feature'; did you mean 'features'"),
        (
            {"*.kernel": (None, None), "a.kernel": (None, None)},
            "matches no parameter that no pattern before it matches",
        ),
    ],
)
def test_a_pattern_that_is_wrong_is_an_error(sharding, message):
    with pytest.raises(RecipeError, match=message):
        laid_out(sharding)


def test_names_are_read():
    named = {"a": ("embed", "mlp"), "b": ("mlp", None)}
    assert read_names(named, {"mlp": "ffn"}) == {"a": ("embed", "ffn"), "b": ("ffn", None)}
    assert read_names(named, {"mlp": None, "embed": "width"}) == {"a": ("width", None), "b": (None, None)}


@pytest.mark.parametrize(
    "named, axis_names, message",
    [
        ({"a": ("embed", "mlp")}, {}, r"calls its axes 'mlp', which Panax does not know.*axis_names=\{'mlp': ...\}"),
        (
            {"a": ("embed", "mlp")},
            {"mlp": "fnn"},
            r"axis_names\['mlp'\]='fnn' is not a logical axis; did you mean 'ffn'",
        ),
        (
            {"a": ("embed",)},
            {"embd": "ffn"},
            r"axis_names\['embd'\] is not an axis that the model names; did you mean 'embed'",
        ),
        ({}, {"mlp": "ffn"}, "names no axes; remove axis_names"),
    ],
)
def test_a_name_that_means_nothing_is_an_error(named, axis_names, message):
    with pytest.raises(RecipeError, match=message):
        read_names(named, axis_names)


@pytest.mark.parametrize(
    "returned, loss, metrics",
    [
        (jnp.float32(2.0), {"objective": 2.0}, {}),
        ((jnp.float32(6.0), jnp.float32(3.0)), {"objective": 2.0}, {}),
        ({"a": jnp.float32(2.0), "b": (jnp.float32(6.0), jnp.float32(3.0))}, {"a": 2.0, "b": 2.0}, {}),
        ((jnp.float32(2.0), {"accuracy": jnp.float32(0.5)}), {"objective": 2.0}, {"accuracy": 0.5}),
        (((jnp.float32(6.0), jnp.int32(3)), {"n": (1.0, 4.0)}), {"objective": 2.0}, {"n": 0.25}),
        ((jnp.bfloat16(2.0), jnp.bfloat16(1.0)), {"objective": 2.0}, {}),
    ],
)
def test_forms_of_a_loss(returned, loss, metrics):
    with jax.numpy_dtype_promotion("standard"):
        losses, measured = read_loss(returned, rows=4)
    assert {name: float(term.mean) for name, term in losses.items()} == loss
    assert {name: float(metric.value) for name, metric in measured.items()} == metrics


def test_a_mean_has_the_rows_as_its_weight():
    assert float(read_loss(jnp.float32(2.0), rows=4)[0]["objective"].weight) == 4


@pytest.mark.parametrize(
    "returned, message",
    [
        (jnp.ones(4), r"float32\[4\], which is not a scalar; expected a scalar"),
        ((jnp.ones(4), jnp.ones(4)), r"float32\[4\], which is not a scalar"),
        (None, "is a NoneType; expected a scalar"),
        ("loss", "is a str; expected a scalar"),
        ({}, "an empty mapping"),
    ],
)
def test_what_is_no_loss(returned, message):
    with pytest.raises(RecipeError, match=message):
        read_loss(returned, rows=4)


def test_a_loss_is_called_with_the_keywords_that_it_names():
    assert call_loss(lambda model, batch, train: (model, batch, train), 1, 2, key=3, train=4) == (1, 2, 4)
    assert call_loss(lambda model, batch, **rest: sorted(rest), 1, 2, key=3, train=4) == ["key", "train"]
    with pytest.raises(RecipeError, match=r"can't be called.*'target'.*keywords key, train"):
        call_loss(lambda model, batch, target: 0, 1, 2, key=3, train=4)


def test_a_library_that_is_not_there():
    with pytest.raises(RecipeError, match=rf"needs no_such_library.*run: {re.escape(install_command('flax'))}"):
        import_extra("no_such_library", "flax")


def test_a_model_without_parameters():
    with pytest.raises(RecipeError, match="Empty has no parameters"):
        AdaptedTask(Model(name="Empty", create=lambda key: ({}, {}), evaluate=lambda *_: 0, rebuild=lambda *_: None))


def test_state_that_changes_its_make_is_an_error():
    def evaluate(params, state, batch, key, train):
        return params["w"].sum(), {"seen": jnp.zeros(3), "more": jnp.zeros(1)}

    task = AdaptedTask(
        Model(
            name="Net",
            create=lambda key: ({"w": jnp.ones((2, 2))}, {"seen": jnp.zeros(2)}),
            evaluate=evaluate,
            rebuild=lambda *_: None,
        )
    )
    with pytest.raises(RecipeError, match=r"more from nothing to float32\[1\], seen from float32\[2\] to float32\[3\]"):
        task.loss(*task.init(jax.random.key(0)), {"x": jnp.ones((4, 1))}, jax.random.key(0), True)
