"""Matmuls that run while a collective is under way, read from a program's schedule."""

import pytest

from panax.plan.overlap import has_async_schedule, overlapped_flops

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=4

%fused (p.0: bf16[8,16], p.1: bf16[16,32]) -> bf16[8,32] {
  %p.0 = bf16[8,16]{1,0} parameter(0)
  %p.1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (c: (s32[], bf16[8,16], bf16[16,32])) -> (s32[], bf16[8,16], bf16[16,32]) {
  %c = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %a = bf16[8,16]{1,0} get-tuple-element(%c), index=1
  %b = bf16[16,32]{1,0} get-tuple-element(%c), index=2
  %s.2 = f32[64]{0} all-reduce-start(%a), channel_id=2, replica_groups={{0,2},{1,3}}, to_apply=%add
  %f.2 = bf16[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  %d.2 = f32[64]{0} all-reduce-done(%s.2)
  ROOT %t = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%c, %a, %b)
}

%cond (c.1: (s32[], bf16[8,16], bf16[16,32])) -> pred[] {
  %c.1 = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: bf16[8,16], w: bf16[16,32]) -> f32[64] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %start = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%x, %x, %w)
  %s.1 = f32[64]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %loop = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) while(%start), condition=%cond, body=%body, TRIPS
  %dot.2 = bf16[8,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d.1 = f32[64]{0} all-reduce-done(%s.1)
  %s.3 = f32[64]{0} all-reduce-start(%x), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %d.3 = f32[64]{0} all-reduce-done(%s.3)
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')
ONE = 2 * 8 * 16 * 32


def test_products_between_start_and_done_are_counted_with_loops_and_fusions():
    found = {one.collective.name: one for one in overlapped_flops(PROGRAM, {"replica": 2, "fsdp": 2})}
    assert {name: one.flops for name, one in found.items()} == {"s.1": 4.0 * ONE, "s.2": ONE, "s.3": 0.0}
    assert found["s.1"].collective.axes == ("fsdp",) and found["s.2"].collective.times == 3
    # A ring of two sends all of an all-reduce's 256 bytes; at a byte for two FLOPs half of its products hide it.
    assert found["s.1"].hidden_bytes(2.0, 1.0) == 256
    assert found["s.2"].hidden_bytes(2.0**14, 1.0) == pytest.approx(0.5)


def test_fields_without_information_are_not_read():
    assert has_async_schedule(PROGRAM)
    assert not has_async_schedule(PROGRAM.replace("-start(", "("))
    with pytest.raises(ValueError, match="not scheduled"):
        overlapped_flops(PROGRAM.replace("is_scheduled=true", "is_scheduled=false"), {"replica": 2, "fsdp": 2})
