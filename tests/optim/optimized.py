"""Parameters of every kind and the steps that optimizers take on them, on one device or on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np

from panax.core import named_leaves
from panax.mesh import Placement
from panax.mesh.topology import MeshShape
from panax.optim.transformation import apply_updates

LAYERS = 4
AXES = {
    "expert": ("layer", "expert", "embed", "expert_ffn"),
    "query": ("layer", "embed", "heads", "head_dim"),
    "out": ("layer", "heads", "head_dim", "embed"),
    "up": ("layer", "embed", "ffn"),
    "down": ("layer", "ffn", "embed"),
    "bias": ("layer", "heads", "head_dim"),
    "scale": ("layer", "norm"),
    "table": ("vocab", "embed"),
    "adapted": ("features", "width"),
}
SHAPES = {
    "expert": (LAYERS, 4, 8, 16),
    "query": (LAYERS, 8, 4, 6),
    "out": (LAYERS, 4, 6, 8),
    "up": (LAYERS, 8, 16),
    "down": (LAYERS, 16, 8),
    "bias": (LAYERS, 4, 6),
    "scale": (LAYERS, 8),
    "table": (24, 8),
    "adapted": (12, 12),
}


def parameters(seed: int) -> dict[str, jax.Array]:
    """Arrays with layers of very different scale: an optimizer that mixes them shows."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape)
        if AXES[name][0] == "layer":
            values *= (10.0 ** np.arange(LAYERS)).reshape(-1, *(1,) * (len(shape) - 1))
        found[name] = jnp.asarray(values, jnp.float32)
    return found


def separate(tree):
    """Each layer's arrays by names of their own."""
    return {
        name if AXES[name][0] != "layer" else f"{name}.{i}": part
        for name, leaf in tree.items()
        for i, part in enumerate(leaf if AXES[name][0] == "layer" else [leaf])
    }


def axes_of(names):
    return {name: AXES[name] if name in AXES else AXES[name.split(".")[0]][1:] for name in names}


def run(optimizer, params, gradients, *, mesh=None, axes=None, num_steps=10):
    """The parameters and the state after a step with each of `gradients`."""
    transformation = optimizer.build(axes or axes_of(params), num_steps)
    described = {name: (leaf.shape, (axes or axes_of(params))[name]) for name, leaf in params.items()}
    state = transformation.init(params)

    def step(params, state, gradient):
        updates, state = transformation.update(gradient, state, params)
        return apply_updates(params, updates), state

    renewal = transformation.renewal

    def renewed(params, state):
        return renewal.renew(state, params)

    def between(number, params, state):
        if renewal is None:
            return state
        return renewal.adopt_renewed(number, renew(params, state) if renewal.due(number) else state)

    if mesh is None:
        step, renew = jax.jit(step), jax.jit(renewed)
        for number, gradient in enumerate(gradients, 1):
            params, state = step(params, state, gradient)
            state = between(number, params, state)
        return params, state
    placement = Placement.create(mesh if isinstance(mesh, MeshShape) else MeshShape(**mesh))
    lies = placement.storage_shardings(params, {name: axes for name, (_, axes) in described.items()})
    rests = placement.storage_shardings(state, transformation.axes(state, described))
    with placement.activate():
        compiled = jax.jit(step, in_shardings=(lies, rests, lies), out_shardings=(lies, rests))
        renew = jax.jit(renewed, in_shardings=(lies, rests), out_shardings=rests)
        params, state = jax.device_put(params, lies), jax.device_put(state, rests)
        for number, gradient in enumerate(gradients, 1):
            params, state = compiled(params, state, jax.device_put(gradient, lies))
            state = between(number, params, state)
    return params, state


def compared(found, wanted, *, bound=4e-6):
    """Each number within `bound` times the largest of its own array: the scale of what was added up to it."""
    for name, value in named_leaves(wanted).items():
        value, other = np.asarray(value, np.float64), np.asarray(named_leaves(found)[name], np.float64)
        own = tuple(range(value.ndim and value.shape[0] == LAYERS, value.ndim))
        largest = np.abs(value).max(own, keepdims=True) if value.ndim else 1.0
        error = float((np.abs(other - value) / np.maximum(largest, 1e-30)).max())
        assert error <= bound, f"{name}: {error:.2e} of the largest number of its array, expected at most {bound:.0e}"
