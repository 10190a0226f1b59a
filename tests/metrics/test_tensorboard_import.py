"""TensorBoard's files are written without torch, which takes seconds to import."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from pathlib import Path
from panax.metrics import tensorboard

assert "tensorboardX" not in sys.modules
tracker = tensorboard.TensorBoardTracker(Path(sys.argv[1]))
tracker.record(1, {"train/loss": 2.0})
tracker.close()
assert "torch" not in sys.modules
import importlib.util
assert importlib.util.find_spec("torch")  # found again afterwards
"""


def test_torch_is_not_imported(tmp_path):
    found = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.rglob("events.out.tfevents.*"))
