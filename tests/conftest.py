"""Eight simulated CPU devices, strict types, and one compilation cache for every test."""

import os
import platform
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook("panax", "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), f"panax-test-cache-{os.getuid()}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_configure(config: pytest.Config) -> None:
    if len(jax.devices()) != 8:
        sys.exit("the tests need 8 simulated devices; something imported jax before tests/conftest.py did")


# The library is made for these machines alone, and there the tests' requirements bring it.
HAS_MKL = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.fixture(params=["mkl", "xla"] if HAS_MKL else ["xla"])
def library(request, monkeypatch):
    """What multiplies on CPU, at any size: Intel's library and the C around it, or XLA."""
    if HAS_MKL:
        from panax.core import blas  # After the hook above.

        assert blas.absent() is None, "the tests need the extra mkl and a C compiler"
    monkeypatch.setattr("panax.core.product.LEAST_PRODUCTS", 1 if request.param == "mkl" else 2**62)
    # As where a layout says what of an array is on which device: simulated ones leave all to XLA otherwise.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    return request.param
