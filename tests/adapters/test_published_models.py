"""Models that others published, unmodified, train here as in their own library: those of benchmarks/adapters_jax.py."""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/adapters_jax.py"
STEPS = 5


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("adapters_jax", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapters_jax"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["haiku_resnet18", "linen_resnet18", "nnx_vit"])
def test_five_steps_are_the_librarys_own(benchmark, name):
    """The tolerance of tests/contracts/test_tasks.py, for each step that came before."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        mine, own, *_ = benchmark.Pair.create(name).round(STEPS)
    assert own[0] != own[-1]
    for i in range(STEPS):
        assert mine[i] == pytest.approx(own[i], rel=(i + 1) * 1e-5), (mine, own)
