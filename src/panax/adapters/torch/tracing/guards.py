"""Guards in every step for conditions in which PyTorch would raise or compute in 64 bits: indices, matrices,
and values that 32 bits can't hold.

A compiled program can't raise. JAX clamps an index that is out of range and wraps an integer that is too
large, and would continue to train. So each operation with that risk yields one number, its worst offending value,
and a step with such a value is not applied and ends the run with an error (`panax.core.DataChecks`).
Operations with values that are known to fit, from constants, shapes and ranges, cost nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ....core.errors import RecipeError
from ....core.measures import NO_FAULT
from ..lowering import LOWERINGS, OutputSpec
from .integers import ACCUMULATING_OPS, INT32_MAX, IntegerRange, RangeAnalysis

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class NodeGuard:
    """One check of one node.

    Attributes:
        text: Message for a failure; the value follows it.
        worst: Function from the values of the nodes to the worst offending value, or `NO_FAULT`.
    """

    node: Node
    text: str
    worst: Callable[[Mapping[Node, Any]], jax.Array]


def build_guards(
    nodes: Sequence[Node], constants: Mapping[str, torch.Tensor], where: Callable[[Node], str]
) -> tuple[NodeGuard, ...]:
    """Return the checks of a forward part.

    Args:
        where: Returns the line of the model that a node comes from.

    Raises:
        RecipeError: An integer in the model's code does not fit into 32 bits.
    """
    ranges = RangeAnalysis(constants)
    guards: list[NodeGuard] = []
    for node in nodes:
        if node.op == "call_function":
            _refuse_large_numbers(node, where)
            guards += _of_indices(node, ranges, where)
            guards += _of_divisors(node, ranges, where)
            guards += _of_sums(node, ranges, where)
            guards += _of_matrices(node, where)
            guards += _of_casts(node, ranges, where)
    return tuple(guards)


def _of_indices(node: Node, ranges: RangeAnalysis, where: Callable[[Node], str]) -> Iterator[NodeGuard]:
    for index, allowed, ignored in _indices(node):
        if not isinstance(index, Node) or ranges.of(index).is_within(allowed):
            continue

        def worst(
            values: Mapping[Node, Any], index: Node = index, allowed: IntegerRange = allowed, ignored: Any = ignored
        ) -> Any:
            value = values[index]
            bad = (value < allowed.low) | (value > allowed.high)
            return _largest(value, bad if ignored is None else bad & (value != ignored))

        text = f"an index of {_name(node)}{where(node)} is out of range: expected {allowed.low} to {allowed.high}, got "
        yield NodeGuard(node, text, worst)


def _indices(node: Node) -> Iterator[tuple[Any, IntegerRange, int | None]]:
    """Yield (indices, allowed range, ignored index) of an operation that addresses by indices."""
    args: Any = node.args
    target: Any = node.target
    if target is torch.ops.panax.within.default:
        yield args[0], IntegerRange(args[1], args[2]), None
    packet = getattr(target, "overloadpacket", None)
    if packet in (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only):
        yield args[1], IntegerRange(0, _shape(args[0])[0] - 1), None
    elif packet in (aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put):
        dim = 0
        for index in args[1]:
            if index is not None and index.meta["val"].dtype == torch.bool:
                dim += index.meta["val"].ndim
                continue
            size = _shape(args[0])[dim]
            dim += 1
            yield index, IntegerRange(-size, size - 1), None
    elif packet in _ALONG and _shape(args[0]):
        size = _shape(args[0])[args[1]]
        yield args[2], IntegerRange(-size if packet is aten.index_fill else 0, size - 1), None
    elif packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
        shape = _shape(args[0])
        yield args[1], IntegerRange(0, shape[1 if len(shape) > 1 else 0] - 1), args[4]


_ALONG = {
    aten.index_select, aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.index_copy,
    aten.index_fill,
}  # fmt: skip


def _of_divisors(node: Node, ranges: RangeAnalysis, where: Callable[[Node], str]) -> Iterator[NodeGuard]:
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in (aten.div, aten.floor_divide, aten.remainder, aten.fmod) or not _is_integer(node):
        return
    divisor: Any = node.args[1]
    if isinstance(divisor, Node) and not ranges.of(divisor).excludes_zero:
        text = f"{_name(node)}{where(node)} divides an integer by "
        yield NodeGuard(node, text, lambda values: _largest(values[divisor], values[divisor] == 0))


def _of_sums(node: Node, ranges: RangeAnalysis, where: Callable[[Node], str]) -> Iterator[NodeGuard]:
    value = node.meta.get("val")
    if getattr(value, "dtype", None) != torch.int64 or node.target not in LOWERINGS or not ranges.may_overflow(node):
        return
    if getattr(node.target, "overloadpacket", None) is aten._to_copy:
        source = cast(Node, node.args[0])

        def worst(values: Mapping[Node, Any]) -> Any:
            return _too_large(values[source].astype(jnp.float32))
    else:
        packet: Any = getattr(node.target, "overloadpacket", None)

        def worst(values: Mapping[Node, Any]) -> Any:
            if packet in _SHIFTS:
                x, by = (values[each] if isinstance(each, Node) else each for each in node.args)
                return _wrapped(jnp.asarray(x, jnp.float32) * jnp.exp2(jnp.asarray(by, jnp.float32)), values[node])
            numbers = ACCUMULATING_OPS.get(packet)
            arguments = [
                map_arg(each, lambda n, i=i: _floating(values[n]) if numbers is None or i in numbers else values[n])
                for i, each in enumerate(node.args)
            ]
            keywords = map_arg(node.kwargs, lambda n: _floating(values[n]))
            out = OutputSpec(tuple(cast(Any, value).shape), jnp.float32, functools.partial(jax.random.key, 0))
            result = LOWERINGS[node.target](out, *cast(Any, arguments), **cast(Any, keywords))
            return _wrapped(jnp.asarray(result), values[node])

    text = f"{_name(node)}{where(node)} makes an integer of 64 bits that 32 bits, as JAX computes, can't hold: expected at most "
    yield NodeGuard(node, text + f"{INT32_MAX}, got ", worst)


_SHIFTS = (aten.bitwise_left_shift, aten.__lshift__)


def _of_matrices(node: Node, where: Callable[[Node], str]) -> Iterator[NodeGuard]:
    """Yield a check for factorizations that raise in PyTorch; a model that reads `info` handles failures."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _FACTORS:
        return
    read = {user for part in node.users if part.args[1:] == (1,) for user in part.users}
    if any(user.target is not aten._linalg_check_errors.default for user in read):
        return

    def worst(values: Mapping[Node, Any]) -> Any:
        source, factor = values[cast(Node, node.args[0])], values[node][0]
        failed = jnp.isfinite(source).all((-2, -1)) & ~jnp.isfinite(factor).all((-2, -1))
        return jnp.where(failed.any(), failed.sum().astype(jnp.float32), NO_FAULT)

    text = (
        f"{_name(node)}{where(node)} is given matrices that are not {_FACTORS[packet]}, for which PyTorch raises an error, and "
        f"the model may take another way; how many of the batch's: "
    )
    yield NodeGuard(node, text, worst)


_FACTORS = {
    aten.linalg_cholesky_ex: "positive definite",
    aten.linalg_inv_ex: "invertible",
}

MAX_EXACT_INTEGER = 2**24
"""Largest integer up to which all are exact in float32."""


def _of_casts(node: Node, ranges: RangeAnalysis, where: Callable[[Node], str]) -> Iterator[NodeGuard]:
    """Yield a check for integers cast to float64, which holds values that float32 does not."""
    source: Any = node.args[0] if node.args else None
    if getattr(node.target, "overloadpacket", None) is not aten._to_copy or not is_double(node):
        return
    if (
        not _is_integer(source)
        or ranges.of(source).is_within(IntegerRange(-MAX_EXACT_INTEGER, MAX_EXACT_INTEGER))
        or not computes_in_double(node)
    ):
        return
    text = f"{_name(node)}{where(node)} makes a float64 of an integer, {_DOUBLE}"
    yield NodeGuard(node, text, lambda values: _largest(values[source], jnp.abs(values[source]) > MAX_EXACT_INTEGER))


_DOUBLE = (
    f"and float64 is computed in float32 here, with exact integers up to {MAX_EXACT_INTEGER}: subtract an offset in "
    f"the data, or cast to float32 first if that is enough; got "
)


def build_double_guards(inputs: Mapping[str, Node], *, of_batch: bool) -> Iterator[NodeGuard]:
    """Yield checks for float64 inputs too large for float32 to resolve, if the model computes with them.

    Args:
        inputs: Leaves of the batch, or buffers that the forward writes, by name.
    """
    for name, node in inputs.items():
        if is_double(node) and computes_in_double(node):

            def worst(values: Mapping[Node, Any], node: Node = node) -> Any:
                size = jnp.abs(values[node])
                return _largest(values[node], (size >= MAX_EXACT_INTEGER) & jnp.isfinite(size))

            what = f"batch[{name!r}]" if of_batch else f"the buffer {name}"
            yield NodeGuard(node, f"{what} is float64, {_DOUBLE}", worst)


def computes_in_double(node: Node) -> bool:
    """Return True if a float64 value is used for more than a cast to fewer bits."""
    for user in node.users:
        packet = getattr(user.target, "overloadpacket", None)
        if packet in _MOVING and is_double(user):
            if computes_in_double(user):
                return True
        elif user.op == "call_function" and not (packet is aten._to_copy and not is_double(user)):
            return True
    return False


_MOVING = {
    getattr(aten, name)
    for name in (
        "view", "view_copy", "expand", "expand_copy", "unsqueeze", "unsqueeze_copy", "squeeze", "squeeze_copy", "slice",
        "slice_copy", "select", "select_copy", "permute", "permute_copy", "transpose", "transpose_copy", "clone", "alias",
        "alias_copy", "detach", "detach_copy", "t", "t_copy", "_unsafe_view",
    )
}  # fmt: skip


def is_double(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in (torch.float64, torch.complex128)


def _floating(value: Any) -> Any:
    return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def _too_large(value: jax.Array) -> jax.Array:
    return _largest(value, jnp.abs(value) > INT32_MAX * (1 - 1e-6))


def _wrapped(value: jax.Array, integer: jax.Array) -> jax.Array:
    """Return the worst integer that differs from the float32 result, and is thus off by 2 ** 32 or more.

    An integer at the limit that has not wrapped is not a fault: models cast minus infinity, which yields the smallest
    integer, and discard it by a later select.
    """
    return _largest(value, jnp.abs(value - integer.astype(jnp.float32)) > 2.0**30)


def _largest(value: jax.Array, bad: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(bad, value.astype(jnp.float32), NO_FAULT), initial=NO_FAULT)


def _refuse_large_numbers(node: Node, where: Callable[[Node], str]) -> None:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.slice, aten.slice_copy, aten.slice_scatter, aten.clamp, aten.clamp_min, aten.clamp_max):
        return
    inputs = [*node.all_input_nodes, node]
    if not all(_is_integer(each) or _is_truth(each) for each in inputs):
        return
    for each in (*node.args, *node.kwargs.values()):
        if isinstance(each, int) and abs(each) > INT32_MAX:
            raise RecipeError(
                f"{_name(node)}{where(node)} uses the number {each}, and integers have 32 bits here, up to {INT32_MAX}; use "
                f"smaller numbers, or take what needs them (a hash of ids) when the data is prepared"
            )


def _is_integer(node: Node) -> bool:
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _is_truth(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).replace("aten.", "torch's ")
