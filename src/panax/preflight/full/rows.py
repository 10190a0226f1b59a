"""Checks of kernels for rows (norms, softmax and its sums), of attention to a cache, and of values apart from all others."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...kernels import Kernel
from ...kernels.attention.key_cache import CachedKeys
from ...kernels.attention.mask import MaskRule
from ...kernels.attention.operands import ScoreRule
from ...kernels.product import MatmulCase
from ...kernels.row_functions import NormParameters, NormRule, log_softmax
from .comparison import local_target, run_kernel, select_supported, worst_error_share
from .parts import CaseSkipped, Figures
from .sizes import Sizes

ALLOWED = {"float32": 2.0**-18, "bfloat16": 2.0**-6}
"""Allowed error of values around 1, of sums of some hundred terms."""


def check_norm(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "norm": a layer norm with scale and bias."""
    x, scale, bias = _draw(kernel, dtype, (sizes.rows, sizes.width), (sizes.width,), (sizes.width,))
    rule = NormRule(centered=True, epsilon=1e-5, gain=0.5)

    def run(x: Any, scale: Any, bias: Any) -> Any:
        return kernel.run(x, NormParameters(scale.astype(jnp.float32), bias.astype(jnp.float32)), rule)

    results, figures = run_kernel(kernel, run, (x, scale, bias), dtype)
    wide, scale, bias = (np.asarray(each, np.float64) for each in (x, scale, bias))
    wide = wide - wide.mean(axis=1, keepdims=True)
    wide = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + rule.epsilon)
    return _compare("norm", results, (wide * scale + bias) * rule.gain, ALLOWED[dtype] * 4, figures)


def check_softmax(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "softmax"."""
    if dtype != "float32":
        raise CaseSkipped("logits are in float32")
    (x,) = _draw(kernel, dtype, (sizes.rows, sizes.width))
    results, figures = run_kernel(kernel, kernel.run, (x,), dtype)
    exponential = np.exp(np.asarray(x, np.float64))
    return _compare("softmax", results, exponential / exponential.sum(axis=1, keepdims=True), ALLOWED[dtype], figures)


def check_logsumexp(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "logsumexp", of all columns but the last one."""
    if dtype != "float32":
        raise CaseSkipped("logits are in float32")
    (x,) = _draw(kernel, dtype, (sizes.rows, sizes.width))
    size = sizes.width - 1

    def run(x: Any) -> Any:
        # XLA has no function of its own here, but a softmax with it.
        return x[:, 0] - log_softmax(x[:, :size])[:, 0] if kernel.run is None else kernel.run(x, size)

    results, figures = run_kernel(kernel, run, (x,), dtype)
    expected = np.log(np.exp(np.asarray(x, np.float64)[:, :size]).sum(axis=1))
    return _compare("logsumexp", results, expected, ALLOWED[dtype], figures)


def check_materialize(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "materialize": its output equals its input, bit by bit."""
    (x,) = _draw(kernel, dtype, (sizes.rows, sizes.width))
    results, figures = run_kernel(kernel, kernel.run, (x,), dtype)
    worst_error_share(("value",), results, [np.asarray(x, np.float32)], [0.0])
    return {"of the allowed error": "bitwise", **figures}


def check_cached_attention(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "cached attention": rows at different positions, heads that share keys, and a window."""
    heads, length, dim = sizes.heads, sizes.positions, sizes.head_dim
    shape = (2, heads // 4, length, dim)
    q, k, v = _draw(kernel, dtype, (2, 1, heads, dim), shape, shape)
    start = np.array([length // 3, length - 1], np.int32)
    window = length // 2
    rule = ScoreRule(mask=MaskRule(causal=True, window=window), scale=dim**-0.5, soft_cap=None)

    def run(q: Any, k: Any, v: Any, start: Any) -> Any:
        return kernel.run(q, CachedKeys(k, v, start), rule, jnp.float32)[0]

    results, figures = run_kernel(kernel, run, (q, k, v, start), dtype)
    wide_q, wide_k, wide_v = (np.asarray(each, np.float64) for each in (q, k, v))
    expected = np.zeros((2, 1, heads, dim))
    for row, position in enumerate(start):
        seen = slice(max(0, position - window + 1), position + 1)
        for head in range(heads):
            scores = wide_k[row, head // 4, seen] @ wide_q[row, 0, head] * rule.scale
            weights = np.exp(scores - scores.max())
            expected[row, 0, head] = weights / weights.sum() @ wide_v[row, head // 4, seen]
    return _compare("output", results, expected, ALLOWED[dtype], figures)


def _draw(kernel: Kernel, dtype: str, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return random operands, after checking that the kernel supports them here."""
    select_supported(kernel, [MatmulCase(dtype=dtype, large=True, local=True)], local_target())
    generator = np.random.default_rng(0)
    return tuple(generator.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype)) for shape in shapes)


def _compare(name: str, results: Any, expected: np.ndarray, allowed: float, figures: Figures) -> Figures:
    share = worst_error_share((name,), results, [expected], [allowed])
    return {"of the allowed error": f"{share:.0%}", **figures}
