"""Eight simulated CPU devices, strict types, and one compilation cache for every test."""

import os
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
