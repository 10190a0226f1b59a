"""Attention over sequences that are split over devices: its order, values, traffic, work and memory."""

import dataclasses
import doctest
import importlib
import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import BATCH, CASES, HEAD_DIM, Case, difference, product_flops, program, sent_bytes
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels.attention.attention import AttentionOptions
from panax.kernels.attention.blockwise import blockwise_attention
from panax.kernels.attention.layout import choose_blocks
from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.reference import reference_attention
from panax.kernels.registry import _log_once
from panax.parallel.context import ContextAxis, LocalSizes, sequence_positions, zigzag_inverse, zigzag_order
from panax.parallel.context_choice import choose_context_attention
from panax.parallel.ring import ring_attention, ring_bytes
from panax.parallel.ring_chunks import active_shifts
from panax.parallel.ulysses import ulysses_attention, ulysses_bytes

KINDS = ("ring", "ulysses")
# The same sums in another order: an entry of a gradient adds some 100 products, each off by a few roundings of 6e-8.
TOLERANCE = 2e-6


def runs(case: Case, name: str) -> bool:
    return name == "ring" or case.heads % case.context == 0


CONTIGUOUS = [dataclasses.replace(case, name=f"contiguous_{case.name}", rows_are="contiguous") for case in CASES]


# ---- order and places


@pytest.mark.parametrize(("length", "n"), [(16, 1), (7, 1), (8, 2), (48, 4), (40, 5), (64, 8)])
def test_a_device_holds_its_two_chunks_and_the_way_back_is_known(length, n):
    order = zigzag_order(length, n)
    row = np.arange(length) * 10
    assert (row[order][zigzag_inverse(length, n)] == row).all()
    if n == 1:
        assert (order == np.arange(length)).all()
        return
    chunks = np.arange(length).reshape(2 * n, -1)
    for device, part in enumerate(order.reshape(n, -1)):
        assert (part == np.concatenate([chunks[device], chunks[2 * n - 1 - device]])).all()


def test_every_device_sees_as_many_keys():
    """The mean over its queries of the keys before them: the same on all devices, up to the diagonal."""
    parts = zigzag_order(128, 4).reshape(4, -1)
    assert len({int(part.sum()) for part in parts}) == 1


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"length=20 is not divisible by 2 \* context=8.*use a length of 16 or 24"):
        zigzag_order(20, 4)
    with pytest.raises(ValueError, match=r"5 tokens, can't be cut into two.*divisible by 2 \* context=4"):
        sequence_positions(5, context=2)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (4, 1), (1, 2), (4, 2), (2, 4)])
def test_places_are_those_of_the_order(context, tensor, order):
    length = 48
    sizes = {name: size for name, size in (("context", context), ("tensor", tensor)) if size > 1}
    expected = zigzag_order(length, context) if order == "zigzag" else np.arange(length)
    if not sizes:
        assert sequence_positions(length, context=1).tolist() == expected.tolist()
        return
    devices = jax.devices()[: context * tensor]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    places = jax.shard_map(
        lambda: sequence_positions(length // context // tensor, context=context, tensor=tensor, order=order),
        mesh=mesh,
        in_specs=(),
        out_specs=P(tuple(sizes)),
        check_vma=False,
    )
    actual = jax.jit(places)()
    assert actual.dtype == jnp.int32
    assert actual.tolist() == expected.tolist()


# ---- values


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", [*CASES, *CONTIGUOUS], ids=str)
def test_equals_the_definition_on_whole_rows(case, name):
    if not runs(case, name):
        with pytest.raises(ValueError, match="to divide the query heads"):
            case.run(name)
        return
    for what, actual, expected in zip(("out", "d_q", "d_k", "d_v"), case.run(name), case.expected()):
        assert difference(actual, expected) < TOLERANCE, what


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", [CASES[0], CONTIGUOUS[3], CASES[4]], ids=str)
def test_sinks_equal_the_definition_on_whole_rows(case, name):
    order = zigzag_order(case.length, case.context)
    order = np.arange(case.length) if case.rows_are == "contiguous" else order
    sinks = jnp.linspace(3.0, -6.0, case.heads)
    q, k, v, d_out, segments = case.inputs()
    segments = segments if case.packed else jnp.ones_like(segments)

    def on_device(q, k, v, d_out, segments, sinks):
        out, pull = jax.vjp(lambda q, k, v, sinks: case.local(name, sinks=sinks)(q, k, v, segments), q, k, v, sinks)
        *gradients, d_sinks = pull(d_out)
        return out, *gradients, d_sinks[None]

    split = jax.shard_map(
        on_device,
        mesh=case.mesh,
        in_specs=(*(case.rows,) * 5, P()),
        out_specs=(*(case.rows,) * 4, P(("fsdp", "context"))),
        check_vma=False,
    )
    *arrays, d_sinks = jax.jit(split)(*(x[:, order] for x in (q, k, v, d_out, segments)), sinks)
    result = [np.asarray(x)[:, np.argsort(order)] for x in arrays] + [np.asarray(d_sinks).sum(axis=0)]

    def whole(q, k, v, sinks):
        return reference_attention(q, k, v, segments, scores=case.scores, sinks=sinks)

    expected, pull = jax.vjp(whole, q, k, v, sinks)
    for what, actual, wanted in zip(
        ("out", "d_q", "d_k", "d_v", "d_sinks"), result, (expected, *pull(d_out)), strict=True
    ):
        assert difference(actual, np.asarray(wanted)) < TOLERANCE, what


@pytest.mark.parametrize("name", KINDS)
def test_padding_gives_zeros(name):
    case = CASES[0]
    padding = np.asarray(case.inputs()[-1]) == 0
    for array in case.run(name):
        assert np.isfinite(array).all()
        assert not array[padding].any()
        assert array[~padding].any()


@pytest.mark.parametrize("name", KINDS)
def test_sixteen_bits_lose_no_more_than_on_one_device(name):
    """In a ring, partial results are merged, and gradients travel and add up, in float32: no rounding more than without.

    Ulysses rounds the gradients of each copy of a key-value head, which then add up: at most one rounding beside that of the sum.
    """
    allowed = {"ring": 1.05, "ulysses": math.sqrt(2)}[name]
    case = Case(name="half", context=8, heads=8, kv_heads=1)

    def rounded(q, k, v, *rest, **options):
        return reference_attention(*(x.astype(jnp.float32) for x in (q, k, v)), *rest, **options).astype(q.dtype)

    def one_device(q, k, v, segments, *, scores):
        blocks = choose_blocks(q, k, window=scores.mask.window, target=Target("cpu"))
        return blockwise_attention(q, k, v, segments, scores=scores, blocks=blocks)

    exact = case.expected(jnp.bfloat16, rounded)
    unsplit, split = case.expected(jnp.bfloat16, one_device), case.run(name, jnp.bfloat16)
    for what, best, right, result in zip(("out", "d_q", "d_k", "d_v"), exact, unsplit, split):
        assert difference(result, best) < allowed * difference(right, best), what


@pytest.mark.parametrize("name", KINDS)
def test_through_a_scan_over_rematerialized_layers(name):
    case = Case(name="layers", context=2, fsdp=2)
    attend = case.local(name)
    order, inverse = zigzag_order(case.length, case.context), zigzag_inverse(case.length, case.context)

    def gradients(attend, q, k, v, d_out):
        def stack(q, k, v):
            layer = jax.checkpoint(lambda x: x + attend(x, k, v))
            return jax.lax.scan(lambda x, _: (layer(x), None), q, length=2)[0]

        return jax.vjp(stack, q, k, v)[1](d_out)

    *inputs, _ = case.inputs()
    unsplit = jax.jit(lambda *a: gradients(lambda q, k, v: case.of_rows(q, k, v, None, reference_attention), *a))(
        *inputs
    )
    split = jax.shard_map(
        lambda *a: gradients(lambda q, k, v: attend(q, k, v, None), *a),
        mesh=case.mesh,
        in_specs=(case.rows,) * 4,
        out_specs=(case.rows,) * 3,
        check_vma=False,
    )
    result = jax.jit(split)(*(x[:, order] for x in inputs))
    for actual, expected in zip(result, unsplit):
        assert difference(np.asarray(actual)[:, inverse], np.asarray(expected)) < 2 * TOLERANCE


def test_one_device_needs_no_mesh():
    case = Case(name="alone", context=1, packed=True)
    q, k, v, _, segments = case.inputs()
    for name in KINDS:
        out = case.local(name)(q, k, v, segments)
        assert difference(np.asarray(out), case.expected()[0]) < TOLERANCE


# ---- what is sent


SENT = [
    Case(name="two", context=2, heads=8, kv_heads=2),
    Case(name="four_packed", packed=True, fsdp=2),
    Case(name="eight_packed", context=8, heads=8, kv_heads=2, packed=True),
    Case(name="eight_window", context=8, heads=8, kv_heads=8, window=4),
    Case(name="everything", causal=False),
    Case(name="contiguous_packed", packed=True, rows_are="contiguous"),
    Case(name="contiguous_window", context=8, heads=8, kv_heads=8, window=9, rows_are="contiguous"),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", SENT, ids=str)
def test_sent_bytes_are_as_computed(case, dtype):
    sizes = LocalSizes(
        batch=BATCH // case.fsdp,
        local_seq=case.length // case.context,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        itemsize=jnp.dtype(dtype).itemsize,
        packed=case.packed,
    )
    for name, expected in (
        ("ring", ring_bytes(sizes, case.context, mask=case.scores.mask, order=case.rows_are)),
        ("ulysses", ulysses_bytes(sizes, case.context)),
    ):
        forward = sent_bytes(program(case, name, dtype=dtype, gradients=False), case.context)
        both = sent_bytes(program(case, name, dtype=dtype), case.context)
        assert (forward, both - forward) == expected, name


def test_a_ring_sends_as_often_as_it_must_and_is_one_program_at_any_size():
    """k and v go n-1 times forward; they and their gradients n-1 times backward."""
    written = set()
    for context in (4, 8):
        case = Case(name="count", context=context)
        for gradients, arrays in ((False, 2), (True, 6)):
            equations = program(case, "ring", gradients=gradients)
            assert sum(times for e, times in equations if e.primitive.name == "ppermute") == arrays * (context - 1)
        lowered = jax.jit(case.split("ring")).lower(*case.shapes())
        written.add(lowered.as_text().count("stablehlo.collective_permute"))
        compiled = re.findall(r"= \S+ (all-\w+|collective-\w+|reduce-scatter)\(", lowered.compile().as_text())
        # On the CPU, where barriers don't hold, keys sent alike forward and backward are sent once.
        assert set(compiled) == {"collective-permute"}
        assert len(compiled) <= 18
    # Before the first step, at the first and at each inner one: 2 arrays forward, the same and 2 more backward.
    assert written == {18}


def test_a_short_window_leaves_steps_out():
    rule = MaskRule(causal=True, window=9)
    for n, chunk in ((4, 8), (8, 4), (8, 8), (5, 3)):
        places = jnp.asarray(zigzag_order(2 * n * chunk, n).reshape(n, -1))
        needed = tuple(
            shift
            for shift in range(1, n)
            if any(
                np.asarray(rule.allows(places[i][:, None], places[(i - shift) % n][None, :])).any() for i in range(n)
            )
        )
        assert active_shifts(n, chunk, rule) == needed
    assert active_shifts(8, 8, rule) == (1, 7)
    assert active_shifts(8, 8, dataclasses.replace(rule, window=10)) == (1, 2, 6, 7)


# ---- what is computed and kept


def test_all_devices_compute_the_same():
    """Nothing in the program depends on the device but which chunks it takes: two products of chunks at every step."""
    for context in (2, 4, 8):
        case = Case(name="balance", context=context, heads=8, kv_heads=2)
        square = 2 * BATCH * case.heads * HEAD_DIM * (case.length // (2 * context)) ** 2
        # At home the two chunks by themselves and the late one by the early one, then two at each of the other devices.
        pieces = 3 + 2 * (context - 1)
        for gradients, products in ((False, 2), (True, 2 + 5)):
            equations = program(case, "ring", gradients=gradients)
            assert not any(equation.primitive.name == "cond" for equation, _ in equations)
            assert product_flops(equations) == products * pieces * square


def test_a_device_keeps_nothing_of_the_size_of_local_by_global():
    case = Case(name="memory", context=8, fsdp=1, length=16384, heads=1, kv_heads=1)
    local = case.length // case.context
    for window in (None, 1000):
        equations = program(dataclasses.replace(case, window=window), "ring", target=Target("gpu"))
        sizes = [
            (v.aval.size, str(v.aval))
            for equation, _ in equations
            for v in equation.outvars
            if equation.primitive.name not in ("shard_map", "jit")
        ]
        # Not even local by local: blocks of 512 by 512 for the two pieces of each row of the batch.
        assert max(sizes)[0] <= 2 * BATCH * 512**2 < local * local, max(sizes)


@pytest.mark.parametrize("context", [2, 4])
def test_a_device_with_contiguous_rows_skips_what_it_does_not_see(context):
    """Behind the step at home, each step is a choice between a whole product and none."""
    case = Case(name="skips", context=context, rows_are="contiguous")
    equations = program(case, "ring", gradients=False)
    choices = [equation for equation, _ in equations if equation.primitive.name == "cond"]
    assert choices
    products = [
        ["dot_general" in str(branch) for branch in equation.params["branches"]]
        for equation in choices
        if len(equation.params["branches"]) == 2
    ]
    assert [True, False] in products or [False, True] in products


# ---- masks between chunks


def test_masks_of_pieces_of_a_longer_sequence():
    for causal in (True, False):
        for window in (None, 1, 4, 9, 11):
            for offset in (-12, -5, 0, 3, 6, 14):
                rule = MaskRule(causal=causal, window=window, offset=offset)
                unsplit = dataclasses.replace(rule, offset=0)
                expected = np.asarray(unsplit.allows(jnp.arange(6)[:, None] + offset, jnp.arange(6)[None, :]))
                visible = np.asarray(rule.allows(jnp.arange(6)[:, None], jnp.arange(6)[None, :]))
                assert (visible == expected).all()
                assert rule.block_allows((0, 6), (0, 6)) == visible.any(), rule
                assert rule.block_allows_all((0, 6), (0, 6)) == visible.all(), rule
                pairs = [
                    (i, j) for i in range(3) for j in range(2) if visible[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].any()
                ]
                assert rule.block_pairs(6, 6, 2, 3) == pairs, rule


# ---- choice and refusals


@pytest.mark.parametrize(
    ("heads", "kv_heads", "axis_size", "asked", "expected"),
    [
        (32, 8, 4, "auto", "ulysses"),
        (32, 8, 8, "auto", "ulysses"),
        (32, 8, 16, "auto", "ring"),
        (32, 8, 3, "auto", "ring"),
        (32, 8, 4, "ring", "ring"),
        (32, 8, 16, "ulysses", "ulysses"),
    ],
)
def test_choice(heads, kv_heads, axis_size, asked, expected):
    assert choose_context_attention(heads, kv_heads, axis_size, asked) == expected


def test_refuses_what_it_cannot_do():
    with pytest.raises(
        ValueError, match=r"heads=12 is not divisible by context=8; use context in \{1, 2, 3, 4, 6, 12\}"
    ):
        choose_context_attention(12, 4, 8, "ulysses")
    # The annotation already refuses it in tests.
    with pytest.raises(Exception, match=r"did you mean 'ulysses'|Type-check error"):
        choose_context_attention(8, 4, 8, "ulises")  # pyright: ignore[reportArgumentType]

    def call(attend, seq=8, heads=4, kv_heads=2, **options):
        q, k = (jnp.zeros((1, seq, n, 8)) for n in (heads, kv_heads))
        attend(q, k, k, None, axis=ContextAxis("context", 4), **options)

    for attend, options in (
        (ring_attention, {"options": AttentionOptions(), "target": Target("cpu")}),
        (ulysses_attention, {"kernel": lambda *_: None}),
    ):
        with pytest.raises(ValueError, match=r"7 tokens, can't be cut.*divisible by 2 \* context=8"):
            call(attend, seq=7, **options)
        with pytest.raises(ValueError, match="heads=4 must be a multiple of kv_heads=3"):
            call(attend, kv_heads=3, **options)
    with pytest.raises(ValueError, match="heads=6 is not divisible by context=4"):
        call(ulysses_attention, heads=6, kernel=lambda *_: None)
    for option, message in (({"window": 0}, "window=0 must be at least 1"), ({"soft_cap": -1.0}, "must be positive")):
        with pytest.raises(ValueError, match=message):
            call(ring_attention, target=Target("cpu"), options=AttentionOptions(**option))


def test_reports_once_that_a_ring_is_not_the_fastest_kernel(caplog):
    _log_once.cache_clear()
    case = Case(name="said")
    with caplog.at_level(logging.WARNING, "panax.kernels"):
        for _ in range(2):
            program(case, "ring", target=Target("gpu"))
            program(case, "ring", target=Target("cpu"))
    assert len(caplog.records) == 1
    assert "ring attention merges partial softmax sums" in caplog.text


def test_docstring_examples():
    names = [f"panax.parallel.{name}" for name in ("context", "context_choice", "ring", "ring_chunks", "ulysses")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) >= 8
    assert not any(result.failed for result in results)
