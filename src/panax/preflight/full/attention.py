"""Checks of attention kernels, whole, in parts, over devices and of traced PyTorch models, against
`reference_attention`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ...kernels import AttentionCase, Kernel, attention
from ...kernels.attention.attention import AttentionOptions
from ...kernels.attention.mask import MaskRule
from ...kernels.attention.operands import ScoreRule
from ...kernels.attention.reference import reference_attention
from ...kernels.product import MatmulCase
from ...kernels.registry import EXACT
from ...parallel.context import ContextAxis, zigzag_order
from ...parallel.context_choice import ContextCase
from .comparison import (
    evaluate_definition,
    full_precision,
    local_target,
    run_kernel,
    select_supported,
    worst_error_share,
)
from .parts import CaseSkipped, Figures
from .sizes import Sizes

NAMES = ("output", "gradient by q", "gradient by k", "gradient by v")
BATCH, WAYS = 2, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options by which cases of attention differ."""

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    packed: bool = False

    @property
    def static(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "soft_cap": self.soft_cap}


PLAIN = Options()
VARIANTS = (PLAIN, Options(window=37, soft_cap=5.0, packed=True), Options(causal=False))


def check_attention(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "attention"."""

    def case(options: Options) -> AttentionCase:
        return AttentionCase(
            batch=BATCH, query_seq=sizes.positions, key_seq=sizes.positions, heads=sizes.heads, kv_heads=sizes.heads // 4,
            head_dim=sizes.head_dim, dtype=dtype, packed=options.packed, **options.static,
        )  # fmt: skip

    target = local_target()
    run = functools.partial(attention, target=target, implementation=kernel.name)

    def attend(options: Options) -> Callable[..., Any]:
        return lambda q, k, v, segments: run(q, k, v, segments=segments, **options.static)

    return _compare_variants(kernel, dtype, sizes, {each: case(each) for each in VARIANTS}, attend, {})


def check_partial_attention(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "partial attention", in blockwise attention."""
    # Exact kernels are for causal attention alone.
    variants = [each for each in VARIANTS if each.causal or kernel.name != EXACT]
    cases = dict.fromkeys(variants, MatmulCase(dtype=dtype, large=True, local=True))

    def attend(options: Options) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, segments: Any) -> Any:
            static = {**options.static, "scale": _scale(sizes), "target": local_target()}
            return attention(q, k, v, segments=segments, implementation="blockwise", **static)

        return run

    return _compare_variants(kernel, dtype, sizes, cases, attend, {kernel.work: kernel.name})


def check_adapted_attention(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "adapted attention": its halves, one after the other."""
    from ...adapters.torch.lowering.attention import AdaptedCase, SavedAttention

    variants = (PLAIN, Options(causal=False))
    case = AdaptedCase(MatmulCase(dtype=dtype, large=True, local=True), masked=False)

    def halves(options: Options, q: Any, k: Any, v: Any, d_out: Any) -> tuple[Any, ...]:
        q, k, v, d_out = (x.swapaxes(1, 2) for x in (q, k, v, d_out))
        scale = _scale(sizes)
        out, normalizer = kernel.run.forward(q, k, v, options.causal, None, scale)
        saved = SavedAttention(q, k, v, out, normalizer)
        gradients = kernel.run.backward(d_out, saved, options.causal, None, scale)
        return tuple(x.swapaxes(1, 2) for x in (out, *gradients))

    def whole(options: Options) -> Callable[..., Any]:
        return lambda q, k, v, d_out, segments: halves(options, q, k, v, d_out)

    return _compare_variants(kernel, dtype, sizes, dict.fromkeys(variants, case), whole, {}, with_gradients=False)


def check_context_attention(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "context attention": rows split over two devices."""
    devices = jax.local_devices()[:WAYS]
    if len(devices) < WAYS:
        raise CaseSkipped(f"it needs {WAYS} devices, and there is only 1")
    # As many key-value heads as devices, or there is nothing to exchange.
    kv_heads = max(sizes.heads // 4, WAYS)
    case = ContextCase(heads=sizes.heads, kv_heads=kv_heads, axis_size=WAYS)
    target = dataclasses.replace(local_target(), devices=WAYS)
    select_supported(kernel, [case], target)
    mesh = jax.make_mesh((WAYS,), ("context",), axis_types=(AxisType.Auto,), devices=devices)
    options = VARIANTS[1]
    arrays = inputs(sizes, dtype, kv_heads)
    segments = documents(sizes.positions)
    order = zigzag_order(sizes.positions, WAYS)

    def on_device(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> tuple[Any, ...]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            static = {"options": AttentionOptions(**options.static), "target": target}
            return kernel.run(q, k, v, segments, axis=ContextAxis("context", WAYS), **static)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    rows = P(None, "context")
    split = jax.shard_map(on_device, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows,) * 4, check_vma=False)
    with full_precision(dtype):
        results = jax.jit(split)(*(np.asarray(x)[:, order] for x in (*arrays, segments)))
    results = [np.asarray(x.astype(jnp.float32))[:, np.argsort(order)] for x in results]
    expected = _definition(options, arrays, segments, sizes)
    share = worst_error_share(NAMES, results, expected, _allowed(expected, dtype, sizes))
    return {"of the allowed error": f"{share:.0%}", "devices": str(WAYS)}


def inputs(sizes: Sizes, dtype: str, kv_heads: int | None = None) -> tuple[np.ndarray, ...]:
    """Return q, k, v and the cotangent of the output."""
    generator = np.random.default_rng(0)
    heads = sizes.heads, kv_heads or sizes.heads // 4, kv_heads or sizes.heads // 4, sizes.heads
    shapes = [(BATCH, sizes.positions, number, sizes.head_dim) for number in heads]
    return tuple(generator.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype)) for shape in shapes)


def documents(positions: int) -> np.ndarray:
    """Return the segments of two packed rows; the first ends in padding, the second has padding in the middle."""
    first = [1] * (positions // 2 + 3) + [2] * (positions - positions // 2 - 3 - 5) + [0] * 5
    second = [1] * 9 + [0] * 2 + [3] * (positions - 11)
    return np.asarray([first, second], np.int32)


def _compare_variants(
    kernel: Kernel,
    dtype: str,
    sizes: Sizes,
    cases: Mapping[Options, Any],
    attend: Callable[[Options], Callable[..., Any]],
    named: dict[str, str],
    *,
    with_gradients: bool = True,
) -> Figures:
    """Compare each variant that the kernel supports with its definition.

    Args:
        cases: The variants, each with the case by which a kernel is chosen for it.
        attend: Returns a function of q, k, v and segments; without `with_gradients` also of the cotangent,
            before the segments, and it returns the gradients too.
        named: As for `run_kernel`.
    """
    variants = list(cases)
    able = select_supported(kernel, list(cases.values()), local_target())
    worst, figures = 0.0, {}
    for number in able:
        options = variants[number]
        arrays = inputs(sizes, dtype)
        segments = documents(sizes.positions) if options.packed else None
        function = attend(options)

        def run(q: Any, k: Any, v: Any, d_out: Any, *segments: Any, function: Callable[..., Any] = function) -> Any:
            first_segments = segments[0] if segments else None
            if not with_gradients:
                return function(q, k, v, d_out, first_segments)
            out, pull = jax.vjp(lambda q, k, v: function(q, k, v, first_segments), q, k, v)
            return out, *pull(d_out)

        operands = (*arrays, segments) if segments is not None else arrays
        results, kernel_figures = run_kernel(kernel, run, operands, dtype, named=named)
        expected = _definition(options, arrays, segments, sizes)
        worst = max(worst, worst_error_share(NAMES, results, expected, _allowed(expected, dtype, sizes)))
        # The first supported variant is the plain one, with comparable time.
        figures = figures or kernel_figures
    return {"of the allowed error": f"{worst:.0%}", "cases": f"{len(able)} of {len(variants)}", **figures}


def _definition(
    options: Options, arrays: Sequence[np.ndarray], segments: np.ndarray | None, sizes: Sizes
) -> tuple[np.ndarray, ...]:
    """Compute the output and gradients with `reference_attention`, in float32 for the same rounded inputs."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any) -> tuple[Any, ...]:
        mask = MaskRule(causal=options.causal, window=options.window)
        scores = ScoreRule(mask=mask, scale=_scale(sizes), soft_cap=options.soft_cap)
        segment_array = None if segments is None else jnp.asarray(segments)
        out, pull = jax.vjp(lambda q, k, v: reference_attention(q, k, v, segment_array, scores=scores), q, k, v)
        return out, *pull(d_out)

    with evaluate_definition():
        return tuple(np.asarray(x) for x in run(*(np.asarray(x, np.float32) for x in arrays)))


def _allowed(expected: Sequence[np.ndarray], dtype: str, sizes: Sizes) -> list[float]:
    """Return the allowed rounding error of an entry: a sum of n products of rounded factors, each off by four
    roundings of the largest.

    Independent errors grow as the root of n: positions times the heads of a group. In 16 bits sums are
    accumulated in float32, so that the four roundings remain.
    """
    terms = sizes.positions * max(4, sizes.heads // WAYS)
    units = 4 * math.sqrt(terms) if dtype == "float32" else 4
    return [units * float(jnp.finfo(dtype).eps) * float(np.abs(each).max()) for each in expected]


def _scale(sizes: Sizes) -> float:
    return 1 / math.sqrt(sizes.head_dim)
