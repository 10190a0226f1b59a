"""The formulas for bytes on the wire, against sums done by hand for one small model, and against each other."""

import dataclasses

import pytest
from formulas.communication import decoder_traffic, traffic_totals
from formulas.decoder_step import DecoderStep
from formulas.passes import Ticks, pipeline_ticks

from panax.core.errors import LayoutError
from panax.mesh import Rules
from panax.models import DecoderConfig, DecoderTask
from panax.parallel import Pipeline
from panax.parallel.schedules import build_schedule

LAYERS, EMBED, HEADS, KV_HEADS, WIDTH, FFN, VOCAB, LENGTH = 4, 256, 8, 4, 32, 512, 1024, 512
MODEL = DecoderConfig(
    vocab_size=VOCAB, max_length=LENGTH, embed=EMBED, num_layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN, tied=False
)  # fmt: skip
MATRICES = EMBED * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * EMBED * FFN
TABLE = VOCAB * EMBED
NORMS = (2 * LAYERS + 1) * EMBED
PACKED = 4


def step(mesh: dict[str, int], rows: int = 64, *, model: DecoderConfig = MODEL, **options) -> DecoderStep:
    fields = {f.name for f in dataclasses.fields(DecoderStep)}
    task = DecoderTask(model=model, compute_dtype="bfloat16", **{k: v for k, v in options.items() if k not in fields})
    rest = {k: v for k, v in options.items() if k in fields}
    return DecoderStep(task=task, mesh=mesh, rows=rows, **{"length": LENGTH, **rest})


def sent(*args, **options) -> dict:
    return traffic_totals(decoder_traffic(step(*args, **options)))


def part(whole: float, n: int) -> float:
    return whole * (n - 1) / n


def test_one_device_sends_nothing():
    assert decoder_traffic(step({})) == []


@pytest.mark.parametrize("remat", ["none", "products", "full"])
def test_zero_3_gathers_twice_and_scatters_once_for_each_micro_batch(remat):
    found = sent({"fsdp": 8}, remat=remat, micro_batches=4)
    assert found == {
        ("all-gather", ("fsdp",)): 4 * part(2 * (2 * LAYERS * MATRICES + 2 * TABLE), 8),
        ("reduce-scatter", ("fsdp",)): 4 * part(4 * (LAYERS * MATRICES + 2 * TABLE), 8),
        ("all-reduce", ("fsdp",)): 2 * part(4 * NORMS, 8),
    }


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [("2", 1, 4), ("1", 1, 1)])
def test_zero_2_and_1_gather_once_a_step(zero, gathers, scatters):
    found = sent({"fsdp": 8}, micro_batches=4, rules=Rules(zero=zero))
    assert found["all-gather", ("fsdp",)] == gathers * part(2 * (LAYERS * MATRICES + 2 * TABLE), 8)
    assert found["reduce-scatter", ("fsdp",)] == scatters * part(4 * (LAYERS * MATRICES + 2 * TABLE), 8)


def test_a_tied_table_is_gathered_once_and_scattered_twice():
    found = sent({"fsdp": 8}, model=dataclasses.replace(MODEL, tied=True))
    assert found["all-gather", ("fsdp",)] == part(2 * (2 * LAYERS * MATRICES + TABLE), 8)
    assert found["reduce-scatter", ("fsdp",)] == part(4 * (LAYERS * MATRICES + 2 * TABLE), 8)


def test_float32_weights_travel_in_float32():
    narrow, wide = (
        traffic_totals(decoder_traffic(dataclasses.replace(s, task=dataclasses.replace(s.task, compute_dtype=dtype))))
        for s in [step({"fsdp": 8})]
        for dtype in ("bfloat16", "float32")
    )
    assert wide["all-gather", ("fsdp",)] == 2 * narrow["all-gather", ("fsdp",)]
    assert wide["reduce-scatter", ("fsdp",)] == narrow["reduce-scatter", ("fsdp",)]


def test_replicas_sum_shards_once_a_step():
    for micro_batches in (1, 4):
        found = sent({"replica": 4, "fsdp": 2}, micro_batches=micro_batches)
        assert found["all-reduce", ("replica",)] == 2 * part(4 * (LAYERS * MATRICES + 2 * TABLE) / 2, 4)
        assert found["all-reduce", ("replica", "fsdp")] == 2 * part(4 * NORMS, 8)


@pytest.mark.parametrize(("remat", "gathers", "scatters"), [("none", 4, 4), ("products", 6, 4), ("full", 6, 5)])
def test_sequence_parallelism(remat, gathers, scatters):
    found = sent({"tensor": 4}, rows=8, remat=remat)
    whole = 2 * 8 * LENGTH * EMBED
    assert found["all-gather", ("tensor",)] == part((gathers * LAYERS + 2) * whole, 4)
    assert found["reduce-scatter", ("tensor",)] == part((scatters * LAYERS + 2) * whole, 4)
    statistics, norms = 4 * 4 * 8 * LENGTH, 4 * NORMS
    assert found["all-reduce", ("tensor",)] == 2 * part(statistics + norms, 4)


def test_a_norm_after_each_sub_layer_needs_both_scatters_again():
    found = sent({"tensor": 4}, rows=8, remat="full", model=dataclasses.replace(MODEL, post_norms=True))
    assert found["reduce-scatter", ("tensor",)] == part((6 * LAYERS + 2) * 2 * 8 * LENGTH * EMBED, 4)


def test_kv_heads_that_tensor_does_not_divide_travel_whole():
    found = sent({"fsdp": 4, "tensor": 8}, rows=8)
    kv = 2 * EMBED * WIDTH * KV_HEADS
    each = (MATRICES - kv) / 8 + kv
    assert found["all-gather", ("fsdp",)] == part(2 * (2 * LAYERS * each + 2 * TABLE / 8), 4)
    # Each device forms the gradient of the heads that its own queries use.
    assert found["all-reduce", ("tensor",)] > 2 * part(4 * LAYERS * kv / 4, 8)


@pytest.mark.parametrize(("remat", "times"), [("none", 2), ("products", 3), ("full", 3)])
@pytest.mark.parametrize("packed", [True, False])
def test_ring(remat, times, packed):
    found = sent({"context": 4}, rows=2, remat=remat, packed=packed, context_attention="ring")
    tokens = 2 * LENGTH // 4
    keys = 2 * 2 * tokens * KV_HEADS * WIDTH + (PACKED * tokens if packed else 0)
    gradients = 2 * 4 * tokens * KV_HEADS * WIDTH
    assert found["collective-permute", ("context",)] == LAYERS * 3 * (times * keys + gradients)
    assert found["all-reduce", ("context",)] == 2 * part(4 * (LAYERS * MATRICES + 2 * TABLE + NORMS), 4)


@pytest.mark.parametrize("remat", ["none", "products", "full"])
def test_ulysses(remat):
    found = sent({"context": 4}, rows=2, remat=remat, context_attention="ulysses")
    column = 2 * (2 * LENGTH // 4) * WIDTH
    inward, outward = (HEADS + 2 * KV_HEADS) * column, HEADS * column
    again = {"none": 0, "products": inward, "full": inward + outward}[remat]
    assert found["all-to-all", ("context",)] == part(LAYERS * (2 * (inward + outward) + again), 4)
    gathers = 1 if remat == "none" else 2
    assert found["all-gather", ("context",)] == gathers * part(LAYERS * PACKED * 2 * LENGTH, 4)


def test_a_pipeline_by_hand():
    """Two stages of two layers, three micro-batches: one tick forward, three of both, one backward."""
    result = sent({"stage": 2, "fsdp": 2, "tensor": 2}, rows=6, micro_batches=3, remat="full")
    activation = 2 * 1 * LENGTH * EMBED
    ticks, losses = 4, 3
    # The last tick is alone, and what it sends is received by nobody.
    assert result["collective-permute", ("stage",)] == (2 * ticks - 1) * activation / 2
    assert result["all-gather", ("stage",)] == result["reduce-scatter", ("stage",)] == losses * part(activation / 2, 2)
    assert result["all-gather", ("fsdp",)] == part(2 * 2 * MATRICES / 2, 2)
    assert result["reduce-scatter", ("fsdp",)] == part(4 * 2 * MATRICES / 2, 2)
    assert result["all-gather", ("stage", "fsdp")] == part(2 * 2 * TABLE / 2, 4)
    assert result["reduce-scatter", ("stage", "fsdp")] == part(4 * 2 * TABLE / 2, 4)
    gathers = 2 * (2 + 6) * ticks + ticks + losses / 2
    assert result["all-gather", ("tensor",)] == part(gathers * activation, 2)
    scatters = 2 * (2 + 5) * ticks + ticks + losses / 2
    assert result["reduce-scatter", ("tensor",)] == part(scatters * activation, 2)


def test_layers_that_do_not_rest_travel():
    rest = sent({"stage": 2, "fsdp": 2}, rows=8, micro_batches=4)
    model = dataclasses.replace(MODEL, num_layers=3)
    moved = sent({"stage": 2, "fsdp": 2}, rows=8, micro_batches=4, model=model)
    assert ("all-to-all", ("stage",)) not in rest
    # Three layers take the room of four: in bfloat16 there, in float32 back.
    assert moved["all-to-all", ("stage",)] == part((2 + 4) * 4 * MATRICES / (2 * 2), 2)
    assert moved["all-gather", ("fsdp",)] == rest["all-gather", ("fsdp",)]


def test_one_layer_on_a_stage_is_not_run_before_it_is_run_again():
    many = sent({"stage": 2, "tensor": 2}, rows=4, micro_batches=4, remat="full")
    few = sent(
        {"stage": 2, "tensor": 2}, rows=4, micro_batches=4, remat="full", model=dataclasses.replace(MODEL, num_layers=2)
    )
    whole, ticks = part(2 * LENGTH * EMBED, 2), 5
    assert many["all-gather", ("tensor",)] - few["all-gather", ("tensor",)] == (2 * 8 - 6) * ticks * whole
    assert many["reduce-scatter", ("tensor",)] - few["reduce-scatter", ("tensor",)] == (2 * 7 - 5) * ticks * whole


@pytest.mark.parametrize(
    "pipeline", [Pipeline(), Pipeline(schedule="gpipe"), Pipeline(schedule="interleaved", chunks=2)], ids=str
)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_long_schedules_are_continued_from_short_ones(pipeline, stages):
    for count in (1, stages, 5 * stages + 1, 6 * stages, 9 * stages + 2, 41):
        whole = Ticks.of(build_schedule(pipeline, stages=stages, micro_batches=count))
        assert pipeline_ticks(pipeline, stages, count) == whole, count


def test_what_does_not_divide_is_refused():
    with pytest.raises(LayoutError, match="use a multiple of 24 rows"):
        step({"fsdp": 8}, rows=64, micro_batches=3)
    with pytest.raises(LayoutError, match="use a multiple of 48 tokens"):
        step({"context": 3, "tensor": 8}, rows=8)
    with pytest.raises(LayoutError, match="heads=8 is not divisible by tensor=16"):
        decoder_traffic(step({"tensor": 16}, rows=8))
