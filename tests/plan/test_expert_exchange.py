"""Traffic of a mixture of experts, against sums by hand and the exchange's plan."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from formulas.communication import decoder_traffic, traffic_totals
from formulas.decoder_step import DecoderStep

from panax.layers import Latent, MoE
from panax.models import DecoderConfig, DecoderTask
from panax.parallel.exchange import ExchangePlan, RoutingCounts

LAYERS, EMBED, FFN, LENGTH, EXPERTS, ACTIVE = 4, 256, 512, 512, 16, 4
MODEL = DecoderConfig(
    vocab_size=1024, max_length=LENGTH, embed=EMBED, num_layers=LAYERS, heads=8, kv_heads=4, ffn=FFN, tied=False,
    feed_forward=MoE(experts=EXPERTS, active=ACTIVE, ffn=128),
)  # fmt: skip
ATTENTION = EMBED * 32 * (2 * 8 + 2 * 4)
OF_EXPERTS = EXPERTS * 3 * EMBED * 128
ROUTER, TABLE = EMBED * EXPERTS, 1024 * EMBED


def step(mesh: dict[str, int], rows: int = 64, *, model: DecoderConfig = MODEL, **options) -> DecoderStep:
    fields = {f.name for f in dataclasses.fields(DecoderStep)}
    task = DecoderTask(model=model, compute_dtype="bfloat16", **{k: v for k, v in options.items() if k not in fields})
    return DecoderStep(
        task=task, mesh=mesh, rows=rows, length=LENGTH, **{k: v for k, v in options.items() if k in fields}
    )


def moe(**changes) -> DecoderConfig:
    assert MODEL.feed_forward is not None
    return dataclasses.replace(MODEL, feed_forward=dataclasses.replace(MODEL.feed_forward, **changes))


def part(whole: float, n: int) -> float:
    return whole * (n - 1) / n


def exchanged(step: DecoderStep) -> int:
    return sum(t.wire_bytes for t in decoder_traffic(step) if t.kind == "ragged-all-to-all")


@pytest.mark.parametrize(("remat", "rows_sent", "weights_sent"), [("none", 4, 2), ("products", 4, 2), ("full", 5, 3)])
def test_rows_go_to_experts_and_back_in_both_directions(remat, rows_sent, weights_sent):
    rows = ACTIVE * 64 * LENGTH // 8
    each = rows_sent * rows * 2 * EMBED + weights_sent * rows * 4
    assert exchanged(step({"fsdp": 2, "expert": 4}, remat=remat)) == pytest.approx(LAYERS * part(each, 4), abs=8)


def test_experts_are_gathered_over_fsdp_alone_and_routers_in_float32():
    found = traffic_totals(decoder_traffic(step({"fsdp": 2, "expert": 4})))
    assert found["all-gather", ("fsdp",)] == LAYERS * part(2 * 2 * OF_EXPERTS / 4, 2)
    assert found["reduce-scatter", ("fsdp",)] == LAYERS * part(4 * OF_EXPERTS / 4, 2)
    others = LAYERS * 2 * (2 * ATTENTION + 4 * ROUTER) + 2 * 2 * TABLE
    assert found["all-gather", ("fsdp", "expert")] == part(others, 8)


def test_tensor_parallel_experts_put_their_rows_together():
    """Without an exchange as a dense layer; with one, whole buffers."""
    plain, spread = (
        {(t.kind, t.purpose): t.wire_bytes for t in decoder_traffic(step(mesh, remat="full")) if t.axes == ("tensor",)}
        for mesh in ({"fsdp": 4, "tensor": 2}, {"expert": 4, "tensor": 2})
    )
    gathered, rows = 2 * 64 * LENGTH // 4 * EMBED, ACTIVE * 64 * LENGTH // 4
    assert plain["all-gather", "activations"] == LAYERS * part(6 * gathered + 4 * 4 * rows, 2)
    buffer = int(1.5 * rows // 2)
    assert spread["all-gather", "activations"] == LAYERS * part(3 * gathered, 2)
    # Rows, their weights, where they lie: forward and again; the results' gradients.
    assert spread["all-gather", "expert exchange"] == LAYERS * part(2 * buffer * (3 * 2 * EMBED + 4 * 4), 2)
    assert spread["reduce-scatter", "expert exchange"] == LAYERS * part(2 * buffer * (2 * 2 * EMBED + 4), 2)


def test_dense_layers_and_shared_experts_are_counted():
    every, first, shared = moe(every=2), moe(first_dense=3), moe(shared=64)
    assert step({}).layers_of_pass == (0, LAYERS)
    assert step({}, model=every).layers_of_pass == (2, 2)
    assert step({}, model=first).layers_of_pass == (3, 1)
    assert exchanged(step({"expert": 4}, model=every)) == 2 * exchanged(step({"expert": 4}, model=first))
    tensor = {"expert": 4, "tensor": 2}
    without, with_ = (
        {t.kind: t.wire_bytes for t in decoder_traffic(step(tensor, model=model)) if t.purpose == "activations"}
        for model in (MODEL, shared)
    )
    assert with_["all-gather"] == without["all-gather"] * 2


def test_a_stage_runs_its_part_of_each_run():
    piped = {"stage": 2, "expert": 2}
    # Four mixtures on two stages; a dense layer and three mixtures; two units of one each.
    for model, layers in ((MODEL, (0, 2)), (moe(first_dense=1), (1, 2)), (moe(every=2), (1, 1))):
        assert step(piped, model=model, micro_batches=4).layers_of_pass == layers
    whole = step(piped, micro_batches=4)
    experts = [array for array in whole.arrays if ".experts." in array.name]
    assert sum(array.each * whole.layers_of(array)[0] for array in experts) == 2 * OF_EXPERTS // 2


def test_latents_are_gathered_instead_of_the_residual_stream():
    latent = Latent(q_rank=64, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    model = dataclasses.replace(MODEL, latent=latent, kv_heads=0, feed_forward=None)
    sent = {
        t.kind: t.wire_bytes
        for t in decoder_traffic(step({"tensor": 2}, 8, model=model, remat="full"))
        if t.purpose == "activations"
    }
    tokens = 2 * 8 * LENGTH
    # The latents twice, the gradient of the output; the feed-forward's three.
    assert sent["all-gather"] == LAYERS * part(tokens * (2 * (64 + 32 + 8) + EMBED + 3 * EMBED), 2)


@pytest.mark.parametrize("load", ["even", "one expert", "random"])
def test_the_plan_sends_each_row_once(load):
    """The formulas count the content of windows over all rounds, whatever the loads; at even loads in one round."""
    ways, experts, rows = 4, 2, 96
    rng = np.random.default_rng(0)
    counts = np.zeros((ways, ways, experts), np.int32)
    if load == "even":
        counts[:] = rows // (ways * experts)
    elif load == "one expert":
        counts[:, 2, 1] = rows
    else:
        for source in range(ways):
            counts[source] = rng.multinomial(rows, rng.dirichlet(np.full(ways * experts, 0.3))).reshape(ways, experts)
    exchange = ExchangePlan(("expert",), ways, buffer=144, ragged=True)
    plan = RoutingCounts(jnp.asarray(counts))
    rounds = int(exchange.rounds(plan))
    windows = [exchange.window(plan, jnp.int32(number)) for number in range(rounds)]
    sent = np.array(sum(window.high - window.low for window in windows))
    assert (sent == counts.sum(axis=2)).all() and sent.sum() == ways * rows
    assert max(int((window.high - window.low).sum(axis=0).max()) for window in windows) <= 144
    assert rounds == {"even": 1, "one expert": 3}.get(load, rounds)


def test_state_falls_with_the_expert_axis():
    def of_experts(mesh: dict[str, int]) -> int:
        return sum(array.stored for array in step(mesh).arrays if ".experts." in array.name)

    assert of_experts({"expert": 8}) == of_experts({}) // 8 == of_experts({"fsdp": 4, "expert": 2})
