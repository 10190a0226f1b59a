"""Eight simulated CPU devices, strict types, and one compilation cache for every test."""

import gc
import os
import sys
import tempfile

from cpu_here import KERNELS
from suite.selection import emitter_flag

os.environ["JAX_PLATFORMS"] = "cpu"
# What a program computes is tested, not how fast it is: LLVM's expensive passes are a third of the suite's time, and the MLIR
# emitters of fusions and the split of each program into 32 modules a quarter of the rest. The caller's own flags come last, and
# so win.
# Tests that look at a whole program's operations and memory are slow; they see what a run compiles.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 " + emitter_flag(sys.argv) + os.environ.get("XLA_FLAGS", "")
)
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# Tests are the same on every machine of a kind: nothing is timed.
os.environ["PANAX_CPU_KERNELS"] = KERNELS[0]

# Programs are kept between runs, unless a folder is named: `python tests/timings` and `.ci/run` name an empty one.
os.environ.setdefault("PANAX_TEST_CACHE", os.path.join(tempfile.gettempdir(), f"panax-test-cache-{os.getuid()}"))

import jax
import pytest
from suite.type_checks import check_types

pytest_plugins = ("suite.durations", "suite.tiers", "suite.slow_share", "suite.budget")

# Tracing and importing create millions of objects that stay. By Python's own thresholds the collector goes through them so often
# that it takes a tenth of the suite's time, and half of a test's that reads every source file.
gc.set_threshold(100_000, 20, 100)

check_types(("panax", "panax_compare"))

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", os.environ["PANAX_TEST_CACHE"])
# A program that another test or the other worker has compiled is read again in a tenth of the time.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_configure(config: pytest.Config) -> None:
    if len(jax.devices()) != 8:
        sys.exit("the tests need 8 simulated devices; something imported jax before tests/conftest.py did")

    from panax.kernels.cpu.choice import (  # After the line that looks at the devices.
        read_environment_choice,
        use_choice,
    )

    kernels = read_environment_choice()
    assert kernels is not None
    use_choice(kernels)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the collector of garbage need not go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=KERNELS)
def library(request, monkeypatch):
    """What multiplies on CPU, at any size: the C files' own kernels, Intel's library in them, or XLA."""
    from panax.kernels.cpu import choice as cpu_kernels
    from panax.kernels.cpu.native import unavailable_reason

    name = request.param
    if name != "xla":
        assert not any(unavailable_reason(name, dtype) for dtype in cpu_kernels.DTYPES), (
            "the tests need a C compiler and the extra mkl"
        )
    works = {f"{work}_{dtype}": name for work in cpu_kernels.WORKS for dtype in cpu_kernels.DTYPES}
    monkeypatch.setattr(cpu_kernels, "_current", cpu_kernels.CpuKernels(**works))
    monkeypatch.setattr("panax.kernels.product.MIN_PRODUCTS", 1)
    return name
