"""What a step takes on each device: the estimate from its trace beside what XLA plans for H100s."""

import dataclasses

import pytest
from planned import WIDE, plan, walk
from test_bytes import CASES, EIGHT, PIPED, SLOW

from panax.mesh import Rules
from panax.models import PRESETS, count_parameters
from panax.parallel import Pipeline

BAND = 0.15
"""How far the estimate may be off. Found: 15 % too low to 10 % too high, 3 % in the median. What is too low keeps all over a
tensor axis; the schedule of a compiler, which decides what lives beside what, is only roughly followed."""

MORE: dict[str, tuple] = {
    "70B": ("h100x64", {"fsdp": 64}, 64, {"model": PRESETS["llama3_70b"]}),
    "70B, tensor": ("h100x64", {"fsdp": 8, "tensor": 8}, 64, {"model": PRESETS["llama3_70b"]}),
    "a large vocabulary": ("h100x64", {"fsdp": 64}, 64, {"model": PRESETS["gemma2_9b"]}),
    "all kept, 1.6B": ("h100x64", {"fsdp": 64}, 512, {"model": PRESETS["gpt2_xl"], "length": 1024, "remat": "none"}),
    "all kept, 1.7B": ("h100x64", {"fsdp": 64}, 64, {"model": PRESETS["qwen3_1.7b"], "remat": "none"}),
    "products kept": ("h100x64", {"fsdp": 64}, 64, {"remat": "products"}),
    "whole gradients": ("h100x64", {"fsdp": 16, "tensor": 4}, 64, {"micro_batches": 4, "rules": Rules(zero="1")}),
}
QUICK = ("fsdp", "hsdp", "fsdp-tensor, nothing again", "replica-fsdp-tensor", "ulysses", "stage-fsdp-tensor")
"""Of those that `test_bytes` compiles anyway."""


TOO_LOW = pytest.mark.xfail(strict=True, reason="the estimate is 15.1 % too low where a tensor axis keeps everything")
TOO_LOW_CASES = ("fsdp-tensor, nothing again",)


@pytest.mark.parametrize(
    ("target", "mesh", "rows", "options"),
    [pytest.param(*CASES[name], id=name, marks=TOO_LOW if name in TOO_LOW_CASES else ()) for name in QUICK]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()],
)
def test_memory_is_that_of_the_walk(target, mesh, rows, options):
    found, walked = plan(target, mesh, rows, **options)
    assert found.memory.arguments == pytest.approx(walked.cost.arguments, abs=1024)
    assert found.memory.outputs - found.memory.reused < 1024
    assert walked.cost.memory == pytest.approx(found.memory.total, rel=BAND)


def test_an_updated_state_takes_the_old_ones_memory():
    """Where the state is most of a step's memory, one that is counted twice is seen."""
    model = dataclasses.replace(WIDE, num_layers=2, vocab_size=8192)
    found, walked = plan("h100x1", {"fsdp": 1}, 1, model=model, length=256)
    assert found.memory.arguments > 2 * found.memory.temporaries
    assert walked.cost.memory == pytest.approx(found.memory.total, rel=BAND)


# Gradients of the layers that EIGHT has and WIDE has not: float32, split over fsdp=8, whatever the context axis.
GRADIENT_BYTES = (count_parameters(EIGHT) - count_parameters(WIDE)) * 4 // 8


@pytest.mark.slow
def test_activations_fall_as_the_context_axis_grows():
    """A layer more takes half as much beside its gradients with each doubling of the axis, for rows of one length."""
    taken = []
    for context in (2, 4, 8):
        mesh = {"fsdp": 8, "context": context}
        few, more = (
            plan(f"h100x{8 * context}", mesh, 16, model=model, remat="none")[0].memory.temporaries
            for model in (WIDE, EIGHT)
        )
        taken.append(more - few - GRADIENT_BYTES)
    assert taken == pytest.approx([taken[0], taken[0] / 2, taken[0] / 4], rel=BAND)


@pytest.mark.slow
def test_so_does_the_estimate():
    estimates = []
    for context in (2, 4, 8):
        mesh = {"fsdp": 8, "context": context}
        few, more = (
            walk(f"h100x{8 * context}", mesh, 16, model=model, remat="none").cost.temporaries for model in (WIDE, EIGHT)
        )
        estimates.append(more - few - GRADIENT_BYTES)
    assert estimates == pytest.approx([estimates[0], estimates[0] / 2, estimates[0] / 4], rel=BAND)


@pytest.mark.slow
def test_1f1b_takes_no_more_for_more_micro_batches():
    """GPipe keeps one input for each; 1F1B as many as there are stages, twice."""

    def temporaries(pipeline: Pipeline, micro_batches: int) -> tuple[int, int]:
        result, walked = plan(
            "h100x64", PIPED, 4 * micro_batches, model=EIGHT, micro_batches=micro_batches, pipeline=pipeline
        )
        return result.memory.temporaries, walked.cost.temporaries

    few, more = temporaries(Pipeline(), 8), temporaries(Pipeline(), 32)
    assert more[1] == pytest.approx(few[1], rel=0.01)
    assert more[0] == pytest.approx(few[0], rel=0.01)
    gpipe = Pipeline(schedule="gpipe")
    few, more = temporaries(gpipe, 8), temporaries(gpipe, 32)
    assert more[0] - few[0] == pytest.approx(more[1] - few[1], rel=BAND)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_state_falls_with_each_axis_that_splits_it(axis):
    before, after = (
        plan(f"h100x{8 * n}", {"fsdp": 8, axis: 8 * n if axis == "fsdp" else n}, 64)[0].memory for n in (1, 8)
    )
    assert after.arguments == pytest.approx(before.arguments / 8, rel=0.01)
    assert after.temporaries < before.temporaries


def test_rematerialization_keeps_less_with_each_policy():
    none, products, full = (
        walk(*CASES["fsdp"][:3], remat=remat).cost.temporaries for remat in ("none", "products", "full")
    )
    assert none > products > full
    assert SLOW.keys().isdisjoint(CASES)
