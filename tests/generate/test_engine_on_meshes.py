"""An engine on a mesh generates as on one device, with equal bits for any neighbors and any row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import blank, drawn
from test_engine import requests

from panax.core import pair_axes
from panax.core.errors import RecipeError
from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate.batching import Batching
from panax.generate.shards import count_row_groups, place_model
from panax.layers import Context, Latent, MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, DeltaNetConfig, HybridConfig, compute_logits

SIZES = {"vocab_size": 96, "max_length": 64, "embed": 32, "num_layers": 2, "heads": 4, "ffn": 32}
CONFIGS = {
    "windows": DecoderConfig(**SIZES, kv_heads=2, windows=(6, 0)),
    "one key head": DecoderConfig(**SIZES, kv_heads=1, tied=False),
    "experts": DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2, shared=8)),
    "latent": DecoderConfig(**SIZES, latent=Latent(q_rank=0, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)),
    "mamba": HybridConfig(**SIZES, attention_layers=(1,)),
    "delta nets": DeltaNetConfig(**SIZES, attention_layers=(1,)),
}
MESHES = [
    {"tensor": 2},
    {"tensor": 4},
    {"fsdp": 2},
    {"fsdp": 8},
    {"replica": 2, "fsdp": 2},
    {"fsdp": 2, "tensor": 2},
    {"expert": 4},
    {"expert": 2, "tensor": 2},
    {"context": 2, "fsdp": 2},
    {"stage": 2, "tensor": 2},
    {"stage": 2, "context": 2, "tensor": 2},
    {"replica": 2, "expert": 2, "tensor": 2},
]
FIRST = [("one key head", 9)]
SECOND = [("experts", 7), ("mamba", 10)]
ALL = [(name, index) for name in CONFIGS for index in range(len(MESHES))]


def build(name):
    task = DecoderTask(model=CONFIGS[name])
    params, state = drawn(task.init)
    # Larger than they are drawn, so that layers are heard above the token's own embedding.
    return task, jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params), state


def place(task, params, shape):
    """The mesh as a run has it: with rules that are fitted to the model."""
    size = int(np.prod(list(shape.values())))
    placement = Placement.create(MeshShape(**({"fsdp": 1} | shape)), devices=jax.devices()[:size])
    arrays = pair_axes(params, task.parameter_axes(params))
    sizes = {axis: size for _, leaf, axes in arrays for axis, size in zip(axes, leaf.shape) if axis}
    return dataclasses.replace(placement, rules=placement.rules.fit(sizes, placement.sizes)).for_generation()


def create(task, params, state, placement, dtype="float32", **settings):
    arrays = jax.tree.map(np.asarray, (params, state))
    model = place_model(task, *arrays, dtype, placement)
    return GenerationEngine(model, **{"rows": 3, "chunk": 8, "placement": placement, **settings})


def check(name, shape):
    task, params, state = build(name)
    placement = place(task, params, shape)
    engine = create(task, params, state, placement)
    together = engine.generate(requests())
    assert [each.tokens for each in engine.generate(requests()[::-1])][::-1] == [each.tokens for each in together]
    alone = [engine.generate([request])[0].tokens for request in requests()]
    assert alone == [each.tokens for each in together], "neighbors or rows change bits"

    one = GenerationEngine(task.incremental_model(params, state), rows=3, chunk=8).generate(requests())
    for here, there in zip(together, one, strict=True):
        # Draws are the same: no two tokens of these are likely within the error.
        assert here.ids == there.ids and here.finish == there.finish
        for field in ("tokens", "prompt_tokens"):
            for token, other in zip(getattr(here, field), getattr(there, field), strict=True):
                assert token.log_probability == pytest.approx(other.log_probability, abs=1e-5)


@pytest.mark.parametrize(("name", "index"), FIRST)
def test_a_mesh_generates_what_one_device_does(name, index):
    check(name, MESHES[index])


@pytest.mark.full
@pytest.mark.parametrize(("name", "index"), SECOND)
def test_other_layers_generate_the_same_on_a_mesh(name, index):
    check(name, MESHES[index])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [each for each in ALL if each not in FIRST + SECOND])
def test_every_mesh_generates_what_one_device_does(name, index):
    check(name, MESHES[index])


@pytest.mark.full
@pytest.mark.parametrize(("name", "index"), [("experts", 7), ("windows", 4), ("mamba", 5)])
def test_a_mesh_runs_several_prompts_at_once(name, index):
    task, params, state = build(name)
    one = GenerationEngine(task.incremental_model(params, state), rows=3, chunk=8)
    mesh = place(task, params, MESHES[index])
    asked = [*requests(), *requests()]
    asked = [dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, n=2)) for each in asked]
    expected = [each.ids for each in one.generate(asked)]
    for batching in (Batching(prompts=2), Batching(prompts=1, samples=2, steps=3)):
        several = create(task, params, state, mesh, rows=16, batching=batching)
        assert [each.ids for each in several.generate(asked)] == expected


@pytest.mark.full
@pytest.mark.parametrize("name", ["windows", "experts"])
def test_bfloat16_stays_near_the_training_forward_pass(name):
    """The bounds of a policy that is trained on its own answers, on the mesh with the most parts of sums."""
    task, params, state = build(name)
    engine = create(task, params, state, place(task, params, {"expert": 2, "tensor": 4}), "bfloat16")
    asked = [GenerationRequest((seed, 5), Sampling(tokens=48, seed=seed)) for seed in range(6)]
    forward = jax.jit(
        lambda row: compute_logits(
            params, params(row, Context(jnp.arange(row.shape[1])[None]), dtype=jnp.bfloat16, state=None)[0]
        )
    )
    differences = []
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        row = np.array([request.prompt + completion.ids], np.int32)
        logs = np.asarray(jax.nn.log_softmax(forward(row)))[0]
        differences.append(
            [
                token.log_probability - logs[len(request.prompt) - 1 + place, token.token]
                for place, token in enumerate(completion.tokens)
            ]
        )
    differences = np.array(differences)
    print(f"{name}: mean {np.abs(differences).mean():.2e}, largest {np.abs(differences).max():.2e}")
    assert np.abs(differences).mean() < 2e-3
    assert np.abs(np.exp(differences.sum(axis=1)) - 1).max() < 0.05


def test_rows_are_copied_within_their_group_only():
    """A shared beginning is reused in its own group, and the answers have the bits of one that is not reused."""
    task, params, state = build("windows")
    placement = place(task, params, {"fsdp": 2})
    assert count_row_groups(placement) == 2
    model = place_model(task, *jax.tree.map(np.asarray, (params, state)), "float32", placement)
    engine = GenerationEngine(model, rows=4, chunk=8, placement=placement)
    beginning = tuple(range(20))
    asked = [GenerationRequest((*beginning, last), Sampling(tokens=4, seed=last, n=2)) for last in (3, 4)]
    apart = []
    for request in asked:
        engine.generate([GenerationRequest((50 + n,) * 20, Sampling(tokens=1)) for n in range(4)])
        apart += [each.tokens for each in engine.generate([request])]
    engine.generate([GenerationRequest((60 + n,) * 20, Sampling(tokens=1)) for n in range(4)])
    together = engine.generate(asked)
    assert [each.tokens for each in together] == apart
    # The first prompt of each group is computed as a whole; in the next round its beginning is there.
    assert sorted(each.reused for each in engine.generate(asked)) == [16] * 4


def test_weights_are_shards_and_no_request_compiles_a_program():
    from panax.generate import programs

    task, params, state = build("windows")
    placement = place(task, params, {"fsdp": 2, "tensor": 2})
    engine = create(task, params, state, placement)
    up = engine._model.layers[0].feed_forward.w_up
    assert up.shape == (32, 32) and {shard.data.shape for shard in up.addressable_shards} == {(32, 16)}
    [cache, _] = engine._model.empty_cache(1, 8)
    assert cache.k.shape == (1, 2, 8, 8)
    compiled = [programs.run_prompt_chunk, programs.run_decode_step, programs.copy_row, programs.empty_state]
    before = [each._cache_size() for each in compiled]
    engine.generate(requests())
    create(task, params, state, place(task, params, {"fsdp": 2, "tensor": 2})).generate(requests()[:1])
    assert [each._cache_size() for each in compiled] == before, "an equal engine runs the same programs"


def test_experts_that_choose_tokens_are_refused():
    task = DecoderTask(model=DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2, choice="expert")))
    with pytest.raises(RecipeError, match="its experts choose among all tokens of a row"):
        task.incremental_model(*blank(task.init))
