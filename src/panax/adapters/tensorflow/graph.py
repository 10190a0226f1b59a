"""A TensorFlow function of a batch as a JAX function of variables, the batch, and random draws.

The function is traced once by TensorFlow, with all functions that it calls inlined. In its graph each random
draw becomes an input: so JAX draws from the step's key, and TensorFlow can receive the same draws. tf2jax
then translates the graph.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tensorflow as tf
import tf2jax

from ...core.errors import RecipeError
from ..agreement import use_library_promotion

_DRAWS: dict[str, Literal["uniform", "normal", "truncated_normal"]] = {
    "RandomUniform": "uniform",
    "RandomStandardNormal": "normal",
    "TruncatedNormal": "truncated_normal",
    "StatelessRandomUniform": "uniform",
    "StatelessRandomUniformV2": "uniform",
    "StatelessRandomNormal": "normal",
    "StatelessRandomNormalV2": "normal",
    "StatelessTruncatedNormal": "truncated_normal",
    "StatelessTruncatedNormalV2": "truncated_normal",
}
_RANDOM = re.compile(r"Random|Multinomial|TruncatedNormal|^Rng|^StatefulUniform|^StatefulStandardNormal|Shuffle")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_LOOPS = ("While", "StatelessWhile")
_LIBRARIES = (os.path.dirname(tf.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


@dataclasses.dataclass(frozen=True)
class Draw:
    """One draw of random numbers in a graph.

    Attributes:
        tensor: Its name in the graph.
    """

    tensor: str
    distribution: Literal["uniform", "normal", "truncated_normal"]
    shape: tuple[int, ...]
    dtype: Any

    def sample(self, key: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.dtype)
        if self.distribution == "truncated_normal":
            return jax.random.truncated_normal(key, -2.0, 2.0, self.shape, dtype)
        return getattr(jax.random, self.distribution)(key, self.shape, dtype)


class TensorflowGraph:
    """The graph of one function for batches of one shape.

    Attributes:
        variables: The variables that the function uses.
        assigned: The variables that it assigns.
        gathered: The variables from which it gathers rows.
        draws: Its random draws, which are inputs.
        hidden_draws: Names of random operations inside loops and branches, which are left unchanged.
        nested: True if the graph calls functions that could not be inlined.
    """

    def __init__(self, function: Callable[..., Any], batch: Any):
        """
        Args:
            function: A TensorFlow function of a batch.
            batch: `tf.TensorSpec`s in the form that `function` takes.

        Raises:
            RecipeError: The function can't be traced, or can't become a function of its inputs.
        """
        self._concrete = concrete = _traced(function, batch)
        self._graph = concrete.graph
        num_inputs = len(concrete.inputs) - len(concrete.captured_inputs)
        self._inputs = [tensor.name for tensor in concrete.inputs[:num_inputs]]
        by_handle = {id(variable.handle): variable for variable in self._graph.variables}
        self._captured: dict[str, Any] = {}
        self._constants: dict[str, Any] = {}
        for inside, outside in zip(concrete.inputs[num_inputs:], concrete.captured_inputs):
            if outside.dtype != tf.resource:
                self._constants[inside.name] = outside
            elif id(outside) in by_handle:
                self._captured[inside.name] = by_handle[id(outside)]
            else:
                raise RecipeError(
                    f"the TensorFlow code uses {inside.op.name}, which is not a tf.Variable (a table, a queue, an "
                    f"iterator?); pass its contents in with the batch"
                )
        self.variables = list(self._captured.values())
        self._returned = concrete.structured_outputs
        flat = tf.nest.flatten(self._returned)
        if not flat or not all(
            isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.string, tf.resource) for leaf in flat
        ):
            raise RecipeError(f"the loss returned {self._returned!r}; expected tensors of numbers")
        unborn = [
            variable.name for variable in self.variables if not bool(tf.compat.v1.is_variable_initialized(variable))
        ]
        if unborn:
            raise RecipeError(
                f"the loss creates {', '.join(unborn)} in a way that can't be traced; call the model once on a batch beforehand"
            )
        self._outputs = [tensor.name for tensor in flat]
        operations = self._graph.get_operations()
        self.draws = tuple(_draw(operation) for operation in operations if operation.type in _DRAWS)
        self._definition = self._graph.as_graph_def()
        self.nested = any(operation.type in ("PartitionedCall", "StatefulPartitionedCall") for operation in operations)
        self.hidden_draws = _free_of_draws(self._definition)
        self.assigned = [
            self._captured[operation.inputs[0].name]
            for operation in operations
            if operation.type in _ASSIGNS and operation.inputs[0].name in self._captured
        ]
        self.gathered = [
            self._captured[operation.inputs[0].name]
            for operation in operations
            if operation.type == "ResourceGather" and operation.inputs[0].name in self._captured
        ]

    def convert(self, names: Mapping[Any, str]) -> "ConvertedGraph":
        """Convert to functions of JAX and of TensorFlow in which the variables have `names` (by
        `variable.ref()`).

        Raises:
            RecipeError: tf2jax lacks an operation.
        """
        refs = dict.fromkeys(variable.ref() for variable in self.variables)
        shadow_variables = {names[ref]: _shadow(f"v{i}", ref.deref()) for i, ref in enumerate(refs)}
        handles = {inside: shadow_variables[names[variable.ref()]] for inside, variable in self._captured.items()}

        def again(*inputs: Any) -> Any:
            bound = dict(zip([*self._inputs, *(draw.tensor for draw in self.draws)], inputs))
            for name, value in self._constants.items():
                bound[name] = tf.constant(value)
            for name, variable in handles.items():
                variable.read_value()  # registers it with the graph
                bound[name] = tf.raw_ops.Identity(input=variable.handle).op.inputs[0]
            return tf.graph_util.import_graph_def(self._definition, bound, self._outputs, name="")

        function = tf.function(again, autograph=False)
        inputs = self._concrete.inputs[: len(self._inputs)]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        specs += [tf.TensorSpec(draw.shape, draw.dtype) for draw in self.draws]
        try:
            with use_library_promotion():
                translated, _ = tf2jax.convert(  # pyright: ignore[reportPrivateImportUsage]
                    function, *specs
                )
        except (ValueError, NotImplementedError, KeyError) as error:
            raise RecipeError(self._why_not(error)) from error
        columns = {variable.name.split(":")[0]: name for name, variable in shadow_variables.items()}
        return ConvertedGraph(self, function, translated, shadow_variables, columns)

    def describe_line(self, *types: str) -> str:
        """Return the source line of an operation of one of these types, as a clause for a message."""
        for operation in self._graph.get_operations():
            if operation.type in types:
                frames = [frame for frame in operation.traceback or () if not frame.filename.startswith(_LIBRARIES)]
                where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
                return f"{operation.type} ({operation.name}{where})"
        return ", ".join(types)

    @property
    def first_loop(self) -> str | None:
        """Return the first loop in the graph and its line; None if there is none."""
        found = [operation.type for operation in self._graph.get_operations() if operation.type in _LOOPS]
        return self.describe_line(*found) if found else None

    def _why_not(self, error: Exception) -> str:
        text = str(error)
        found = re.search(r"Unsupported operations in graph: \[(.*?)\]", text)
        if found is None:
            return f"tf2jax can't translate the TensorFlow code: {type(error).__name__}: {text.splitlines()[0] if text else ''}"
        operations = [name.strip("' \"") for name in found.group(1).split(",")]
        lines = ", ".join(self.describe_line(name) for name in operations)
        return f"tf2jax has no translation of {lines}; write it with other operations, or compute it in the data"


@dataclasses.dataclass(frozen=True, eq=False)
class ConvertedGraph:
    """One graph as a JAX function, and as a TensorFlow function of the same inputs, on separate variables.

    Attributes:
        shadows: Copies of the variables by name, which the TensorFlow function reads and assigns.
    """

    graph: TensorflowGraph
    function: Any
    translated: Any
    shadows: Mapping[str, Any]
    columns: Mapping[str, str]

    def sample_draws(self, key: jax.Array) -> list[jax.Array]:
        return [draw.sample(jax.random.fold_in(key, i)) for i, draw in enumerate(self.graph.draws)]

    def __call__(
        self, values: Mapping[str, Any], batch: Any, draws: list[Any], key: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """Return the function's result, and its variables by name afterwards.

        Args:
            values: Values of the variables, by name.
            batch: Arrays in the form that the function takes.
        """
        own = {column: values[name] for column, name in self.columns.items()}
        with use_library_promotion():
            outputs, after = self.translated(own, *tf.nest.flatten(batch), *draws, rng=key)
        returned = tf.nest.pack_sequence_as(self.graph._returned, list(outputs))
        return returned, {self.columns[column]: value for column, value in after.items()}

    def run_tensorflow(self, batch: Any, draws: list[Any]) -> Any:
        """Compute the result in TensorFlow, on the copies of the variables."""
        inputs = [tf.convert_to_tensor(leaf) for leaf in [*tf.nest.flatten(batch), *draws]]
        return tf.nest.pack_sequence_as(self.graph._returned, self.function(*inputs))

    def drop_shadows(self) -> "ConvertedGraph":
        """Return the graph with its JAX function only, which holds no copy of the weights."""
        return dataclasses.replace(self, function=None, shadows={})


def _shadow(name: str, variable: Any) -> Any:
    with tf.init_scope():
        return tf.Variable(variable.read_value(), trainable=variable.trainable, name=name, dtype=variable.dtype)


def _traced(function: Callable[..., Any], batch: Any) -> Any:
    """Return the concrete function, with the functions that it calls inlined, unless their control flow depends
    on tensors."""
    try:
        with _inlined():
            return tf.function(function).get_concrete_function(batch)
    except Exception:  # whatever it is, the ordinary path has the better message
        try:
            return tf.function(function).get_concrete_function(batch)
        except Exception as error:
            message = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            raise RecipeError(
                f"the loss can't be traced by TensorFlow: {type(error).__name__}: {message.strip()}"
            ) from error


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _draw(operation: Any) -> Draw:
    output = operation.outputs[0]
    if not output.shape.is_fully_defined():
        raise RecipeError(
            f"{operation.type} ({operation.name}) draws random numbers of an unknown shape, {output.shape}; make it static"
        )
    dtype = output.dtype.as_numpy_dtype
    return Draw(
        output.name, _DRAWS[operation.type], tuple(output.shape.as_list()), jax.dtypes.canonicalize_dtype(dtype)
    )


def _free_of_draws(definition: Any) -> tuple[str, ...]:
    """Replace every draw by a placeholder, to be bound to an input; return the names of the draws inside
    functions, which remain, without a seed."""
    for node in definition.node:
        if node.op in _DRAWS:
            dtype = node.attr["dtype"].type
            _becomes(node, "Placeholder")
            node.attr["dtype"].type = dtype
        elif node.op == "RngReadAndSkip":
            # The operation that advances a tf.random.Generator has nothing left to do.
            _becomes(node, "Const")
            node.attr["dtype"].type = tf.int64.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0, 0, 0], tf.int64))
    hidden = []
    for node in [*definition.node, *(node for function in definition.library.function for node in function.node_def)]:
        if _RANDOM.search(node.op) and node.op not in ("StatelessRandomGetKeyCounter", "StatelessRandomGetAlg"):
            hidden.append(node.name)
            for seed in ("seed", "seed2"):
                if seed in node.attr:
                    node.attr[seed].i = 0
    return tuple(hidden)


def _becomes(node: Any, operation: str) -> None:
    node.op = operation
    del node.input[:]
    node.attr.clear()
