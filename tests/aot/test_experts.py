"""Mixtures of experts on absent H100s: what their exchange sends, what splits their weights, what a layer takes besides."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from formulas.communication import decoder_traffic
from formulas.communication import traffic_totals as formula_totals
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planned import devices, plan, walk

from panax.core import logical_axes, map_axes, use_layout
from panax.layers import MoE
from panax.layers.moe.moe import MixtureOfExperts
from panax.layers.moe.routing import Tokens
from panax.mesh import MeshShape, Placement, Rules
from panax.mesh.placement import partition_entries
from panax.models import PRESETS
from panax.parallel import rematerialize
from panax.plan import count_collectives, summarize_collectives, traffic_totals
from panax.plan.hlo import HloModule

MIXTRAL = dataclasses.replace(PRESETS["mixtral_8x7b"], num_layers=3, max_length=4096)
FINE = dataclasses.replace(
    PRESETS["deepseek_v3"], num_layers=3, max_length=4096, vocab_size=32000, embed=4096, ffn=8192, heads=32,
    feed_forward=MoE(experts=64, active=8, ffn=1024, shared=1024, first_dense=1, scores="sigmoid", selection_bias=True),
)  # fmt: skip
EVERY = dataclasses.replace(
    PRESETS["glam_64b_64e"], num_layers=8, vocab_size=32000, embed=4096, ffn=8192, heads=32,
    feed_forward=MoE(experts=32, active=2, every=2, gated=False),
)  # fmt: skip

BAND = (0.87, 1.15)
"""The estimate of memory over what XLA plans. Found: 8 % too low to 13 % too high."""

CASES: dict[str, tuple] = {
    "mixtral, 64": ("h100x64", {"fsdp": 8, "expert": 8}, 64, MIXTRAL, {}),
}
SLOW: dict[str, tuple] = {
    "fine-grained, 256": ("h100x256", {"replica": 4, "fsdp": 8, "expert": 8}, 256, FINE, {}),
    "mixtral, 256": ("h100x256", {"fsdp": 32, "expert": 8}, 256, MIXTRAL, {}),
    "fine-grained, 64": ("h100x64", {"fsdp": 8, "expert": 8}, 64, FINE, {}),
    "tensor": ("h100x64", {"fsdp": 8, "expert": 4, "tensor": 2}, 64, MIXTRAL, {}),
    "tensor, products kept": ("h100x64", {"fsdp": 8, "expert": 4, "tensor": 2}, 64, MIXTRAL, {"remat": "products"}),
    "fine-grained, tensor": ("h100x64", {"fsdp": 4, "expert": 8, "tensor": 2}, 64, FINE, {}),
    "no exchange": ("h100x64", {"fsdp": 32, "tensor": 2}, 64, MIXTRAL, {}),
    "no exchange, shared": ("h100x64", {"fsdp": 32, "tensor": 2}, 64, FINE, {}),
    "uneven stages": (
        "h100x64", {"stage": 4, "fsdp": 2, "expert": 8}, 128, dataclasses.replace(MIXTRAL, num_layers=6), {"micro_batches": 8},
    ),
    "every second layer, stages": (
        "h100x64", {"stage": 4, "fsdp": 2, "expert": 4, "tensor": 2}, 256, EVERY, {"micro_batches": 8, "length": 1024},
    ),
}  # fmt: skip
ALL = [pytest.param(*case, id=name) for name, case in CASES.items()] + [
    pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()
]


# Its memory is a sum of what elementwise work keeps, which the formula does not follow in a mixture.
NOTHING_AGAIN = pytest.param(
    "h100x64", {"fsdp": 8, "expert": 8}, 64, MIXTRAL, {"remat": "none"}, id="nothing again", marks=pytest.mark.slow
)


def planned(target, mesh, rows, model, options):
    return plan(target, mesh, rows, model=model, **{"length": 4096, **options})


@pytest.mark.parametrize(
    ("target", "mesh", "rows", "model", "options"),
    [*(pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in ALL), NOTHING_AGAIN],
)
def test_the_walk_is_what_the_formulas_say(target, mesh, rows, model, options):
    walked = walk(target, mesh, rows, model=model, **{"length": 4096, **options})
    assert walked.cost.unknown == ()
    assert_alike(traffic_totals(walked.cost.traffic), formula_totals(decoder_traffic(walked.formula)), 0.002)
    # Later rounds are declared: none is expected, and there is a worst case.
    later = [one for one in walked.cost.traffic if one.times.expected == 0]
    assert bool(later) == ("expert" in mesh) and all(one.times.maximum for one in later)


@pytest.mark.parametrize(("target", "mesh", "rows", "model", "options"), [*ALL, NOTHING_AGAIN])
def test_bytes_are_those_of_the_walk(target, mesh, rows, model, options):
    found, walked = planned(target, mesh, rows, model, options)
    # Later rounds are in loops of unknown length, and in nothing else.
    assert {c.kind for c in found.collectives if c.open_ended} <= {"ragged-all-to-all", "all-gather", "reduce-scatter"}
    counted = {(total.kind, total.axes): total.wire_bytes for total in summarize_collectives(found.collectives)}
    assert_alike(counted, traffic_totals(walked.cost.traffic), 0.002)


def assert_alike(found: dict, expected: dict, tolerance: float) -> None:
    whole = sum(expected.values())
    assert sum(found.values()) == pytest.approx(whole, rel=tolerance)
    for group in sorted(found.keys() | expected.keys()):
        if max(found.get(group, 0), expected.get(group, 0)) > 0.005 * whole:
            assert found.get(group, 0) == pytest.approx(expected.get(group, 0), rel=tolerance), group


@pytest.mark.parametrize(("target", "mesh", "rows", "model", "options"), ALL)
def test_memory_is_that_of_the_walk(target, mesh, rows, model, options):
    found, walked = planned(target, mesh, rows, model, options)
    assert found.memory.arguments == pytest.approx(walked.cost.arguments, abs=4096)
    assert BAND[0] <= walked.cost.memory / found.memory.total <= BAND[1]


@pytest.mark.parametrize(
    ("target", "mesh", "rows", "model", "options"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [
        pytest.param(*SLOW[name], id=name, marks=pytest.mark.slow)
        for name in ("fine-grained, 256", "mixtral, 256", "fine-grained, 64")
    ],
)
def test_an_exchange_sends_its_rows_and_little_else(target, mesh, rows, model, options):
    """Payload: the smaller of the two buffers of a ragged exchange, which bounds what it can carry, in every layer each way."""
    result, walked = planned(target, mesh, rows, model, options)
    step = walked.formula
    mixtures, moe = len(model.mixture_layers), model.feed_forward
    # A device's share of what goes on the wire, were nothing for its own experts: the rows themselves.
    theory = moe.active * step.tokens * model.embed * step.compute_bytes
    first = [c for c in result.collectives if c.kind == "ragged-all-to-all" and not c.open_ended]
    payload = {True: 0, False: 0}
    for collective in first:
        payload[collective.dtype == "bf16"] += collective.times * collective.wire_bytes * 8 // 7
    # Dispatch and return, forward and backward, and the dispatch again; weights of rows beside them.
    assert payload[True] == pytest.approx(5 * mixtures * theory, rel=1e-6)
    ids = sum(c.total_wire_bytes for c in result.collectives if c.dtype == "s32" and c.axes == ("expert",))
    assert payload[True] + payload[False] + ids <= 1.05 * 5 * mixtures * theory
    assert max(c.buffer_bytes for c in first) == pytest.approx(moe.buffer * theory, rel=1e-3)


@functools.cache
def layer_program(moe: MoE, embed: int, remat: str) -> tuple[Any, int]:
    """The backward pass of one mixture layer on fsdp 8 x expert 8, as a scan over layers runs it; and its rows on a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placement = Placement.create(MeshShape(fsdp=8, expert=8), Rules(), devices("h100x64"))
    build = functools.partial(MixtureOfExperts.build, embed=embed, ffn=embed, moe=moe, gated=True, activation="silu")
    layer = jax.eval_shape(build, jax.random.key(0))
    specs = map_axes(lambda _, axes: P(*partition_entries(placement.storage(axes))), layer, logical_axes(layer))
    spec = P(*partition_entries(placement.compute(("batch", "residual", "embed"))))

    def backward(layer: Any, x: jax.Array, gradient: jax.Array) -> Any:
        run = rematerialize(lambda layer, x: layer(x, Tokens())[0], remat)
        return jax.vjp(run, layer, x)[1](gradient)

    def step(*arguments: Any) -> Any:
        with use_layout(placement):
            return jax.shard_map(
                backward, mesh=placement.mesh, in_specs=(specs, spec, spec), out_specs=(specs, spec), check_vma=False
            )(*arguments)

    def shape(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(placement.mesh, spec))

    rows, length = 64, 8192
    x = shape(jnp.zeros((), jnp.bfloat16), P())
    x = jax.ShapeDtypeStruct((rows, length, embed), jnp.bfloat16, sharding=NamedSharding(placement.mesh, spec))
    compiled = jax.jit(step).lower(jax.tree.map(shape, layer, specs), x, x).compile()
    return compiled, moe.active * rows * length // 64


@pytest.mark.parametrize(
    ("moe", "embed", "times_rows", "times_hidden"),
    [
        pytest.param(MoE(experts=64, active=8, ffn=512, shared=512), 2048, 6.5, 0.0, id="fine-grained"),
        pytest.param(MoE(experts=8, active=2, ffn=7168), 2048, 3.5, 5.0, id="mixtral", marks=pytest.mark.slow),
    ],
)
def test_a_layer_takes_a_few_times_its_sorted_tokens(moe, embed, times_rows, times_hidden):
    """In a program of fixed shapes: so also where every token picks one expert.

    Besides: the layer's weights, gathered, and their gradients twice, one of them the sum over rounds.
    """
    compiled, rows = layer_program(moe, embed, "full")
    sorted_tokens, hidden = 2 * rows * embed, 2 * rows * moe.ffn
    weights = 3 * moe.experts // 8 * embed * moe.ffn + 3 * embed * moe.shared
    taken = compiled.memory_analysis().temp_size_in_bytes - (2 + 4 + 4) * weights
    assert taken <= times_rows * sorted_tokens + times_hidden * hidden


def test_the_shared_expert_can_run_beside_the_exchange():
    """Its products need nothing of the exchange, and the compiler puts work between an exchange's start and its end."""
    compiled, _ = layer_program(MoE(experts=64, active=8, ffn=512, shared=512), 2048, "full")
    module = HloModule.parse(compiled.as_text())
    entry = list(module.computations[module.entry].instructions.values())
    between = 0
    for place, instruction in enumerate(entry):
        if instruction.opcode == "ragged-all-to-all-start":
            after = [i.opcode for i in entry[place + 1 :]]
            end = next(
                n for n, i in enumerate(entry[place + 1 :])
                if i.opcode == "ragged-all-to-all-done" and instruction.name in i.operands
            )  # fmt: skip
            between += sum(opcode in ("fusion", "custom-call", "dot") for opcode in after[:end])
    exchanges = [
        c for c in count_collectives(compiled.as_text(), {"fsdp": 8, "expert": 8}) if c.kind == "ragged-all-to-all"
    ]
    assert [c.times for c in exchanges if not c.open_ended] == [1] * 5
    assert between > 0
