"""What holds on 8 devices holds on 64 and on 256: every axis at once, each longer than 2 if possible."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MESHES = [
    {"replica": 2, "stage": 2, "fsdp": 4, "context": 2, "tensor": 2},
    {"replica": 2, "stage": 2, "fsdp": 4, "expert": 2, "context": 4, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sizes", MESHES, ids=["64 devices", "256 devices"])
def test_trains_like_one_device(sizes):
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    script = [sys.executable, str(Path(__file__).parent / "on_many_devices.py"), json.dumps(sizes)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert " · ".join(f"{axis}={size}" for axis, size in sizes.items()) in done.stdout
