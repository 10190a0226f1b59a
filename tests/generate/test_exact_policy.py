"""With `exact_policy`, a token's log-probability has the bits of the training forward pass: wherever its document lies in a
packed row, whatever ran beside it in the engine, and on the mesh that both run on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import blank, drawn
from test_engine_on_meshes import place

from panax.core import RecipeError
from panax.core.measures import total_loss
from panax.core.task import LOG_PROBABILITIES
from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate.shards import place_model
from panax.kernels import Kernels, use_kernels
from panax.kernels.cpu.native import OWN, unavailable_reason
from panax.layers import Latent, MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, DeltaNetConfig, HybridConfig, PolicyGradient
from panax.train.mesh_execution import GradientInputs, GradientRule, compute_mesh_gradients

LACKING = unavailable_reason(OWN, "float32") or unavailable_reason(OWN, "bfloat16")
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

EXACT = Kernels(exact_policy=True)
SIZES = {"vocab_size": 200, "max_length": 640, "embed": 32, "num_layers": 2, "heads": 4, "ffn": 48}
CONFIGS = {
    "windows": DecoderConfig(**SIZES, kv_heads=2, windows=(40, 0), qk_norm=True),
    "plain": DecoderConfig(**SIZES),
    "caps": DecoderConfig(**SIZES, kv_heads=1, post_norms=True, logit_soft_cap=30.0, tied=False),
    "layer norms": DecoderConfig(**SIZES, norm="layer", attention_bias=True, gated=False, activation="gelu"),
    "sinks": DecoderConfig(**SIZES, attention_sinks=True),
    "experts": DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2)),
    "shared expert": DecoderConfig(**SIZES, feed_forward=MoE(experts=8, active=3, shared=16, scores="sigmoid")),
}
LENGTHS = ((1, 10), (17, 30), (40, 25), (3, 9), (29, 70))
LONG = (530, 20)
"""More keys than attention has in a block."""


def create(config, dtype, shape):
    task = DecoderTask(model=config, compute_dtype=dtype)
    params, state = drawn(task.init)
    # Larger than they are drawn, so that layers are heard above the token's own embedding.
    params = jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params)
    if shape is None:
        return task, params, state, None, task.incremental_model(params, state, dtype)
    placement = place(task, params, shape)
    return (
        task,
        params,
        state,
        placement,
        place_model(task, *jax.tree.map(np.asarray, (params, state)), dtype, placement),
    )


def pack(documents, groups, length):
    """Rows with several documents each, and where each document begins."""
    tokens, targets, segment, position = np.zeros((4, len(groups), length), np.int32)
    mask, places = np.zeros((len(groups), length), np.float32), {}
    for row, group in enumerate(groups):
        at = 0
        for number, document in enumerate(group):
            ids = documents[document]
            here = slice(at, at + len(ids))
            tokens[row, here], segment[row, here], position[row, here] = ids, number + 1, np.arange(len(ids))
            targets[row, at : at + len(ids) - 1], mask[row, at : at + len(ids) - 1] = ids[1:], 1.0
            places[document], at = (row, at), at + len(ids)
    batch = {"tokens": tokens, "targets": targets, "loss_mask": mask, "segment": segment, "position": position}
    return {**batch, "row": np.arange(len(groups), dtype=np.int32)}, places


def train_forward(task, params, state, batch, shape):
    """The log-probabilities of a step's own forward pass, with gradients taken."""
    rows, length = batch["tokens"].shape
    task = task.log_probability_task(rows, length)
    rule = GradientRule(task=task, trainable=jax.tree.map(lambda _: True, params))
    inputs = GradientInputs(params, state, batch, jax.random.key(0))
    axes = {name: ("batch",) if name == "row" else ("batch", "seq") for name in batch}
    size = int(np.prod(list((shape or {}).values())))
    placement = Placement.create(MeshShape(**({"fsdp": 1} | (shape or {}))), devices=jax.devices()[:size])
    if shape is not None:
        placement = dataclasses.replace(placement, rules=placement.rules.fit({}, placement.sizes))
    with use_kernels(EXACT.names), placement.activate():
        gradients = jax.jit(lambda inputs: compute_mesh_gradients(rule, inputs, axes)[0])(inputs)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients.gradients))
    return np.asarray(gradients.metrics[LOG_PROBABILITIES].value)


def check(config, dtype, shape=None, lengths=LENGTHS, length=192):
    task, params, state, placement, model = create(config, dtype, shape)
    engine = GenerationEngine(model, rows=4, chunk=16, length=640, placement=placement, kernels=EXACT)
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(
            tuple(rng.integers(0, 200, size).tolist()),
            Sampling(tokens=tokens, seed=size, prompt_log_probabilities=True),
        )
        for size, tokens in lengths
    ]
    answers = engine.generate(asked)
    documents = [request.prompt + answer.ids for request, answer in zip(asked, answers, strict=True)]
    count = len(documents)
    apart = [[number] for number in range(count)]
    together = [list(range(count - 1)), [count - 1], [], []] if length < 600 else apart
    for groups in (apart + [[]] * (-count % 4), together):
        batch, places = pack(documents, groups, length)
        values = train_forward(task, params, state, batch, shape)
        for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
            row, at = places[number]
            trained = values[row, at : at + len(documents[number]) - 1]
            drawn = [*answer.prompt_log_probabilities, *(token.log_probability for token in answer.tokens)]
            assert trained.tolist() == drawn, f"request {number}, of {len(request.prompt)} tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_row_has_the_bits_of_generation(dtype):
    check(CONFIGS["windows"], dtype)


@pytest.mark.parametrize(
    ("name", "temperature", "dtype"),
    [
        ("plain", 1.0, "bfloat16"),
        pytest.param("caps", 0.7, "float32", marks=pytest.mark.full),
        pytest.param("experts", 1.3, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_a_rollout_has_no_gap_at_any_temperature(name, temperature, dtype):
    """Between the sampler's distribution and the forward pass of a policy gradient; a change of the parameters makes one."""
    task, params, state, _, model = create(CONFIGS[name], dtype, None)
    engine = GenerationEngine(model, rows=4, chunk=16, length=640, kernels=EXACT)
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(
            tuple(rng.integers(0, 200, size).tolist()), Sampling(tokens=tokens, seed=size, temperature=temperature)
        )
        for size, tokens in LENGTHS
    ]
    answers = engine.generate(asked)
    documents = [request.prompt + answer.ids for request, answer in zip(asked, answers, strict=True)]
    batch, places = pack(documents, [[0, 1, 2], [3, 4]], 192)
    behavior, mask = np.zeros((2, 2, 192), np.float32)
    for number, (row, at) in places.items():
        first = at + len(asked[number].prompt) - 1
        drawn_with = [token.sampling_log_probability for token in answers[number].tokens]
        behavior[row, first : first + len(drawn_with)], mask[row, first : first + len(drawn_with)] = drawn_with, 1.0
    batch |= {"loss_mask": mask, "behavior_log_probability": behavior, "advantage": mask}
    task = dataclasses.replace(task, objective=PolicyGradient(temperature=temperature))

    @jax.jit
    def gap_of(params, batch):
        def loss(params):
            result = task.loss(params, state, batch, jax.random.key(0), True)
            return total_loss(result.losses), result.metrics["gap/largest"].value

        with use_kernels(EXACT.names):
            return jax.grad(loss, has_aux=True)(params)[1]

    batch = {leaf: jnp.asarray(values) for leaf, values in batch.items()}
    assert float(gap_of(params, batch)) == 0.0
    assert float(gap_of(jax.tree.map(lambda leaf: leaf * 1.01, params), batch)) > 0.0


def in_turn(cases):
    """Each case in one of the two dtypes in `full`, and in the other in `slow`."""
    return [
        pytest.param(*case, dtype, marks=pytest.mark.full if (number + place) % 2 else pytest.mark.slow)
        for number, case in enumerate(cases)
        for place, dtype in enumerate(("float32", "bfloat16"))
    ]


@pytest.mark.parametrize(("name", "dtype"), in_turn([(name,) for name in CONFIGS if name != "windows"]))
def test_other_layers_have_the_bits_of_generation(name, dtype):
    check(CONFIGS[name], dtype)


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.full)]
)
def test_a_long_document_has_the_bits_of_generation(dtype):
    check(CONFIGS["windows"], dtype, lengths=(LONG, (9, 12)), length=608)


MESHES = [("plain", {"fsdp": 4}), ("experts", {"expert": 4}), ("experts", {"replica": 2, "fsdp": 2})]


@pytest.mark.parametrize(("name", "shape", "dtype"), in_turn(MESHES))
def test_a_mesh_has_the_bits_of_generation_on_it(name, shape, dtype):
    check(CONFIGS[name], dtype, shape)


def test_layouts_and_layers_without_exact_kernels_are_refused():
    task, params, state, *_ = create(CONFIGS["plain"], "float32", None)
    batch, _ = pack([tuple(range(40))] * 4, [[0], [1], [2], [3]], 64)
    with pytest.raises(RecipeError, match=r"exact_policy has no kernels for sums over the mesh axis tensor"):
        train_forward(task, params, state, batch, {"tensor": 2})
    latent = DecoderConfig(**SIZES, latent=Latent(q_rank=0, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8))
    for config, what in [
        (latent, "latent attention"),
        (HybridConfig(**SIZES, attention_layers=(1,)), "state-space layers"),
        (DeltaNetConfig(**SIZES, attention_layers=(1,)), "delta-net layers"),
    ]:
        task = DecoderTask(model=config)
        model = task.incremental_model(*blank(task.init))
        with pytest.raises(RecipeError, match=f"exact_policy has no kernels for {what}"):
            GenerationEngine(model, rows=1, kernels=EXACT)
    with pytest.raises(RecipeError, match=r"exact_policy names the kernels of all work, and kernels\.matmul='mkl'"):
        Kernels(exact_policy=True, matmul="mkl")
