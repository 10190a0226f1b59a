"""A pipeline's gradients and measures are those of the same layers run one after the other, whatever idle stages compute.

The layers here divide by the norm of their input: on the zeros that an unused slot holds they give NaN, forward and backward, and
any of it that reached a gradient or a measure would stay there.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from panax.core.measures import Loss, Maximum, Mean, Sum
from panax.mesh import MeshShape, Placement
from panax.parallel import Pipeline
from panax.parallel.pipeline import AXIS, LastStageShare, PipelineWork, run_pipeline
from panax.parallel.schedules import build_schedule
from panax.spmd import merge_over_devices

MICRO_BATCHES, LENGTH, WIDTH = 6, 4, 8
BALANCE = 0.03

# Float32 sums of the same terms in another order, through at most 8 layers.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def layer(w: jax.Array, x: jax.Array, batch, depth) -> tuple[jax.Array, jax.Array, dict]:
    """One virtual stage: NaN on zeros, different at each depth, with an auxiliary loss and a measure of each kind."""
    h = x @ w
    y = x + h * jax.lax.rsqrt((h**2).sum(-1, keepdims=True)) * jnp.cos(0.5 * depth)
    tokens = batch["weight"].sum()
    uneven = (batch["weight"][..., None] * (y - y.mean(-1, keepdims=True)) ** 2).sum()
    measures = {
        "balance": Loss(uneven, tokens, jnp.float32(BALANCE)),
        "size": Mean(jnp.abs(y).sum(), tokens),
        "tokens": Sum(tokens),
        "largest": Maximum(jnp.abs(y).max()),
        "lowest": Maximum((-jnp.abs(y)).max()),
    }
    return y, BALANCE * uneven, measures


def head(w: jax.Array, hidden: jax.Array, target: jax.Array, weight: jax.Array) -> tuple[jax.Array, dict]:
    """The loss of some tokens; a token of weight 0 may be anything."""
    missed = jnp.where(weight > 0, ((hidden @ w)[..., 0] - target) ** 2, 0.0)
    loss = (weight * missed).sum()
    return loss, {"square": Loss(loss, weight.sum(), jnp.float32(1.0)), "worst": Maximum(missed.max())}


def problem(stages: int, chunks: int, rows: int):
    """Weights and micro-batches: layers as [stage, chunk], rows of all replicas."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    outer = {"into": draw(3, WIDTH), "out": draw(WIDTH, 1)}
    layers = draw(stages, chunks, WIDTH, WIDTH) / math.sqrt(WIDTH)
    batches = {
        "x": draw(MICRO_BATCHES, rows, LENGTH, 3),
        "target": draw(MICRO_BATCHES, rows, LENGTH),
        "weight": jnp.asarray(rng.uniform(0.5, 1.5, (MICRO_BATCHES, rows, LENGTH)), jnp.float32),
    }
    return outer, layers, batches


def one_after_the_other(outer, layers, batches):
    """(gradients of outer and layers, measures of layers, measures of losses), without a pipeline or a mesh."""
    stages, chunks = layers.shape[:2]

    def objective(weights):
        outer, layers = weights
        total, of_layers, of_loss = jnp.float32(0.0), [], []
        for m in range(MICRO_BATCHES):
            batch = {name: leaf[m] for name, leaf in batches.items()}
            x = batch["x"] @ outer["into"]
            for k in range(stages * chunks):
                x, auxiliary, measures = layer(layers[k % stages, k // stages], x, batch, jnp.float32(k))
                total += auxiliary
                of_layers.append(measures)
            loss, measures = head(outer["out"], x, batch["target"], batch["weight"])
            total += loss
            of_loss.append(measures)
        return total, (merged(of_layers), merged(of_loss))

    gradients, measures = jax.jit(jax.grad(objective, has_aux=True))((outer, layers))
    return gradients, *measures


def merged(found: list[dict]) -> dict:
    return {name: functools.reduce(lambda a, b: a.merge(b), [each[name] for each in found]) for name in found[0]}


def share_of(leaf: jax.Array, share: LastStageShare) -> jax.Array:
    each = share.output.shape[0]
    flat = jnp.pad(leaf.reshape(-1), (0, each * share.parts - leaf.size))
    return jax.lax.dynamic_slice_in_dim(flat, share.part * each, each)


def in_a_pipeline(pipeline: Pipeline, outer, layers, batches, *, replica: int = 1, forward_only: bool = False):
    """As `one_after_the_other`, on a mesh."""
    stages = layers.shape[0]
    schedule = build_schedule(pipeline, stages=stages, micro_batches=MICRO_BATCHES, forward_only=forward_only)
    shape = MeshShape(stage=stages, replica=replica, fsdp=1)
    placement = Placement.create(shape, devices=jax.devices()[: stages * replica])

    def embed(outer, batch):
        return batch["x"] @ outer["into"]

    def layers_of(weights, x, batch, chunk):
        depth = (chunk * stages + jax.lax.axis_index(AXIS)).astype(jnp.float32)
        return layer(weights, x, batch, depth)

    def loss(outer, share, batch):
        return head(outer["out"], share.output, share_of(batch["target"], share), share_of(batch["weight"], share))

    def local(outer, layers, batches):
        outcome = run_pipeline(schedule, PipelineWork(embed, layers_of, None, loss), outer, layers[0], batches)
        measures = (outcome.layer_measures, outcome.loss_measures)
        if replica > 1:
            measures = merge_over_devices(measures, ("replica",))
        if forward_only:
            return measures
        # What `train.on_mesh` does at the end of a step: sums over the axes that a parameter is not split over.
        return (
            (jax.lax.psum(outcome.outer, ("replica", AXIS)), jax.lax.psum(outcome.chunks, "replica")[None]),
            *measures,
        )

    out = (P(), P()) if forward_only else ((P(), P(AXIS)), P(), P())
    mapped = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(P(), P(AXIS), P(None, "replica")),
        out_specs=out,
        check_vma=False,
    )
    with placement.activate():
        return jax.jit(mapped)(outer, layers, batches)


def assert_same(found, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, expected)


@pytest.mark.parametrize(
    "pipeline, stages, replica",
    [
        (Pipeline(), 2, 1),
        (Pipeline(), 4, 2),
        (Pipeline(schedule="gpipe"), 4, 2),
        (Pipeline(schedule="interleaved", chunks=2), 2, 1),
        (Pipeline(schedule="interleaved", chunks=2), 4, 2),
    ],
    ids=lambda value: f"{value.schedule}" if isinstance(value, Pipeline) else str(value),
)
def test_a_pipeline_is_its_layers_one_after_the_other(pipeline, stages, replica):
    given = problem(stages, pipeline.chunks, rows=2 * replica)
    assert_same(in_a_pipeline(pipeline, *given, replica=replica), one_after_the_other(*given))


def test_tokens_that_the_stages_do_not_divide():
    """Twelve tokens of a micro-batch on eight stages: some shares of the loss are padding."""
    # In float64: in float32 one value of 0.14, a sum of terms up to 90, is 5.7e-6 off on some processors, in any order of sums.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        given = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), problem(8, 1, rows=3))
        assert_same(in_a_pipeline(Pipeline(), *given), one_after_the_other(*given))


@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(schedule="interleaved", chunks=2)], ids=lambda p: p.schedule)
def test_an_evaluation_gives_the_same_measures(pipeline):
    given = problem(4, pipeline.chunks, rows=2)
    assert_same(in_a_pipeline(pipeline, *given, forward_only=True), one_after_the_other(*given)[1:])


def test_the_layers_are_nan_on_what_unused_slots_hold():
    _, layers, batches = problem(2, 1, rows=2)
    batch = {name: leaf[0] for name, leaf in batches.items()}
    y, auxiliary, measures = layer(layers[0, 0], jnp.zeros((2, LENGTH, WIDTH)), batch, jnp.float32(0.0))
    assert jnp.isnan(y).all() and jnp.isnan(auxiliary) and jnp.isnan(measures["largest"].value)
