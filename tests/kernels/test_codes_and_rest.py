"""Codes of a sum and what they leave out: the kernel for GPUs interpreted, its program compiled, and its bytes counted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core.layout.target import Target
from panax.kernels.quantized import FLOAT8, INT4, INT8, SIGN
from panax.kernels.quantized.residual import WORK, ResidualCase, quantize_with_residual, reference
from panax.kernels.quantized.residual_gpu import gpu_quantize_with_residual
from panax.kernels.registry import choose
from panax.plan import parse_target, target_devices

FORMATS = {"int8": INT8, "int4": INT4, "float8": FLOAT8}


def arrays(rows, seed=0):
    random = np.random.default_rng(seed)
    x, owed = (random.standard_normal((rows, 256)) * 10.0 ** random.uniform(-6, 3, (rows, 1)) for _ in range(2))
    x[1], owed[1] = 0.0, 0.0
    x[2], owed[2] = 1e-45, 0.0
    x[3, 7], x[4, 9], owed[5, 0] = np.nan, np.inf, -np.inf
    x[6, 1] = 3e38
    return jnp.asarray(x, jnp.float32), jnp.asarray(owed, jnp.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [16, 21])
def test_the_kernel_is_its_definition_bit_by_bit(name, rows):
    x, owed = arrays(rows)
    wanted, left = jax.jit(reference, static_argnums=2)(x, owed, FORMATS[name])
    codes, scales, rest = gpu_quantize_with_residual(x, owed, FORMATS[name], interpret=True)
    bad = np.isnan(np.asarray(wanted.scales)[:, 0])
    assert bad.tolist() == [number in (3, 4, 5) for number in range(rows)]
    np.testing.assert_array_equal(scales, wanted.scales[:, 0])
    np.testing.assert_array_equal(np.asarray(codes)[~bad].view(np.uint8), np.asarray(wanted.codes)[~bad].view(np.uint8))
    # A product and a difference may be rounded together.
    largest = np.abs(np.asarray(x + owed)).max(1, keepdims=True)
    assert (np.abs(np.asarray(rest) - np.asarray(left))[~bad] <= 2.0**-23 * largest[~bad]).all()
    assert np.isnan(np.asarray(rest)[bad]).all()


def test_it_is_chosen_where_it_can_do_the_case():
    gpu = Target("cuda", architecture="h100")
    assert choose(WORK, ResidualCase(INT8, 256), gpu).name == "pallas"
    for case, target in (
        (ResidualCase(INT8, 256, True), gpu),
        (ResidualCase(SIGN, 256), gpu),
        (ResidualCase(INT8, 250), gpu),
    ):
        assert choose(WORK, case, target).name == "xla"
    assert choose(WORK, ResidualCase(INT8, 256), Target("cpu")).name == "xla"
    x, owed = arrays(8)
    quantized, rest = quantize_with_residual(x.reshape(2, 4, 256), owed.reshape(2, 4, 256), INT8)
    assert quantized.codes.shape == rest.shape == (2, 4, 256) and quantized.scales.shape == (2, 4, 1)


def bytes_of(text):
    """Arrays that the kernels of a compiled program read and write."""
    entry = text[text.index("ENTRY") :]
    sizes = {"f32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1, "pred": 1}

    def of(shapes):
        matches = re.findall(r"(f32|s8|u8|f8e4m3fn|pred)\[([\d,]*)\]", shapes)
        return sum(sizes[kind] * int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for kind, dims in matches)

    shapes, total = {}, 0
    for line in entry.splitlines():
        match = re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, shape, operation, rest = match.groups()
        shapes[name] = of(shape)
        if operation in ("fusion", "custom-call"):
            total += shapes[name] + sum(
                shapes[each] for each in re.findall(r"%[\w.\-]+", rest.split("), ")[0]) if each in shapes
            )
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_one_pass_over_the_gradient_for_h100s(name):
    rows, format = 65536, FORMATS[name]
    device = target_devices(parse_target("h100x1"))
    mesh = jax.sharding.Mesh(np.array(device).reshape(-1), ("x",))
    x = jax.ShapeDtypeStruct((rows, 256), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))

    def run(kernel):
        def both(x, owed):
            actual, rest = kernel(x, owed)
            return actual, rest

        return jax.jit(both, donate_argnums=1).lower(x, x).compile().as_text()

    numbers = rows * 256
    pallas = choose(WORK, ResidualCase(format, 256), Target("cuda", architecture="h100")).kernel
    fused = run(lambda x, owed: pallas.run(x, owed, format))
    assert fused.count("panax_codes_and_rest") >= 1
    once = 8 + 4 + 1 / format.packed + 4 / 256
    assert bytes_of(fused) / numbers == pytest.approx(once, rel=0.02)
    in_two = bytes_of(run(lambda x, owed: reference(x, owed, format))) / numbers
    print(name, once, in_two)
    assert in_two > 1.5 * once
