"""Clipping layer by layer: as optax does it on separate arrays, and on every layout as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimized import AXES, axes_of, compared, parameters, separate

from panax.core import RecipeError
from panax.mesh import MeshShape, Placement
from panax.optim.clipping import clip_by_layer
from panax.train import StepConfig

LIMITS = {"norm": {"norm": 5.0}, "ratio": {"ratio": 0.01}, "both": {"norm": 50.0, "ratio": 0.5}}


def test_each_layer_has_its_own_norm():
    gradients, params = parameters(1), parameters(0)
    found = separate(clip_by_layer(gradients, params, axes_of(params), norm=5.0))
    for name, before in separate(gradients).items():
        # An expert's array is its own, too.
        for one, was in zip(*((found[name], before) if name.startswith("expert") else ([found[name]], [before]))):
            length = float(jnp.linalg.norm(was))
            np.testing.assert_allclose(one, was * min(1.0, 5.0 / length), rtol=1e-5, err_msg=name)


def test_adaptive_clipping_is_optax_s_of_each_matrix_and_vector():
    names = ("up", "down", "scale", "table")
    params = {name: separate(parameters(0))[name if name == "table" else f"{name}.0"] for name in names}
    gradients = {name: separate(parameters(1))[name if name == "table" else f"{name}.0"] for name in names}
    axes = {name: AXES[name] if name == "table" else AXES[name][1:] for name in names}
    actual = clip_by_layer(gradients, params, axes, ratio=0.1)
    transformation = optax.adaptive_grad_clip(0.1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wanted, _ = transformation.update(gradients, transformation.init(params), params)
    compared(actual, wanted)
    assert any((actual[name] != gradients[name]).any() for name in names)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"stage": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "replica": 4}])
def test_every_layout_clips_as_one_device(mesh, limits):
    gradients, params = parameters(1), parameters(0)
    one = clip_by_layer(gradients, params, axes_of(params), **LIMITS[limits])
    placement = Placement.create(MeshShape(**{"fsdp": 1, **mesh}))
    lies = placement.storage_shardings(params, axes_of(params))
    with placement.activate():
        clip = jax.jit(lambda g, p: clip_by_layer(g, p, axes_of(params), **LIMITS[limits]), out_shardings=lies)
        found = clip(jax.device_put(gradients, lies), jax.device_put(params, lies))
    compared(found, one)


def test_gradients_of_zeros_and_weights_of_zeros_are_no_division_by_zero():
    zeros = jax.tree.map(jnp.zeros_like, parameters(0))
    for gradients, params in ((zeros, parameters(0)), (zeros, zeros), (parameters(1), zeros)):
        found = clip_by_layer(gradients, params, axes_of(params), norm=1.0, ratio=0.01)
        assert all(np.isfinite(leaf).all() for leaf in found.values())


@pytest.mark.parametrize("setting", ["clip_norm", "clip_layer_norm", "clip_ratio"])
def test_limits_that_are_none_are_refused(setting):
    with pytest.raises(RecipeError, match=rf"step.{setting}=0.0; expected a positive"):
        StepConfig(**{setting: 0.0})
