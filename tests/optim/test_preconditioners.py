"""Shampoo and SOAP against their definitions written out in float64, and the roots and bases that they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimized import compared, run

from panax.core import RecipeError
from panax.optim import Schedule, Shampoo, Soap
from panax.optim.matrix.blocks import MatrixBlocks
from panax.optim.matrix.roots import inverse_root
from panax.optim.matrix.soap import _next_basis

RATE = 0.05
SCHEDULE = Schedule(peak=RATE, decay="constant")
AXES = {"w": ("embed", "ffn"), "tall": ("ffn", "embed"), "bias": ("ffn",)}


def arrays(seed, shapes):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def adam(values, gradients, b1, b2, epsilon):
    """The directions of Adam, one for each gradient."""
    mean = square = 0.0
    for number, gradient in enumerate(gradients, 1):
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        yield mean, mean / (1 - b1**number) / (np.sqrt(square / (1 - b2**number)) + epsilon)


def root(matrix, ridge):
    values, vectors = np.linalg.eigh(matrix + ridge * np.linalg.norm(matrix) * np.eye(len(matrix)))
    return vectors @ np.diag(values**-0.25) @ vectors.T


def shampoo(value, gradients, one):
    """As published, with blocks of half of the columns."""
    half = value.shape[1] // 2
    parts = [slice(0, half), slice(half, None)]
    left = [np.zeros((len(value), len(value)))] * 2
    right = [np.zeros((half, half))] * 2
    roots = later = None
    for number, (gradient, (mean, usual)) in enumerate(
        zip(gradients, adam(value, gradients, one.b1, one.b2, one.epsilon)), 1
    ):
        towards = usual
        if roots is not None:
            towards = np.concatenate([a @ mean[:, part] @ b for part, (a, b) in zip(parts, roots)], 1)
            towards = towards * np.linalg.norm(usual) / np.linalg.norm(towards)
        value = value - RATE * (towards + one.weight_decay * value)
        decay = one.b_statistics
        for i, part in enumerate(parts):
            left[i] = decay * left[i] + (1 - decay) * gradient[:, part] @ gradient[:, part].T
            right[i] = decay * right[i] + (1 - decay) * gradient[:, part].T @ gradient[:, part]
        if number % one.precondition_frequency == 0:
            later = number, [(root(a, one.ridge), root(b, one.ridge)) for a, b in zip(left, right)]
        if later is not None and later[0] + one.root_delay == number + 1:
            roots = later[1]
    return value


@pytest.mark.parametrize("delay", [1, 3])
def test_shampoo_takes_the_steps_of_its_definition(delay):
    optimizer = Shampoo(schedule=SCHEDULE, block=16, precondition_frequency=3, ridge=0.01, root_delay=delay)
    shapes = {"w": (8, 24), "tall": (24, 8), "bias": (24,)}
    params, steps = arrays(0, shapes), [arrays(seed, shapes) for seed in range(1, 21)]
    actual, state = run(optimizer, params, steps, axes=AXES, num_steps=20)
    assert state["left"]["w"].shape == (1, 2, 8, 8) and state["right_root"]["tall"].shape == (1, 2, 12, 12)
    assert state["left"].keys() == {"w", "tall"}
    for name, turned in (("w", np.array), ("tall", np.transpose)):
        gradients = [turned(np.asarray(step[name], np.float64)) for step in steps]
        wanted = shampoo(turned(np.asarray(params[name], np.float64)), gradients, optimizer)
        # A root in float32 is uncertain by a few roundings, of 6e-8 each, over the ridge.
        compared({name: actual[name]}, {name: turned(wanted)}, bound=5e-5)


def soap(value, gradients, one):
    """As published: the first gradient begins the statistics, and nothing else."""
    decay, bases = one.b_statistics, None
    statistics, mean, square = [0.0, 0.0], 0.0, 0.0
    for number, gradient in enumerate(gradients):
        if bases is not None:
            a, b = bases
            mean = one.b1 * mean + (1 - one.b1) * gradient
            square = one.b2 * square + (1 - one.b2) * (a.T @ gradient @ b) ** 2
            towards = a.T @ mean @ b / (1 - one.b1**number)
            towards = a @ (towards / (np.sqrt(square / (1 - one.b2**number)) + one.epsilon)) @ b.T
            value = value - RATE * (towards + one.weight_decay * value)
        statistics = [
            decay * old + (1 - decay) * new
            for old, new in zip(statistics, (gradient @ gradient.T, gradient.T @ gradient))
        ]
        if bases is None:
            bases = [np.linalg.eigh(one)[1][:, ::-1] for one in statistics]
        elif (number + 1) % one.precondition_frequency == 0:
            for side, statistic in enumerate(statistics):
                order = np.argsort(-np.diag(bases[side].T @ statistic @ bases[side]))
                bases[side] = np.linalg.qr(statistic @ bases[side][:, order])[0]
                square = np.take(square, order, side)
    return value


def test_soap_takes_the_steps_of_its_definition():
    optimizer = Soap(schedule=SCHEDULE, precondition_frequency=3, epsilon=0.01)
    shapes = {"w": (12, 12), "bias": (12,)}
    given, steps = arrays(0, shapes), [arrays(seed, shapes) for seed in range(1, 21)]
    found, state = run(optimizer, given, steps, axes=AXES, num_steps=20)
    assert state["left_basis"]["w"].shape == (12, 12) and state["left"].keys() == {"w"}
    wanted = soap(np.asarray(given["w"], np.float64), [np.asarray(s["w"], np.float64) for s in steps], optimizer)
    # Eigenvectors are as uncertain as a rounding over the distance of two eigenvalues, here of 1e-3 or more.
    compared({"w": found["w"]}, {"w": wanted}, bound=2e-4)


def test_a_side_that_is_too_large_keeps_its_own_basis():
    optimizer = Soap(schedule=SCHEDULE, largest=8)
    shapes = {"w": (8, 24)}
    _, state = run(optimizer, arrays(0, shapes), [arrays(1, shapes)] * 3, axes=AXES)
    assert set(state) == {"count", "mean", "square", "left", "left_basis"}


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_inverse_roots_equal_those_of_eigenvalues(condition):
    random = np.random.default_rng(0)
    vectors = np.linalg.qr(random.standard_normal((5, 64, 64)))[0]
    values = np.geomspace(1, 1 / condition, 64)
    scales = np.array([1e-12, 1e-3, 1.0, 1e3, 1e12]).reshape(-1, 1, 1)
    matrices = (vectors * values) @ vectors.transpose(0, 2, 1) * scales
    actual = np.asarray(inverse_root(jnp.asarray(matrices, jnp.float32), 4, 1e-6), np.float64)
    ridge = 1e-6 * np.linalg.norm(values)
    wanted = (vectors * (values + ridge) ** -0.25) @ vectors.transpose(0, 2, 1) * scales**-0.25
    error = np.abs(actual - wanted).max((1, 2)) / np.abs(wanted).max((1, 2))
    # The smallest eigenvalue's own rounding, of 6e-8 of the largest, is that of a float32 matrix before any root is taken.
    assert error.max() < 1e-5 + 64 * 6e-8 / (1 / condition + ridge)


def test_the_root_of_zeros_is_the_identity_and_a_power_of_two_is_one_too():
    both = inverse_root(jnp.stack([jnp.zeros((3, 3)), 16 * jnp.eye(3)]), 4, 0.0)
    np.testing.assert_allclose(both, jnp.stack([jnp.eye(3), jnp.eye(3) / 2]), rtol=1e-5, atol=1e-6)
    square = inverse_root(4 * jnp.eye(3)[None], 2, 0.0)
    np.testing.assert_allclose(square[0], jnp.eye(3) / 2, rtol=1e-5, atol=1e-6)


def test_blocks_are_cut_evenly_and_joined_again():
    blocks = MatrixBlocks.of((10, 7), 4)
    assert blocks == ((10, 7), (3, 2), (4, 4)) and blocks.padded_shape == (12, 8)
    x = jnp.arange(140.0).reshape(2, 10, 7)
    cut = blocks.split(x)
    assert cut.shape == (2, 3, 2, 4, 4)
    np.testing.assert_array_equal(cut[1, 1, 1, :, :3], x[1, 4:8, 4:7])
    np.testing.assert_array_equal(blocks.join(cut), x)


def test_bases_of_zeros_stay_and_others_stay_orthonormal():
    random = np.random.default_rng(0)
    half = random.standard_normal((3, 6, 4))
    statistics = jnp.asarray(half @ half.transpose(0, 2, 1), jnp.float32).at[1].set(0)
    basis, _ = _next_basis(statistics, jnp.zeros((3, 6, 6)))
    np.testing.assert_array_equal(basis[1], np.eye(6))
    again, order = _next_basis(statistics, basis)
    np.testing.assert_array_equal(again[1], np.eye(6))
    np.testing.assert_array_equal(order[1], np.arange(6))
    # Of rank 4: the others' eigenvalues are 0, in any order.
    np.testing.assert_array_equal(order[:, :4], np.tile(np.arange(4), (3, 1)))
    np.testing.assert_allclose(again @ again.mT, np.tile(np.eye(6), (3, 1, 1)), atol=1e-5)
    turned = np.asarray(again.mT @ statistics @ again)
    assert np.abs(turned[:, :4, :4] - turned[:, :4, :4] * np.eye(4)).max() < 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shampoo(block=0), r"optimizer.block=0"),
        (lambda: Shampoo(ridge=0.0), r"optimizer.ridge=0.0; expected a positive number, usually 1e-6"),
        (lambda: Shampoo(root_delay=11), r"optimizer.root_delay=11; expected 1 to 10, the steps until the next roots"),
        (lambda: Shampoo(root_delay=0), r"optimizer.root_delay=0"),
        (lambda: Soap(precondition_frequency=0), r"optimizer.precondition_frequency=0"),
        (lambda: Soap(b_statistics=1.0), r"optimizer.b_statistics=1.0; expected a decay rate"),
        (lambda: Shampoo(), r"Shampoo found no eligible matrix.*use AdamW"),
        (lambda: Soap(excluded=("vocabulary",)), r"optimizer.excluded: 'vocabulary' is not a logical axis"),
    ],
)
def test_settings_without_sense_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make().build({"bias": AXES["bias"]}, 10)


def test_zeros_have_no_roots_yet_and_move_nothing():
    shapes = {"w": (8, 24)}
    zeros = jax.tree.map(jnp.zeros_like, arrays(0, shapes))
    for optimizer in (Shampoo(schedule=SCHEDULE, precondition_frequency=1), Soap(schedule=SCHEDULE)):
        after, state = run(optimizer, zeros, [zeros] * 3, axes=AXES)
        assert not np.asarray(after["w"]).any() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
