"""The chunked scan of a state-space model, and its convolution, against their definitions."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import Target
from panax.kernels import causal_convolution as convolution_file
from panax.kernels.causal_convolution import causal_convolution
from panax.kernels.state_space.reference import reference_state_space_scan
from panax.kernels.state_space.state_space import ScanInputs, initial_state_output, state_space_scan

CPU = Target("cpu")
BATCH, HEADS, HEAD_DIM, GROUPS, STATE = 3, 6, 4, 2, 5
# The same sums in another order: an element of a gradient by `a` adds some BATCH * 70 * HEAD_DIM * STATE = 4,000 terms, each off
# by a few roundings of 6e-8, of which errors of either sign add up like a square root: 65 * 3 * 6e-8.
TOLERANCE = 1e-5
NAMES = ("x", "dt", "a", "b", "c", "state")


def inputs(length: int, dtype=jnp.float32) -> dict[str, jax.Array]:
    generator = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(generator.normal(size=shape), dtype)  # noqa: E731
    return {
        "x": normal(BATCH, length, HEADS, HEAD_DIM),
        "dt": jnp.asarray(np.exp(generator.uniform(-4, 0, (BATCH, length, HEADS))), jnp.float32),
        "a": -jnp.asarray(generator.uniform(0.5, 3, HEADS), jnp.float32),
        "b": normal(BATCH, length, GROUPS, STATE),
        "c": normal(BATCH, length, GROUPS, STATE),
        "state": jnp.asarray(generator.normal(size=(BATCH, HEADS, HEAD_DIM, STATE)), jnp.float32),
    }


def documents(length: int) -> jax.Array:
    """Boundaries within chunks and between them, padding inside, at the end and the beginning of a row; and a row of one."""
    first = np.repeat([4, 5, 0, 4, 7, 0], [3, length // 2, 2, 5, length, 1])[: length - 2]
    second = np.repeat([0, 2, 3], [2, length // 3, length])[:length]
    return jnp.asarray([np.pad(first, (0, length - len(first))), second, [9] * length], jnp.int32)


def chunked(chunk):
    def run(x, dt, a, b, c, state, segments):
        return state_space_scan(ScanInputs(x, dt, a, b, c), state=state, segments=segments, target=CPU, chunk=chunk)

    return jax.jit(run)


def defined(x, dt, a, b, c, state, segments):
    return reference_state_space_scan(ScanInputs(x, dt, a, b, c), state=state, segments=segments)


def with_gradients(scan, arrays, segments, *, begins: bool):
    """Outputs, and the gradients of a sum of them with fixed random weights."""
    names = NAMES if begins else NAMES[:-1]
    generator = np.random.default_rng(1)
    outputs = jax.eval_shape(defined, *arrays.values(), segments)
    weights = [jnp.asarray(generator.normal(size=out.shape), jnp.float32) for out in outputs]

    def total(differentiated):
        arguments = {**arrays, "state": None, **differentiated}
        params = scan(*(arguments[name] for name in NAMES), segments)
        return sum(jnp.vdot(w, out.astype(jnp.float32)) for w, out in zip(weights, params)), params

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, params), gradients = run({name: arrays[name] for name in names})
    return {**params._asdict(), **{f"d_{name}": gradient for name, gradient in gradients.items()}}


def difference(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0))


@pytest.mark.parametrize("begins", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("length, chunk", [(64, 16), (37, 16), (11, 64), (1, 8), (70, 1)])
def test_equals_the_definition(length, chunk, packed, begins):
    arrays, segments = inputs(length), documents(length) if packed and length > 1 else None
    found = with_gradients(chunked(chunk), arrays, segments, begins=begins)
    expected = with_gradients(defined, arrays, segments, begins=begins)
    for name, value in expected.items():
        assert np.isfinite(found[name]).all(), name
        assert difference(found[name], value) < TOLERANCE, name


def test_a_document_is_scanned_as_if_alone():
    arrays, segments = inputs(40), jnp.asarray([[1] * 13 + [2] * 20 + [0] * 7] * BATCH, jnp.int32)
    full = chunked(8)(**{**arrays, "state": None}, segments=segments)
    alone = {name: arrays[name][:, 13:33] if arrays[name].ndim > 1 else arrays[name] for name in NAMES[:-1]}
    part = chunked(8)(**alone, state=None, segments=None)
    np.testing.assert_allclose(full.y[:, 13:33], part.y, rtol=0, atol=TOLERANCE * float(jnp.abs(part.y).max()))
    assert (
        not np.asarray(full.y[:, 33:]).any() and not np.asarray(full.state).any() and not np.asarray(full.decay).any()
    )


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_states_pass_between_parts_of_a_row(packed):
    """Scanned in two parts, and the second corrected by what the first one left: what devices do."""
    arrays, segments = inputs(50), documents(50) if packed else None
    full = chunked(16)(**{**arrays, "state": None}, segments=segments)
    cut = 23

    def part(where):
        return {n: v[:, where] if v.ndim > 1 else v for n, v in arrays.items() if n != "state"} | {
            "segments": segments if segments is None else segments[:, where]
        }

    first, second = part(slice(0, cut)), part(slice(cut, None))
    left = chunked(16)(**first, state=None)
    right = chunked(16)(**second, state=None)
    goes_on = jnp.ones(BATCH, bool) if segments is None else segments[:, cut] == segments[:, cut - 1]
    passed = jnp.where(goes_on[:, None, None, None], left.state, 0.0)
    extra = initial_state_output(second["dt"], second["a"], second["c"], passed, second["segments"])
    assert difference(jnp.concatenate([left.y, right.y + extra], axis=1), full.y) < TOLERANCE
    assert difference(right.state + right.decay[..., None, None] * passed, full.state) < TOLERANCE


def test_sixteen_bits_lose_a_few_roundings():
    """Against float32 on the same rounded inputs. A product's operand that is computed (scores, states, written x) is rounded
    once, to 2**-9 at most and a third of that in the mean square, and so is the output: two roundings in a row, forward; the
    backward pass rounds the cotangents as well, and its own operands: three or four.
    """
    arrays = inputs(96, jnp.bfloat16)
    exact = {name: value.astype(jnp.float32) for name, value in arrays.items()}
    found = with_gradients(chunked(16), arrays, documents(96), begins=True)
    expected = with_gradients(defined, exact, documents(96), begins=True)
    assert found["y"].dtype == jnp.bfloat16 and found["state"].dtype == jnp.float32
    for name, value in expected.items():
        roundings = 4 if name.startswith("d_") else 2
        assert difference(found[name], value) < roundings * 2.0**-9, name


def test_nothing_is_kept_of_the_size_of_all_scores():
    arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in inputs(1024).items()}
    gradient = jax.grad(lambda *given: chunked(32)(*given, None).y.sum(), argnums=range(6))
    largest = max(v.aval.size for e in _equations(jax.make_jaxpr(gradient)(*arrays.values()).jaxpr) for v in e.outvars)
    # x, and the state of each chunk: 32 * 3 * 6 * 4 * 5; all scores would be 1024 * 32 * 3 * 6.
    assert largest <= 1024 * BATCH * HEADS * HEAD_DIM


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from _equations(inside)


def test_refuses_what_it_cannot_do():
    arrays = inputs(8)
    with pytest.raises(ValueError, match="heads=6 must be a multiple of groups=4"):
        ungrouped = jnp.ones((BATCH, 8, 4, STATE))
        state_space_scan(ScanInputs(arrays["x"], arrays["dt"], arrays["a"], ungrouped, ungrouped), target=CPU)
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        chunked(0)(**arrays, segments=None)


# ---- convolution


def test_convolves_each_document_by_itself_and_continues_from_a_tail():
    generator = np.random.default_rng(3)
    x, w = generator.normal(size=(2, 12, 3, 2)).astype(np.float32), generator.normal(size=(3, 2, 4)).astype(np.float32)
    segments = np.asarray([[1] * 5 + [2] * 4 + [0] * 3, [3] * 2 + [0] * 2 + [3] * 8], np.int32)
    expected = np.zeros_like(x)
    for row in range(2):
        for t in range(12):
            for back in range(4):
                between = segments[row, max(t - back, 0) : t + 1]
                if t >= back and segments[row, t] and (between == segments[row, t]).all():
                    expected[row, t] += w[..., 3 - back] * x[row, t - back]
    np.testing.assert_allclose(causal_convolution(x, w, segments=segments), expected, atol=1e-6)
    cut = 6
    rest = causal_convolution(
        *(jnp.asarray(v) for v in (x[:, cut:], w, x[:, cut - 3 : cut], segments[:, cut:], segments[:, cut - 3 : cut]))
    )
    np.testing.assert_allclose(rest, expected[:, cut:], atol=1e-6)
    full = causal_convolution(jnp.asarray(x), jnp.asarray(w))
    tail = causal_convolution(jnp.asarray(x[:, cut:]), jnp.asarray(w), jnp.asarray(x[:, cut - 3 : cut]))
    np.testing.assert_allclose(tail, full[:, cut:], atol=1e-6)


def test_docstring_examples():
    assert not doctest.testmod(convolution_file).failed
