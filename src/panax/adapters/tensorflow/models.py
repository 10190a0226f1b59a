"""Raw TensorFlow code: a `tf.Module`, a `tf.function`, or any function on `tf.Variable`s."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ...core import Axes, Batch
from ...core.errors import RecipeError, describe_type
from ...core.measures import total_loss
from ...data.loading.iterable import as_batch
from ..adapted_task import AdaptedTask, Model
from ..agreement import check_agreement, exact_host_precision, explain_too_large, use_library_promotion
from ..extras import import_extra
from ..layouts import Kind
from ..loss_call import select_keywords
from ..losses import read_loss


def task(
    model: Any,
    loss: Callable[..., Any] | None = None,
    *,
    example: Any,
    variables: Mapping[str, Any] | Iterable[Any] | None = None,
    sharding: Mapping[str, Axes] | None = None,
    check: bool = True,
) -> AdaptedTask:
    """Adapt TensorFlow code as a task. It starts from the values of its variables; `trained` assigns the
    trained ones to them.

    Random draws (dropout) come from the step's key, whatever seed the code sets. Variables that the code
    assigns while training, such as a BatchNorm's statistics, are the state.

    Args:
        model: A `tf.Module`, a `tf.function` or a function; passed to `loss` as it is.
        loss: `loss(model, batch)` in TensorFlow operations, or with the keyword `train` or `training`, which is
            False in evaluation. None: `model(batch)` returns its loss itself, and takes these keywords.
        example: A batch, for its form, its shapes, and the check.
        variables: The variables to train, by name or as objects; other variables that the code uses are
            constants. None: all trainable ones.
        sharding: Patterns of parameter names to logical axes.
        check: Compare loss and gradients with TensorFlow's own on the example, with the same random draws.

    Raises:
        RecipeError: The code can't be traced, uses an operation that tf2jax lacks, assigns a variable that is
            trained, or computes other results in JAX than in TensorFlow.
    """
    import_extra("tensorflow", "tensorflow")
    import_extra("tf2jax", "tensorflow")
    _limit_tensorflow()
    return AdaptedTask(_Adapter(model, loss, example, variables, check).model(), sharding)


def _limit_tensorflow() -> None:
    """Restrict TensorFlow to no GPU and few threads, since it only traces and checks; JAX uses the devices."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # it is initialized already
        tf.config.set_visible_devices([], "GPU")
        for threading in ("intra", "inter"):
            if not getattr(tf.config.threading, f"get_{threading}_op_parallelism_threads")():
                getattr(tf.config.threading, f"set_{threading}_op_parallelism_threads")(min(4, os.cpu_count() or 1))


class _Adapter:
    """The user's code, its graphs and its variables."""

    def __init__(self, model: Any, loss: Callable[..., Any] | None, example: Any, variables: Any, check: bool):
        if type(model).__module__.split(".")[0] in ("keras", "tf_keras"):
            raise RecipeError("the model is Keras's; use panax.adapters.keras.task")
        if not callable(model) and loss is None:
            raise RecipeError(f"the model is {describe_type(model)}, which can't be called; pass a loss(model, batch)")
        self.user_model, self.loss = model, loss
        self.example = as_batch(example)
        self.restored = _form_of(example)
        self.cache: dict[Any, Any] = {}
        self.graphs = {train: self.graph(self.example, train) for train in (True, False)}
        self.variables = _by_name(model, [v for graph in self.graphs.values() for v in graph.variables], variables)
        self.names = {variable.ref(): name for name, variable in self.variables.items()}
        chosen = None if variables is None else {v.ref() for v in _values(variables)}
        self.trained_names = [
            name
            for name, variable in self.variables.items()
            if variable.dtype.is_floating and (variable.trainable if chosen is None else variable.ref() in chosen)
        ]
        self.assigned = {self.names[v.ref()] for v in self.graphs[True].assigned}
        wrong = sorted(self.assigned & set(self.trained_names))
        if wrong:
            raise RecipeError(
                f"the loss assigns {', '.join(wrong)}, which is trained; create it with trainable=False, or leave it to "
                f"the optimizer"
            )
        used = {v.ref() for v in self.graphs[True].variables}
        self.unused = tuple(name for name in self.trained_names if self.variables[name].ref() not in used)
        self.notes: list[str] = []
        weights_bytes = sum(v.shape.num_elements() * v.dtype.size for v in self.variables.values())
        reason = explain_too_large(weights_bytes) if check else "check=False"
        if reason is None:
            self.compare()
        else:
            self.notes.append(f"not compared with TensorFlow: {reason}")
            if check:
                warnings.warn(f"{_called(model)} was not compared with TensorFlow: {reason}", stacklevel=3)
        if self.unused:
            listed = ", ".join(self.unused[:5])
            self.notes.append(
                f"the loss does not depend on {listed}: not trained, as in TensorFlow, which gives them the gradient "
                f"None"
            )

    def graph(self, batch: Mapping[str, Any], train: bool) -> Any:
        import tensorflow as tf

        from .graph import TensorflowGraph

        specs = self.restored({name: tf.TensorSpec(leaf.shape, leaf.dtype) for name, leaf in batch.items()})
        offered = {"train": train, "training": train}
        if self.loss is None:
            function, arguments = self.user_model, (specs,)
        else:
            function, arguments = self.loss, (self.user_model, specs)
        keywords = select_keywords(_signature_of(function), len(arguments), offered)
        # The function inside a tf.function: its conditions and loops then become operations of the one graph.
        function = getattr(function, "python_function", function)

        def of_batch(batch: Any) -> Any:
            return function(*arguments[:-1], batch, **keywords)

        return TensorflowGraph(of_batch, specs)

    def converted(self, batch: Mapping[str, Any], train: bool) -> Any:
        """Return the JAX function for batches of this shape."""
        shapes = (*((name, tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in batch.items()), train)
        if shapes not in self.cache:
            graph = self.graph(batch, train)
            unknown = [v.name for v in graph.variables if v.ref() not in self.names]
            if unknown:
                raise RecipeError(
                    f"the loss uses {', '.join(unknown)} on this batch, and not on the example; create all variables beforehand"
                )
            self.cache[shapes] = graph.convert(self.names).drop_shadows()
        return self.cache[shapes]

    def model(self) -> Model:
        import tensorflow as tf

        values = {name: np.array(variable.numpy()) for name, variable in self.variables.items()}
        params = {name: values[name] for name in self.trained_names}
        state = {name: value for name, value in values.items() if name not in params}

        def evaluate(params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
            converted = self.converted(batch, train)
            returned, after = converted({**params, **state}, self.restored(batch), converted.sample_draws(key), key)
            return returned, {name: after[name] if name in self.assigned else leaf for name, leaf in state.items()}

        def rebuild(params: Any, state: Any) -> Any:
            for name, value in {**params, **{name: state[name] for name in self.assigned}}.items():
                self.variables[name].assign(tf.cast(value, self.variables[name].dtype))
            return self.user_model

        gathered = {self.names[v.ref()] for graph in self.graphs.values() for v in graph.gathered}

        def kind_of(name: str) -> Kind | None:
            return "embedding" if name in gathered else None

        return Model(
            name=_called(self.user_model),
            evaluate=evaluate,
            rebuild=rebuild,
            initial=(params, state),
            kind_of=kind_of,
            frozen=self.unused,
            notes=tuple(self.notes),
        )

    def compare(self) -> None:
        """Compare loss and gradients in TensorFlow and JAX, on the example."""
        import tensorflow as tf

        for train in (True, False):
            graph = self.graphs[train]
            converted = graph.convert(self.names)
            unlike = (
                f"it draws random numbers inside a loop or a branch ({', '.join(graph.hidden_draws)})"
                if graph.hidden_draws
                else "a tf.function inside another has conditions or loops on tensors"
            )
            if graph.hidden_draws or graph.nested:
                mode = "training" if train else "evaluation"
                self.notes.append(f"{mode} was not compared with TensorFlow: {unlike}")
                continue
            key = jax.random.key(0)
            draws = [np.asarray(draw) for draw in converted.sample_draws(key)]
            values = {name: np.array(shadow.numpy()) for name, shadow in converted.shadows.items()}
            free = {name: values.pop(name) for name in self.trained_names if name in values}
            batch = self.restored(self.example)
            with tf.device("CPU:0"), tf.GradientTape() as tape:
                expected = _tensorflow_total(
                    converted.run_tensorflow(batch, draws), len(next(iter(self.example.values())))
                )
            theirs = tape.gradient(expected, {name: converted.shadows[name] for name in free})
            if train:
                used = {name for name, gradient in theirs.items() if gradient is not None}
                self.unused = tuple(name for name in self.trained_names if name not in used)
                if not used:
                    raise RecipeError("the loss depends on no trainable variable; is there a model behind it?")
            with exact_host_precision(), use_library_promotion():
                (loss, after), gradients = self.differentiated(converted, graph, free, values, batch, draws, key)
            tensorflow_gradients = {
                name: tf.convert_to_tensor(g).numpy() for name, g in theirs.items() if g is not None
            }
            moved = {name: converted.shadows[name].numpy() for name in (self.assigned if train else ())}
            check_agreement(
                _called(self.user_model),
                "TensorFlow",
                (loss, gradients),
                (expected, tensorflow_gradients),
                (after, moved),
            )

    def differentiated(
        self, converted: Any, graph: Any, free: Any, held: Any, batch: Any, draws: list[Any], key: jax.Array
    ) -> tuple[Any, Any]:
        rows = len(next(iter(self.example.values())))

        def objective(free: Any) -> tuple[Any, Any]:
            returned, after = converted({**free, **held}, batch, draws, key)
            return total_loss(read_loss(returned, rows)[0]), after

        try:
            return jax.jit(jax.value_and_grad(objective, has_aux=True))(free)
        except ValueError as error:
            if graph.first_loop and "while_loop" in str(error):
                raise RecipeError(
                    f"JAX can't differentiate {graph.first_loop}, a loop of a length that is known only at run time; "
                    f"use a Python loop (range instead of tf.range), which is unrolled"
                ) from error
            raise


def _tensorflow_total(returned: Any, rows: int) -> Any:
    """Compute the value of `total_loss(read_loss(...))` in TensorFlow."""
    import tensorflow as tf

    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]
    terms = returned.values() if isinstance(returned, Mapping) else [returned]
    total = tf.constant(0.0)
    for term in terms:
        if isinstance(term, tuple | list) and len(term) == 2:
            weight = tf.stop_gradient(tf.cast(term[1], tf.float32))
            term = tf.math.divide_no_nan(tf.cast(term[0], tf.float32), weight)
        total = total + tf.cast(term, tf.float32)
    return total


def _form_of(example: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that converts named leaves back to the form of the user's batches."""
    if isinstance(example, Mapping):
        return dict
    if isinstance(example, tuple | list):
        count = len(example)
        return lambda leaves: tuple(leaves[str(i)] for i in range(count))
    return lambda leaves: leaves["0"]


def _signature_of(function: Any) -> Any:
    """Return the Python function of a `tf.function`; the `__call__` of a module."""
    function = getattr(function, "python_function", function)
    if not hasattr(function, "__code__") and not hasattr(function, "__func__") and callable(function):
        call = type(function).__call__
        call = getattr(call, "python_function", call)
        return functools.partial(call, function)
    return function


def _values(variables: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    return list(variables.values() if isinstance(variables, Mapping) else variables)


def _by_name(model: Any, used: list[Any], variables: Any) -> dict[str, Any]:
    """Return every variable of the model and its loss by a unique name: the user's, its path in the module,
    or TensorFlow's."""
    names: dict[Any, str] = {}
    if isinstance(variables, Mapping):
        names.update({variable.ref(): str(name) for name, variable in variables.items()})
    for path, variable in _paths(model, "", set()):
        names.setdefault(variable.ref(), path)
    for variable in [*used, *(_values(variables) if variables is not None else ())]:
        if variable.ref() not in names:
            name = plain = variable.name.split(":")[0]
            number = 0
            while name in names.values():
                number += 1
                name = f"{plain}_{number}"
            names[variable.ref()] = name
    return {name: ref.deref() for ref, name in names.items()}


def _paths(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    import tensorflow as tf

    if isinstance(node, tf.Variable):
        yield path, node
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, tf.Module):
        parts: Iterable[tuple[Any, Any]] = [(k, v) for k, v in vars(node).items() if not k.startswith("_self_")]
    elif isinstance(node, Mapping):
        parts = node.items()
    elif isinstance(node, tuple | list):
        parts = enumerate(node)
    else:
        return
    for key, part in parts:
        yield from _paths(part, f"{path}.{key}" if path else str(key), seen)


def _called(model: Any) -> str:
    return getattr(model, "name", None) or getattr(model, "__name__", None) or type(model).__name__
