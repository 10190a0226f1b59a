"""Equinox models: a module is its own parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from ..core import Axes, Batch
from ..core.errors import RecipeError
from .adapted import AdaptedTask, Model
from .calling import call_loss


def task(
    create: Callable[[jax.Array], Any],
    loss: Callable[..., Any],
    *,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """An Equinox model as a task.

    Args:
        create: `key -> model`, or `key -> (model, eqx.nn.State)` as `eqx.nn.make_with_state` returns; traced, so that
            no device holds a whole copy.
        loss: `loss(model, batch)`, or with any of the keywords `key`, `train` and `state` that it names. With `state` it returns
            `(what a loss returns, state)`.
        sharding: Patterns of parameter names to logical axes.

    Raises:
        RecipeError: `create` is no function of a key, or a pattern matches nothing.

    >>> import equinox as eqx, jax.numpy as jnp
    >>> net = task(lambda key: eqx.nn.Linear(4, 1, key=key), lambda model, batch: (jax.vmap(model)(batch["x"]) ** 2).mean())
    >>> net.name
    'linear'
    """
    if isinstance(create, eqx.Module) or not callable(create):
        raise RecipeError(
            f"create is a {type(create).__name__}; expected a function of a key: lambda key: Net(key=key)"
        )

    def both(key: jax.Array) -> tuple[Any, Any]:
        made = create(key)
        return made if isinstance(made, tuple) else (made, None)

    model_shape, state_shape = eqx.filter_eval_shape(both, jax.random.key(0))
    static = eqx.filter(model_shape, _trains, inverse=True)
    rest_state = eqx.filter(state_shape, _is_array, inverse=True)

    def split(key: jax.Array) -> tuple[Any, Any]:
        model, state = both(key)
        params, others = eqx.partition(model, _trains)
        return params, (eqx.filter(others, _is_array), eqx.filter(state, _is_array))

    plain = eqx.filter(static, _is_array, inverse=True)

    def join(params: Any, held: tuple[Any, Any]) -> tuple[Any, Any]:
        others, state = held
        return eqx.combine(params, others, plain), eqx.combine(state, rest_state)

    def evaluate(params: Any, held: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        model, state = join(params, held)
        model = eqx.nn.inference_mode(model, value=not train)
        if state_shape is None:
            return call_loss(loss, model, batch, key=key, train=train), held
        returned, state = call_loss(loss, model, batch, key=key, train=train, state=state)
        return returned, (held[0], eqx.filter(state, _is_array))

    def rebuild(params: Any, held: Any) -> Any:
        model, state = join(params, held)
        return model if state_shape is None else (model, state)

    name = type(model_shape).__name__
    return AdaptedTask(Model(name=name, create=split, evaluate=evaluate, rebuild=rebuild), sharding)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def _trains(leaf: Any) -> bool:
    return _is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
