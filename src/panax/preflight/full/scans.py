"""Checks of work for which one kernel serves every platform, and that the registry therefore lacks:
cross-entropy, the state-space scan."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels import CrossEntropySettings, Kernel, linear_cross_entropy
from ...kernels.state_space.reference import reference_state_space_scan
from ...kernels.state_space.state_space import ScanInputs, state_space_scan
from .attention import BATCH, documents
from .comparison import evaluate_definition, local_target, run_kernel, worst_error_share
from .parts import Case, Figures
from .sizes import Sizes

STATE, GROUPS = 16, 2

SCAN_TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-6}
"""Tolerance relative to the norm of an output or a gradient: float32 as in the scan's own tests; in bfloat16
four roundings of 2**-8."""


def scan_cases(sizes: Sizes) -> list[Case]:
    """Return one part for each of these computations in each dtype."""
    found = []
    for name, check in (("cross-entropy, chunked", check_cross_entropy), ("state-space scan, chunked", check_scan)):
        for dtype in ("float32", "bfloat16"):
            found.append(Case("kernel", f"{name}, {dtype}", functools.partial(check, dtype, sizes)))
    return found


def check_cross_entropy(dtype: str, sizes: Sizes) -> Figures:
    """Check the loss and its gradients in chunks of tokens, against whole float32 logits."""
    vocab, embed = 2 * sizes.width, sizes.width
    generator = np.random.default_rng(0)
    x = generator.normal(size=(sizes.rows, embed)).astype(np.float32).astype(jnp.dtype(dtype))
    head = (generator.normal(size=(vocab, embed)) / math.sqrt(embed)).astype(np.float32).astype(jnp.dtype(dtype))
    targets = generator.integers(0, vocab, sizes.rows).astype(np.int32)
    mask = (generator.random(sizes.rows) < 0.8).astype(np.float32)

    def chunked(x: Any, head: Any, targets: Any, mask: Any) -> Any:
        options = {"target": local_target(), "chunk_tokens": sizes.rows // 4}
        return linear_cross_entropy(x, head, targets, mask, CrossEntropySettings(z_loss=1e-3), **options).loss_sum

    def whole(x: Any, head: Any, targets: Any, mask: Any) -> Any:
        logits = jnp.einsum("te,ve->tv", x, head)
        total = jax.nn.logsumexp(logits, axis=-1)
        expected = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (mask * (total - expected + jnp.float32(1e-3) * total * total)).sum()

    kernel = Kernel(work="cross-entropy", name="chunked", run=chunked)
    results, figures = run_kernel(kernel, jax.value_and_grad(chunked, (0, 1)), (x, head, targets, mask), dtype)
    with evaluate_definition():
        wide = (np.asarray(x, np.float32), np.asarray(head, np.float32), targets, mask)
        loss, gradients = jax.jit(jax.value_and_grad(whole, (0, 1)))(*wide)
    expected = [np.asarray(each) for each in (loss, *gradients)]
    # As for attention: sums of as many products as an entry has terms, or in 16 bits the roundings of factors
    # and result.
    terms = max(embed, sizes.rows, vocab)
    units = 4 * math.sqrt(terms) if dtype == "float32" else 4
    allowed = [units * float(jnp.finfo(dtype).eps) * float(np.abs(each).max()) for each in expected]
    share = worst_error_share(("loss", "gradient by x", "gradient by the head"), results, expected, allowed)
    return {"of the allowed error": f"{share:.0%}", **figures}


def check_scan(dtype: str, sizes: Sizes) -> Figures:
    """Check the chunked scan of a state-space model and its gradients, against a scan of single positions."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype))

    heads, length = sizes.heads, sizes.positions
    arrays = (
        normal(BATCH, length, heads, 16),
        np.exp(generator.uniform(-4, 0, (BATCH, length, heads))).astype(np.float32),
        -generator.uniform(0.5, 3, heads).astype(np.float32),
        normal(BATCH, length, GROUPS, STATE),
        normal(BATCH, length, GROUPS, STATE),
    )
    segments, d_out = documents(length), normal(BATCH, length, heads, 16)

    def with_gradients(scan: Any, operands: Any, d_out: Any) -> tuple[Any, ...]:
        out, pull = jax.vjp(lambda *operands: scan(ScanInputs(*operands))[0], *operands)
        return out, *pull(d_out)

    def chunked(x: Any, dt: Any, a: Any, b: Any, c: Any, segments: Any, d_out: Any) -> tuple[Any, ...]:
        scan = functools.partial(state_space_scan, segments=segments, target=local_target())
        return with_gradients(scan, (x, dt, a, b, c), d_out)

    def stepwise(x: Any, dt: Any, a: Any, b: Any, c: Any, segments: Any, d_out: Any) -> tuple[Any, ...]:
        scan = functools.partial(reference_state_space_scan, segments=segments)
        return with_gradients(scan, (x, dt, a, b, c), d_out)

    kernel = Kernel(work="state-space scan", name="chunked", run=chunked)
    results, figures = run_kernel(kernel, chunked, (*arrays, segments, d_out), dtype)
    with evaluate_definition():
        wide = [np.asarray(each, np.float32) for each in arrays]
        expected = [np.asarray(x) for x in jax.jit(stepwise)(*wide, segments, np.asarray(d_out, np.float32))]
    distances = [np.asarray(np.linalg.norm(left - right)) for left, right in zip(results, expected)]
    allowed = [SCAN_TOLERANCE[dtype] * float(np.linalg.norm(each)) for each in expected]
    names = ["the output's norm", *(f"the norm of the gradient by {name}" for name in ("x", "dt", "a", "b", "c"))]
    share = worst_error_share(names, distances, [np.zeros(())] * len(names), allowed)
    return {"of the allowed error": f"{share:.0%}", **figures}
