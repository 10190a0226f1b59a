"""An adapted module beside PyTorch itself: loss, gradients and buffers of one batch, with the same random bits."""

import jax
import numpy as np
import pytest

from panax.adapters.torch.state.random_ops import ReplayDrawsMode
from panax.adapters.torch.tracing.values import as_numpy
from panax.core import total_loss
from panax.data.loading.iterable import as_batch

# Float32 sums in another order. True zeros (a bias before BatchNorm) are noise of the largest gradient's rounding.
TOLERANCE, FLOOR = 1e-5, 1e-6


def ours(task, batch, key=None, train=True):
    """(loss, gradients by name, state afterwards) of the adapted task."""
    key = jax.random.key(0) if key is None else key
    abstract = jax.eval_shape(task.init, jax.random.key(0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params, state = task.load_initial(jax.tree.map(lambda _: device, abstract))
    free = {name: leaf for name, leaf in params.items() if name not in task.frozen_parameters}

    def loss(free, state, batch):
        result = task.loss({**params, **free}, state, batch, key, train)
        return total_loss(result.losses), result

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})
    (value, result), gradients = run(free, state, {k: jax.numpy.asarray(v) for k, v in as_batch(batch).items()})
    return float(value), {name: np.asarray(g) for name, g in gradients.items()}, result


def theirs(module, loss, batch, key=None):
    """(loss, gradients by name) by PyTorch; the module's buffers are afterwards those after the step."""
    with ReplayDrawsMode(jax.random.key(0) if key is None else key):
        value = loss(module, batch)
    value.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return float(value.detach()), {name: as_numpy(g) for name, g in gradients.items()}


def assert_same(actual, expected, tolerance=TOLERANCE):
    assert actual[0] == pytest.approx(expected[0], rel=tolerance, abs=1e-7)
    assert actual[1].keys() == expected[1].keys()
    largest = max((np.abs(g).max() for g in expected[1].values()), default=0.0)
    for name, gradient in expected[1].items():
        distance = np.abs(actual[1][name] - gradient).max()
        assert distance <= tolerance * np.abs(gradient).max() + FLOOR * largest, (
            name,
            distance,
            np.abs(gradient).max(),
        )


def assert_trains_as_pytorch(task, module, loss, batch, tolerance=TOLERANCE):
    """One loss with all gradients and buffers."""
    actual = ours(task, batch)
    assert_same(actual, theirs(module, loss, batch), tolerance)
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(
            np.asarray(actual[2].state[name]), as_numpy(buffer), rtol=tolerance, atol=1e-6, err_msg=name
        )
