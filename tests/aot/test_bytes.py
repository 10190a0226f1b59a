"""Traffic of compiled programs, by kind and mesh axes, equals that of the walk through their trace, and of the formulas of
`docs/parallelism/communication.md` say."""

import dataclasses

import pytest
from formulas.communication import decoder_traffic
from formulas.communication import traffic_totals as formula_totals
from planned import WIDE, plan, walk

from panax.mesh import Rules
from panax.models import PRESETS
from panax.parallel import Pipeline
from panax.plan import summarize_collectives, traffic_totals

WALK = 0.002
"""How far walk and formulas may differ. The formulas leave out scalars, and how many tokens chose each expert."""

TOLERANCE = {"h": 0.002, "v": 0.05}
"""By the first letter of the target. XLA for GPUs sends the traced collectives, but moves the gather of the segments, which
is the same for all layers, out of their loop. XLA for TPUs also rounds some scatters up to whole tiles, and
writes single ones, outside of loops, as all-reduces."""

COUNTED = {"h": 0.005, "v": 0.03}
"""Groups below this share of a step's bytes are compared within the total alone."""

EIGHT = dataclasses.replace(WIDE, num_layers=8)
SMALL = dataclasses.replace(PRESETS["llama3_1b"], num_layers=2)
TIED = dataclasses.replace(PRESETS["qwen3_1.7b"], num_layers=4)
NORMS_AFTER = dataclasses.replace(PRESETS["gemma2_9b"], num_layers=4)
BIASED = dataclasses.replace(PRESETS["gpt2_xl"], num_layers=4, heads=24, head_dim=64)
PIPED = {"stage": 4, "fsdp": 4, "tensor": 4}
INTERLEAVED = Pipeline(schedule="interleaved", chunks=2)

CASES: dict[str, tuple] = {
    "fsdp": ("h100x64", {"fsdp": 64}, 64, {}),
    "hsdp": ("h100x64", {"replica": 8, "fsdp": 8}, 64, {}),
    "fsdp-tensor, nothing again": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"remat": "none"}),
    "fsdp-tensor, products kept": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"remat": "products"}),
    "replica-fsdp-tensor": ("h100x64", {"replica": 2, "fsdp": 4, "tensor": 8}, 64, {"micro_batches": 2}),
    "replica-fsdp-tensor, 256": ("h100x256", {"replica": 4, "fsdp": 8, "tensor": 8}, 64, {}),
    "ulysses": ("h100x64", {"fsdp": 8, "context": 8}, 8, {}),
    "context-tensor-fsdp": ("h100x64", {"fsdp": 8, "context": 4, "tensor": 2}, 8, {"remat": "products"}),
    "stage-fsdp-tensor": ("h100x64", PIPED, 32, {"micro_batches": 8, "model": EIGHT}),
    "uneven stages": (
        "h100x64", PIPED, 32, {"micro_batches": 8, "model": dataclasses.replace(WIDE, num_layers=7)},
    ),
}  # fmt: skip

SLOW: dict[str, tuple] = {
    "ring": ("h100x64", {"fsdp": 16, "context": 4}, 16, {"context_attention": "ring"}),
    "interleaved": ("h100x64", PIPED, 32, {"micro_batches": 8, "model": EIGHT, "pipeline": INTERLEAVED}),
    "kv heads that tensor does not divide": ("h100x64", {"fsdp": 4, "tensor": 16}, 64, {}),
    "a tied table": ("h100x64", {"fsdp": 16, "tensor": 4}, 64, {"model": TIED, "micro_batches": 2}),
    "norms after sub-layers": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"model": NORMS_AFTER}),
    "biases, learned positions": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"model": BIASED, "length": 1024}),
    "zero 2": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"micro_batches": 4, "rules": Rules(zero="2")}),
    "zero 1": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"micro_batches": 4, "rules": Rules(zero="1")}),
    "tensor in rings": ("h100x64", {"fsdp": 16, "tensor": 4}, 64, {"rules": Rules(overlap=True)}),
    "expert axis of a dense model": ("h100x64", {"fsdp": 8, "expert": 2, "tensor": 4}, 64, {}),
    "ring over hosts": ("h100x64", {"fsdp": 2, "context": 16, "tensor": 2}, 8, {"remat": "products"}),
    "fsdp, 256": ("h100x256", {"fsdp": 256}, 256, {}),
    "stages, 256": ("h100x256", {"stage": 4, "fsdp": 8, "tensor": 8}, 64, {"micro_batches": 8, "model": EIGHT}),
    "stages, zero 3": ("h100x64", PIPED, 32, {"micro_batches": 8, "model": EIGHT, "rules": Rules(zero="3")}),
    "stages, zero 2, interleaved": (
        "h100x64", PIPED, 32, {
            "micro_batches": 8, "model": dataclasses.replace(WIDE, num_layers=16), "rules": Rules(zero="2"),
            "pipeline": INTERLEAVED,
        },
    ),
    "gpipe": (
        "h100x64", PIPED, 32,
        {"micro_batches": 8, "model": EIGHT, "pipeline": Pipeline(schedule="gpipe"), "remat": "none"},
    ),
    "stage-context-tensor": ("h100x64", {"stage": 4, "context": 4, "tensor": 4}, 8, {"micro_batches": 8, "model": EIGHT}),
    "two stages, ring": (
        "h100x64", {"stage": 2, "fsdp": 2, "context": 8, "tensor": 2}, 8,
        {"micro_batches": 4, "model": dataclasses.replace(PRESETS["llama3_1b"], num_layers=5)},
    ),
    "v5p": ("v5p-64", {"fsdp": 8, "tensor": 4}, 32, {"model": SMALL}),
    "v5e, context": ("v5e-16", {"fsdp": 2, "context": 4, "tensor": 2}, 16, {"model": SMALL}),
    "v5e, stages": (
        "v5e-16", {"stage": 2, "fsdp": 2, "tensor": 4}, 16,
        {"micro_batches": 4, "model": dataclasses.replace(SMALL, num_layers=4)},
    ),
}  # fmt: skip


ALL = [pytest.param(*case, id=name) for name, case in CASES.items()] + [
    pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()
]
TRACED = ("fsdp", "fsdp-tensor, products kept", "context-tensor-fsdp", "uneven stages")
"""Of each kind of parallelism one, in the default suite; nothing is compiled for them."""


@pytest.mark.parametrize(
    ("target", "mesh", "rows", "options"),
    [
        pytest.param(*case, id=name, marks=() if name in TRACED else pytest.mark.slow)
        for name, case in {**CASES, **SLOW}.items()
    ],
)
def test_the_walk_is_what_the_formulas_say(target, mesh, rows, options):
    walked = walk(target, mesh, rows, **options)
    assert walked.cost.unknown == ()
    assert_alike(traffic_totals(walked.cost.traffic), formula_totals(decoder_traffic(walked.formula)), WALK, 0.005)


@pytest.mark.parametrize(("target", "mesh", "rows", "options"), ALL)
def test_bytes_are_those_of_the_walk(target, mesh, rows, options):
    found, walked = plan(target, mesh, rows, **options)
    assert all(collective.exact for collective in found.collectives)
    counted = {(total.kind, total.axes): total.wire_bytes for total in summarize_collectives(found.collectives)}
    assert_alike(counted, traffic_totals(walked.cost.traffic), TOLERANCE[target[0]], COUNTED[target[0]])


def assert_alike(found: dict, expected: dict, tolerance: float, counted: float) -> None:
    whole = sum(expected.values())
    assert sum(found.values()) == pytest.approx(whole, rel=tolerance)
    for group in sorted(found.keys() | expected.keys()):
        if max(found.get(group, 0), expected.get(group, 0)) > counted * whole:
            assert found.get(group, 0) == pytest.approx(expected.get(group, 0), rel=tolerance), group
