"""Runs of the tiny recipe by the command line, made once for a file of tests and copied by each that changes them."""

from pathlib import Path

import pytest
import tiny_recipe

from panax.cli.main import main


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Give the folder of a run of so many steps, and of its cache."""

    def make(steps: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{steps}-steps")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("PANAX_CACHE", str(folder / "cache"))
            assert main(["train", str(tiny_recipe.__file__), "--num-steps", str(steps)]) == 0
        return folder

    return make
