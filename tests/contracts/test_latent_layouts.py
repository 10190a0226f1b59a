"""A decoder with latent attention trains on every layout as on one device, and holds the shards of its rules."""

import dataclasses
import functools

import pytest
from test_layouts import Trained, assert_trains_alike, compiled, train

from panax.layers import Latent, Rotary, YarnScaling
from panax.mesh import Rules
from panax.mesh.legality import find_problem
from panax.models import PRESETS, DecoderConfig, DecoderTask
from panax.optim import AdamW
from panax.train import Program
from panax.train.compilation.mesh_requirements import mesh_requirements

CONFIG = DecoderConfig(
    vocab_size=96,
    max_length=32,
    embed=32,
    num_layers=2,
    heads=4,
    ffn=64,
    latent=Latent(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
    rotary=Rotary(interleaved=True, scaling=YarnScaling(factor=4.0, original_length=8, mscale_all_dim=1.0)),
    dropout=0.1,
)


def task(**changes) -> DecoderTask:
    return DecoderTask(model=CONFIG, **changes)


@functools.cache
def on_one_device() -> Trained:
    return train(compiled({}, task=task()))


@pytest.mark.parametrize(
    "sizes, changes",
    [
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"context": 2}, {"context_attention": "ring"}),
        ({"context": 2, "tensor": 2}, {"remat": "products"}),
        ({"stage": 2, "fsdp": 2}, {}),
    ],
    ids=["fsdp2·tensor2", "context2-ring", "context2·tensor2", "stage2·fsdp2"],
)
def test_trains_like_one_device(sizes, changes):
    step = compiled(sizes, task=task(**changes), micro_batches=2 if "stage" in sizes else 1)
    assert_trains_alike(train(step), on_one_device())
    attention = step.program.abstract.params.stacks[0].blocks[0].attention
    places = step.shardings.params.stacks[0].blocks[0].attention
    fsdp, tensor, stage = (sizes.get(axis, 1) for axis in ("fsdp", "tensor", "stage"))
    assert {
        name: getattr(places, name).shard_shape(getattr(attention, name).shape)
        for name in ("w_q_down", "w_q_up", "w_kv_down", "w_kv_up", "w_o")
    } == {
        "w_q_down": (2 // stage, 32 // fsdp, 16),
        "w_q_up": (2 // stage, 16 // fsdp, 4 // tensor, 12),
        "w_kv_down": (2 // stage, 32 // fsdp, 12),
        "w_kv_up": (2 // stage, 8 // fsdp, 4 // tensor, 16),
        "w_o": (2 // stage, 4 // tensor, 8, 32 // fsdp),
    }


def test_queries_from_the_residual_stream_itself_train_alike():
    direct = DecoderTask(model=dataclasses.replace(CONFIG, latent=dataclasses.replace(CONFIG.latent, q_rank=0)))
    assert_trains_alike(
        train(compiled({"fsdp": 2, "tensor": 2}, task=direct), steps=2), train(compiled({}, task=direct), steps=2)
    )


@pytest.mark.parametrize("mesh", [{"fsdp": 128, "expert": 8}, {"fsdp": 16, "expert": 8, "stage": 4, "tensor": 2}])
def test_the_largest_preset_may_lie_on_a_thousand_devices(mesh):
    program = Program.create(DecoderTask(model=PRESETS["kimi_k2"]), AdamW(), num_steps=1)
    assert find_problem(mesh_requirements(program), Rules(), mesh) is None


def test_a_rank_rests_split_over_the_axes_that_divide_it():
    mesh = {"fsdp": 4, "expert": 3, "stage": 2}
    fitted = Rules().fit({"embed": 96, "q_rank": 48, "kv_rank": 8}, mesh)
    assert fitted.storage["q_rank"] == ("fsdp", "expert", "stage")
    assert fitted.storage["kv_rank"] == ("fsdp",)
    assert Rules().fit({"embed": 96, "kv_rank": 6}, mesh).storage["kv_rank"] == ()
