"""Eight simulated CPU devices, strict types, and one compilation cache for every test."""

import gc
import os
import sys
import tempfile

from cpu_here import KERNELS
from slow_cases import SLOW

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# Tests are the same on every machine of a kind: nothing is timed.
os.environ["PANAX_CPU_KERNELS"] = KERNELS[0]

import jax
import pytest
from type_checks import check_types

check_types(("panax", "panax_compare"))

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), f"panax-test-cache-{os.getuid()}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_configure(config: pytest.Config) -> None:
    if len(jax.devices()) != 8:
        sys.exit("the tests need 8 simulated devices; something imported jax before tests/conftest.py did")

    from panax.kernels.cpu.choice import forced, use  # After the line that looks at the devices.

    kernels = forced()
    assert kernels is not None
    use(kernels)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the collector of garbage need not go through it again."""
    gc.collect()
    gc.freeze()


WHOLE_SUITE = 3000
"""Tests, about: where so many are collected, every case that `slow_cases.py` names must be there."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that take long are slow ones, though others of their test are not: `slow_cases.py` names them."""
    found = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in SLOW & found.keys():
        found[name].add_marker("slow")
    if len(items) > WHOLE_SUITE:
        gone = SLOW - found.keys()
        if gone:
            raise pytest.UsageError(f"tests/slow_cases.py names cases that are not there: {sorted(gone)}")


@pytest.fixture(params=KERNELS)
def library(request, monkeypatch):
    """What multiplies on CPU, at any size: the C files' own kernels, Intel's library in them, or XLA."""
    from panax.kernels.cpu import choice as cpu_kernels
    from panax.kernels.cpu.native import missing

    name = request.param
    if name != "xla":
        assert not any(missing(name, dtype) for dtype in cpu_kernels.DTYPES), (
            "the tests need a C compiler and the extra mkl"
        )
    works = {f"{work}_{dtype}": name for work in cpu_kernels.WORKS for dtype in cpu_kernels.DTYPES}
    monkeypatch.setattr(cpu_kernels, "_current", cpu_kernels.CpuKernels(**works))
    monkeypatch.setattr("panax.kernels.product.LEAST_PRODUCTS", 1)
    return name
