"""The wheels of the C files, as a user builds them: what they hold; the one for this machine multiplies without a compiler."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import jax.numpy as jnp
from panax.kernels.cpu import choice, library, native
from panax.kernels.product import product
print(native.unavailable_reason("c", "float32"), library.load()._name)
choice.use_choice(choice.CpuKernels(product_float32="c"))
print(float(product("ab,bc->ac", jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.float32).max()))
"""


@pytest.fixture(scope="module")
def wheels(wheel_tools, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "PYTHONPATH": str(wheel_tools)}
    subprocess.run(
        [sys.executable, str(ROOT / "wheels/build.py"), str(folder)], env=environment, check=True, timeout=900
    )
    return sorted(folder.glob("*.whl"))


def test_each_platform_has_every_instruction_set_of_its_own(wheels):
    held = {
        wheel.stem.rpartition("-")[2]: [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        for wheel in wheels
    }
    assert {tag: len(names) for tag, names in held.items()} == {
        "macosx_11_0_arm64": 2,
        "manylinux_2_17_aarch64": 2,
        "manylinux_2_17_x86_64": 3,
    }


def test_it_multiplies_where_there_is_no_compiler(wheels, tmp_path):
    [wheel] = [each for each in wheels if each.stem.endswith(f"manylinux_2_17_{platform.machine()}")]
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=120)
    variables = {
        **os.environ,
        "PYTHONPATH": str(site),
        "PATH": "/nowhere",
        "XDG_CACHE_HOME": str(tmp_path),
        "XLA_FLAGS": "",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, value = done.stdout.splitlines()[-2:]
    assert loaded.startswith("None ") and str(site) in loaded and np.float64(value) == 256.0
