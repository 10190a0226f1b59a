"""The examples of custom kernels are right, train, and stay where the rows are."""

import runpy
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from panax.mesh import MeshShape
from panax.plan.search.targets import parse_target, target_devices

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def pallas() -> dict:
    return runpy.run_path(str(EXAMPLES / "pallas_kernel.py"))


@pytest.fixture(scope="module")
def ffi() -> dict:
    namespace = runpy.run_path(str(EXAMPLES / "ffi_function/train.py"))
    namespace["register"]()
    return namespace


def rows(count: int, width: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, width))


def close(ours, theirs) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def test_the_pallas_kernel_and_its_gradient(pallas):
    def reference(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale[None, :]

    x, scale, target = rows(24, 16), 1.0 + 0.1 * rows(1, 16, 1)[0], rows(24, 16, 2)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (
            jax.value_and_grad(lambda x, s, f=f: jnp.sum(f(x, s) * target), argnums=(0, 1))(x, scale)
            for f in (pallas["rms_norm"], reference)
        )
    close(ours, theirs)


def test_the_pallas_kernels_compile_for_a_gpu(pallas):
    device = np.ravel(target_devices(parse_target("h100x1")))[0]
    x, scale = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        for shape in ((64, 128), (128,))
    )
    for kernel, outputs, rest in (("forward_kernel", 1, ()), ("backward_kernel", 2, (x,))):
        function = partial(pallas["call"], pallas[kernel], outputs, "gpu")
        with jax.numpy_dtype_promotion("standard"):
            assert "triton" in jax.jit(function).lower(x, scale, *rest).compile().as_text()


def test_the_cplusplus_function_and_its_gradient(ffi):
    x = 3 * rows(5, 33)
    ours, theirs = (
        jax.value_and_grad(lambda x, f=f: jnp.sum(f(x) * x), argnums=0)(x)
        for f in (ffi["fused_gelu"], lambda x: jax.nn.gelu(x, approximate=False))
    )
    close(ours, theirs)


def test_on_a_mesh_each_device_calls_it_on_its_rows(pallas, ffi):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(rows(64, 16), NamedSharding(mesh, PartitionSpec("fsdp")))
    scale = jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec()))
    with jax.numpy_dtype_promotion("standard"):
        programs = {
            "pallas": jax.jit(pallas["rms_norm"]).lower(x, scale).compile(),
            "ffi": jax.jit(ffi["fused_gelu"]).lower(x).compile(),
        }
    assert ffi["TARGET"] in programs["ffi"].as_text() and "f32[8,16]" in programs["ffi"].as_text()
    for name, program in programs.items():
        assert "all-gather" not in program.as_text(), name
        assert program.output_shardings.spec[0] == "fsdp", name


@pytest.mark.parametrize("example", [pytest.param("pallas", marks=pytest.mark.slow), "ffi"])
def test_it_trains_and_does_the_same_on_a_mesh(example, request):
    main = request.getfixturevalue(example)["main"]
    losses = main(num_steps=30)
    assert losses[-1] < 0.5 * losses[0]
    sharded = main(num_steps=3, mesh=MeshShape(fsdp=4, tensor=2))
    np.testing.assert_allclose(sharded, losses[:3], rtol=1e-4)


def test_without_a_compiler_it_reports_it(ffi, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="needs a C\\+\\+17 compiler, and there is no no-such-compiler"):
        ffi["build"](tmp_path)
