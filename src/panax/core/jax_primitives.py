"""Reading and definition of JAX primitives: the only module that depends on their parameter names. Written
against jax 0.10.2 and 0.12.0.

A traced program is a list of equations, each with a primitive and its parameters. JAX changes names and forms
of parameters without notice (the counts of a `scan` were removed in 0.12), so all other code calls the
functions below. A value that follows from the shapes in the program is derived from these. An unknown form
raises `UnknownForm`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_partitioning": "call",
}
"""Primitives that only call a program, and the parameter that holds it."""

_EXPANDED = "call_hi_primitive"
"""A primitive that is expanded into others when lowered; `jnp.searchsorted` is one from jax 0.12 on."""

REMATERIALIZED = frozenset({"remat2", "checkpoint"})
"""Calls that recompute their program in the backward pass."""


class UnknownForm(RuntimeError):
    """A primitive's parameters aren't in a form that this module reads."""

    def __init__(self, equation: Any, wanted: str):
        held = ", ".join(sorted(equation.params)) or "none"
        super().__init__(
            f"jax {jax.__version__}: the primitive '{equation.primitive.name}' has no {wanted} (its parameters: {held}); "
            f"this Panax reads the programs of jax 0.10.2 to 0.12: install one of these"
        )


def read_parameter(equation: Any, *names: str) -> Any:
    """Return the parameter of an equation that has one of these names.

    Raises:
        UnknownForm: None of the names is present.
    """
    for name in names:
        if name in equation.params:
            return equation.params[name]
    raise UnknownForm(equation, " or ".join(f"parameter '{name}'" for name in names))


# Programs and calls


def open_jaxpr(program: Any) -> Jaxpr:
    """Return the program without its constants; from jax 0.12 on a jaxpr holds them itself."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def eliminate_dead_code(program: ClosedJaxpr) -> Jaxpr:
    """Return the program without the equations that no result depends on, and with all of its inputs."""
    jaxpr = open_jaxpr(program)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def read_constants(program: Any) -> list[tuple[Any, Any]]:
    """Return the constants that a program holds: each variable with its array.

    Raises:
        ValueError: The program is open: it has variables for constants, and the arrays are elsewhere.

    >>> table = jax.numpy.array([3.0, 4.0])
    >>> [(_, value)] = read_constants(jax.make_jaxpr(lambda i: table[i])(0))
    >>> value.tolist()
    [3.0, 4.0]
    """
    variables, values = open_jaxpr(program).constvars, getattr(program, "consts", ())
    if len(variables) != len(values):
        raise ValueError(f"the program has {len(variables)} constants and holds the arrays of {len(values)}")
    return list(zip(variables, values))


def called_program(equation: Any) -> Any:
    """Return the program that a call, custom derivative or rematerialization runs, with its constants if it
    holds any; None for any other primitive."""
    name = equation.primitive.name
    if name in _CALLS:
        return read_parameter(equation, _CALLS[name])
    if name == _EXPANDED:
        return _expand(equation)
    return None


def called_jaxpr(equation: Any) -> Jaxpr | None:
    """Return the program of `called_program` without its constants.

    >>> called = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
    >>> [inner.primitive.name for inner in called_jaxpr(called.eqns[0]).eqns]
    ['add']
    """
    program = called_program(equation)
    return None if program is None else open_jaxpr(program)


def has_side_effects(equation: Any) -> bool:
    """Return True if an equation does more than compute its results: it calls the host, or reads or writes a
    reference. Using a mesh axis has no side effect.

    >>> [has_side_effects(each) for each in jax.make_jaxpr(lambda x: jax.debug.print("{}", x + 1))(1.0).eqns]
    [False, True]
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def _expand(equation: Any) -> Jaxpr:
    """Trace the expansion of a primitive."""
    operation = read_parameter(equation, "_prim")
    if not all(hasattr(operation, name) for name in ("expand", "in_tree", "out_tree")):
        raise UnknownForm(equation, f"`expand`, `in_tree` and `out_tree` in its '{type(operation).__name__}'")
    avals = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in equation.invars
    )
    try:
        return _traced(operation, avals)
    except TypeError:  # Parameters that can't be hashed.
        return _traced.__wrapped__(operation, avals)


@functools.lru_cache(maxsize=1024)
def _traced(operation: Any, avals: tuple[jax.ShapeDtypeStruct, ...]) -> Jaxpr:
    def expanded(*arrays: jax.Array) -> Any:
        results = operation.expand(*jax.tree_util.tree_unflatten(operation.in_tree, arrays))
        return operation.out_tree.flatten_up_to(results)

    return open_jaxpr(jax.make_jaxpr(expanded)(*avals))


class ShardMap(NamedTuple):
    """A `shard_map`: the program that each device runs.

    Attributes:
        jaxpr: The program, with the shapes of one device.
        sizes: Mesh axis to size.
        in_specs: For each operand, the mesh axes of its dimensions.
        out_specs: The same for each result.
    """

    jaxpr: Jaxpr
    sizes: Mapping[str, int]
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]


def is_shard_map(equation: Any) -> bool:
    """Return True if the primitive is `shard_map`."""
    return equation.primitive.name == "shard_map"


def read_shard_map(equation: Any) -> ShardMap:
    """Read a `shard_map`."""
    return ShardMap(
        open_jaxpr(read_parameter(equation, "jaxpr")),
        read_parameter(equation, "mesh").shape,
        read_parameter(equation, "in_specs"),
        read_parameter(equation, "out_specs"),
    )


def shard_map_mesh(equation: Any) -> tuple[Any, frozenset[str]]:
    """Return the mesh of a `shard_map`, and the axes over which its program is of one device."""
    return read_parameter(equation, "mesh"), frozenset(read_parameter(equation, "newly_manual_axes", "manual_axes"))


# Loops and branches


class ScanArity(NamedTuple):
    """Division of the operands of a `scan`, also the inputs of its body; the scanned arrays come last.

    Attributes:
        consts: Number of operands that every iteration reads.
        carry: Number of operands that every iteration replaces; they are also the first results.
    """

    consts: int
    carry: int


def scan_body(equation: Any) -> Jaxpr:
    """Return the program of one iteration of a `scan`."""
    return open_jaxpr(read_parameter(equation, "jaxpr"))


def scan_length(equation: Any) -> int:
    """Return the number of iterations of a `scan`."""
    return read_parameter(equation, "length")


def scan_arity(equation: Any) -> ScanArity:
    """Count a scan's constants and carry from shapes: a scanned array has one more dimension outside of the
    body.

    >>> def total(x):
    ...     return jax.lax.scan(lambda carry, row: (carry + row, row), 0.0, x)
    >>> scan_arity(jax.make_jaxpr(total)(jax.numpy.ones(3)).eqns[-1])
    ScanArity(consts=0, carry=1)
    """
    body = scan_body(equation)
    operands, results = len(equation.invars), len(equation.outvars)
    scanned = _extra_dimensions(equation, equation.invars, body.invars)
    stacked = _extra_dimensions(equation, equation.outvars, body.outvars)
    carry = results - stacked
    consts = operands - scanned - carry
    if consts < 0:
        raise UnknownForm(equation, f"operands for the {carry} arrays that it carries")
    return ScanArity(consts, carry)


def _extra_dimensions(equation: Any, outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Count the trailing arrays that have one dimension less inside a loop's body."""
    ranks = [_rank(a) - _rank(b) for a, b in zip(outside, inside)]
    count = sum(ranks)
    if len(outside) != len(inside) or ranks != [0] * (len(ranks) - count) + [1] * count:
        raise UnknownForm(equation, "body with last inputs and results of one dimension less than its operands")
    return count


def _rank(variable: Any) -> int:
    return len(getattr(variable.aval, "shape", ()))


class ScanOrder(NamedTuple):
    """How a `scan` runs.

    Attributes:
        reverse: True if it begins with the last element.
        unroll: Number of iterations in one iteration of the compiled loop.
    """

    reverse: bool
    unroll: int


def scan_order(equation: Any) -> ScanOrder:
    """Return how a `scan` runs."""
    return ScanOrder(bool(read_parameter(equation, "reverse")), read_parameter(equation, "unroll"))


class WhileArity(NamedTuple):
    """How the operands of a `while` are divided.

    Attributes:
        cond_consts: Number of leading operands that the condition reads.
        body_consts: Number of operands after these that the body reads; the remaining ones are carried.
    """

    cond_consts: int
    body_consts: int


def while_condition(equation: Any) -> Jaxpr:
    """Return the program that decides whether a `while` runs another iteration."""
    return open_jaxpr(read_parameter(equation, "cond_jaxpr"))


def while_body(equation: Any) -> Jaxpr:
    """Return the program of one iteration of a `while`."""
    return open_jaxpr(read_parameter(equation, "body_jaxpr"))


def while_arity(equation: Any) -> WhileArity:
    """Count the constants of a loop's condition and of its body.

    >>> def double(x, limit):
    ...     return jax.lax.while_loop(lambda y: y < limit, lambda y: y + x, x)
    >>> while_arity(jax.make_jaxpr(double)(1.0, 9.0).eqns[-1])
    WhileArity(cond_consts=1, body_consts=1)
    """
    carry = len(equation.outvars)
    first, second = (len(each.invars) - carry for each in (while_condition(equation), while_body(equation)))
    if min(first, second) < 0 or first + second + carry != len(equation.invars):
        raise UnknownForm(equation, f"operands for its condition, its body and the {carry} arrays that it carries")
    return WhileArity(first, second)


def cond_branches(equation: Any) -> tuple[Jaxpr, ...]:
    """Return the programs that a `cond` chooses from."""
    return tuple(map(open_jaxpr, read_parameter(equation, "branches")))


# Collectives


def collective_axes(equation: Any) -> tuple[str, ...]:
    """Return the mesh axes of a collective or an `axis_index`."""
    axes = read_parameter(equation, "axes", "axis_name")
    return tuple(axes) if isinstance(axes, tuple | list | frozenset) else (axes,)


def gathered_dim(equation: Any) -> int:
    """Return the dimension along which an `all_gather` concatenates or stacks."""
    return read_parameter(equation, "all_gather_dimension")


def is_tiled_gather(equation: Any) -> bool:
    """Return True if an `all_gather` concatenates along an existing dimension; otherwise it adds one."""
    return bool(read_parameter(equation, "tiled"))


def scattered_dim(equation: Any) -> int:
    """Return the dimension that a `reduce_scatter` divides among devices."""
    return read_parameter(equation, "scatter_dimension")


def exchanged_dims(equation: Any) -> tuple[int, int]:
    """Return the dimensions that an `all_to_all` splits, and that it concatenates along."""
    return read_parameter(equation, "split_axis"), read_parameter(equation, "concat_axis")


def permutation_pairs(equation: Any) -> Sequence[tuple[int, int]]:
    """Return the pairs of sender and receiver of a `ppermute`."""
    return read_parameter(equation, "perm")


# Operations on arrays


def contracted_dims(equation: Any) -> tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]:
    """Return ((contracted dims of the left, of the right), (batch dims of the left, of the right)) of a
    `dot_general`.
    """
    return read_parameter(equation, "dimension_numbers")


def dimension_numbers(equation: Any) -> Any:
    """Return the dimension numbers of a `gather`, a `scatter` or a convolution, with JAX's public fields."""
    return read_parameter(equation, "dimension_numbers")


def reduced_dims(equation: Any) -> Sequence[int]:
    """Return the dimensions that a reduction removes."""
    return read_parameter(equation, "axes")


def slice_sizes(equation: Any) -> Sequence[int]:
    """Return the shape of the slice that a `dynamic_slice` reads."""
    return read_parameter(equation, "slice_sizes")


def transposed_dims(equation: Any) -> Sequence[int]:
    """Return, for each dimension of a `transpose`'s result, the operand's dimension."""
    return read_parameter(equation, "permutation")


def broadcast_dims(equation: Any) -> Sequence[int]:
    """Return, for each dimension of a `broadcast_in_dim`'s operand, the result's dimension."""
    return read_parameter(equation, "broadcast_dimensions")


def squeezed_dims(equation: Any) -> Sequence[int]:
    """Return the dimensions of size 1 that a `squeeze` removes."""
    return read_parameter(equation, "dimensions")


def stacked_dim(equation: Any) -> int:
    """Return the dimension that a `stack` adds or an `unstack` removes."""
    return read_parameter(equation, "axis")


def converted_dtype(equation: Any) -> Any:
    """Return the result dtype of a `convert_element_type`."""
    return read_parameter(equation, "new_dtype")


def foreign_target(equation: Any) -> str:
    """Return the name of the foreign function that an `ffi_call` runs."""
    return str(read_parameter(equation, "target_name"))


class PallasKernel(NamedTuple):
    """A Pallas kernel.

    Attributes:
        jaxpr: The program of one grid point.
        grid: Size of the grid in each dimension.
        flops: FLOPs declared by its author, if any.
    """

    jaxpr: Jaxpr
    grid: Sequence[int]
    flops: float | None


def read_kernel(equation: Any) -> PallasKernel:
    """Read a `pallas_call`."""
    declared = read_parameter(equation, "cost_estimate")
    return PallasKernel(
        open_jaxpr(read_parameter(equation, "jaxpr")),
        read_parameter(equation, "grid_mapping").grid,
        None if declared is None else float(declared.flops),
    )


# Definition of primitives


def define_primitive(
    name: str,
    compute: Callable[..., Any],
    infer: Callable[..., Any],
    *,
    batch: Callable[..., Any],
    differentiate: Callable[..., Any] | None = None,
) -> Primitive:
    """Define a primitive with one result.

    Args:
        compute: The result as a JAX function of the operands, with the parameters as keywords.
        infer: The result's abstract value from the operands' abstract values.
        batch: (operands, batched dimension of each) to (result, its batched dimension), for `vmap`.
        differentiate: (operands, tangents) to (result, its tangent); None if it is not differentiable.
    """
    primitive = Primitive(name)
    primitive.def_impl(compute)
    primitive.def_abstract_eval(infer)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    batching.primitive_batchers[primitive] = batch
    if differentiate is not None:
        ad.primitive_jvps[primitive] = differentiate
    return primitive
