"""Equinox models, in which a module holds its own parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from ..core import Axes, Batch
from ..core.errors import RecipeError
from ..core.params.axes import path_name
from .adapted_task import AdaptedTask, Model, use_standard_promotion
from .layouts import Kind
from .loss_call import call_loss


def task(
    create: Any,
    loss: Callable[..., Any],
    *,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """Adapt an Equinox model as a task.

    Its parameters are its floating-point arrays; other arrays are state. `eqx.nn.inference_mode` is off while
    it trains, and on while it is evaluated.

    Args:
        create: `key -> model`, or `key -> (model, eqx.nn.State)` as `eqx.nn.make_with_state` returns; traced,
            so that no device holds a whole copy. Or an existing model, or such a pair: its weights are used.
        loss: `loss(model, batch)`, or with any of the keywords `key`, `train` and `state` that it names. With
            `state` it returns `(value of the loss, state)`.
        sharding: Patterns of parameter names to logical axes.

    Raises:
        RecipeError: `create` returns no model, the loss does not return the state, or a pattern matches
            nothing.

    >>> import equinox as eqx, jax.numpy as jnp
    >>> net = task(lambda key: eqx.nn.Linear(4, 1, key=key), lambda model, batch: (jax.vmap(model)(batch["x"]) ** 2).mean())
    >>> net.name
    'linear'
    """
    exists = isinstance(create, tuple | eqx.Module)
    if not exists and (not callable(create) or isinstance(create, type)):
        raise RecipeError(f"create is {create!r}; expected a function of a key: lambda key: Net(key=key)")

    def both(key: jax.Array) -> tuple[Any, Any]:
        created = create if exists else create(key)
        model, state = created if isinstance(created, tuple) and len(created) == 2 else (created, None)
        if not isinstance(model, eqx.Module) or not isinstance(state, eqx.nn.State | None):
            raise RecipeError(
                f"create made {type(created).__name__}; expected an equinox.Module, or a pair of one and its eqx.nn.State"
            )
        return model, state

    with use_standard_promotion():
        model_shape, state_shape = both(jax.random.key(0)) if exists else eqx.filter_eval_shape(both, jax.random.key(0))
    plain_model = eqx.filter(model_shape, _is_array, inverse=True)
    plain_state = eqx.filter(state_shape, _is_array, inverse=True)

    def split(key: jax.Array) -> tuple[Any, Any]:
        model, state = both(key)
        params, others = eqx.partition(model, _trains)
        return params, (eqx.filter(others, _is_array), eqx.filter(state, _is_array))

    def join(params: Any, state_arrays: tuple[Any, Any]) -> tuple[Any, Any]:
        others, state = state_arrays
        return eqx.combine(params, others, plain_model), eqx.combine(state, plain_state)

    def evaluate(params: Any, state_arrays: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        model, state = join(params, state_arrays)
        model = eqx.nn.inference_mode(model, value=not train)
        if state_shape is None:
            return call_loss(loss, model, batch, key=key, train=train), state_arrays
        returned = call_loss(loss, model, batch, key=key, train=train, state=state)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], eqx.nn.State)):
            raise RecipeError(
                "the model has an eqx.nn.State; expected a loss with the keyword state that returns (the loss's usual "
                "result, state)"
            )
        return returned[0], (state_arrays[0], eqx.filter(returned[1], _is_array))

    def rebuild(params: Any, state_arrays: Any) -> Any:
        model, state = join(params, state_arrays)
        return model if state_shape is None else (model, state)

    return AdaptedTask(
        Model(
            name=type(model_shape).__name__,
            create=None if exists else split,
            initial=jax.device_get(split(jax.random.key(0))) if exists else None,
            evaluate=evaluate,
            rebuild=rebuild,
            kind_of=_kinds(model_shape).get,
            notes=_notes(model_shape),
        ),
        sharding,
    )


_LAYERS: Mapping[type, Kind] = {
    eqx.nn.Linear: "out_in",
    eqx.nn.GRUCell: "out_in",
    eqx.nn.LSTMCell: "out_in",
    eqx.nn.Conv: "convolution_first",
    eqx.nn.Embedding: "embedding",
}


def _kinds(model: Any) -> dict[str, Kind]:
    """Return the kinds of the weights of Equinox's own layers, by name."""
    found: dict[str, Kind] = {}
    layers = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda node: isinstance(node, tuple(_LAYERS)))[0]
    for path, layer in layers:
        for cls, kind in _LAYERS.items():
            if isinstance(layer, cls):
                weights = jax.tree_util.tree_flatten_with_path(eqx.filter(layer, _trains))[0]
                found |= {path_name((*path, *inner)): kind for inner, leaf in weights if leaf.ndim >= 2}
    return found


def _notes(model: Any) -> tuple[str, ...]:
    """Return notes on fields that enable training, which `eqx.nn.inference_mode` does not change."""
    modules = [model]
    notes = []
    while modules:
        module = modules.pop()
        for name, value in vars(module).items():
            if name in ("train", "training", "is_training") and value is True:
                notes.append(
                    f"{type(module).__name__} has the field {name}=True, which evaluation keeps: take the keyword train "
                    "of the loss, or "
                    f"name the field inference, which is off while the model trains and on while it is evaluated"
                )
            inner = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, eqx.Module))
            modules += [each for each in inner if isinstance(each, eqx.Module)]
    return tuple(notes)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def _trains(leaf: Any) -> bool:
    return _is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
