"""Decoders with state-space layers, alone and beside attention, train on every layout as on one device."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from panax.layers import Rotary
from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, HybridConfig
from panax.optim import AdamW
from panax.parallel import Pipeline
from panax.plan import walk_step
from panax.testing import check_task
from panax.train import CompiledStep, Program

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
LONG = dataclasses.replace(HYBRID, num_layers=8, attention_layers=(1, 3, 5, 7))
# Its layers are three stacks, each of one kind.
IRREGULAR = dataclasses.replace(HYBRID, attention_layers=(1,))
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
        slow(IRREGULAR, {"stage": 2, "context": 2}, {"context_attention": "ulysses"}, name="irregular-stage2·ulysses2"),
        slow(IRREGULAR, {"stage": 2, "context": 2}, {"context_attention": "ring"}, name="irregular-stage2·ring2"),
        slow(
            LONG,
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


def test_the_walk_knows_all_that_a_step_does() -> None:
    shape = MeshShape(fsdp=2, context=2, tensor=2)
    program = Program.create(DecoderTask(model=HYBRID), AdamW(), num_steps=1)
    step = CompiledStep(program, Placement.create(shape, devices=jax.devices()), tiny.AXES)
    cost = walk_step(step, batch())
    assert cost.unknown == ()
    # Of all devices: the model's own products, and what a scan of tiny states in chunks computes besides.
    own = DecoderTask(model=HYBRID).flops_per_token(tiny.LENGTH) * batch()["tokens"].size
    assert own < 8 * cost.work.flops < 1.6 * own
