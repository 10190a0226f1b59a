"""A mixture of experts trains on every layout as on one device, however its tokens choose, and loses none of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_layouts import AXES, Trained, assert_trains_alike, communication, compiled, layout_name, train

from panax.layers import MoE, register_router
from panax.mesh import Rules
from panax.models import DecoderTask

MOE = MoE(experts=8, active=2, ffn=24, shared=16, balance=0.02, z_loss=0.01, selection_bias=True, jitter=0.1)
# No attention bias: a key's gets a gradient of nothing but rounding, which AdamW blows up to whole steps, and routers are steps.
CONFIG = dataclasses.replace(tiny.CONFIG, windows=(0,), attention_bias=False)


def task(layers: int = 2, remat: str = "none", **changes) -> DecoderTask:
    """The last of two layers is a mixture by default."""
    feed_forward = dataclasses.replace(MOE, **{"every": 2} | changes)
    return DecoderTask(model=dataclasses.replace(CONFIG, num_layers=layers, feed_forward=feed_forward), remat=remat)


@functools.cache
def on_one_device(task_: DecoderTask, micro_batches: int = 1) -> Trained:
    return train(compiled({}, task=task_, micro_batches=micro_batches))


def check(sizes, task_=None, rules=None):
    """Losses that are counted over a micro-batch depend on how many there are, so both have as many."""
    count, task_ = (2, task_ or task(layers=4)) if "stage" in sizes else (1, task_ or task())
    step = compiled(sizes, rules, task_, micro_batches=count)
    plain = dataclasses.replace(task_, remat="none")
    assert_trains_alike(train(step), on_one_device(plain, count))
    return step


FEW = [
    {"expert": 4},
    {"tensor": 2},
    {"replica": 2, "expert": 2},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
]
MORE = [
    {"stage": 2, "expert": 2},
    {"expert": 2},
    {"expert": 8},
    {"context": 2},
    *({"expert": 2, axis: 2} for axis in ("fsdp", "context", "tensor")),
    {"expert": 4, "tensor": 2},
    {"replica": 2, "fsdp": 2, "expert": 2},
    {"stage": 2, "fsdp": 2, "expert": 2},
    {"stage": 2, "expert": 2, "tensor": 2},
]


def shards(step) -> dict[str, tuple[int, ...]]:
    model, placed = step.program.abstract.params, step.shardings.params
    experts, places = (tree.stacks[0].blocks[1].feed_forward.experts for tree in (model, placed))
    return {name: getattr(places, name).shard_shape(getattr(experts, name).shape) for name in ("w_up", "w_down")}


def expected_shards(sizes) -> dict[str, tuple[int, ...]]:
    _, _, fsdp, expert, _, tensor = (sizes.get(axis, 1) for axis in AXES)
    layers, embed, ffn = 1, 32 // fsdp, 24 // tensor
    return {"w_up": (layers, 8 // expert, embed, ffn), "w_down": (layers, 8 // expert, ffn, embed)}


@pytest.mark.parametrize(
    "sizes", [*FEW, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in MORE)], ids=layout_name
)
def test_trains_like_one_device(sizes):
    step = check(sizes)
    assert shards(step) == expected_shards(sizes)
    if "expert" in sizes:
        assert "all-to-all" in communication(step)["expert"]


def least_likely(moe, logits, tokens):
    expert = jax.lax.top_k(-logits, moe.active)[1]
    return expert, jax.nn.sigmoid(jnp.take_along_axis(logits, expert, axis=-1))


register_router("least_likely", least_likely)

VARIANTS = {
    "own-router": ({"expert": 2, "tensor": 2}, {"choice": "least_likely", "selection_bias": False}),
    "capacity": ({"expert": 2, "tensor": 2}, {"capacity": 0.7, "balance_scope": "sequence"}),
    "capacity-context": ({"context": 2, "tensor": 2}, {"capacity": 0.7}),
    "expert-choice": ({"expert": 2, "tensor": 2}, {"choice": "expert", "selection_bias": False}),
    "expert-choice-tensor": ({"tensor": 2}, {"choice": "expert", "selection_bias": False}),
    "expert-choice-context": ({"context": 2, "expert": 2}, {"choice": "expert", "selection_bias": False}),
    "groups": ({"expert": 4}, {"groups": 4, "active_groups": 2, "scores": "sigmoid", "scale": 2.5, "buffer": 1.0}),
    "products": ({"expert": 2, "fsdp": 2}, {"remat": "products"}),
    "full": ({"expert": 2, "tensor": 2}, {"remat": "full"}),
    "first-dense": ({"stage": 2, "expert": 2}, {"layers": 3, "first_dense": 1, "every": 1}),
    "left-over": ({"stage": 2, "expert": 2}, {"layers": 5}),
}
AT_ONCE = ("capacity", "expert-choice-context")


@pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_every_way_to_route_trains_alike(name):
    sizes, changes = VARIANTS[name]
    check(sizes, task(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("zero, sizes", [("1", {"expert": 2, "fsdp": 2}), ("2", {"expert": 2, "tensor": 2, "fsdp": 2})])
def test_every_zero_level_trains_alike(zero, sizes):
    check(sizes, rules=Rules(zero=zero))


def gradient_when_all_choose_two_experts(sizes, **changes):
    """Experts 0 and 1, whatever the scores say: one device of the expert axis takes in every row."""
    step = compiled(sizes, task=task(bias_rate=0.0, **changes))
    state = step.init(0)
    bias = np.zeros((1, 8), np.float32)
    bias[:, :2] = 100.0
    placed = jax.device_put(bias, step.shardings.model_state["router_bias"])
    state = dataclasses.replace(state, model_state={"router_bias": placed})
    state, scalars = step(state, step.put(tiny.batch(0)))
    load = np.asarray(scalars["experts/load"])
    assert (load[:, :2] > 0).all() and (load[:, 2:] == 0).all()
    return float(scalars["loss"]), [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer_state["gradient"])]


@pytest.mark.parametrize(
    "sizes, buffer", [({"expert": 4}, 1.0), ({"expert": 2, "tensor": 2}, 1.5)], ids=["4", "2·tensor2"]
)
def test_rounds_deliver_every_token_of_the_worst_imbalance(sizes, buffer):
    loss, gradients = gradient_when_all_choose_two_experts(sizes, buffer=buffer)
    expected_loss, expected = gradient_when_all_choose_two_experts({})
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    whole = np.sqrt(sum(float((leaf**2).sum()) for leaf in expected))
    for found, wanted in zip(gradients, expected):
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted) + 2.0**-24 * whole
