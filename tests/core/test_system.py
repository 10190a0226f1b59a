"""A Python without Unix's modules, as on Windows: everything is imported, and a run is one message."""

import os
import subprocess
import sys

WITHOUT = """
import sys
sys.modules.update(fcntl=None, grp=None, pwd=None)
import panax, panax.checkpoint, panax.run
from panax.cli.main import main
from panax.core import PanaxError
import tiny_recipe
try:
    panax.fit(tiny_recipe.tiny())
except PanaxError as error:
    print(error)
sys.exit(main(["train", tiny_recipe.__file__]))
"""


def test_a_run_without_locks_is_one_message(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    expected = (
        "a run needs the file locks and users of Linux or macOS, and this Python lacks fcntl, grp, pwd; on Windows, run"
    )
    assert done.returncode == 1 and done.stdout.startswith(expected)
    # JAX's plugins may have said something before.
    assert done.stderr.splitlines()[-1].startswith(f"panax: error: {expected}") and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
