"""Programs are read the same way on every JAX of the range, and no other module reads a primitive's parameters."""

import ast
import re
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import panax
from panax.core import jax_primitives
from panax.core.jax_primitives import (
    ScanArity,
    UnknownForm,
    WhileArity,
    called_jaxpr,
    scan_arity,
    scan_length,
    while_arity,
)
from panax.plan.walk.operations import measure_work
from panax.plan.walk.program import read_program

SOURCES = sorted(Path(panax.__file__).parent.rglob("*.py"))
X = jnp.arange(12.0).reshape(3, 4)


def equation_of(name, function, *arguments):
    """The only equation of a traced function with a primitive of this name."""
    (found,) = [each for each in jax.make_jaxpr(function)(*arguments).eqns if each.primitive.name == name]
    return found


SCANS = {
    "constants, a carry and rows": (
        lambda x: lax.scan(lambda c, row: (c + row.sum() + x.sum(), row * 2), 0.0, x),
        ScanArity(1, 1),
    ),
    "rows only": (lambda x: lax.scan(lambda c, row: (c, row * 2), (), x), ScanArity(0, 0)),
    "a carry only": (lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=5), ScanArity(0, 1)),
    "a carry and what is stacked, without rows": (
        lambda x: lax.scan(lambda c, _: ((c[0] + x[0], c[1] * 2), c[0].sum()), (x[0], 1.0), None, length=5),
        ScanArity(1, 2),
    ),
    "no turn": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x[:0]), ScanArity(0, 1)),
    "keys": (
        lambda x: lax.scan(lambda key, row: (jax.random.split(key)[0], row), jax.random.key(0), x),
        ScanArity(0, 1),
    ),
    "backwards, with a gradient": (
        jax.grad(lambda x: lax.scan(lambda c, row: (c * row.sum(), c), 1.0, x, reverse=True)[1].sum()),
        None,
    ),
}


@pytest.mark.parametrize("name", SCANS)
def test_operands_of_a_scan_are_counted_from_its_shapes(name):
    function, wanted = SCANS[name]
    scans = [each for each in jax.make_jaxpr(function)(X).eqns if each.primitive.name == "scan"]
    assert scans
    for scan in scans:
        consts, carry = used_names = scan_arity(scan)
        if "num_consts" in scan.params:
            assert used_names == (scan.params["num_consts"], scan.params["num_carry"])
        carried = zip(scan.invars[consts : consts + carry], scan.outvars[:carry])
        assert all(a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype for a, b in carried)
        for row in (*scan.invars[consts + carry :], *scan.outvars[carry:]):
            assert row.aval.shape[0] == scan_length(scan)
        assert wanted in (None, used_names)


def test_operands_of_a_while_are_counted_from_its_programs():
    loop = equation_of(
        "while", lambda x, y: lax.while_loop(lambda c: c[0] < y, lambda c: (c[0] + x, c[1] * x + y), (x, y)), 1.0, 9.0
    )
    found = while_arity(loop)
    assert found == WhileArity(1, 2) == (loop.params["cond_nconsts"], loop.params["body_nconsts"])


def test_an_unknown_form_names_the_version_and_the_primitive():
    body = jax.make_jaxpr(lambda x: x)(1.0)
    scan = SimpleNamespace(
        primitive=SimpleNamespace(name="scan"), params={"program": body}, invars=body.jaxpr.invars, outvars=[]
    )
    with pytest.raises(UnknownForm, match=rf"jax {re.escape(jax.__version__)}: the primitive 'scan' has no parameter"):
        scan_arity(scan)
    scan.params = {"jaxpr": body}
    with pytest.raises(UnknownForm, match=r"'scan' has no body with last inputs .* parameters: jaxpr"):
        scan_arity(scan)
    with pytest.raises(UnknownForm, match="no parameter 'axes' or parameter 'axis_name'"):
        jax_primitives.collective_axes(scan)


def names_in(program, found=None):
    """The primitives of a program, those that it calls included."""
    found = set() if found is None else found
    for equation in program.eqns:
        found.add(equation.primitive.name)
        called = called_jaxpr(equation)
        if called is not None:
            names_in(called, found)
    return found


def test_an_expanded_primitive_is_read_as_what_it_expands_into():
    # Itself a primitive from jax 0.12 on, and a scan before.
    found = names_in(jax.make_jaxpr(lambda x, y: jnp.searchsorted(x, y))(X[0], X).jaxpr)
    assert "scan" in found


def test_products_inside_of_an_expanded_primitive_are_counted():
    hijax = pytest.importorskip("jax.experimental.hijax")
    base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

    class Product(base):
        def __init__(self, left, right):
            self.in_avals = (left, right)
            self.out_aval = left.update(shape=(left.shape[0], right.shape[1]))
            self.params = {}
            super().__init__()

        def expand(self, left, right):
            return left @ right

    def product(left, right):
        return Product(jax.typeof(left), jax.typeof(right))(left, right)

    program = jax.make_jaxpr(product)(X, X.T)
    assert [each.primitive.name for each in program.eqns] == ["call_hi_primitive"]
    assert measure_work(read_program(program)).flops == 2 * 3 * 4 * 3
    (call,) = program.eqns
    assert called_jaxpr(call) is called_jaxpr(call)


def test_only_one_module_reads_parameters_of_primitives():
    reads = re.compile(r"\b(eqn|equation)\.params\[|\b(eqn|equation)\.params\.get|operation\.params[\[.]")
    registers = re.compile(r"^\s*(from|import) jax\.(interpreters|extend\.core)", re.MULTILINE)
    for path in SOURCES:
        if path.name != "jax_primitives.py":
            text = path.read_text(encoding="utf-8")
            assert not reads.search(text) and not registers.search(text), path


def chains_in(tree):
    """Names of JAX in a module: what it imports from there, and each dotted name that begins with such an import."""
    modules, used_names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "jax":
                    used_names.add(name.name)
                    modules[name.asname or "jax"] = name.name if name.asname else "jax"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "jax":
            for name in node.names:
                used_names.add(f"{node.module}.{name.name}")
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name) and at.id in modules:
            used_names.add(".".join([modules[at.id], *reversed(parts)]))
    return used_names


# Not resolved: Pallas kernels that are imported on their hardware alone, and private names, which `jax_internals.py` looks for.
LEFT_OUT = ("jax.experimental.pallas.ops", "jax._src")


def resolve(name):
    """Import and get a dotted name, as far as it names modules, and types or functions in them."""
    parts = name.split(".")
    value, at = import_module(parts[0]), 1
    while at < len(parts) and not isinstance(value, type) and not callable(value):
        # A module below another is an attribute of it once it was imported.
        there = hasattr(value, parts[at])
        value = getattr(value, parts[at]) if there else import_module(".".join(parts[: at + 1]))
        at += 1


@pytest.mark.filterwarnings("error")
def test_every_name_of_jax_that_is_used_is_there_and_is_not_deprecated():
    names = set().union(*(chains_in(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES))
    assert len(names) > 200
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in sorted(names):
            if not name.startswith(LEFT_OUT):
                try:
                    resolve(name)
                except (ImportError, AttributeError, Warning) as error:
                    wrong[name] = str(error)
    assert not wrong
