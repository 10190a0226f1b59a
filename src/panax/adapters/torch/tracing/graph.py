"""A traced graph as a JAX function with a derivative that is the graph's own backward part.

Values of the forward part that the backward part reads are stored between the two, except inside checkpointed
regions: there only a region's inputs are stored, and its operations run again behind a barrier that holds
them until the gradient arrives, or the compiler would merge the two runs into one and store everything.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ....core import current_target
from ....core.errors import RecipeError
from ..lowering import DTYPES, LOWERINGS, OutputSpec
from ..lowering.randomness import is_random
from ..rejection import MODULE_KEY
from .aten_trace import BACKWARD_KEY, MAX_LOSSES, TracedGraph
from .guards import NodeGuard, build_double_guards, build_guards, computes_in_double, is_double
from .regions import REGION_KEY
from .values import as_jax

Values = dict[Node, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedProgram:
    """A traced graph, divided into the nodes that run forward and those that run backward.

    Attributes:
        region: Checkpointed region of each forward node that is in one.
        residuals: Forward nodes with values that the backward part reads.
        draws: Random node to its index among all random nodes.
        guards: Checks of indices and integers in the forward part.
    """

    traced: TracedGraph
    inputs: tuple[Node, ...]
    outputs: tuple[Any, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    region: Mapping[Node, int]
    residuals: tuple[Node, ...]
    draws: Mapping[Node, int]
    guards: tuple[NodeGuard, ...]

    @classmethod
    def create(cls, traced: TracedGraph) -> "TracedProgram":
        """Sort a graph's nodes.

        Raises:
            RecipeError: An operation has no lowering; the message names it and the module that uses it.
        """
        nodes = list(traced.graph.nodes)
        inputs = tuple(node for node in nodes if node.op == "placeholder")
        cotangents = set(inputs[len(traced.parameters) + len(traced.buffers) + len(traced.leaves) :])
        output = next(node for node in nodes if node.op == "output")
        calls = [node for node in nodes if node.op in ("call_function", "get_attr")]
        backward: set[Node] = set()
        region: dict[Node, int] = {}
        draws: dict[Node, int] = {}
        for node in calls:
            marks = node.meta.get("custom") or {}
            source = node.args[0] if node.target is operator.getitem else None
            if (
                (source in backward if source is not None else bool(marks.get(BACKWARD_KEY)))
                or any(each in cotangents or each in backward for each in node.all_input_nodes)
            ) and node.op != "get_attr":
                backward.add(node)
            elif source is not None and source in region:
                region[node] = region[source]
            elif REGION_KEY in marks and node.op != "get_attr":
                region[node] = marks[REGION_KEY]
            if node.op == "call_function":
                _check(node)
                if is_random(node.target):
                    draws[node] = len(draws)
        flat = tuple(output.args[0])
        reachable = _reachable(flat)
        residuals = _find_residuals(
            [node for node in calls if node in backward and node in reachable], backward | cotangents, region
        )
        forward = tuple(node for node in calls if node not in backward and node in reachable)
        return cls(
            traced=traced,
            inputs=inputs,
            outputs=flat,
            forward=forward,
            backward=tuple(node for node in calls if node in backward and node in reachable),
            region=region,
            residuals=residuals,
            draws=draws,
            guards=(*build_guards(forward, traced.constants, _location), *_guard_inputs(traced, inputs, flat)),
        )

    @property
    def doubles(self) -> tuple[str, ...]:
        """Return the names of inputs and modules that compute in float64, which becomes float32."""
        names = [*self.traced.parameters, *self.traced.buffers, *self.traced.leaves]
        found = {name: None for name, node in zip(names, self.inputs) if is_double(node) and computes_in_double(node)}
        for node in self.forward:
            if is_double(node) and node.op == "call_function" and computes_in_double(node):
                found.setdefault((node.meta.get("custom") or {}).get(MODULE_KEY) or "the loss")
        return tuple(found)

    @functools.cached_property
    def _is_backward(self) -> frozenset[Node]:
        return frozenset(self.backward)

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of the forward part: two for each loss and metric, and the buffers."""
        return 2 * (len(self.traced.losses) + len(self.traced.metrics)) + len(self.traced.buffers)

    def run_forward(self, inputs: Sequence[Any], key: jax.Array) -> tuple[list[Any], list[Any]]:
        """Return the outputs, with the worst value of each guard as the last one, and the values that the
        backward part reads."""
        values: Values = dict(zip(self.inputs, inputs))
        for node in self.forward:
            values[node] = self._call(node, values, key)
        outputs = [_output(values, each) for each in self.outputs[: self.num_outputs]]
        if self.guards:
            outputs.append(jnp.stack([guard.worst(values) for guard in self.guards]))
        return outputs, [values[node] for node in self.residuals]

    def run_backward(self, residuals: Sequence[Any], cotangents: Sequence[Any], key: jax.Array) -> list[Any]:
        """Compute the gradients of the trained parameters."""
        values: Values = dict(zip(self.residuals, residuals))
        values.update(zip(self.inputs[-MAX_LOSSES:], cotangents))
        again = _Recomputing(self, values, key)
        for node in self.backward:
            again.provide(node)
            values[node] = self._call(node, values, key)
            again.latest(values[node])
        last = [_output(values, each) for each in self.outputs[self.num_outputs :]]
        return [jnp.asarray(gradient) for gradient in last]

    def _call(self, node: Node, values: Values, key: jax.Array) -> Any:
        if node.op == "get_attr":
            return as_jax(self.traced.constants[str(node.target)])
        arguments, keywords = (map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        if node.target is operator.getitem:
            return cast(Any, arguments)[0][cast(Any, arguments)[1]]
        out = _out(node.meta["val"], lambda: jax.random.fold_in(key, self.draws[node]))
        if isinstance(out, OutputSpec):
            shared = node in self._is_backward and len(node.users) > 1
            out = dataclasses.replace(out, transposed_operands=_transposed_arguments(node), shared_backward=shared)
        with jax.named_scope(node.name):
            return _as_declared(LOWERINGS[node.target](out, *cast(Any, arguments), **cast(Any, keywords)), out, node)


class _Recomputing:
    """Recomputation of the operations of checkpointed regions, as the backward part needs them."""

    def __init__(self, program: TracedProgram, values: Values, key: jax.Array):
        self._program, self._values, self._key = program, values, key
        self._gradient: Any = None
        self._opened: dict[int, Values] = {}

    def latest(self, value: Any) -> None:
        """Store a value of the backward pass, on which the recomputation of a region will depend."""
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
            self._gradient = value

    def provide(self, node: Node) -> None:
        for each in node.all_input_nodes:
            if each not in self._values:
                self._values[each] = self._recompute(each)

    def _recompute(self, node: Node) -> Any:
        region = self._program.region[node]
        if region not in self._opened:
            self._opened[region] = self._read_inputs(region)
        region_values = self._opened[region]
        if node not in region_values:
            for each in node.all_input_nodes:
                if each not in region_values:
                    # Values that a region reads of another one are stored; constants are created again.
                    region_values[each] = self._recompute(each)
            region_values[node] = self._program._call(node, region_values, self._key)
        return region_values[node]

    def _read_inputs(self, region: int) -> Values:
        """Return the stored inputs of a region behind a barrier, available only after the newest gradient."""
        inside = self._program.region
        inputs = [
            node
            for node in self._program.residuals
            if inside.get(node) != region and any(inside.get(u) == region for u in node.users)
        ]
        stored = [self._values[node] for node in inputs]
        if self._gradient is None:
            return dict(zip(inputs, jax.lax.optimization_barrier(stored)))
        *stored, gradient = jax.lax.optimization_barrier([*stored, self._gradient])
        if not current_target().traits.keeps_barriers:
            stored = [
                value if node.op == "placeholder" else _after(value, gradient) for node, value in zip(inputs, stored)
            ]
        return dict(zip(inputs, stored))


UNUSED_NAN_BITS = 0x7FC5A5A5
"""Bits of a NaN that no operation produces."""


def _after(value: Any, gradient: jax.Array) -> Any:
    """Return `value` with a dependency on `gradient`, which no compiler can prove to be `value`.

    XLA on CPU drops barriers before it merges equal operations (jax 0.10 to 0.12), which also undoes
    `jax.checkpoint`.
    """
    if not (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)):
        return value
    bits = jax.lax.bitcast_convert_type(gradient.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return jnp.where(bits == jnp.uint32(UNUSED_NAN_BITS), jnp.zeros_like(value), value)


def _find_residuals(backward: list[Node], later: set[Node], region: Mapping[Node, int]) -> tuple[Node, ...]:
    """Return the forward values that the backward part reads outside of regions, and those that recomputed
    regions read."""
    residuals: dict[Node, None] = {}
    recomputed: set[Node] = set()
    pending: list[Node] = []
    for node in backward:
        for each in node.all_input_nodes:
            if each in region:
                pending.append(each)
            elif each not in later:
                residuals[each] = None
    while pending:
        node = pending.pop()
        if node in recomputed:
            continue
        recomputed.add(node)
        for each in node.all_input_nodes:
            if region.get(each) == region[node]:
                pending.append(each)
            else:
                residuals[each] = None
    return tuple(residuals)


def _reachable(outputs: Iterable[Any]) -> set[Node]:
    reachable: set[Node] = set()
    pending = [node for node in outputs if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in reachable:
            reachable.add(node)
            pending.extend(node.all_input_nodes)
    return reachable


def _guard_inputs(traced: TracedGraph, inputs: Sequence[Node], outputs: Sequence[Any]) -> Iterator[NodeGuard]:
    """Yield the guards of float64 inputs: leaves of the batch, and buffers that change."""
    first = 2 * (len(traced.losses) + len(traced.metrics))
    rest = inputs[len(traced.parameters) :]
    buffers = dict(zip(traced.buffers, rest))
    leaves = dict(zip(traced.leaves, rest[len(buffers) :]))
    changed = {name: node for (name, node), after in zip(buffers.items(), outputs[first:]) if after is not node}
    yield from build_double_guards(changed, of_batch=False)
    yield from build_double_guards(leaves, of_batch=True)


def _transposed_arguments(node: Node) -> frozenset[int]:
    """Return the indices of the arguments that are transposed matrices, except those transposed twice."""

    def turned(each: Any) -> bool:
        return isinstance(each, Node) and _transposes(each) and not turned(each.args[0])

    return frozenset(i for i, each in enumerate(node.args) if turned(each))


def _transposes(node: Node) -> bool:
    aten = torch.ops.aten
    if node.op != "call_function" or not hasattr(node.meta.get("val"), "ndim") or node.meta["val"].ndim != 2:
        return False
    if node.target in (aten.permute.default, aten.permute_copy.default):
        return [dim % 2 for dim in cast(Any, node.args[1])] == [1, 0]
    if node.target in (aten.transpose.int, aten.transpose_copy.int):
        return cast(Any, node.args[1]) % 2 != cast(Any, node.args[2]) % 2
    return node.target in (aten.t.default, aten.t_copy.default)


def _output(values: Values, output: Any) -> Any:
    return values[output] if isinstance(output, Node) else output


def _check(node: Node) -> None:
    if node.target is torch.ops.aten.view.dtype:
        for value in (node.meta["val"], cast(Any, node.args[0]).meta["val"]):
            if value.dtype in (torch.int64, torch.float64, torch.complex128):
                raise RecipeError(
                    f"view(dtype){_location(node)} reads the bits of {value.dtype}, which has half as many bits in JAX; "
                    f"convert the values (.to(dtype)), or take their bits when the data is prepared"
                )
    if node.target is operator.getitem or node.target in LOWERINGS or node.target is torch.ops.aten.copy_.default:
        return
    if getattr(node.target, "namespace", None) == "profiler":
        return  # `record_function` returns nothing that a value depends on
    raise RecipeError(
        f"the operation {node.target} has no JAX lowering here{_location(node)}; write the model without it, or "
        f"register one with "
        f"panax.adapters.torch.register_lowering"
    )


def _location(node: Node) -> str:
    """Return the module or the line of an operation, as far as known."""
    module = (node.meta.get("custom") or {}).get(MODULE_KEY)
    if module is not None:
        return f" in {module}"
    trace = node.meta.get("stack_trace") or node.meta.get("seq_stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    return f" (used at {' '.join(lines[-2:])})" if lines else ""


def _out(value: Any, key: Callable[[], jax.Array]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_out(part, key) for part in value)
    return None if value is None else OutputSpec(tuple(value.shape), DTYPES[value.dtype], key)


def _as_declared(result: Any, out: Any, node: Node) -> Any:
    """Convert a lowering's result to PyTorch's dtypes, and assert that it has PyTorch's shapes."""
    if isinstance(out, tuple):
        return tuple(_as_declared(part, declared, node) for part, declared in zip(result, out))
    if result is None or out is None:
        return None
    result = jnp.asarray(result)
    assert result.shape == out.shape, f"{node.target}: {result.shape} where PyTorch has {out.shape}"
    return result if result.dtype == out.dtype else result.astype(out.dtype)


def to_jax_function(program: TracedProgram) -> Callable[..., list[Any]]:
    """Return `f(trained, others, key_data) -> outputs`, differentiable once in `trained`, a tuple of arrays.

    `others` has the remaining inputs in their order; the divisors of the losses' gradients are passed as their
    cotangents.
    """
    index_by_name = {name: i for i, name in enumerate(program.traced.parameters)}
    trained_indices = [index_by_name[name] for name in program.traced.trained]
    num_inputs = len(program.inputs) - MAX_LOSSES

    def merge_inputs(trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        inputs: list[Any] = [None] * num_inputs
        for index, value in zip(trained_indices, trained):
            inputs[index] = value
        remaining = iter(others)
        return [next(remaining) if value is None else value for value in inputs]

    @functools.partial(jax.custom_vjp)
    def run(trained: tuple[Any, ...], others: tuple[Any, ...], key_data: jax.Array) -> list[Any]:
        return program.run_forward(merge_inputs(trained, others), jax.random.wrap_key_data(key_data))[0]

    def forward(trained: tuple[Any, ...], others: tuple[Any, ...], key_data: jax.Array) -> Any:
        outputs, residual_values = program.run_forward(
            merge_inputs(trained, others), jax.random.wrap_key_data(key_data)
        )
        return outputs, (residual_values, key_data)

    def backward(residuals: Any, cotangents: Any) -> Any:
        residual_values, key_data = residuals
        loss_cotangents = [jnp.asarray(c, jnp.float32) for c in cotangents[: 2 * len(program.traced.losses) : 2]]
        loss_cotangents += [jnp.zeros(())] * (MAX_LOSSES - len(loss_cotangents))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            gradients = program.run_backward(residual_values, loss_cotangents, jax.random.wrap_key_data(key_data))
        return tuple(gradients), None, None

    run.defvjp(forward, backward)
    return cast(Callable[..., list[Any]], run)
