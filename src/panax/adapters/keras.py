"""Keras models on the JAX backend: trained as `compile` and `compute_loss` define, with the weights assigned
back to the same model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import Axes, Batch, Mean
from ..core.errors import RecipeError
from ..data.loading.iterable import as_batch
from .adapted_task import AdaptedTask, Model, use_standard_promotion
from .extras import import_extra
from .heads import head_axes
from .layouts import Kind

keras = import_extra("keras", "keras")

Unpack = Callable[[Batch], tuple[Any, Any, Any]]
SEED_STATE = "seed_generator_state"


def task(
    model: Any,
    loss: Any = None,
    *,
    metrics: Any = None,
    example: Any = None,
    unpack: Unpack | None = None,
    sharding: Mapping[str, Axes] | None = None,
) -> AdaptedTask:
    """Adapt a Keras model as a task. It starts from the weights that the model has.

    Losses of layers (`add_loss`, regularizers) and an overridden `compute_loss` count as they do in
    `model.fit`; dropout and other layers that draw from a seed generator follow the step's key; variables that
    are not trainable are state.

    Args:
        loss: Any argument of `model.compile(loss=...)`; by default the loss that the model was compiled with.
            Its weight is the number of rows.
        metrics: Any argument of `model.compile(metrics=...)` with metrics that are means.
        example: A batch with the shapes of the training batches, if the model is not built yet, or has metrics.
        unpack: `batch -> (x, y, sample_weight)`. By default, a batch is `(x, y)` or `(x, y, sample_weight)`,
            or a mapping with the leaves `x`, `y` and optionally `sample_weight`; inputs with names other than
            `x` are passed to the model by name. Rows with a leaf `loss_mask` of 0, which pad a source's last
            batch, do not count.
        sharding: Patterns of the variables' paths, with dots for slashes, to logical axes.

    Raises:
        RecipeError: Keras runs on another backend; the model is not built, overrides `train_step`, has no
            loss, or a metric that is not a mean; or a pattern matches nothing.
    """
    _check_usable(model)
    unpack = unpack or unpack_batch
    if loss is None and not model.compiled and type(model).compute_loss is keras.Model.compute_loss:
        raise RecipeError("the model is not compiled and no loss is given; use task(model, loss=...)")
    if loss is not None or metrics is not None or not model.compiled:
        _compile(model, loss, metrics)
    with use_standard_promotion():
        if not model.built:
            _build(model, example, unpack)
        measured = _built_metrics(model, example, unpack)
    weights = _named(model.trainable_variables)
    _refuse_ruled(model, weights)
    others = _named(model.non_trainable_variables)
    seeds = [name for name in others if name.rpartition(".")[2].startswith(SEED_STATE)]

    def evaluate(
        params: Mapping[str, Any], state: Mapping[str, Any], batch: Batch, key: jax.Array, train: bool
    ) -> tuple[Any, Any]:
        x, y, sample_weight = unpack(batch)
        mask = batch.get("loss_mask")
        mask = None if mask is None or mask.ndim != 1 else mask
        seeds_by_name = {name: _seed(key, i, others[name]) for i, name in enumerate(seeds)}
        loss, (_, predicted, after, _) = model.compute_loss_and_updates(
            [params[name] for name in weights],
            [seeds_by_name[name] if name in seeds_by_name else state[name] for name in others],
            _zeros(model.metrics_variables),
            x,
            y,
            # Keras divides by all rows: with these weights, the mean is that of the rows that count.
            sample_weight if mask is None else _masked(sample_weight, mask * mask.size / jnp.maximum(mask.sum(), 1)),
            training=train,
            optimizer_variables=_zeros([] if model.optimizer is None else model.optimizer.variables),
        )
        scalars = {} if measured is None else measured(y, predicted, sample_weight, mask)
        value = loss if mask is None else (loss * mask.sum(), mask.sum())
        return (value, scalars), {name: leaf for name, leaf in zip(others, after) if name not in seeds}

    def rebuild(params: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        for name, value in params.items():
            weights[name].assign(value)
        for name, value in state.items():
            others[name].assign(value)
        if model.optimizer is not None and not model.optimizer.built:
            # A model saved with an optimizer that is not built can't be loaded (Keras 3.15).
            model.optimizer.build(model.trainable_variables)
        return model

    def host(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(variable.value) for name, variable in variables.items() if name not in seeds}

    return AdaptedTask(
        Model(
            name=model.name,
            initial=(host(weights), host(others)),
            evaluate=evaluate,
            rebuild=rebuild,
            axes=head_axes({name: tuple(variable.shape) for name, variable in weights.items()}),
            kind_of=_kind_of,
            one_pass=_one_pass(model),
        ),
        sharding,
    )


def unpack_batch(batch: Batch) -> tuple[Any, Any, Any]:
    """Return `(x, y, sample_weight)` of a batch: by these names, or by position; other names are those of
    inputs.

    Raises:
        RecipeError: The batch has no `y`, or no input.
    """
    if set(batch) <= {"0", "1", "2"}:
        batch = {name: batch[place] for place, name in zip("012", ("x", "y", "sample_weight")) if place in batch}
    inputs = {name: leaf for name, leaf in batch.items() if name not in ("y", "sample_weight", "loss_mask")}
    if "y" not in batch or not inputs:
        raise RecipeError(
            f"a batch has the leaves {sorted(batch)}; expected (x, y), or names with y among them, or give "
            f"task(..., unpack=lambda batch: (x, y, None))"
        )
    return inputs.get("x", inputs), batch["y"], batch.get("sample_weight")


def _check_usable(model: Any) -> None:
    if keras.backend.backend() != "jax":
        raise RecipeError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=jax in the environment before it is first imported"
        )
    if not isinstance(model, keras.Model):
        raise RecipeError(f"the model is {model!r}; expected a keras.Model")
    if type(model).train_step is not keras.Model.train_step:
        raise RecipeError(
            f"{type(model).__name__} overrides train_step, which Panax's step would ignore; put the loss into "
            f"compute_loss, which it calls"
        )


def _refuse_ruled(model: Any, weights: Mapping[str, Any]) -> None:
    """Raise a RecipeError if Keras' optimizers would do more with a variable than add an update, such as apply a
    constraint."""
    for name, variable in weights.items():
        if getattr(variable, "constraint", None) is not None:
            raise RecipeError(
                f"{name} of {model.name} has the constraint {type(variable.constraint).__name__}, which Keras' "
                "optimizers apply after each "
                "update, and Panax's do not; compute with the constrained weight in the layer's call, or build it "
                "without the constraint"
            )
        if getattr(variable, "overwrite_with_gradient", False):
            raise RecipeError(
                f"{name} of {model.name} is overwritten with its gradient by Keras' optimizers (float8), which Panax's "
                "do not; use "
                f"another dtype policy"
            )


def _one_pass(model: Any) -> str | None:
    """Return why a batch can't be split: a loss that is not a mean over its rows; None if it can."""
    for loss in jax.tree.leaves(getattr(model, "loss", None)):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            return (
                f"the loss {type(loss).__name__} has reduction={reduction!r}, which parts of a batch do not add up to; use "
                f"reduction='sum_over_batch_size'"
            )
    return None


def _compile(model: Any, loss: Any, metrics: Any) -> None:
    """Compile again, with its optimizer: without one, a saved model can't be loaded. Plain SGD has no
    moments."""
    optimizer = model.optimizer if model.compiled else None
    model.compile(optimizer="sgd" if optimizer is None else optimizer, loss=loss, metrics=metrics)


def _build(model: Any, example: Any, unpack: Unpack) -> None:
    if example is None:
        raise RecipeError(f"{model.name} is not built, so it has no variables; pass task(..., example=batch)")
    model(jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), unpack(as_batch(example))[0]))


def _built_metrics(model: Any, example: Any, unpack: Unpack) -> Callable[..., dict[str, Mean]] | None:
    """Return a function of all metrics of a batch; their variables can't be created while a step is
    traced."""
    compiled = next((each for each in model.metrics if isinstance(getattr(each, "metrics", None), list)), None)
    if compiled is None:
        return None
    if not compiled.built:
        if example is None:
            raise RecipeError("metrics are made for the shapes of a batch; pass task(..., example=batch)")
        x, y, _ = unpack(as_batch(example))
        inputs = jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), x)
        predicted = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model.compute_output_spec(inputs))
        model.compute_metrics(x, y, predicted)
        model.reset_metrics()
    for metric in compiled.metrics:
        if not isinstance(metric, keras.metrics.Mean) or type(metric).result is not keras.metrics.Mean.result:
            raise RecipeError(
                f"the metric {metric.name} ({type(metric).__name__}) is not a mean, so batches and devices can't be merged; "
                f"use one that is, such as accuracy, or judge with model.evaluate after task.trained(state)"
            )
    variables = list(compiled.variables)
    places = {id(variable): place for place, variable in enumerate(variables)}
    named = {
        name: [places[id(variable)] for variable in metric.variables]
        for name, metric in zip(compiled.result(), compiled.metrics)
    }

    def sums(y: Any, predicted: Any, sample_weight: Any) -> list[jax.Array]:
        return compiled.stateless_update_state(_zeros(variables), y, predicted, sample_weight)

    def measure(y: Any, predicted: Any, sample_weight: Any, mask: Any) -> dict[str, Mean]:
        if mask is None:
            after = sums(y, predicted, sample_weight)
        else:
            # Most metrics take no weights: padding rows become copies of the first one, which are subtracted
            # again.
            copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), (y, predicted))
            filled = jax.tree.map(
                lambda leaf, copy: jnp.where(_along(mask, leaf) > 0, leaf, copy), (y, predicted), copies
            )
            filled_sums = sums(filled[0], filled[1], _masked(sample_weight, mask))
            alone = sums(copies[0], copies[1], _masked(sample_weight, jnp.zeros_like(mask)))
            after = [a - (1 - mask.mean()) * b for a, b in zip(filled_sums, alone)]
        return {name: Mean(after[total], after[count]) for name, (total, count) in named.items()}

    return measure


def _zeros(variables: Any) -> list[jax.Array]:
    return [jnp.zeros(variable.shape, variable.dtype) for variable in variables]


def _masked(sample_weight: Any, mask: Any) -> Any:
    """Set the sample weights of padding to 0."""
    if sample_weight is None:
        return mask
    return jax.tree.map(lambda weight: weight * _along(mask, weight), sample_weight)


def _along(mask: Any, leaf: Any) -> Any:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1))


def _seed(key: jax.Array, index: int, variable: Any) -> jax.Array:
    data = jax.random.key_data(jax.random.fold_in(key, index)).ravel()[:2]
    return data.astype(variable.dtype)


def _named(variables: Any) -> dict[str, Any]:
    """Return variables by their paths, numbered if two have the same path."""
    named: dict[str, Any] = {}
    for variable in variables:
        path, again = variable.path.replace("/", "."), 1
        name = path
        while name in named:
            name, again = f"{path}_{again}", again + 1
        named[name] = variable
    return named


def _kind_of(path: str) -> Kind | None:
    return "embedding" if path.endswith("embeddings") else None
