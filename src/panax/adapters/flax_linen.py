"""Flax Linen modules: parameters are the collection `params`, state is every other collection."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..core import Axes, Batch
from ..core.errors import RecipeError
from ..core.params.axes import path_name
from .adapted_task import AdaptedTask, Model, use_standard_promotion
from .axis_names import AxisNames, read_names
from .bound_model import BoundModel, example_batch
from .extras import import_extra
from .heads import head_axes
from .layouts import Kind
from .loss_call import call_loss

nn = import_extra("flax.linen", "flax")
unfreeze = import_extra("flax.core", "flax").unfreeze

TRANSIENT_COLLECTIONS = frozenset({"intermediates", "perturbations"})
"""Collections that belong to one call, and are not state."""

MODE_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Names of arguments that switch between training and evaluation, with their values for training."""


def task(
    module: Any,
    loss: Callable[..., Any],
    *,
    example: Any = None,
    variables: Any = None,
    axis_names: AxisNames | None = None,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """Adapt a Flax Linen module as a task.

    In the loss, `model(*args, **kwargs)` is `module.apply` with the variables, the random keys, and the
    collections that change; the resulting collections, such as `batch_stats`, are the state. If the
    module's `__call__` has an argument `train`, `training`, `is_training`, `deterministic` or
    `use_running_average` that the loss does not pass, it is set; a field of the module with such a name that
    is set for training is reversed in evaluation (`module.clone(train=False)`). With `mutable=["losses"]` a
    call returns `(output, {"losses": ...})`, as `apply` does, and the collection `losses` is not state.
    `model.variables` are the variables. Axis names (`nn.with_partitioning`, `nn.with_logical_partitioning`)
    are read.

    The variables are created by `module.init` in the model's calls, as the loss makes them for a batch of the
    example's shapes.

    Args:
        loss: `loss(model, batch)`, or with any of the keywords `key` and `train` that it names.
        example: A batch with the shapes of the training batches; only its shapes are used.
        variables: Existing variables, instead of an example; their values are used.
        axis_names: The module's names of axes to Panax's.
        sharding: Patterns of parameter names to logical axes, with precedence over axis names.

    Raises:
        RecipeError: The module is not one of Flax Linen, there is neither an example nor variables, or an
            axis name or a pattern has no meaning.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> net = task(nn.Dense(1), lambda model, batch: (model(batch["x"]) ** 2).mean(), example={"x": jnp.ones((8, 4))})
    >>> sorted(net.init(jax.random.key(0))[0])
    ['bias', 'kernel']
    """
    if not isinstance(module, nn.Module):
        raise RecipeError(f"the module is {module!r}; expected an instance of flax.linen.Module: Net(), not Net")
    passing = set(TRANSIENT_COLLECTIONS)
    evaluated = _for_evaluation(module)

    def modes(args: tuple[Any, ...], keywords: Mapping[str, Any], train: bool) -> dict[str, Any]:
        method = keywords.get("method")
        function = getattr(module, method or "__call__") if isinstance(method, str | None) else partial(method, module)
        parameters = inspect.signature(function).parameters
        left_out = parameters.keys() - keywords.keys() - set(list(parameters)[: len(args)])
        return {name: MODE_ARGUMENTS[name] == train for name in left_out & MODE_ARGUMENTS.keys()}

    def variables_for(key: jax.Array) -> dict[str, Any]:
        def creating(current: Any, _: jax.Array, *args: Any, mutable: Any = (), **keywords: Any) -> tuple[Any, Any]:
            mutable = [mutable] if isinstance(mutable, str) else list(mutable)
            passing.update(mutable)
            keywords |= modes(args, keywords, True)
            output, created = module.init_with_output(key, *args, **keywords)
            requested = {name: created[name] for name in mutable if name in created}
            return (output, requested) if mutable else output, _merge_missing(current, unfreeze(created))

        model = BoundModel(creating, {}, key)
        call_loss(loss, model, example_batch(example, type(module).__name__), key=key, train=True)
        if not model.variables:
            raise RecipeError("the loss never calls its model; call it: model(batch['x'])")
        return model.variables

    with use_standard_promotion():
        boxed = jax.eval_shape(variables_for, jax.random.key(0)) if variables is None else unfreeze(variables)
    if variables is not None and "params" not in boxed:
        raise RecipeError(f"the variables are {sorted(boxed)}; expected a collection params")

    def split(all_variables: Mapping[str, Any]) -> tuple[Any, Any]:
        plain = jax.tree.map(lambda leaf: leaf.value if _is_box(leaf) else leaf, all_variables, is_leaf=_is_box)
        state = {name: tree for name, tree in plain.items() if name != "params" and name not in passing}
        return plain.get("params", {}), state

    def evaluate(params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        def call(current: Any, key: jax.Array, *args: Any, mutable: Any = (), **keywords: Any) -> tuple[Any, Any]:
            mutable = [mutable] if isinstance(mutable, str) else list(mutable)
            keywords |= modes(args, keywords, train)
            # A random stream under any other name falls back on `params`.
            rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
            applied = module if train else evaluated
            output, after = applied.apply(current, *args, rngs=rngs, mutable=[*state, *mutable], **keywords)
            requested = {name: after[name] for name in mutable if name in after}
            after = {name: after.get(name, current[name]) for name in state}
            return (output, requested) if mutable else output, {"params": params, **after}

        model = BoundModel(call, {"params": params, **state}, key)
        returned = call_loss(loss, model, batch, key=key, train=train)
        return returned, {name: model.variables[name] for name in state}

    def rebuild(params: Any, state: Any) -> dict[str, Any]:
        return {"params": params, **state}

    flat = jax.tree_util.tree_flatten_with_path(boxed.get("params", {}), is_leaf=_is_box)[0]
    named = {path_name(path): box.names for path, box in flat if _is_box(box)}
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(split(boxed)[0])[0]}
    return AdaptedTask(
        Model(
            name=type(module).__name__,
            create=(lambda key: split(variables_for(key))) if variables is None else None,
            initial=None if variables is None else jax.device_get(split(boxed)),
            evaluate=evaluate,
            rebuild=rebuild,
            axes=head_axes(shapes) | read_names(named, axis_names or {}),
            kind_of=_kind_of,
        ),
        sharding,
    )


def _for_evaluation(module: Any) -> Any:
    """Return the module for evaluation: fields set for training are reversed, also in submodules."""
    fields = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module) if field.init}
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("parent", "name"):
            continue
        if name in MODE_ARGUMENTS and value is MODE_ARGUMENTS[name]:
            changes[name] = not value
        elif isinstance(value, nn.Module) and (inner := _for_evaluation(value)) is not value:
            changes[name] = inner
        elif isinstance(value, list | tuple) and any(isinstance(each, nn.Module) for each in value):
            turned = [_for_evaluation(each) if isinstance(each, nn.Module) else each for each in value]
            if any(a is not b for a, b in zip(turned, value)):
                changes[name] = type(value)(turned)
    return module.clone(**changes) if changes else module


def _kind_of(path: str) -> Kind | None:
    return "embedding" if path.rpartition(".")[2] == "embedding" else None


def _merge_missing(variables: Any, created: Any) -> Any:
    """Return `variables` with the entries of `created` that it lacks."""
    if not isinstance(variables, Mapping) or not isinstance(created, Mapping):
        return variables
    new = {name: tree for name, tree in created.items() if name not in variables}
    return {**{name: _merge_missing(tree, created.get(name, tree)) for name, tree in variables.items()}, **new}


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)
