"""Every optimizer equals another library's for twenty steps, on a single layer's arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optimized import compared, run

from panax.optim import Adafactor, AdamW, Lamb, Lars, Lion, Muon, Schedule, ScheduleFreeAdamW, Sgd

SCHEDULE = Schedule(peak=0.05, warmup_steps=3)
AXES = {"w": ("embed", "ffn"), "flat": ("ffn", "embed"), "bias": ("ffn",)}
RATE = SCHEDULE.build(20)


def arrays(seed):
    random = np.random.default_rng(seed)
    shapes = {"w": (8, 24), "flat": (24, 8), "bias": (24,)}
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def gradients():
    """Of very different size, zeros among them: of one array, and of all."""
    found = [arrays(seed) for seed in range(1, 21)]
    found[4] = jax.tree.map(lambda g: g * 1e4, found[4])
    found[7] = {**found[7], "w": jnp.zeros_like(found[7]["w"])}
    found[9] = jax.tree.map(jnp.zeros_like, found[9])
    return found


def matrices(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def everywhere(tree):
    return jax.tree.map(lambda _: True, tree)


OPTAX = {
    "adamw": (
        AdamW(schedule=SCHEDULE, b2=0.9, weight_decay=0.3),
        optax.adamw(RATE, 0.9, 0.9, weight_decay=0.3, mask=matrices),
    ),
    "lion": (Lion(schedule=SCHEDULE, weight_decay=0.3), optax.lion(RATE, weight_decay=0.3, mask=matrices)),
    "sgd": (
        Sgd(schedule=SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1, matrices), optax.sgd(RATE, 0.9, nesterov=True)),
    ),
    "sgd, plain": (Sgd(schedule=SCHEDULE), optax.sgd(RATE)),
    "adafactor": (
        Adafactor(schedule=SCHEDULE, minimum_factored=4, weight_decay=0.01),
        optax.adafactor(RATE, 4, weight_decay_rate=0.01, weight_decay_mask=matrices),
    ),
    "adafactor, not factored": (Adafactor(schedule=SCHEDULE), optax.adafactor(RATE)),
    "lamb": (
        Lamb(schedule=SCHEDULE, weight_decay=0.1, vectors=True),
        optax.lamb(RATE, weight_decay=0.1, mask=matrices),
    ),
    "lars": (
        Lars(schedule=SCHEDULE, trust=0.01, weight_decay=0.1),
        optax.lars(RATE, 0.1, matrices, 0.01, trust_ratio_mask=matrices),
    ),
    "lars, all": (
        Lars(schedule=SCHEDULE, trust=0.01, weight_decay=0.1, vectors=True, nesterov=True, epsilon=1e-3),
        optax.lars(RATE, 0.1, matrices, 0.01, 1e-3, everywhere, nesterov=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTAX)
def test_it_takes_the_steps_of_optax(name):
    optimizer, reference = OPTAX[name]
    found, _ = run(optimizer, arrays(0), gradients(), axes=AXES, num_steps=20)
    params, state = arrays(0), reference.init(arrays(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for gradient in gradients():
            updates, state = reference.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
    compared(found, params, bound=1e-5)


def test_without_a_schedule_steps_and_averages_are_optax_s():
    steady = Schedule(peak=0.05, decay="constant")
    optimizer = ScheduleFreeAdamW(schedule=steady, weight_decay=0.1, decay_multipliers={"*": 1.0})
    actual, state = run(optimizer, arrays(0), gradients(), axes=AXES, num_steps=20)
    reference = optax.contrib.schedule_free_adamw(0.05, weight_decay=0.1)
    params, told = arrays(0), reference.init(arrays(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for gradient in gradients():
            updates, told = reference.update(gradient, told, params)
            params = optax.apply_updates(params, updates)
        averaged = optax.contrib.schedule_free_eval_params(told, params)
    compared(actual, params, bound=1e-5)
    compared(optimizer.average(actual, state), averaged, bound=1e-5)


@pytest.mark.parametrize("scale", ["adamw", "spectral"])
def test_muon_takes_the_steps_of_torch(scale):
    # Both iterate in bfloat16: five times three products, each rounded to 4e-3, and carried on with a slope of up to 3.4.
    optimizer = Muon(schedule=Schedule(peak=0.05, decay="constant"), scale=scale, weight_decay=0.1)
    axes = {name: AXES[name] for name in ("w", "flat")}
    params = {name: arrays(0)[name] for name in axes}
    steps = [{name: gradient[name] for name in axes} for gradient in gradients()]
    actual, _ = run(optimizer, params, steps, axes=axes, num_steps=20)
    # PyTorch's rows are what comes out.
    weights = {name: torch.nn.Parameter(torch.tensor(np.array(value.T))) for name, value in params.items()}
    adjusted = {"adamw": "match_rms_adamw", "spectral": "original"}[scale]
    reference = torch.optim.Muon(
        weights.values(), lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjusted, nesterov=True
    )
    for gradient in steps:
        for name, weight in weights.items():
            weight.grad = torch.tensor(np.array(gradient[name].T))
        reference.step()
    for name, weight in weights.items():
        wanted = weight.detach().numpy().T
        moved = np.linalg.norm(wanted - params[name])
        assert float(np.linalg.norm(actual[name] - wanted)) <= 0.05 * moved, name


def test_muon_in_float32_makes_matrices_orthogonal():
    optimizer = Muon(schedule=Schedule(peak=1.0, decay="constant"), dtype="float32", weight_decay=0.0, scale="spectral")
    axes = {"w": AXES["w"]}
    before = {"w": arrays(0)["w"]}
    after, _ = run(optimizer, before, [{"w": arrays(1)["w"]}], axes=axes)
    singular = np.linalg.svd(np.asarray(before["w"] - after["w"]), compute_uv=False) / np.sqrt(3)
    assert singular.min() > 0.6 and singular.max() < 1.3
    # In the coordinates of the gradient.
    u, _, v = np.linalg.svd(np.asarray(arrays(1)["w"]), full_matrices=False)
    wanted = u @ np.diag(np.diag(u.T @ np.asarray(before["w"] - after["w"]) @ v.T)) @ v
    np.testing.assert_allclose(before["w"] - after["w"], wanted, atol=1e-4)


def test_muon_in_float32_equals_optax():
    optimizer = Muon(
        schedule=Schedule(peak=0.05, decay="constant"),
        dtype="float32",
        nesterov=False,
        weight_decay=0.1,
        scale="spectral",
    )
    axes = {name: AXES[name] for name in ("w", "flat")}
    inputs = {name: arrays(0)[name] for name in axes}
    # Without the step of zeros: epsilon then has a part in what is left of the momentum.
    steps = [{name: gradient[name] for name in axes} for gradient in gradients()]
    actual, _ = run(optimizer, inputs, steps, axes=axes, num_steps=20)
    reference = optax.contrib.muon(0.05, nesterov=False, weight_decay=0.1, eps=0.0)
    params, state, update = inputs, reference.init(inputs), jax.jit(reference.update)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for gradient in steps:
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
    compared(actual, params, bound=2e-4)
