"""The chunked gated delta rule against its definition in float64."""

import doctest
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import Target
from panax.kernels.delta_rule import triangular
from panax.kernels.delta_rule.delta_rule import DeltaInputs, delta_rule, delta_rule_map
from panax.kernels.delta_rule.reference import reference_delta_rule
from panax.kernels.delta_rule.triangular import invert_unit_lower

CPU = Target("cpu")
BATCH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 6, 5, 4
TOLERANCE = 2e-6
"""Float32 against float64, as a part of a result's norm: a state is corrected some 70 times, each time by a product of
5 terms and one of at most 64, with a rounding of 6e-8 each; errors of either sign add up like a square root, and the
rule is a contraction, so that old ones fade: sqrt(70) * 3 * 6e-8. A lost term moves a result by far more than 1e-3."""
FULL = pytest.mark.full
NAMES = ("q", "k", "v", "log_decay", "beta", "state")

Arrays = dict[str, jax.Array]


def inputs(length: int, slowest: float = 0.01, fastest: float = 3.0) -> Arrays:
    """Unit keys of which neighbors are alike, decays between `exp(-fastest)` and `exp(-slowest)`, betas up to 1."""
    generator = np.random.default_rng(0)
    normal = lambda *shape: generator.normal(size=shape)  # noqa: E731
    k = normal(BATCH, length, KEY_HEADS, KEY_DIM) + 2.0 * normal(BATCH, 1, KEY_HEADS, KEY_DIM)
    rates = np.exp(generator.uniform(np.log(slowest), np.log(fastest), (BATCH, length, HEADS)))
    results = {
        "q": normal(BATCH, length, KEY_HEADS, KEY_DIM),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": normal(BATCH, length, HEADS, VALUE_DIM),
        "log_decay": -rates,
        "beta": generator.uniform(0.1, 1.0, (BATCH, length, HEADS)),
        "state": normal(BATCH, HEADS, KEY_DIM, VALUE_DIM),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in results.items()}


def documents(length: int) -> jax.Array:
    """Boundaries within chunks and between them, padding inside, at the end and the beginning of a row; and a row of one."""
    first = np.repeat([4, 5, 0, 4, 7, 0], [3, length // 2, 2, 5, length, 1])[: length - 2]
    second = np.repeat([0, 2, 3], [2, length // 3, length])[:length]
    return jnp.asarray([np.pad(first, (0, length - len(first))), second, [9] * length], jnp.int32)


def with_gradients(rule, arrays: Arrays, segments, dtype, *, begins: bool) -> dict[str, np.ndarray]:
    """Outputs, and the gradients of a sum of them with fixed random weights."""
    cast = {name: value.astype(dtype) for name, value in arrays.items()}
    names = NAMES if begins else NAMES[:-1]
    generator = np.random.default_rng(1)
    weights = [
        jnp.asarray(generator.normal(size=arrays[name].shape).astype(np.float32), dtype) for name in ("v", "state")
    ]

    def total(leaves):
        result = rule(
            DeltaInputs(*(leaves[name] for name in NAMES[:-1])),
            state=leaves.get("state"),
            segments=segments,
        )
        return sum(jnp.vdot(w, out) for w, out in zip(weights, result)), result

    (_, result), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))({name: cast[name] for name in names})
    results = {**result._asdict(), **{f"d_{name}": gradient for name, gradient in gradients.items()}}
    return {name: np.asarray(value) for name, value in results.items()}


def difference(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0))


def assert_equals_the_definition(
    arrays: Arrays, segments, chunk: int, *, begins: bool, tolerance: float = TOLERANCE
) -> None:
    found = with_gradients(
        functools.partial(delta_rule, target=CPU, chunk=chunk), arrays, segments, jnp.float32, begins=begins
    )
    with jax.enable_x64(True):
        expected = with_gradients(reference_delta_rule, arrays, segments, jnp.float64, begins=begins)
    for name, value in expected.items():
        assert np.isfinite(found[name]).all(), name
        assert difference(found[name], value) < tolerance, (name, difference(found[name], value))


def case(length: int, chunk: int, *marks):
    return pytest.param(length, chunk, marks=marks, id=f"{length}-{chunk}")


CASES = [case(37, 16), case(64, 16, FULL), case(11, 64, FULL), case(45, 24, FULL), case(1, 8, FULL), case(70, 1, FULL)]


@pytest.mark.parametrize("length, chunk", CASES)
def test_equals_the_definition(length, chunk):
    assert_equals_the_definition(inputs(length), None, chunk, begins=length != 37)


@pytest.mark.parametrize("length, chunk", CASES[:4])
def test_equals_the_definition_packed(length, chunk):
    assert_equals_the_definition(inputs(length), documents(length), chunk, begins=length != 45)


EXTREME = [
    pytest.param(1e-6, 1e-5, marks=FULL, id="none"),
    pytest.param(0.1, 200.0, id="mixed"),
    pytest.param(1e3, 1e5, marks=FULL, id="all"),
]


@pytest.mark.parametrize("slowest, fastest", EXTREME)
def test_extreme_decays(slowest, fastest):
    """Nearly none; such that factors of a chunk underflow; such that nothing is left at the next position.

    Of mixed ones, a chunk's log decays add up to some 500: differences of such sums are off by 500 * 6e-8.
    """
    arrays = inputs(50, slowest, fastest)
    assert_equals_the_definition(arrays, documents(50), 16, begins=True, tolerance=3e-5)


def test_equal_keys_corrected_in_full():
    """The system is of ones: its powers would reach 3e8 in a chunk of 32."""
    arrays = inputs(64, 1e-6, 1e-5)
    arrays["k"] = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["beta"] = jnp.ones_like(arrays["beta"])
    assert_equals_the_definition(arrays, None, 32, begins=True)


def test_a_document_is_computed_as_if_alone():
    arrays, segments = inputs(40), jnp.asarray([[1] * 13 + [2] * 20 + [0] * 7] * BATCH, jnp.int32)
    run = jax.jit(functools.partial(delta_rule, target=CPU, chunk=8))
    rows = DeltaInputs(*(arrays[name] for name in NAMES[:-1]))
    whole, part = run(rows, segments=segments), run(DeltaInputs(*(array[:, 13:33] for array in rows)))
    assert difference(whole.y[:, 13:33], part.y) < TOLERANCE
    assert not np.asarray(whole.y[:, 33:]).any() and not np.asarray(whole.state).any()


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_maps_of_parts_compose(packed):
    """What devices do with the parts of a row."""
    arrays, segments = inputs(50), documents(50) if packed else None
    rows = DeltaInputs(*(arrays[name] for name in NAMES[:-1]))
    full = delta_rule(rows, state=arrays["state"], segments=segments, target=CPU, chunk=16)
    state, cuts = arrays["state"], (0, 7, 23, 50)
    for low, high in itertools.pairwise(cuts):
        if segments is not None and low:
            goes_on = segments[:, low] == segments[:, low - 1]
            state = jnp.where(goes_on[:, None, None, None], state, 0.0)
        segment = None if segments is None else segments[:, low:high]
        part = [array[:, low:high] for array in rows[1:]]
        change = delta_rule_map(*part, segments=segment, target=CPU, chunk=8)
        if segments is not None:
            state = jnp.where((segments[:, low] != 0)[:, None, None, None], state, 0.0)
        state = change.written + jnp.einsum("bhmn,bhnp->bhmp", change.transfer, state)
    assert difference(state, full.state) < TOLERANCE


def test_sixteen_bits_are_computed_in_float32():
    """Inputs are exact, so that only the output is rounded, once."""
    arrays = inputs(48)
    rounded = DeltaInputs(*(arrays[name].astype(jnp.bfloat16).astype(jnp.float32) for name in NAMES[:-1]))
    narrow = DeltaInputs(*(array.astype(jnp.bfloat16) for array in rounded[:3]), *rounded[3:])
    run = jax.jit(functools.partial(delta_rule, target=CPU, chunk=16))
    found, expected = run(narrow), run(rounded)
    assert found.y.dtype == jnp.bfloat16 and found.state.dtype == jnp.float32
    np.testing.assert_array_equal(found.y, expected.y.astype(jnp.bfloat16))
    np.testing.assert_array_equal(found.state, expected.state)


def test_nothing_is_kept_of_the_size_of_all_scores():
    arrays = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in inputs(1024).values()][:-1]
    gradient = jax.grad(
        lambda *arrays: delta_rule(DeltaInputs(*arrays), target=CPU, chunk=32).y.sum(), argnums=range(5)
    )
    largest = max(v.aval.size for e in _equations(jax.make_jaxpr(gradient)(*arrays).jaxpr) for v in e.outvars)
    # v itself; all scores would be 1024 * 32 * 3 * 6.
    assert largest <= 1024 * BATCH * HEADS * VALUE_DIM


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from _equations(inside)


def test_refuses_what_it_cannot_do():
    arrays = inputs(8)
    q, k, v, decay, beta = (arrays[name] for name in NAMES[:-1])
    with pytest.raises(ValueError, match="heads=5 must be a multiple of key_heads=2"):
        delta_rule(DeltaInputs(q, k, v[:, :, :5], decay[..., :5], beta[..., :5]), target=CPU)
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        delta_rule(DeltaInputs(q, k, v, decay, beta), target=CPU, chunk=0)


@pytest.mark.parametrize("size", [1, 7, pytest.param(32, marks=FULL)])
def test_inverse(size):
    lower = np.tril(np.random.default_rng(0).normal(size=(2, size, size)), -1).astype(np.float32) / 2
    exact = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert difference(invert_unit_lower(jnp.asarray(lower)), exact) < 1e-6
    weight = np.random.default_rng(1).normal(size=lower.shape).astype(np.float32)
    gradient = jax.grad(lambda lower: jnp.vdot(weight, invert_unit_lower(lower)))(jnp.asarray(lower))
    transposed = exact.swapaxes(-1, -2)
    assert difference(gradient, np.tril(-transposed @ weight @ transposed, -1)) < 1e-6


def test_docstring_examples():
    assert not doctest.testmod(triangular).failed
