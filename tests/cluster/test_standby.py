"""Standby workers wait until they are needed, also if they restart themselves to get huge pages."""

import os
import subprocess
import sys
import time

from panax.cluster.node.standby import StandbyProcess
from panax.job.heartbeat import DESCRIPTOR
from panax.system.allocator import TUNABLES

COMMAND = [sys.executable, "-m", "panax.cli.standby"]

IMPORTING = f"""
import os
descriptor = int(os.environ[{DESCRIPTOR!r}])
import panax.cli.standby
assert os.get_inheritable(descriptor), "a program that restarts itself would close its pipe"
"""


def test_the_pipe_to_the_agent_outlasts_a_restart_of_the_program():
    """What reads the heartbeat's pipe makes it close at the next start of a program; imports come before that."""
    reading, writing = os.pipe()
    variables = {DESCRIPTOR: str(writing), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", IMPORTING], env={**os.environ, **variables}, pass_fds=(writing,), check=True, timeout=120
    )
    os.close(reading), os.close(writing)


def test_a_standby_worker_becomes_the_worker_that_is_requested(tmp_path):
    lifeline = os.pipe()
    # Without the setting the program restarts itself once, where that has an effect.
    spare = StandbyProcess(COMMAND, {TUNABLES: "", "JAX_PLATFORMS": "cpu"}, lifeline[0])
    try:
        time.sleep(1)
        assert spare.is_waiting
        log = tmp_path / "log"
        assert spare.become(["--version"], {}, log, tmp_path / "stacks")
        assert spare.process.wait(120) == 0
        assert log.read_text().startswith("panax ")
    finally:
        spare.end()
        for descriptor in lifeline:
            os.close(descriptor)
