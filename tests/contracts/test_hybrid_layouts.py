"""Decoders with state-space layers, alone and beside attention, train on every layout as on one device."""

import numpy as np
import pytest
import tiny

from panax.layers import Rotary
from panax.layers.moe_config import MoE
from panax.models import DecoderTask, HybridConfig
from panax.parallel import Pipeline
from panax.testing import check_task

SIZES = {
    "vocab_size": tiny.CONFIG.vocab_size,
    "max_length": tiny.LENGTH,
    "embed": 32,
    "ssm_heads": 4,
    "ssm_head_dim": 8,
    "ssm_groups": 2,
    "ssm_state": 8,
    "dropout": 0.1,
}
PURE = HybridConfig(**SIZES, num_layers=2)
HYBRID = HybridConfig(
    **SIZES, num_layers=4, attention_layers=(1, 3), heads=4, kv_heads=2, ffn=64, rotary=Rotary(fraction=0.5)
)
MIXTURE = HybridConfig(
    **SIZES, num_layers=2, attention_layers=(1,), heads=4, ffn=32, feed_forward=MoE(experts=4, active=2, balance=0.1)
)


def batch() -> dict[str, np.ndarray]:
    """Two packed documents a row, and padding."""
    return tiny.batch(rows=8)


def slow(*values, name):
    return pytest.param(*values, marks=pytest.mark.slow, id=name)


@pytest.mark.parametrize(
    "config, sizes, settings",
    [
        pytest.param(HYBRID, {"fsdp": 2, "context": 2, "tensor": 2}, {}, id="hybrid-fsdp2·context2·tensor2"),
        pytest.param(PURE, {"stage": 2}, {}, id="pure-stage2"),
        slow(HYBRID, {"stage": 2, "context": 2}, {}, name="hybrid-stage2·context2"),
        slow(
            HYBRID,
            {"stage": 2, "tensor": 2},
            {"pipeline": Pipeline(schedule="interleaved", chunks=2)},
            name="hybrid-interleaved·tensor2",
        ),
        slow(PURE, {"stage": 2, "context": 2}, {"remat": "full"}, name="pure-stage2·context2-remat"),
        slow(PURE, {"tensor": 4}, {}, name="pure-tensor4"),
        slow(PURE, {"replica": 2, "context": 4}, {}, name="pure-replica2·context4"),
        slow(MIXTURE, {"expert": 2, "tensor": 2}, {}, name="mixture-expert2·tensor2"),
        slow(HYBRID, {"context": 2}, {"context_attention": "ulysses"}, name="hybrid-ulysses2"),
    ],
)
def test_trains_like_one_device(config, sizes, settings) -> None:
    report = check_task(DecoderTask(model=config, **settings), batch(), layouts=[sizes])
    assert len(report.compared) == 1, report.left_out
