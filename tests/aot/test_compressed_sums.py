"""What a compressed reduction sends over the slow axis: by its formula, in the trace, and in programs for absent H100s."""

import collections
import math

import jax
import pytest
from planned import WIDE, devices, plan, walk

from panax.comms import Comms
from panax.core import pair_axes
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask
from panax.optim import AdamW
from panax.plan import count_collectives, traffic_totals
from panax.plan.step import disable_compilation_cache
from panax.plan.walk.walk import walk_agreement
from panax.train import CompiledStep, Program

MESHES = {
    "64": ("h100x64", {"replica": 8, "fsdp": 8}, 64),
    "256": ("h100x256", {"replica": 4, "fsdp": 8, "tensor": 8}, 64),
}
SCALE = 4 / 256
"""Bytes a number, where 256 share one."""
EACH_WAY = {"bfloat16": 2.0, "int8": 1 + SCALE, "float8": 1 + SCALE, "int4": 0.5 + SCALE, "sign": 0.125 + SCALE}
MOST = {"bfloat16": 4.0, "int8": 2.05, "float8": 2.05, "int4": 1.05, "sign": 0.30}
CODES = {"bfloat16": {"u16"}, "int8": {"s8"}, "float8": {"f8e4m3fn", "u8"}, "int4": {"u8"}, "sign": {"u8"}}
"""Bytes a parameter that are asked for, and how codes are written in a program."""


def held(walked) -> int:
    """Parameters that rest on a device."""
    step = walked.step
    leaves = zip(jax.tree.leaves(step.program.abstract.params), jax.tree.leaves(step.shardings.params))
    return sum(math.prod(place.shard_shape(leaf.shape)) for leaf, place in leaves)


def compressed(name: str, wire: str):
    target, mesh, rows = MESHES[name]
    return (target, mesh, rows), {"comms": Comms(compress=wire)}


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        pytest.param(name, wire, marks=() if (name, wire) in (("64", "int8"), ("64", "sign")) else pytest.mark.slow)
        for name in MESHES
        for wire in EACH_WAY
    ],
)
def test_a_step_sends_what_its_codes_weigh(name, wire):
    arguments, options = compressed(name, wire)
    walked, plain = walk(*arguments, **options), walk(*arguments)
    result, usual = traffic_totals(walked.cost.traffic), traffic_totals(plain.cost.traffic)
    over, replicas = ("replica",), arguments[1]["replica"]
    numbers, away = held(walked), (replicas - 1) / replicas
    # Losses and the guard add up a few numbers in float32; so do norms, which fsdp does not split, over both axes.
    small = 1e3
    program = walked.step.program
    named = pair_axes(program.abstract.params, program.axes.params)
    norms = sum(leaf.size for _, leaf, axes in named if "norm" in axes)
    assert usual["all-reduce", over] == pytest.approx(8 * away * (numbers - norms), abs=small)
    assert result.get(("all-reduce", over), 0) <= small
    for kind in ("all-to-all", "all-gather"):
        assert result[kind, over] == pytest.approx(EACH_WAY[wire] * away * numbers, rel=1e-3), kind
    on_the_axis = sum(sent for (_, axes), sent in result.items() if axes == over)
    assert on_the_axis / numbers <= MOST[wire] * away * 1.0001
    # Nothing else of the step has changed, but that norms are added up over the fast axes first.
    others, before = ({key: sent for key, sent in all_.items() if key[1] != over} for all_ in (result, usual))
    changed = {key for key in others.keys() | before.keys() if others.get(key, 0) != before.get(key, 0)}
    fast = tuple(axis for axis in arguments[1] if axis != "replica")
    assert changed == {("all-reduce", fast), ("all-reduce", ("replica", *fast))}


LOCAL = 500
OF_LOCAL_STEPS = {"": (4.0, 0.0165), "int8": (1 + SCALE, 0.0041), "int4": (0.5 + SCALE, 0.0022)}
"""Of outer gradients: bytes a number each way, and the most a parameter and step that are asked for."""


def agreeing(name: str, wire: str):
    target, mesh, _ = MESHES[name]
    comms = Comms(local_steps=LOCAL, compress=wire)
    program = Program.create(DecoderTask(model=WIDE, compute_dtype="bfloat16"), AdamW(), num_steps=1000, comms=comms)
    placement = Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices(target))
    return CompiledStep(program, placement, dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq")))


@pytest.mark.parametrize("wire", OF_LOCAL_STEPS)
@pytest.mark.parametrize("name", MESHES)
def test_local_steps_send_what_is_agreed_on(name, wire):
    step = agreeing(name, wire)
    cost = walk_agreement(step)
    assert cost is not None
    leaves = zip(jax.tree.leaves(step.program.abstract.params), jax.tree.leaves(step.shardings.params))
    numbers = sum(math.prod(place.shard_shape(leaf.shape)) for leaf, place in leaves)
    each, limit = OF_LOCAL_STEPS[wire]
    replicas = MESHES[name][1]["replica"]
    assert {one.axes for one in cost.traffic} == {("replica",)}
    sent = sum(one.wire_bytes for one in cost.traffic) / numbers
    assert sent == pytest.approx(2 * each * (replicas - 1) / replicas, rel=1e-3)
    assert sent / LOCAL <= limit


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["", "int4"])
def test_local_steps_compiled_program_sends_it_in_these_types(wire):
    step = agreeing("64", wire)
    with disable_compilation_cache():
        text = step.trace_outer_sync().lower().compile().as_text()
    leaves = zip(jax.tree.leaves(step.program.abstract.params), jax.tree.leaves(step.shardings.params))
    numbers = sum(math.prod(place.shard_shape(leaf.shape)) for leaf, place in leaves)
    sent: dict[str, float] = collections.defaultdict(float)
    for one in count_collectives(text, step.placement.sizes):
        for dtype, _ in one.shares:
            sent[dtype] += one.total_wire_bytes_as(dtype) / numbers * 8 / 7
    print(wire, dict(sent))
    assert sum(sent.values()) == pytest.approx(2 * OF_LOCAL_STEPS[wire][0], rel=0.02)
    assert sent["u8" if wire else "f32"] == pytest.approx(1.0 if wire else 8.0, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("wire", EACH_WAY)
@pytest.mark.parametrize("name", MESHES)
def test_codes_are_what_travels_in_the_compiled_program(name, wire):
    arguments, options = compressed(name, wire)
    planned, walked = plan(*arguments, **options)
    replicas, numbers = arguments[1]["replica"], held(walked)
    away = (replicas - 1) / replicas
    by_type: dict[str, float] = collections.defaultdict(float)
    for one in planned.collectives:
        if one.axes == ("replica",) and one.wire_bytes > 1e3:
            assert one.exact
            for dtype, _ in one.shares:
                by_type[dtype] += one.total_wire_bytes_as(dtype) / numbers / away
    print(name, wire, dict(by_type))
    scales = 0.0 if wire == "bfloat16" else 2 * SCALE
    assert sum(by_type.values()) == pytest.approx(2 * EACH_WAY[wire], rel=0.02)
    assert sum(by_type.values()) <= MOST[wire] * 1.001
    assert sum(sent for dtype, sent in by_type.items() if dtype in CODES[wire]) == pytest.approx(
        2 * EACH_WAY[wire] - scales, rel=0.02
    )


@pytest.mark.slow
def test_the_compiled_plain_step_sends_float32():
    planned, walked = plan(*MESHES["64"])
    sent = sum(one.total_wire_bytes_as("f32") for one in planned.collectives if one.axes == ("replica",))
    assert sent / held(walked) == pytest.approx(8 * 7 / 8, rel=0.02)
