"""What compilers write that a CPU program never holds: pieces of text as GPU and TPU compilers print them."""

import pytest

from panax.plan import count_collectives
from panax.plan.groups import group_axes, permutation_axes, read_groups

SHAPE = {"a": 2, "b": 4}
OVER_B = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ACROSS_A = "source_target_pairs={{0,4},{4,0}}"


def module(body: str, before: str = "") -> str:
    return f"HloModule jit_step, num_partitions=8\n\n{before}\nENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n"


def found(body: str, before: str = ""):
    collectives = count_collectives(module(body, before), SHAPE)
    return [(c.kind, c.axes, c.dtype, c.buffer_bytes, c.wire_bytes, c.times) for c in collectives]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("channel_id=1", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh[x=2,y=4] {y}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['x'=8,'y'=1] {'x'}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", [(3, 1), (2, 0)]),
        ("source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)]),
    ],
)
def test_groups_are_read_in_every_notation(written, groups):
    assert read_groups(f"channel_id=1, {written}, dimensions={{0}}", 8) == groups


def test_groups_become_axes():
    shape = {"a": 2, "b": 4, "c": 2}
    assert group_axes([tuple(range(16))], shape) == ("a", "b", "c")
    assert group_axes([(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)], shape) == ("b",)
    assert group_axes([(0, 2), (4, 6)], shape) == ("b[2 of 4]",)
    assert group_axes([(0,), (1,)], shape) == ()
    assert permutation_axes([(0, 8), (8, 0)], shape) == ("a",)
    assert permutation_axes([(i, (i + 1) % 4) for i in range(4)], {"a": 2, "b": 2}) == ("a", "b")
    assert permutation_axes([(0, 0), (1, 1)], shape) == ()


def test_starts_give_operands_and_results():
    assert found(f"""
  %p = bf16[2,16]{{1,0}} parameter(0)
  %g = (bf16[2,16]{{1,0}}, bf16[8,16]{{1,0}}) all-gather-start(%p), channel_id=1, {OVER_B}, dimensions={{0}}
  %gd = bf16[8,16]{{1,0}} all-gather-done(%g)
  %s = ((bf16[8,16]{{1,0}}), bf16[2,16]{{1,0}}) reduce-scatter-start(%gd), channel_id=1, {OVER_B}, dimensions={{0}}
  %sd = bf16[2,16]{{1,0}} reduce-scatter-done(%s)
  %r = bf16[2,16]{{1,0}} all-reduce-start(%sd), channel_id=1, {OVER_B}, to_apply=%add
  %rd = bf16[2,16]{{1,0}} all-reduce-done(%r)
  %c = (bf16[2,16]{{1,0:T(8,128)S(1)}}, bf16[2,16]{{1,0}}, u32[]{{:S(2)}}, u32[]) collective-permute-start(%rd), {ACROSS_A}
  ROOT %cd = bf16[2,16]{{1,0}} collective-permute-done(%c)""") == [
        ("all-gather", ("b",), "bf16", 256, 192, 1),
        ("reduce-scatter", ("b",), "bf16", 256, 192, 1),
        ("all-reduce", ("b",), "bf16", 64, 96, 1),
        ("collective-permute", ("a",), "bf16", 64, 64, 1),
    ]


def test_combined_operations_add_up():
    assert found(f"""
  %g = ((bf16[2,16], f32[1,8]), (bf16[8,16]{{1,0}}, /*index=1*/f32[4,8]{{0,1}})) all-gather-start(%p, %q), {OVER_B}
  %r = (f32[8]{{0}}, f32[], f32[4,2]{{1,0}}) all-reduce(%p, %q, %r), {OVER_B}, to_apply=%add
  %a = (f32[2,4]{{1,0}}, f32[2,4], f32[2,4], f32[2,4]) all-to-all(%p, %q, %r, %s), {OVER_B}""") == [
        ("all-gather", ("b",), "bf16+f32", 256 + 128, 288, 1),
        ("all-reduce", ("b",), "f32", 68, 102, 1),
        ("all-to-all", ("b",), "f32", 128, 96, 1),
    ]


def test_an_asynchronous_wrapper_counts_once():
    before = f"""%wrapped (q: f32[2,16]) -> f32[8,16] {{
  %q = f32[2,16]{{1,0}} parameter(0)
  ROOT %g = f32[8,16]{{1,0}} all-gather(%q), channel_id=1, {OVER_B}, dimensions={{0}}
}}
"""
    assert found(
        """
  %s = ((f32[2,16]{1,0}), f32[8,16]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %u = ((f32[2,16]{1,0}), f32[8,16]{1,0}, u32[]) async-update(%s), calls=%wrapped
  ROOT %d = f32[8,16]{1,0} async-done(%u), calls=%wrapped""",
        before,
    ) == [("all-gather", ("b",), "f32", 512, 384, 1)]


def test_a_tpu_reduce_scatter_is_a_fusion():
    before = f"""%all-reduce-scatter.3.clone (q: bf16[8,16]) -> bf16[2,16] {{
  %q = bf16[8,16]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %r = bf16[8,16]{{1,0:T(8,128)(2,1)}} all-reduce(%q), channel_id=8, {OVER_B}, to_apply=%add
  ROOT %d = bf16[2,16]{{1,0}} dynamic-slice(%r, %i, %j), dynamic_slice_sizes={{2,16}}
}}
"""
    fusion = "  ROOT %f = bf16[2,16] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3.clone"
    fusion += ', metadata={op_name="jit(step)/feed_forward/dot_general"}'
    (collective,) = count_collectives(module(fusion, before), SHAPE)
    assert found(fusion, before) == [("reduce-scatter", ("b",), "bf16", 256, 192, 1)]
    assert collective.where == "feed_forward"


def chain(name: str, target: str) -> str:
    return f"""%{name} (q: f32[2,16]) -> f32[8,16] {{
  %q = f32[2,16]{{1,0}} parameter(0)
  %g.{name} = f32[8,16]{{1,0}} all-gather(%q), channel_id=3, {OVER_B}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %r = f32[8,16]{{1,0}} custom-call(%g.{name}), custom_call_target="{target}"
}}

"""


def test_a_tpu_chain_counts_where_it_starts():
    """Its links lie in other loops than its start."""
    before = (
        chain("start", "AsyncCollectiveStart")
        + chain("link", "Other")
        + chain("done", "AsyncCollectiveDone")
        + """%body (t: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %t = (s32[], f32[2,16]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[2,16] get-tuple-element(%t), index=1
  %f = f32[8,16] fusion(%x), kind=kCustom, calls=%link
  ROOT %out = (s32[], f32[2,16]) tuple(%next, %x)
}

%condition (t: (s32[], f32[2,16])) -> pred[] {
  %t = (s32[], f32[2,16]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %most = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}
"""
    )
    body = """
  %p = f32[2,16] parameter(0)
  %a = f32[8,16] fusion(%p), kind=kCustom, calls=%start
  %zero = s32[] constant(0)
  %first = (s32[], f32[2,16]) tuple(%zero, %p)
  %w = (s32[], f32[2,16]) while(%first), condition=%condition, body=%body
  ROOT %z = f32[8,16] fusion(%p), kind=kCustom, calls=%done"""
    once = ("all-gather", ("b",), "f32", 512, 384, 1)
    assert found(body, before) == [once]
    # Where no start is marked, the first link that is met counts.
    assert found(body, before.replace("AsyncCollectiveStart", "Other")) == [once]


def test_a_bound_that_a_loop_carries_along():
    """TPU compilers move constants into what the loop carries, also through an outer loop."""

    def loop(name: str, inside: str, bound: str) -> str:
        return f"""%body_{name} (t: (s32[], s32[])) -> (s32[], s32[]) {{
  %t = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %kept = s32[] get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  %moved = s32[] copy(%zero)
{inside}
  ROOT %out = (s32[], s32[]) tuple(%next, %kept)
}}

%condition_{name} (t: (s32[], s32[])) -> pred[] {{
  %t = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %most = s32[] {bound}
  ROOT %less = pred[] fusion(%most, %i), kind=kLoop, calls=%compared
}}

"""

    compared = """%compared (x: s32[], y: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %c = pred[] compare(%x, %y), direction=GT
}

"""
    reduce = f"  %r = f32[8]{{0}} all-reduce(%q), {OVER_B}, to_apply=%add"
    inner = """  %first = (s32[], s32[]) tuple(%moved, %kept)
  %w = (s32[], s32[]) while(%first), condition=%condition_in, body=%body_in"""
    carried = "get-tuple-element(%t), index=1"
    before = compared + loop("in", reduce, carried) + loop("out", inner, "constant(3)")
    body = """
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %first = (s32[], s32[]) tuple(%zero, %five)
  ROOT %w = (s32[], s32[]) while(%first), condition=%condition_out, body=%body_out"""
    assert found(body, before) == [("all-reduce", ("b",), "f32", 32, 48, 15)]


def test_a_ragged_exchange_counts_the_smaller_of_its_buffers():
    groups = "replica_groups=[2,4]<=[8]"
    assert found(f"""
  %p = f32[96,2] parameter(0)
  %z = f32[32,2] ragged-all-to-all(%p, %o, %a, %b, %c, /*index=5*/%d), channel_id=1, {groups}
  %w = f32[128,2] ragged-all-to-all(%p, %o, %a, %b, %c, /*index=5*/%d), channel_id=1, {groups}
  %x = f32[64,2] ragged-all-to-all(%p, %o, %a, %b, %c, /*index=5*/%d), channel_id=1, {groups}
  %y = ((bf16[64,2], bf16[64,2], s64[4]{{0}}), bf16[64,2]{{1,0}}) ragged-all-to-all-start(%p, %o, %a), {groups}""") == [
        ("ragged-all-to-all", ("b",), "f32", 768, 192, 1),
        ("ragged-all-to-all", ("b",), "f32", 1024, 576, 1),
        ("ragged-all-to-all", ("b",), "f32", 768, 384, 1),
        ("ragged-all-to-all", ("b",), "bf16", 768, 192, 1),
    ]


def test_an_unknown_dtype_is_an_error():
    with pytest.raises(ValueError, match=r"array of f7.*known|array of f7.*did you mean"):
        found(f"  %r = f7[8]{{0}} all-reduce(%q), {OVER_B}, to_apply=%add")


@pytest.mark.parametrize(
    ("op_name", "where"),
    [
        ("jit(step)/shard_map/while/body/closed_call/feed_forward/all_gather", "feed_forward"),
        (
            "jit(step)/transpose(jvp(layer))/while/body/checkpoint/attention/reduce_scatter",
            "layer/attention (backward)",
        ),
        ("jit(step)/jvp()/while/body/checkpoint/rematted_computation/head/all_gather", "head (again)"),
        ("jit(step)/psum", ""),
    ],
)
def test_where_is_the_named_scope(op_name, where):
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), {OVER_B}, to_apply=%add, metadata={{op_name="{op_name}"}}
}}
"""
    assert [collective.where for collective in count_collectives(text, SHAPE)] == [where]
