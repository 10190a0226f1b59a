"""Exact kernels: a row's bits for any number of rows and neighbors, values against float64, gradients against XLA's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.core.layout.target import Target
from panax.kernels import Kernels, attention, use_kernels
from panax.kernels.attention.key_cache import CachedKeys, cached_attention
from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.reference import reference_attention
from panax.kernels.cpu.exact import native_logsumexp, native_norm, native_softmax
from panax.kernels.cpu.native import OWN, unavailable_reason
from panax.kernels.grouped.grouped_matmul import grouped_product
from panax.kernels.grouped.rows import Groups
from panax.kernels.product import product
from panax.kernels.row_functions import NormParameters, NormRule, normalize_by_xla

LACKING = unavailable_reason(OWN, "float32") or unavailable_reason(OWN, "bfloat16")
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

EXACT = Kernels(exact_policy=True).names
CPU = Target("cpu")
DTYPES = [jnp.float32, jnp.bfloat16]


def draw(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def exactly(function: Any, *arguments: Any) -> Any:
    with use_kernels(EXACT):
        return jax.jit(function)(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(40, 33), (777, 50)])
def test_a_row_has_the_same_product_among_any_number_of_rows(k, n, dtype):
    """1 to 257 rows; sums longer than the kernel's blocks over k, and columns that fill no vector."""
    x, w = draw(257, k, dtype=dtype), draw(k, n, dtype=dtype, seed=1)
    multiply = functools.partial(product, "ab,bc->ac", out_dtype=jnp.float32)
    everything = np.asarray(exactly(multiply, x, w))
    for count in (1, 2, 3, 5, 11, 12, 13, 16, 31, 64, 100, 255, 257):
        first = 257 - count
        assert (np.asarray(exactly(multiply, x[first:], w)) == everything[first:]).all(), count
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    # Of k products, each rounded once: 2^-24 of the sum of their sizes, k times, at most.
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))
    assert (np.abs(everything - exact) <= k * 2**-24 * size).all()


def test_a_row_has_the_same_norm_softmax_and_logarithm_among_any_number_of_rows():
    x = draw(257, 37) * 3.0
    rule = NormRule(centered=True, epsilon=1e-5, gain=0.5)
    parameters = NormParameters(draw(37, seed=1), draw(37, seed=2))
    functions = [
        lambda x: native_norm(x, parameters, rule),
        lambda x: native_norm(x.astype(jnp.bfloat16), NormParameters(None, None), rule),
        native_softmax,
        lambda x: native_logsumexp(x, 30),
    ]
    for function in functions:
        everything = np.asarray(function(x).astype(jnp.float32))
        for count in (1, 2, 15, 16, 17, 100):
            assert (
                np.asarray(function(x[count : 2 * count]).astype(jnp.float32)) == everything[count : 2 * count]
            ).all()
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(native_logsumexp(x, 30), np.log(np.exp(wide[:, :30]).sum(-1)), atol=2e-6)
    np.testing.assert_allclose(native_softmax(x), np.exp(wide) / np.exp(wide).sum(-1, keepdims=True), rtol=4e-6)
    np.testing.assert_allclose(native_norm(x, parameters, rule), normalize_by_xla(x, parameters, rule), atol=2e-6)


def test_gradients_are_those_of_the_functions():
    x, parameters = draw(5, 24), NormParameters(draw(24, seed=1), draw(24, seed=2))
    rule = NormRule(centered=False, epsilon=1e-6)
    weights = draw(5, 24, seed=3)

    def total(normalize: Any, x: Any, parameters: Any) -> Any:
        return (normalize(x, parameters, rule) * weights).sum()

    ours, theirs = (jax.grad(total, argnums=(1, 2))(each, x, parameters) for each in (native_norm, normalize_by_xla))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
    softmaxes: Any = (native_softmax, jax.nn.softmax)
    ours, theirs = (jax.grad(lambda x, each=each: (each(x) * weights).sum())(x) for each in softmaxes)
    np.testing.assert_allclose(ours, theirs, atol=2e-7)


CASES = [{}, {"window": 70}, {"soft_cap": 5.0, "scale": 0.3}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_document_has_the_same_attention_wherever_it_lies(case, dtype):
    """Alone, packed after others, and as the queries of a cache, alone or in chunks."""
    document, before, heads = 530, 45, 4
    q, k, v = (draw(1, document, each, 16, dtype=dtype, seed=seed) for seed, each in enumerate((heads, 2, 2)))
    mask = MaskRule(causal=True, window=case.get("window"))
    rule = ScoreRule(mask=mask, scale=case.get("scale", 0.25), soft_cap=case.get("soft_cap"))

    def attend(q, k, v, segments=None):
        return attention(q, k, v, segments=segments, target=CPU, **case)

    alone = np.asarray(exactly(attend, q, k, v).astype(jnp.float32))[0]
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    reference = reference_attention(wide_q, wide_k, wide_v, None, scores=rule)
    np.testing.assert_allclose(alone, np.asarray(reference)[0], atol=2e-6 if dtype == jnp.float32 else 2e-2)
    others = [draw(1, before, each, 16, dtype=dtype, seed=9) for each in (heads, 2, 2)]
    packed = [jnp.concatenate([other, x, other], axis=1) for other, x in zip(others, (q, k, v))]
    segments = np.repeat([1, 2, 0], [before, document, before])[None].astype(np.int32)
    after = np.asarray(exactly(attend, *packed, segments).astype(jnp.float32))[0]
    assert (after[before:-before] == alone).all() and not after[-before:].any()

    length = 640
    caches = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, length - document), (0, 0))) for x in (k, v)]
    caches = [jnp.concatenate([cache, cache[:, :, ::-1]]) for cache in caches]
    k_cache, v_cache = caches
    at_once = jax.jit(lambda q, start: cached_attention(q, CachedKeys(k_cache, v_cache, start), rule))
    for first, count in [(0, 1), (1, 1), (40, 1), (511, 1), (512, 1), (529, 1), (0, 16), (500, 30)]:
        queries = jnp.concatenate([q[:, first : first + count]] * 2)
        out = np.asarray(at_once(queries, jnp.array([first, 77], jnp.int32)).astype(jnp.float32))
        assert (out[0] == alone[first : first + count]).all(), (first, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_grouped_product_in_any_group_size(dtype):
    w = draw(3, 40, 24, dtype=dtype, seed=1)
    x = draw(24, 40, dtype=dtype)

    def multiply(x, w, sizes):
        return grouped_product(x, w, Groups(sizes, 24, 8), target=CPU, out_dtype=jnp.float32)

    full = np.asarray(exactly(multiply, x, w, jnp.array([8, 8, 8])))
    few = np.asarray(exactly(multiply, x, w, jnp.array([1, 3, 2])))
    for group, size in enumerate((1, 3, 2)):
        rows = slice(8 * group, 8 * group + size)
        assert (few[rows] == full[rows]).all()


def test_what_has_no_exact_kernel_is_refused():
    with pytest.raises(RecipeError, match="no product of two matrices of float32 or bfloat16"):
        exactly(lambda x, w: product("abc,acd->abd", x, w, jnp.float32), draw(2, 3, 4), draw(2, 4, 5))
    with pytest.raises(RecipeError, match="exact_policy has no kernels for attention that is not causal"):
        exactly(lambda q: attention(q, q, q, causal=False, target=CPU), draw(1, 4, 2, 8))
