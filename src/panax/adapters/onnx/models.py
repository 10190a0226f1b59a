"""ONNX files: fine-tuning of models exported from any framework (PyTorch, MXNet, TensorFlow, PaddlePaddle,
…).

An exported graph is the model at inference: BatchNorm's statistics are frozen, and dropout is removed. It is therefore
suited to fine-tuning trained weights, but not to training from the beginning as in the model's own framework.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import Axes, Batch
from ...core.errors import DataError, RecipeError, describe_type
from ...data.loading.iterable import as_batch
from ..adapted_task import AdaptedTask, Model
from ..agreement import exact_host_precision, use_library_promotion
from ..extras import import_extra
from ..loss_call import call_loss
from ..losses import read_loss

OUTPUT_TOLERANCE = 1e-4
"""Tolerance of an output, relative to its largest value: ONNX's evaluator is NumPy in the graph's
precision."""


def task(
    model: Any,
    loss: Callable[..., Any],
    *,
    example: Any,
    sharding: Mapping[str, Axes] | None = None,
    weights: Iterable[str] = (),
    constants: Iterable[str] = (),
    tied: Iterable[str] = (),
    untied: Iterable[str] = (),
    check: bool = True,
) -> AdaptedTask:
    """Adapt an ONNX model as a task, for fine-tuning: its weights train, and parts that existed only in
    training, such as dropout, are missing.

    Operations that jaxonnxruntime lacks are replaced by those with which ONNX defines them (LayerNormalization,
    Gelu and many more); others are rejected by name. `trained` returns an `onnx.ModelProto`, for `onnx.save`.

    Args:
        model: A file's path, or an `onnx.ModelProto`.
        loss: `loss(model, batch)`, or with the keywords `key` and `train`, in JAX; `model(*inputs)` or
            `model(name=input)` returns an array, or a tuple if the graph has several outputs.
        example: A batch, for its shapes and the check.
        sharding: Patterns of weight names to logical axes.
        weights: Initializers that train though they look like constants; this argument and the next three are
            names or patterns (`*`).
        constants: Initializers that do not train though they look like weights.
        tied: Weights that several nodes use, and that are one weight.
        untied: Weights that several nodes use because the exporter merged equal ones: each node trains a
            separate copy.
        check: Compare the outputs for the example with those of ONNX's reference evaluator.

    Raises:
        RecipeError: An operation is unknown, the graph is in training mode or has no weights, it is not clear
            which initializers train, the loss can't be computed, or the outputs differ.
    """
    onnx = import_extra("onnx", "onnx")
    import_extra("jaxonnxruntime", "onnx")
    proto = model
    if isinstance(model, str | os.PathLike):
        try:
            proto = onnx.load(os.fspath(model))
        except Exception as error:  # protobuf's own, a missing file, missing external data
            raise DataError(
                f"{os.fspath(model)} can't be read as an ONNX model: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(proto, onnx.ModelProto):
        raise RecipeError(
            f"the model is {describe_type(model)}; expected the path of an ONNX file, or an onnx.ModelProto"
        )
    from .graph import OnnxGraph
    from .weights import WeightPatterns

    graph = OnnxGraph(proto, WeightPatterns(*(_names(patterns) for patterns in (weights, constants, tied, untied))))
    if not graph.weights:
        raise RecipeError("the ONNX graph has no weights (initializers of floating point); there is nothing to train")
    cache: dict[Any, Any] = {}

    def run(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
        shapes = tuple((name, leaf.shape, np.dtype(leaf.dtype).name) for name, leaf in inputs.items())
        if shapes not in cache:
            cache[shapes] = graph.to_jax({n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inputs.items()})
        return cache[shapes](weights, inputs)

    def evaluate(params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        return call_loss(loss, _Callable(graph, run, params), batch, key=key, train=train), state

    name = os.path.splitext(os.path.basename(model))[0] if isinstance(model, str) else proto.graph.name or "onnx"
    unchecked = _check(name, graph, run, loss, as_batch(example)) if check else "check=False"
    notes = (
        graph.notes
        if unchecked is None
        else (*graph.notes, f"not compared with ONNX's reference evaluator: {unchecked}")
    )
    return AdaptedTask(
        Model(
            name=name,
            evaluate=evaluate,
            rebuild=lambda params, state: graph.with_weights(params),
            initial=(graph.weights, {}),
            kind_of=graph.kind_of,
            notes=notes,
        ),
        sharding,
    )


def _names(patterns: Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


class _Callable:
    """The model as the user's loss calls it.

    Attributes:
        calls: (inputs, outputs) so far.
    """

    def __init__(self, graph: Any, run: Callable[..., list[Any]], weights: Mapping[str, Any]):
        self._graph, self._run, self._weights = graph, run, weights
        self.calls: list[tuple[dict[str, Any], list[Any]]] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        names = self._graph.inputs
        if len(inputs) > len(names):
            raise RecipeError(
                f"the ONNX model was given {len(inputs)} inputs; it takes {len(names)}: {', '.join(names)}"
            )
        bound = dict(zip(names, map(jnp.asarray, inputs)))
        for name, value in named.items():
            if name not in names or name in bound:
                raise RecipeError(f"the ONNX model was given {name!r}; its inputs are {', '.join(names)}, each once")
            bound[name] = jnp.asarray(value)
        if missing := [name for name in names if name not in bound]:
            raise RecipeError(f"the ONNX model was not given {', '.join(missing)}; its inputs are {', '.join(names)}")
        outputs = self._run(self._weights, bound)
        self.calls.append((bound, outputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _check(
    name: str, graph: Any, run: Callable[..., list[Any]], loss: Callable[..., Any], example: Batch
) -> str | None:
    """Compute the loss of the example, and repeat each of its calls of the model with ONNX's own evaluator.

    Returns:
        Why they could not be compared; None if they were, and agree.
    """
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.reference import ReferenceEvaluator

    with exact_host_precision(), use_library_promotion():
        batch = {name: jnp.asarray(leaf) for name, leaf in example.items()}
        model = _Callable(graph, jax.jit(run), {name: jnp.asarray(value) for name, value in graph.weights.items()})
        returned = call_loss(loss, model, batch, key=jax.random.key(0), train=True)
        read_loss(returned, len(next(iter(batch.values()))))
    if not model.calls:
        raise RecipeError("the loss never calls its model; call it: model(batch['x'])")
    evaluator = ReferenceEvaluator(graph.proto)
    kinds = {
        value.name: tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in graph.proto.graph.input
    }
    for inputs, outputs in model.calls:
        try:
            with np.errstate(all="ignore"):
                expected = evaluator.run(None, {n: np.asarray(value).astype(kinds[n]) for n, value in inputs.items()})
        except Exception as error:  # it does not run everything that it is the reference for
            return f"it fails on this graph ({type(error).__name__}: {error})"
        for output, ours, theirs in zip(graph.outputs, outputs, expected):
            theirs = np.asarray(theirs, np.float64)
            off = np.abs(np.asarray(ours, np.float64) - theirs).max(initial=0.0)
            if not off <= OUTPUT_TOLERANCE * max(np.abs(theirs).max(initial=0.0), 1e-3):
                raise RecipeError(
                    f"{name}: the output {output!r} differs from that of ONNX's reference evaluator by {off:.1e} on the example "
                    f"batch; the graph can't be adapted faithfully, please report which operations it uses"
                )
    return None
