"""Haiku functions: parameters and state from `hk.transform_with_state`, random keys from the step's."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core import Axes, Batch, named_leaves
from ..core.errors import RecipeError
from .adapted_task import AdaptedTask, Model, use_standard_promotion
from .bound_model import BoundModel, example_batch
from .extras import import_extra
from .layouts import Kind
from .loss_call import call_loss, select_keywords

hk = import_extra("haiku", "haiku")


def task(
    function: Any,
    loss: Callable[..., Any] | None = None,
    *,
    example: Any = None,
    variables: tuple[Any, Any] | None = None,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """Adapt a Haiku function as a task.

    Args:
        function: Without `loss`, the function that computes the loss: `function(batch)`, or with any of the
            keywords `train` and `is_training` that it names. With `loss`, the network. Either plain, or
            transformed by `hk.transform` or `hk.transform_with_state`.
        loss: `loss(model, batch)`, or with any of the keywords `key` and `train` that it names; `model(*args,
            **kwargs)` calls the network with its parameters and state.
        example: A batch with the shapes of the training batches; only its shapes are used.
        variables: Existing `(params, state)`, instead of an example; their values are used.
        sharding: Patterns of parameter names to logical axes.

    Raises:
        RecipeError: `function` is not a function, there is neither an example nor variables, or a pattern has
            no meaning.
    >>> import haiku as hk, jax.numpy as jnp
    >>> net = task(lambda batch: (hk.Linear(1)(batch["x"]) ** 2).mean(), example={"x": jnp.ones((8, 4))})
    >>> sorted(net.init(jax.random.key(0))[0]["linear"])
    ['b', 'w']
    """
    transformed, name, takes = _transformed(function)

    def modes(train: bool) -> dict[str, Any]:
        return select_keywords(*takes, {"train": train, "is_training": train})

    def initial(key: jax.Array) -> tuple[Any, Any]:
        batch = example_batch(example, name)
        if loss is None:
            return transformed.init(key, batch, **modes(True))

        def creating(current: Any, call_key: jax.Array, *args: Any, **keywords: Any) -> tuple[Any, Any]:
            current = current or transformed.init(key, *args, **keywords)
            return transformed.apply(*current, call_key, *args, **keywords)[0], current

        model = BoundModel(creating, None, key)
        call_loss(loss, model, batch, key=key, train=True)
        if model.variables is None:
            raise RecipeError("the loss never calls its model; call it: model(batch['x'])")
        return model.variables

    def evaluate(params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        if loss is None:
            return transformed.apply(params, state, key, batch, **modes(train))

        def call(current: Any, call_key: jax.Array, *args: Any, **keywords: Any) -> tuple[Any, Any]:
            output, after = transformed.apply(*current, call_key, *args, **keywords)
            return output, (params, after)

        model = BoundModel(call, (params, state), key)
        return call_loss(loss, model, batch, key=key, train=train), model.variables[1]

    with use_standard_promotion():
        params, _ = jax.eval_shape(initial, jax.random.key(0)) if variables is None else variables
    return AdaptedTask(
        Model(
            name=name,
            create=initial if variables is None else None,
            initial=None if variables is None else jax.device_get(tuple(variables)),
            evaluate=evaluate,
            rebuild=lambda params, state: (params, state),
            axes={path: (None,) * leaf.ndim for path, leaf in named_leaves(params).items() if _is_norm_parameter(path)},
            kind_of=_kind_of,
        ),
        sharding,
    )


def _transformed(function: Any) -> tuple[Any, str, tuple[Any, int]]:
    """Return (the transformed function, its name, (the callable that declares the user's keywords, the number
    of its positional arguments))."""
    if isinstance(function, hk.Transformed | hk.TransformedWithState):
        with_state = hk.with_empty_state(function) if isinstance(function, hk.Transformed) else function
        original, takes = getattr(function.init, "_original_fn", function), (with_state.apply, 4)
    elif callable(function) and not isinstance(function, type | hk.Module):
        with_state = hk.transform_with_state(function)
        original, takes = function, (function, 1)
    else:
        raise RecipeError(
            f"the function is {function!r}; expected a function that makes its modules when called: "
            f"lambda x, train: Net()(x, train)"
        )
    return with_state, getattr(original, "__name__", "haiku").strip("<>"), takes


def _is_norm_parameter(path: str) -> bool:
    """Return True for parameters of Haiku's norms, which retain their broadcast dimensions."""
    return path.rpartition(".")[2] in ("scale", "offset")


def _kind_of(path: str) -> Kind | None:
    return "embedding" if path.endswith("embeddings") else None
