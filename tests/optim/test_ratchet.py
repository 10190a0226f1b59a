"""What an optimizer keeps in fewer bits follows a signal that falls as it follows one that rises, over 10,000 updates (K6)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.kernels.quantized import FLOAT8, INT8, QuantizedArray, quantize
from panax.optim import AdamW, Lamb, Lion, Schedule, ScheduleFreeAdamW, Sgd

AXES = {"w": ("embed", "ffn")}
SHAPE = (64, 128)
STEADY = Schedule(peak=1e-4, decay="constant", warmup_steps=0)
RISING, FALLING = 200, 9_800

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda **s: AdamW(schedule=STEADY, weight_decay=0.0, **s),
    "adamw-0.99": lambda **s: AdamW(schedule=STEADY, weight_decay=0.0, b2=0.99, **s),
    "adamw-0.999": lambda **s: AdamW(schedule=STEADY, weight_decay=0.0, b2=0.999, **s),
    "lamb": lambda **s: Lamb(schedule=STEADY, weight_decay=0.0, **s),
    "lion": lambda **s: Lion(schedule=STEADY, weight_decay=0.0, **s),
    "sgd": lambda **s: Sgd(schedule=STEADY, momentum=0.999, **s),
    "schedule_free": lambda **s: ScheduleFreeAdamW(schedule=STEADY, **s),
}


def kept_after(optimizer: Any) -> dict[str, np.ndarray]:
    """What is kept after gradients of 1, then of 0.01. Some numbers of each row stay at 1, so that no scale of a block falls."""
    made = optimizer.build(AXES, RISING + FALLING)
    first = {"w": jnp.zeros(SHAPE, jnp.float32)}
    large = jnp.broadcast_to((jnp.arange(SHAPE[1]) % 64 == 0)[None], SHAPE)

    def update(carry: Any, number: jax.Array) -> Any:
        params, state = carry
        small = jnp.where(number < RISING, 1.0, 0.01).astype(jnp.float32)
        changes, state = made.update({"w": jnp.where(large, 1.0, small)}, state, params)
        return ({"w": params["w"] + changes["w"]}, state), None

    run = jax.jit(lambda carry: jax.lax.scan(update, carry, jnp.arange(RISING + FALLING))[0])
    _, state = run((first, made.init(first)))
    small, result = ~np.asarray(large), {}
    for kind in state.keys() - {"count"}:
        stored = state[kind]["w"]
        values = np.asarray(stored.dequantize(jnp.float32) if isinstance(stored, QuantizedArray) else stored)
        if values.shape == SHAPE:
            result[kind] = np.abs(values)[small]
    return result


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_moment_that_falls_is_followed(name, moments):
    wanted = kept_after(OPTIMIZERS[name](moments="float32"))
    for kind, values in kept_after(OPTIMIZERS[name](moments=moments)).items():
        mean = values.astype(np.float64).mean()
        # Rounded by chance, each of 8,064 numbers wanders about its value, by at most a tenth of it, or by one code of its block.
        code = 2.0**-7 * (1.0 if moments == "int8" else 0.0) * 0.02
        assert mean == pytest.approx(float(wanted[kind].mean()), rel=0.1, abs=code), kind


@pytest.mark.parametrize("format", [FLOAT8, INT8], ids=["float8", "int8"])
def test_no_chance_makes_a_finite_number_nan(format):
    largest = jnp.full((4, 256), format.largest, jnp.float32)
    for bits in (jnp.uint32(2**32 - 1), jnp.uint32(0)):
        codes = quantize(
            largest * jnp.array([[1.0], [-1.0], [1e30], [1e-30]]), format, 256, jnp.full(largest.shape, bits)
        )
        assert bool(jnp.isfinite(codes.dequantize(jnp.float32)).all())
