"""Build the distributions, and try the wheel in a fresh environment."""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = ("tests/", ".venv/", "runs/", ".git/", "__pycache__/")
"""Beginnings of paths, and folders, that no distribution has."""

NEEDED = (
    "panax/__init__.py",
    "panax/kernels/cpu/csrc/gemm.c",
    "panax_compare/__init__.py",
    "panax_recipes/__init__.py",
)
"""Files that the wheel has."""


def build(root: Path, folder: Path) -> list[Path]:
    """Build the source distribution, and the wheel from it, so that the former is known to be complete."""
    folder.mkdir(parents=True, exist_ok=True)
    if stale := sorted(folder.glob("panax_jax-*")):
        raise SystemExit(f"{folder} has {stale[0].name} already; name an empty folder")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, root], check=True, stdout=sys.stderr)
    return sorted(folder.glob("panax_jax-*"))


def content_problems(distribution: Path) -> Iterator[str]:
    """Yield what is wrong with the files in a distribution."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            names = wheel.namelist()
        yield from (f"{distribution.name} lacks {name}" for name in NEEDED if name not in names)
        if not any(name.endswith("licenses/LICENSE") for name in names):
            yield f"{distribution.name} lacks the license"
        wrong = [name for name in names if any(part in f"/{name}" for part in (f"/{each}" for each in FORBIDDEN))]
    else:
        with tarfile.open(distribution) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        wrong = [name for name in names if any(f"/{each}" in f"/{name}" for each in FORBIDDEN[1:])]
    yield from (f"{distribution.name} has {name}" for name in wrong[:3])


def try_wheel(wheel: Path, version: str) -> None:
    """Install a wheel with what it depends on in a fresh environment, and use it: the version, recipes, two steps and a resume.

    Raises:
        SystemExit: A command failed, or printed something else.
    """
    with tempfile.TemporaryDirectory(prefix="panax-release-") as temporary:
        scratch = Path(temporary)
        python = scratch / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", scratch / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        # From elsewhere and without settings of this shell, so that no file of the clone is imported.
        ours = ("PYTHONPATH", "PANAX_", "JAX_", "XLA_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment |= {"JAX_PLATFORMS": "cpu", "PANAX_CACHE": str(scratch / "cache")}

        def panax(*arguments: str) -> str:
            command = [scratch / "venv/bin/panax", *arguments]
            done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(
                    f"panax {' '.join(arguments)} failed in a fresh environment:\n{done.stdout}{done.stderr}"
                )
            return done.stdout

        if (printed := panax("--version").strip()) != f"panax {version}":
            raise SystemExit(f"panax --version printed {printed!r} in a fresh environment; expected 'panax {version}'")
        panax("recipes")
        short = ("--evaluate.every", "0", "--task.model.num-layers", "2")
        panax("train", "quickstart", "--num-steps", "2", *short)
        if "resuming from step 2 of 3" not in panax("train", "quickstart", "--num-steps", "3", *short):
            raise SystemExit("a run did not resume in a fresh environment")
