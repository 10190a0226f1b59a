"""The canonical hash of a traced program: equal for programs that compute the same values by the same operations.

A value's label is a hash of the operation that makes it, its parameters, and the labels of its operands; a program's hash is
that of all its operations, sorted, and of its results. So the names of variables, the order of independent operations and the
order of the leaves that a loop or a device's program is given don't count. Calls are read as what they call. What counts:
every operation that a result depends on, its dtype and shape, the values of constants, the order of operands, loops with
their lengths, rematerialization, and where each value is stored and which are donated.

Two values that a loop starts with alike get the same label at first; what an iteration makes of them then distinguishes them,
repeated until it distinguishes no more (the refinement of Weisfeiler and Leman).
"""

import dataclasses
import enum
import hashlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from panax.core import jax_primitives as primitives

INDEPENDENT = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pvary", "pcast", "optimization_barrier"}
)
"""Operations on any number of operands, each of which gives a result; their order does not count."""

CARRIED_BY_LOOPS = frozenset({"jaxpr", "linear", "num_consts", "num_carry", "cond_jaxpr", "body_jaxpr", "cond_nconsts"})
OF_BRANCHES = frozenset({"branches"})
OF_SHARD_MAP = frozenset({"jaxpr", "in_specs", "out_specs", "mesh", "debug_info", "newly_manual_axes"})
WITHOUT_MEANING = frozenset({"name_and_src_info", "debug_info", "debug", "body_nconsts", "label"})
"""Parameters that are read otherwise, or that record where a program comes from or how an error would name a value."""


def digest(*parts: str | bytes) -> str:
    """Hash parts, each with its length."""
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def hash_traced(traced: Any, *, state_argument: int | None = 0, shardings: Any = None) -> str:
    """Hash a traced function.

    A leaf of an argument or result is named by its path if it is a parameter, or of a plain dictionary (a batch, metrics).
    Any other leaf of the state is known by its shape, its sharding and its use, so that it may move within the state.

    Args:
        state_argument: Position of the argument that is a training state; None if there is none.
        shardings: Shardings of the first results, if the function has any.
    """
    arguments, _ = jax.tree_util.tree_flatten_with_path(traced.args_info)
    results, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    given = [digest("argument", _name(path), str(info.donated)) for path, info in arguments]
    program = primitives.ClosedJaxpr(primitives.eliminate_dead_code(traced.jaxpr), traced.jaxpr.consts)
    avals = [variable.aval for variable in program.jaxpr.invars]
    given = [digest(label, describe_aval(aval)) for label, aval in zip(given, avals, strict=True)]
    stored = [describe(each) for each in jax.tree.leaves(shardings)]
    stored += [""] * (len(results) - len(stored))
    returned = [digest("result", _name(path), where) for (path, _), where in zip(results, stored, strict=True)]
    state = _carried(arguments, results, avals, state_argument)

    def step(labels: Sequence[str], bag: list[str] | None) -> list[str]:
        return _Walk(bag).program(program, labels, "")

    bag: list[str] = []
    labels = _refine(given, state, step)
    made = step(labels, bag)
    before = {result: labels[argument] for argument, result in state.items()}
    bag += [digest(name, before.get(i, ""), label) for i, (name, label) in enumerate(zip(returned, made, strict=True))]
    return digest(*sorted(bag))


def hash_program(program: Any) -> str:
    """Hash a program with its arguments and results in their order.

    >>> def hashed(function):
    ...     return hash_program(jax.make_jaxpr(function)(1.0, 2.0))
    >>> hashed(lambda x, y: (x + 1) * (y + 2)) == hashed(lambda a, b: (c := b + 2, (a + 1) * c)[1])
    True
    """
    bag: list[str] = []
    inputs = [
        digest("input", str(i), describe_aval(v.aval)) for i, v in enumerate(primitives.open_jaxpr(program).invars)
    ]
    return digest(*_Walk(bag).program(program, inputs, ""), "operations", *sorted(bag))


def _name(path: Sequence[Any]) -> str:
    """The path by which a leaf is known, whatever else a state holds; empty for a leaf that may move within the state."""
    attributes = [i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)]
    if not attributes:
        return jax.tree_util.keystr(tuple(path))
    first = attributes[0]
    return jax.tree_util.keystr(tuple(path[first:])) if path[first].name == "params" else ""


def _carried(arguments: Any, results: Any, avals: Any, state_argument: int | None) -> dict[int, int]:
    """Leaves of the state that the function returns under the same path: position of the argument to that of the result."""
    if state_argument is None:
        return {}
    made = {jax.tree_util.keystr(path): (i, info) for i, (path, info) in enumerate(results)}
    pairs = {}
    for i, (path, _) in enumerate(arguments):
        own = path[2:] if [getattr(key, "idx", None) for key in path[:2]] == [0, state_argument] else None
        # Of a step, which returns (state, metrics), or of a function of the state alone.
        for form in () if own is None else ((jax.tree_util.SequenceKey(0), *own), own):
            found = made.get(jax.tree_util.keystr(form))
            if found is not None and (found[1].shape, found[1].dtype) == (avals[i].shape, avals[i].dtype):
                pairs[i] = found[0]
                break
    return pairs


def _refine(
    labels: Sequence[str],
    carried: Mapping[int, int],
    iterate: Callable[[Sequence[str], list[str] | None], list[str]],
) -> list[str]:
    """Distinguish carried values with the same label by the results of an iteration.

    Args:
        carried: Position of an input to that of the result that replaces it.
    """
    labels = list(labels)
    while len({labels[i] for i in carried}) < len(carried):
        made = iterate(labels, None)
        finer = [digest(labels[i], made[carried[i]]) if i in carried else labels[i] for i in range(len(labels))]
        if len(set(finer)) == len(set(labels)):
            break
        labels = finer
    return labels


class _Walk:
    """One pass over a program, which labels each value.

    Attributes:
        bag: Receives a hash of each operation; None to label values only.
    """

    def __init__(self, bag: list[str] | None):
        self.bag = bag
        self.token = "start"

    def program(self, program: Any, inputs: Sequence[str], context: str) -> list[str]:
        """Label the results of a program from the labels of its inputs."""
        jaxpr = primitives.open_jaxpr(program)
        labels = dict(zip(jaxpr.invars, inputs, strict=True))
        labels |= {variable: describe(value) for variable, value in primitives.read_constants(program)}

        def read(variable: Any) -> str:
            if isinstance(variable, primitives.Literal):
                return digest("literal", describe_aval(variable.aval), describe(variable.val))
            return labels[variable]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(variable) for variable in equation.invars], context)
            labels.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[str], context: str) -> list[str]:
        name = equation.primitive.name
        if primitives.is_shard_map(equation):
            return self.shard_map(equation, operands, context)
        if name == "scan":
            return self.scan(equation, operands, context)
        if name == "while":
            return self.while_loop(equation, operands, context)
        if name == "cond":
            return self.cond(equation, operands, context)
        called = primitives.called_program(equation)
        if called is not None:
            if name in primitives.REMATERIALIZED:
                context = digest(context, name, _parameters(equation, {"jaxpr"}))
            return self.program(called, operands, context)
        return self.operation(equation, operands, context)

    def operation(self, equation: Any, operands: list[str], context: str) -> list[str]:
        """Label the results of an operation that runs no other program, or one that is read as a parameter."""
        name, avals = equation.primitive.name, [describe_aval(variable.aval) for variable in equation.outvars]
        independent = name in INDEPENDENT and len(operands) == len(avals)
        order = sorted(operands) if independent else operands
        effects = primitives.has_side_effects(equation)
        made = digest(context, name, _parameters(equation), *order, *(sorted(avals) if independent else avals))
        if effects:
            # It stays after those before it.
            self.token = made = digest(made, self.token)
        self.note(made)
        if independent:
            return [digest(made, operand) for operand in operands]
        return [digest(made, str(i)) for i in range(len(avals))]

    def shard_map(self, equation: Any, operands: list[str], context: str) -> list[str]:
        read = primitives.read_shard_map(equation)
        inner = digest(context, "shard_map", describe(dict(read.sizes)), _parameters(equation, OF_SHARD_MAP))
        inputs = [digest("shard", describe(spec), label) for spec, label in zip(read.in_specs, operands, strict=True)]
        results = self.program(primitives.read_parameter(equation, "jaxpr"), inputs, inner)
        return [digest("whole", describe(spec), label) for spec, label in zip(read.out_specs, results, strict=True)]

    def scan(self, equation: Any, operands: list[str], context: str) -> list[str]:
        consts, carry = primitives.scan_arity(equation)
        inner = digest(context, "scan", _parameters(equation, CARRIED_BY_LOOPS))
        body = primitives.read_parameter(equation, "jaxpr")
        inputs = [
            *operands[:consts],
            *(digest("carried", label) for label in operands[consts : consts + carry]),
            *(digest("scanned", label) for label in operands[consts + carry :]),
        ]
        positions = {consts + i: i for i in range(carry)}
        inputs, made = self.loop(inputs, positions, lambda walk, labels: walk.program(body, labels, inner))
        started = inputs[consts : consts + carry]
        for begin, end in zip(started, made):
            self.note(digest(inner, "carry", begin, end))
        final = [digest(inner, "last", begin, end) for begin, end in zip(started, made)]
        return final + [digest(inner, "stacked", label) for label in made[carry:]]

    def while_loop(self, equation: Any, operands: list[str], context: str) -> list[str]:
        condition, consts = primitives.while_arity(equation)
        inner = digest(context, "while", _parameters(equation, CARRIED_BY_LOOPS))
        body, test = (primitives.read_parameter(equation, name) for name in ("body_jaxpr", "cond_jaxpr"))
        of_test, rest = operands[:condition], operands[condition:]
        inputs = [*rest[:consts], *(digest("carried", label) for label in rest[consts:])]
        positions = {consts + i: i for i in range(len(inputs) - consts)}
        inputs, made = self.loop(inputs, positions, lambda walk, labels: walk.program(body, labels, inner))
        started = inputs[consts:]
        self.note(digest(inner, "runs", *self.program(test, [*of_test, *started], digest(inner, "test"))))
        for begin, end in zip(started, made):
            self.note(digest(inner, "carry", begin, end))
        return [digest(inner, "last", begin, end) for begin, end in zip(started, made)]

    def loop(
        self, inputs: list[str], carried: Mapping[int, int], body: Callable[["_Walk", Sequence[str]], list[str]]
    ) -> tuple[list[str], list[str]]:
        """Return the refined labels of a loop's inputs, and those that one iteration makes of them."""

        def iterate(labels: Sequence[str], bag: list[str] | None) -> list[str]:
            walk = _Walk(bag)
            walk.token = self.token
            return body(walk, labels)

        inputs = _refine(inputs, carried, iterate)
        return inputs, body(self, inputs)

    def cond(self, equation: Any, operands: list[str], context: str) -> list[str]:
        which, *given = operands
        inner = digest(context, "cond", which, _parameters(equation, OF_BRANCHES))
        branches = [
            self.program(branch, given, digest(inner, str(i)))
            for i, branch in enumerate(primitives.read_parameter(equation, "branches"))
        ]
        results = [digest(inner, *choices) for choices in zip(*branches, strict=True)]
        for result in results:
            self.note(result)
        return results

    def note(self, made: str) -> None:
        if self.bag is not None:
            self.bag.append(made)


def _parameters(equation: Any, without: Iterable[str] = ()) -> str:
    """A text of an equation's parameters."""
    kept = sorted(equation.params.keys() - WITHOUT_MEANING - set(without))
    return ";".join(f"{name}={describe(equation.params[name])}" for name in kept)


def describe_aval(aval: Any) -> str:
    """A text of the type of a value."""
    if not hasattr(aval, "dtype"):
        return type(aval).__name__
    varying = sorted(map(str, getattr(aval, "vma", ())))
    weak = "~" if getattr(aval, "weak_type", False) else ""
    inner = f" of {describe_aval(aval.inner_aval)}" if hasattr(aval, "inner_aval") else ""
    return f"{aval.dtype}{list(aval.shape)}{weak}{varying}{inner}"


def describe(value: Any) -> str:
    """A text of a parameter, the same in every process: nothing of objects' ids, of sets' order or of places in files.

    A function is only "function": its operations are in the program.
    """
    if value is None or isinstance(value, bool | int | str | bytes | complex):
        return repr(value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key {describe(jax.random.key_data(value))}"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} {digest(np.ascontiguousarray(array).tobytes())}"
    if isinstance(value, primitives.ClosedJaxpr | primitives.Jaxpr):
        return hash_program(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return str(np.dtype(value))
    if isinstance(value, NamedSharding):
        return f"sharding({describe(value.mesh)}, {describe(value.spec)}, {value.memory_kind})"
    if isinstance(value, PartitionSpec):
        return f"spec{describe(tuple(value))}"
    if isinstance(value, Mesh | AbstractMesh):
        return f"mesh({describe(dict(value.shape))}, {[str(kind) for kind in value.axis_types or ()]})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{describe(key)}: {describe(entry)}" for key, entry in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, tuple | list):
        kind = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{kind}({', '.join(map(describe, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe_aval(value)
    if isinstance(value, types.FunctionType | types.MethodType) or callable(value):
        return "function"
    return type(value).__name__
