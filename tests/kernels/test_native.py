"""The compiled C files: only what this user compiled is loaded, whole; what is missing is said, and XLA does the work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from panax.core.errors import RecipeError
from panax.kernels.cpu import native
from panax.kernels.cpu.choice import CpuKernels, forced

PROGRAM = """
import jax.numpy as jnp
from panax.kernels.cpu import choice as cpu_kernels, native
from panax.kernels.product import product
print(native.missing("c", "float32") or native.missing("mkl", "float32") or "whole")
names = [name for name in ("c", "mkl") if native.missing(name, "float32") is None]
cpu_kernels.use(cpu_kernels.CpuKernels(product_float32=(*names, "xla")[0]))
print(float(product("ab,bc->ac", jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.float32).max()))
"""


def run(cache: Path, **environment: str) -> str:
    """What is said of the kernels by a process with this cache; its product is right in any case."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": "", **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said, value = done.stdout.splitlines()[-2:]
    assert value == "256.0"
    return said


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    cache.chmod(0o700)
    first = run(cache)
    assert first == "whole" or "lacks AVX-512" in first
    return cache


def test_a_torn_library_is_made_again(made):
    """As a power failure after the rename leaves it: empty, cut short, or of zeros. Each would end the process, if mapped."""
    [file] = (made / "panax" / "kernels").glob("*.so")
    whole = file.read_bytes()
    for torn in (b"", whole[:5000], bytes(len(whole))):
        file.write_bytes(torn)
        assert not native.is_whole(file)
    said = run(made)
    assert native.is_whole(file) and (said == "whole" or "lacks AVX-512" in said)
    file.with_suffix(".sha256").unlink()
    assert not native.is_whole(file)
    file.with_suffix(".sha256").write_text("")
    assert not native.is_whole(file)


def test_what_others_may_have_put_there_is_not_loaded(made):
    folder = made / "panax" / "kernels"
    [file] = folder.glob("*.so")
    run(made)
    file.chmod(0o722)
    assert not native.is_whole(file), "others may write to it"
    file.chmod(0o700)
    away = file.rename(made / "elsewhere.so")
    file.symlink_to(away)
    assert not native.is_whole(file), "it is a link"
    file.unlink()
    away.rename(file)
    for mode, why in ((0o777, "others may write to"), (0o700, "")):
        folder.chmod(mode)
        assert why in run(made)
    folder.rename(made / "moved")
    folder.symlink_to(made / "moved")
    assert "is a link to" in run(made)
    folder.unlink()
    (made / "moved").rename(folder)


@pytest.mark.parametrize(
    "environment, why",
    [({"PATH": "/nowhere"}, "no C compiler"), ({"PATH": "false"}, "failed")],
)
def test_without_a_compiler_xla_multiplies(environment, why, tmp_path):
    if environment["PATH"] == "false":
        (tmp_path / "cc").symlink_to("/bin/false")
        environment = {"PATH": str(tmp_path)}
    assert why in run(tmp_path / "cache", **environment)


def test_a_kernel_that_is_named_but_missing_is_an_error(monkeypatch):
    monkeypatch.setenv("PANAX_CPU_KERNELS", "mlk")
    with pytest.raises(RecipeError, match="did you mean 'mkl'"):
        forced()
    monkeypatch.setattr("panax.kernels.cpu.choice.missing", lambda kernel, dtype: "not installed")
    monkeypatch.setenv("PANAX_CPU_KERNELS", "mkl")
    with pytest.raises(RecipeError, match="PANAX_CPU_KERNELS=mkl: not installed"):
        forced()
    monkeypatch.setenv("PANAX_CPU_KERNELS", "xla")
    assert forced() == CpuKernels()
    with pytest.raises(ValueError, match="product_float32='mk': did you mean"):
        CpuKernels(product_float32="mk")
    with pytest.raises(ValueError):
        CpuKernels.from_json('["c"]')
