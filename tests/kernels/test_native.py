"""The compiled C files: only what this user compiled is loaded, whole; a missing one is reported, and XLA does the work."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from panax.core.errors import RecipeError
from panax.kernels.cache import is_intact
from panax.kernels.cpu.choice import CpuKernels, read_environment_choice
from panax.kernels.cpu.instruction_sets import INSTRUCTION_SETS, ISA_VARIABLE, detect
from panax.kernels.cpu.library import MANIFEST, OPTIONS, PACKAGE, build_manifest, compile_library, sources_digest
from panax.system import cpu_info

PROGRAM = """
import jax.numpy as jnp
from panax.kernels.cpu import choice as cpu_kernels, native
from panax.kernels.product import product
print(native.unavailable_reason("c", "float32") or native.unavailable_reason("mkl", "float32") or "whole")
names = [name for name in ("c", "mkl") if native.unavailable_reason(name, "float32") is None]
cpu_kernels.use_choice(cpu_kernels.CpuKernels(product_float32=(*names, "xla")[0]))
print(float(product("ab,bc->ac", jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.float32).max()))
"""


def run(cache: Path, **environment: str) -> str:
    """Report on the kernels by a process with this cache; its product is right in any case."""
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
    assert first == "whole"
    return cache


def test_a_torn_library_is_made_again(made):
    """As a power failure after the rename leaves it: empty, cut short, or of zeros. Each would end the process, if mapped."""
    [file] = (made / "panax" / "kernels").glob("*.so")
    intact = file.read_bytes()
    for torn in (b"", intact[:5000], bytes(len(intact))):
        file.write_bytes(torn)
        assert not is_intact(file)
    said = run(made)
    assert is_intact(file) and said == "whole"
    file.with_suffix(".sha256").unlink()
    assert not is_intact(file)
    file.with_suffix(".sha256").write_text("")
    assert not is_intact(file)


def test_what_others_may_have_put_there_is_not_loaded(made):
    folder = made / "panax" / "kernels"
    [file] = folder.glob("*.so")
    run(made)
    file.chmod(0o722)
    assert not is_intact(file), "others may write to it"
    file.chmod(0o700)
    away = file.rename(made / "elsewhere.so")
    file.symlink_to(away)
    assert not is_intact(file), "it is a link"
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


def install_wheel(folder: Path, write_library: Callable[[Path], object]) -> None:
    """Write what a wheel `panax-jax-kernels` installs, for the least of this processor's instruction sets."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    file = package / f"kernels-{detect()[0].name}.so"
    write_library(file)
    (package / MANIFEST).write_text(build_manifest([file]))


@pytest.fixture
def wheel(tmp_path) -> Path:
    """A folder with a wheel that is not loaded: its library holds arbitrary bytes, since compiling one takes seconds."""
    folder = tmp_path / "site"
    folder.mkdir()
    install_wheel(folder, lambda file: file.write_bytes(bytes(range(256)) * 64))
    return folder


def test_without_a_compiler_a_wheel_multiplies(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    install_wheel(site, lambda file: compile_library(file, (*OPTIONS, *INSTRUCTION_SETS[file.stem[8:]].options)))
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(site)}
    cache = tmp_path / "cache"
    assert run(cache, **environment) == "whole"
    assert not list(cache.glob("**/*.so")), "nothing is compiled"
    best = detect()[-1].name
    if best != detect()[0].name:
        assert "has nothing for this processor" in run(cache, **environment, **{ISA_VARIABLE: best})


def test_a_wheel_of_other_sources_is_not_loaded(wheel, tmp_path):
    manifest = wheel / PACKAGE / MANIFEST
    right = manifest.read_text()
    for wrong, why in (
        (right.replace(sources_digest(), "0" * 16), "of another version"),
        (right[:9], "is damaged"),
    ):
        manifest.write_text(wrong)
        assert why in run(tmp_path, PATH="/nowhere", PYTHONPATH=str(wheel))


def test_a_wheel_that_is_torn_is_reported(wheel, tmp_path):
    [file] = (wheel / PACKAGE).glob("*.so")
    file.write_bytes(file.read_bytes()[:4000])
    assert "is damaged" in run(tmp_path, PATH="/nowhere", PYTHONPATH=str(wheel))


def test_without_proc_cpuinfo_the_compiler_knows_the_processor(monkeypatch, tmp_path):
    monkeypatch.setattr("panax.system.cpu_info.CPUINFO", tmp_path / "absent")
    assert detect() == () or sys.platform == "darwin"
    assert cpu_info.describe_processor().endswith("; ")


def test_a_kernel_that_is_named_but_missing_is_an_error(monkeypatch):
    monkeypatch.setenv("PANAX_CPU_KERNELS", "mlk")
    with pytest.raises(RecipeError, match="did you mean 'mkl'"):
        read_environment_choice()
    monkeypatch.setattr("panax.kernels.cpu.choice.unavailable_reason", lambda kernel, dtype: "not installed")
    monkeypatch.setenv("PANAX_CPU_KERNELS", "mkl")
    with pytest.raises(RecipeError, match="PANAX_CPU_KERNELS=mkl: not installed"):
        read_environment_choice()
    monkeypatch.setenv("PANAX_CPU_KERNELS", "xla")
    assert read_environment_choice() == CpuKernels()
    with pytest.raises(ValueError, match="product_float32='mk': did you mean"):
        CpuKernels(product_float32="mk")
    with pytest.raises(ValueError):
        CpuKernels.from_json('["c"]')
