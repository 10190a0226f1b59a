"""Flax NNX models: parameters are `nnx.Param`, state is every other variable, random streams follow the step
key."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import Axes, Batch, DataChecks
from ..core.errors import RecipeError, describe_type
from ..core.measures import NO_FAULT
from .adapted_task import AdaptedTask, Model, use_standard_promotion
from .axis_names import AxisNames, read_names
from .extras import import_extra
from .heads import head_axes
from .layouts import Kind
from .loss_call import call_loss
from .losses import named_terms

nnx = import_extra("flax.nnx", "flax")

Flat = dict[str, Any]
"""Dotted name to array, for one group of a model's variables."""


def task(
    create: Any,
    loss: Callable[..., Any],
    *,
    trains: Any = None,
    axis_names: AxisNames | None = None,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """Adapt a Flax NNX model as a task.

    The model is in training mode (`model.train()`) while it trains and in evaluation mode (`model.eval()`)
    while it is evaluated. Before each batch its random streams are seeded from the step's key, as
    `nnx.reseed` does; so they are not part of a checkpoint. Axis names in the variables' metadata
    (`nnx.with_partitioning`) are read as logical axes.

    Args:
        create: `rngs -> model`, traced, so that no device holds a whole copy; or an existing model, with
            weights that are used.
        loss: `loss(model, batch)`, or with any of the keywords `key` and `train` that it names. It may change
            the model.
        trains: A filter of the variables that are trained, such as `nnx.LoRAParam`; by default every
            `nnx.Param`.
        axis_names: The model's names of axes to Panax's.
        sharding: Patterns of parameter names to logical axes, with precedence over axis names.

    Raises:
        RecipeError: `create` returns no model, an axis name has no meaning, or a pattern matches nothing.

    >>> from flax import nnx
    >>> net = task(lambda rngs: nnx.Linear(4, 1, rngs=rngs), lambda model, batch: (model(batch["x"]) ** 2).mean())
    >>> sorted(net.init(jax.random.key(0))[0])
    ['bias', 'kernel']
    """
    exists = isinstance(create, nnx.Module)
    if not exists and (not callable(create) or isinstance(create, type)):
        raise RecipeError(f"create is {create!r}; expected a function of random streams: lambda rngs: Net(rngs=rngs)")

    def made(key: jax.Array) -> Any:
        # Otherwise NNX would place named variables at once, on its own mesh.
        with nnx.use_eager_sharding(False):
            model = create(nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise RecipeError(f"create made {describe_type(model)}; expected an nnx.Module")
        return model

    def groups(model: Any) -> tuple[Any, Any, Any, Any]:
        return nnx.split(model, nnx.Param if trains is None else nnx.Any(nnx.Param, trains), nnx.RngState, ...)

    with use_standard_promotion():
        example = create if exists else nnx.eval_shape(made, jax.random.key(0))
    definition, params_like, rng_like, state_like = groups(example)

    def split(key: jax.Array) -> tuple[Flat, Flat]:
        _, params, _, state = groups(made(key))
        return _flat(params), _flat(state)

    def join(params: Flat, state: Flat, key: jax.Array) -> Any:
        seeds = {name: _blank(leaf) for name, leaf in _flat(rng_like).items()}
        parts = (
            _with_values(like, flat) for like, flat in ((params_like, params), (rng_like, seeds), (state_like, state))
        )
        model = nnx.merge(definition, *parts)
        tags = sorted({variable.tag for _, variable in nnx.to_flat_state(rng_like)})
        keys = {tag: jax.random.fold_in(key, i) if i else key for i, tag in enumerate(tags)}
        nnx.reseed(model, policy="match_shape", **keys)
        return model

    def evaluate(params: Flat, state: Flat, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Flat]:
        model = join(params, state, key)
        model.train() if train else model.eval()
        # Custom modules may use another name for the mode.
        model.set_attributes(training=train, is_training=train, raise_if_not_found=False)
        before, params_before = _attributes(model), _flat(groups(model)[1])
        returned = call_loss(loss, model, batch, key=key, train=train)
        _refuse_changed(before, _attributes(model))
        if train:
            returned = _with_fault(returned, params_before, _flat(groups(model)[1]))
        # Values that a model sows belong to one call of it.
        sown = _flat(nnx.state(model, nnx.Intermediate)).keys() - state.keys()
        return returned, {name: leaf for name, leaf in _flat(groups(model)[3]).items() if name not in sown}

    def rebuild(params: Flat, state: Flat) -> Any:
        return join(params, state, jax.random.key(0))

    named = {
        name: (*axes, *(None,) * (variable.get_value().ndim - len(axes)))
        for name, variable in _variables(params_like).items()
        if (axes := _names_of(variable))
    }
    shapes = {name: leaf.shape for name, leaf in _flat(params_like).items()}
    fixed = () if trains is None else tuple(_flat(params_like).keys() - _flat(nnx.filter_state(params_like, trains)))
    return AdaptedTask(
        Model(
            name=type(example).__name__,
            create=None if exists else split,
            initial=jax.device_get((_flat(params_like), _flat(state_like))) if exists else None,
            evaluate=evaluate,
            rebuild=rebuild,
            axes=head_axes(shapes) | read_names(named, axis_names or {}),
            kind_of=_kind_of,
            frozen=fixed,
        ),
        sharding,
    )


def _attributes(model: Any) -> dict[str, Any]:
    """Return a model's plain Python values, also those in dictionaries and lists; a compiled step treats them as
    constants."""
    attributes: dict[str, Any] = {}
    for path, part in nnx.iter_modules(model):
        # NNX's own bookkeeping of nodes changes with a variable that is sown.
        fields = {name: value for name, value in vars(part).items() if not name.startswith(("_pytree__", "_object__"))}
        entries = [(".".join((*map(str, path), name)), value) for name, value in fields.items()]
        while entries:
            name, value = entries.pop()
            if isinstance(value, bool | int | float | str):
                attributes[name] = value
            elif isinstance(value, Mapping):
                entries += [(f"{name}.{key}", each) for key, each in value.items()]
            elif isinstance(value, list | tuple):
                entries += [(f"{name}.{index}", each) for index, each in enumerate(value)]
    return attributes


def _refuse_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            raise RecipeError(
                f"a call of the model changes its attribute {name} (from {before.get(name)!r} to {after.get(name)!r}), "
                "which one compiled "
                f"step for all batches would hold fixed; make it an nnx.Variable: self.{name.rpartition('.')[2]} = "
                f"nnx.Variable(jnp.array(...))"
            )


def _with_fault(returned: Any, params_before: Flat, params_after: Flat) -> Any:
    """Add a check to the loss's return value that a call has left the trained parameters unchanged.

    Values are compared, since transformations such as `nnx.remat` return new arrays with equal values.
    """
    changed = {
        name: params_after[name]
        for name in params_before
        if name in params_after and params_after[name] is not params_before[name]
    }
    if not changed:
        return returned
    terms, metrics = named_terms(returned)
    apart = [
        jnp.max(jnp.where(value == params_before[name], NO_FAULT, jnp.abs(value - params_before[name])))
        for name, value in changed.items()
    ]
    checks = tuple(
        f"a call of the model changes the parameter {name}, which is left to the optimizer here: compute with a changed "
        "copy in the call, "
        f"or make it an nnx.Variable; by "
        for name in changed
    )
    return terms, {**metrics, "faults": DataChecks(jnp.stack([each.astype(jnp.float32) for each in apart]), checks)}


def _kind_of(path: str) -> Kind | None:
    return "embedding" if path.rpartition(".")[2] == "embedding" else None


def _names_of(variable: Any) -> tuple[Any, ...]:
    metadata = variable.get_metadata()
    # Before Flax 0.12.4 they were `sharding_names`.
    return tuple(metadata.get("out_sharding") or metadata.get("sharding_names") or ())


def _variables(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _flat(state: Any) -> Flat:
    return {name: variable.get_value() for name, variable in _variables(state).items()}


def _with_values(like: Any, flat: Flat) -> Any:
    """Return the variables of `like`, with their metadata and the values of `flat`."""
    return nnx.from_flat_state(
        [(path, variable.replace(flat[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(like)]
    )


def _blank(like: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)
