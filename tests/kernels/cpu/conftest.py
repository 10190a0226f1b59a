"""What tests of several files of kernels take."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wheel_tools(tmp_path_factory) -> Path:
    """A folder with the packages of the extra `wheel`."""
    folder = tmp_path_factory.mktemp("tools")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(folder),
        "ziglang",
        "wheel",
        "pyelftools",
    ]
    subprocess.run(command, check=True, timeout=600)
    return folder
