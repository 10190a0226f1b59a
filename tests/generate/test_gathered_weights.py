"""A rollout gathers each weight once: the program that makes the engine's model does, and those that draw tokens gather none."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from panax.core import pair_axes
from panax.generate.decode_steps import RowEnds, run_decode_steps
from panax.generate.draw import AllowedTokens, RowSettings
from panax.generate.programs import NextTokens, empty_state
from panax.generate.sampling import MAX_TOP_LOG_PROBABILITIES
from panax.generate.shards import ProgramSettings, count_row_groups, place_model
from panax.layers import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask
from panax.plan import count_collectives, parse_target, target_devices
from panax.plan.step import disable_compilation_cache

SIZES = {"vocab_size": 512, "max_length": 64, "embed": 64, "num_layers": 2, "heads": 4, "ffn": 128}
DENSE = DecoderTask(model=DecoderConfig(**SIZES, kv_heads=2, tied=False))
EXPERTS = DecoderTask(model=DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2, ffn=64), tied=False))
LLAMA = DecoderTask(
    model=DecoderConfig(
        vocab_size=128_256, max_length=8192, embed=4096, num_layers=2, heads=32, kv_heads=8, ffn=14_336, tied=False
    )
)
"""Two layers of Llama 3 8B."""

ROWS, STEPS = 16, 4
RESULTS = ROWS * STEPS * MAX_TOP_LOG_PROBABILITIES
"""Numbers of the largest array of results: the most likely tokens beside each one."""

LOGITS = 8
"""Arrays of one token's logits that the drawing program may hold: the model's, the processed ones, sorted ones, random bits."""


class Compiled(NamedTuple):
    """The program that gathers the weights, and the one that draws four tokens of each row.

    Attributes:
        stored: Bytes of each weight on one device as the trainer stores it.
        held: Bytes of each weight on one device of the engine.
        cache: Bytes of caches and histories on one device.
        logits: Bytes of the logits of one token of each row that a device has.
    """

    gathering: jax.stages.Compiled
    drawing: jax.stages.Compiled
    sizes: dict[str, int]
    stored: list[int]
    held: list[int]
    cache: int
    logits: int


def compile_rollout(task, shape, devices, dtype="float32"):
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    placement = Placement.create(MeshShape(**({"fsdp": 1} | shape)), devices=devices)
    axes = task.parameter_axes(params)
    sizes = {name: size for _, leaf, of in pair_axes(params, axes) for name, size in zip(of, leaf.shape) if name}
    trained = dataclasses.replace(placement, rules=placement.rules.fit(sizes, placement.sizes))
    stored = jax.tree.map(with_sharding, params, trained.storage_shardings(params, axes))
    placement = trained.for_generation()
    compiled_for = ProgramSettings(placement)
    traced = jax.jit(lambda params, state: place_model(task, params, state, dtype, placement)).trace(stored, state)
    gathering = traced.lower().compile()
    model = jax.tree.map(with_sharding, traced.out_info, gathering.output_shardings)
    state = empty_state.trace(model, ROWS, 128, compiled_for)
    shardings = state.lower().compile().output_shardings
    state = jax.tree.map(with_sharding, state.out_info, shardings)
    drawing = run_decode_steps.lower(model, state, *decode_inputs(), compiled_for, STEPS).compile()
    logits = ROWS // count_row_groups(placement) * task.model.vocab_size * 4
    weights = shard_bytes(stored), shard_bytes(model)
    return Compiled(gathering, drawing, dict(placement.sizes), *weights, sum(shard_bytes(state)), logits)


def with_sharding(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shard_bytes(tree):
    return [int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]


def decode_inputs():
    floats, ints = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.int32)
    free = AllowedTokens(ints > 0, np.zeros((ROWS, 1), np.uint32))
    settings = RowSettings(floats, ints, *[floats] * 5, ints.astype(np.uint32), ints, free)
    return NextTokens(ints, ints, ints > 0, np.bool_(False)), settings, RowEnds(ints, np.zeros((ROWS, 4), np.int32))


CASES = {
    "dense": (DENSE, {"fsdp": 4, "tensor": 2}),
    "experts": (EXPERTS, {"fsdp": 2, "expert": 4}),
}


def check_traffic(rollout):
    gathers = count_collectives(rollout.gathering.as_text(), rollout.sizes)
    assert {each.kind for each in gathers} == {"all-gather"} and len(gathers) <= len(rollout.held)
    # What a device lacks of the weights that it is to hold.
    assert sum(each.wire_bytes * each.times for each in gathers) == sum(rollout.held) - sum(rollout.stored)
    sent = [each.buffer_bytes for each in count_collectives(rollout.drawing.as_text(), rollout.sizes)]
    assert max(sent) <= max(rollout.logits, RESULTS * 4) and sum(sent) < sum(rollout.held) / 4


@pytest.mark.parametrize("case", CASES)
def test_each_weight_is_gathered_once_and_none_while_tokens_are_drawn(case):
    check_traffic(compile_rollout(*CASES[case], jax.devices()))


@pytest.mark.full
def test_on_64_gpus_weights_are_gathered_once_and_memory_is_that_of_weights_caches_and_logits():
    with disable_compilation_cache():
        rollout = compile_rollout(LLAMA, {"fsdp": 8, "tensor": 8}, target_devices(parse_target("h100x64")))
    check_traffic(rollout)
    memory = rollout.drawing.memory_analysis()
    # The arrays that describe rows are some kilobytes.
    assert memory.argument_size_in_bytes == pytest.approx(sum(rollout.held) + rollout.cache, rel=1e-4)
    assert memory.temp_size_in_bytes <= LOGITS * rollout.logits
    # Gathered weights are sent in a few large pieces, which have buffers.
    assert rollout.gathering.memory_analysis().temp_size_in_bytes <= sum(rollout.held) / 2
