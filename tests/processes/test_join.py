"""`panax train`, started several times with the variables that torchrun sets, is one job."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_recipe
from launching import NOT_OURS, environment, free_port, one_job_at_a_time

STEPS = 4
SECONDS = 180


class Trained:
    """Output of the processes of `panax train tiny_recipe.py`."""

    def __init__(self, folder: Path, processes: int, flags: tuple[str, ...] = (), **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        port, run = free_port(), folder / "run"
        command = [sys.executable, "-m", "panax", "train", tiny_recipe.__file__, "--directory", str(run)]
        command += ["--num-steps", str(STEPS), "--log-every", "1", "--evaluate.every", "0", *flags]
        base = environment(1, Path(__file__).parent) | {"PANAX_CACHE": str(folder.parent / "cache")} | variables
        children = []
        with one_job_at_a_time():
            for index in range(processes):
                place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                env = base | ({name: str(value) for name, value in place.items()} if processes > 1 else {})
                with open(folder / f"{index}.out", "w") as out, open(folder / f"{index}.err", "w") as err:
                    children.append(subprocess.Popen(command, stdout=out, stderr=err, env=env))
            deadline = time.monotonic() + SECONDS
            try:
                self.codes = [child.wait(max(1, deadline - time.monotonic())) for child in children]
            finally:
                for child in children:
                    child.kill()
        self.out = [(folder / f"{index}.out").read_text() for index in range(processes)]
        self.err = [(folder / f"{index}.err").read_text() for index in range(processes)]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] if run.exists() else []
        self.losses = [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("joined")


@pytest.fixture(scope="module")
def alone(folder) -> Trained:
    return Trained(folder / "alone", 1)


@pytest.mark.slow
def test_two_processes_train_as_one_and_the_first_speaks_for_both(folder, alone):
    both = Trained(folder / "both", 2)
    assert alone.codes == [0] and both.codes == [0, 0], both.err
    assert len(both.losses) == STEPS
    # As between layouts in one process, tests/contracts/test_layouts.py.
    np.testing.assert_allclose(both.losses, alone.losses, rtol=1e-5)
    assert f"{STEPS}/{STEPS}  loss" in both.out[0]
    said = [line for line in both.out[1].splitlines() if not line.startswith("[Gloo]")]
    assert said == [] and both.err[1] == ""


@pytest.mark.slow
def test_a_peer_that_never_comes_ends_the_others_with_one_message(folder):
    code = subprocess.run(
        [sys.executable, "-m", "panax", "train", tiny_recipe.__file__, "--directory", str(folder / "waiting")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(1, Path(__file__).parent)
        | {"PANAX_COORDINATOR": f"127.0.0.1:{free_port()}", "PANAX_PROCESSES": "2", "PANAX_PROCESS": "0"}
        | {"PANAX_JOIN_SECONDS": "1"},
    )
    assert code.returncode == 5
    [line] = code.stderr.splitlines()
    assert "1 of 2 processes reached" in line and "missing: 1" in line


@pytest.mark.parametrize("command", ["sweep", "generate", "evaluate"])
def test_other_commands_run_alone(command, monkeypatch, capsys):
    from panax.cli.main import main

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    arguments = {
        "sweep": [tiny_recipe.__file__, "--seed", "0,1"],
        "generate": ["nothing", "--prompt", "x"],
        "evaluate": ["nothing"],
    }[command]
    assert main([command, *arguments]) == 2
    assert f"panax {command} runs in one process, and this is process 1 of 2" in capsys.readouterr().err


def test_joining_after_jax_runs_is_one_message(monkeypatch):
    import jax

    import panax
    from panax.core import RecipeError

    assert jax.devices()
    with pytest.raises(RecipeError, match=r"JAX has been used before the processes were joined; call panax\.join\(\)"):
        panax.join("127.0.0.1:1", processes=2, index=0)
    with pytest.raises(RecipeError, match="together"):
        panax.join("127.0.0.1:1", processes=2)
    assert panax.join("127.0.0.1:1", processes=1, index=0) is None
    for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
        monkeypatch.delenv(name)
    assert panax.join() is None


JOINS = """
import sys
import numpy as np
import panax
panax.join(sys.argv[1], processes=2, index=int(sys.argv[2]))
from jax.experimental import multihost_utils
print(multihost_utils.process_allgather(np.array([1.0 + int(sys.argv[2])])).tolist())
"""


@pytest.mark.parametrize("where", ["behind a proxy", "a host without an address"])
def test_processes_of_a_host_join_over_loopback_whatever_its_network_is(where, tmp_path):
    before, variables = [], {"no_proxy": "elsewhere"}
    if where == "behind a proxy":
        # Nobody listens there.
        variables |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    elif os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a host name of its own needs root and unshare")
    else:
        before = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    env = environment(1, Path(__file__).parent) | variables
    port = free_port()
    with one_job_at_a_time():
        children = [
            subprocess.Popen(
                [*before, sys.executable, "-c", JOINS, f"127.0.0.1:{port}", str(index)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for index in range(2)
        ]
        said = [child.communicate(timeout=SECONDS) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert [out.splitlines()[-1] for out, _ in said] == ["[[1.0], [2.0]]"] * 2


ENDS = """
import os, signal, sys, time
import numpy as np
import panax
panax.join(sys.argv[1], processes=2, index=int(sys.argv[2]))
from jax.experimental import multihost_utils
multihost_utils.process_allgather(np.array([1.0]))
if sys.argv[2] == "0":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
"""


def test_a_signal_after_the_last_step_does_not_keep_the_processes(tmp_path):
    """JAX's preemption service would wait two minutes for the other process, which has ended."""
    port, env = free_port(), environment(1, Path(__file__).parent)
    with one_job_at_a_time():
        began = time.monotonic()
        command = [sys.executable, "-c", ENDS, f"127.0.0.1:{port}"]
        children = [
            subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            for index in range(2)
        ]
        try:
            said = [child.communicate(timeout=SECONDS) for child in children]
        finally:
            for child in children:
                child.kill()
    assert [child.returncode for child in children] == [0, 0], said
    assert time.monotonic() - began < 60
