"""The largest published decoders, compiled for as many H100s as their papers used, or fewer: each step fits."""

import dataclasses

import pytest
from planned import plan

from panax.models import PRESETS
from panax.plan import summarize_collectives, traffic_totals
from panax.system.terminal_text import format_bytes

MEMORY_BYTES = 80 * 10**9

CASES = {
    # Llama 3 (arXiv:2407.21783), table 4: tensor 8, stage 16, 16 million tokens a step, on 8,192 and more.
    "llama3_405b on 1,024": ("llama3_405b", "h100x1024", {"stage": 16, "fsdp": 8, "tensor": 8}, 2048, 8192, 256, True),
    # MT-NLG (arXiv:2201.11990): 280 A100s for each copy of the model, 8 copies, 1,920 rows.
    "mt_nlg_530b on 2,240": ("mt_nlg_530b", "h100x2240", {"stage": 35, "fsdp": 8, "tensor": 8}, 1920, 2048, 240, False),
    # Megatron-LM (arXiv:2104.04473), table 1: tensor 8, stage 64, data 6, 3,072 rows. 6 does not divide the width 25,600.
    "megatron_1t on 3,072": (
        "megatron_1t", "h100x3072", {"replica": 3, "stage": 64, "fsdp": 2, "tensor": 8}, 3072, 2048, 512, False,
    ),
    # Stages and experts as DeepSeek-V3 (arXiv:2412.19437, section 3.2): 16 stages, 64 ways. Within a host, experts would not fit.
    "kimi_k2 on 1,024": ("kimi_k2", "h100x1024", {"stage": 16, "expert": 64}, 4096, 4096, 64, True),
    # GLaM (arXiv:2112.06905): 1,024 TPUs v4, 1 million tokens a step; here 2.
    "glam_64b_64e on 1,024": (
        "glam_64b_64e", "h100x1024", {"stage": 16, "expert": 8, "tensor": 8}, 2048, 1024, 64, True,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "target", "mesh", "rows", "length", "micro_batches", "packed"),
    [pytest.param(*case, id=name) for name, case in CASES.items()],
)
def test_a_step_compiles_and_fits(preset, target, mesh, rows, length, micro_batches, packed, capsys):
    model = dataclasses.replace(PRESETS[preset], max_length=length)
    result, walked = plan(
        target, mesh, rows, model=model, length=length, micro_batches=micro_batches, packed=packed, remat="full"
    )
    memory, cost = result.memory, walked.cost
    sent = {(total.kind, total.axes): total.wire_bytes for total in summarize_collectives(result.collectives)}
    with capsys.disabled():
        print(
            f"\n{preset} on {target}: compiled in {result.compile_seconds:.0f} s; {format_bytes(memory.arguments)} state + "
            f"{format_bytes(memory.temporaries)} temporaries (estimate {format_bytes(cost.memory)} together); sends "
            f"{format_bytes(sum(sent.values()))} a step"
        )
    assert memory.arguments + memory.temporaries <= MEMORY_BYTES
    assert sum(sent.values()) == pytest.approx(sum(traffic_totals(cost.traffic).values()), rel=0.002)
    assert cost.memory == pytest.approx(memory.total, rel=0.15)
