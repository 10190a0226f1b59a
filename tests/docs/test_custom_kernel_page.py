"""The kernel in docs/extending/custom-kernel.md compiles for an H100, and runs there if a model adds a bias."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from pages import ROOT, fences

from panax.kernels import registry
from panax.mesh import Placement
from panax.plan import parse_target, target_devices
from panax.plan.step import disable_compilation_cache
from panax.spmd import add_bias


@pytest.fixture
def page(monkeypatch) -> Iterator[None]:
    """Run the page, and remove the kernel that it registers afterwards."""
    monkeypatch.setattr(registry, "_kernels", {work: list(kernels) for work, kernels in registry._kernels.items()})
    namespace: dict = {}
    for block in fences(ROOT / "docs/extending/custom-kernel.md"):
        if block.language == "python":
            exec(compile(block.text, "docs/extending/custom-kernel.md", "exec"), namespace)
    yield
    registry._chosen.cache_clear()


# From jax 0.12 on; see kernels/attention/gpu.py.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("target", "rows", "taken"), [("h100x1", 4096, True), ("h100x1", 16, False), ("v5e-1", 4096, False)]
)
def test_a_registered_kernel_is_compiled_into_a_program(page, target, rows, taken):
    placement = Placement.create(devices=target_devices(parse_target(target)))
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=placement.sharding()) for s in ((2048,), (rows, 2048))]

    def gradient(w, x):
        return jax.vjp(lambda w: add_bias(x, w, "norm"), w)[1](x)

    with placement.activate(), disable_compilation_cache():
        program = jax.jit(gradient).lower(*arrays).compile()
    assert ("my_row_sums" in program.as_text()) == taken
