"""What engines are asked for and given, with clients that are not real: wrong use is one message, and no value is shown."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from panax.cluster.engines import ENGINES, Engine, Resources, make_engine
from panax.cluster.engines.client import ClientProcess, local_address, run_client
from panax.cluster.engines.slurm import check_allocation
from panax.core.errors import LaunchError

SECRET = "5ecre7" * 8
HOME = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/me",
    "JAX_PLATFORMS": "cpu",
    "HF_TOKEN": "token of mine",
    "PANAX_SECRET": "old",
}


@pytest.fixture
def clients(tmp_path):
    """Makes programs of an engine that print, and the environment in which they are found."""

    def make(**programs: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, script in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return HOME | {"PATH": f"{folder}:/usr/bin:/bin"}

    return make


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"nodes": 0}, "nodes=0; expected a whole number of at least 1"),
        ({"processes": True}, "processes=True; expected a whole number"),
        ({"nodes": 2, "processes": 3}, "processes=3 is not divisible by nodes=2"),
        ({"accelerator": "GPU"}, "accelerator='GPU'; expected one of cpu, gpu, tpu"),
        ({"memory": "64"}, "memory='64'; expected a whole number with M, G or T"),
        ({"time": "90"}, "time='90'; expected HH:MM:SS"),
        ({"time": "00:61:00"}, "time='00:61:00'; expected"),
        ({"time": "00:00:00"}, "time='00:00:00'; expected"),
        ({"time": "1-30:00:00"}, "time='1-30:00:00'; expected"),
        ({"env": ("A=b",)}, "env='A=b'; expected the name"),
        ({"node_selector": ("pool",)}, "node_selector='pool'; expected KEY=VALUE"),
        ({"node_selector": ("a=b c",)}, "node_selector='a=b c'; expected one word"),
        ({"partition": "a\n#SBATCH --uid=0"}, "partition=.*; expected one word"),
        ({"hosts": "a; rm"}, "hosts='a; rm'; expected one word"),
    ],
)
def test_what_is_asked_for_is_checked(given, expected):
    with pytest.raises(LaunchError, match=expected):
        Resources(**given)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_have_one_interface_and_refuse_what_they_do_not_use(name, clients):
    environment = clients()
    needed = {"image": "x", "claim": "x"} if name == "kubernetes" else {}
    assert isinstance(make_engine(name, Resources(**needed), environment=environment), Engine)
    other = "partition" if name != "slurm" else "hosts"
    with pytest.raises(LaunchError, match=f"{other}='x' has no effect on {name}; it takes "):
        make_engine(name, Resources(**needed, **{other: "x"}), environment=environment)


def test_an_unknown_engine_is_named():
    with pytest.raises(LaunchError, match="unknown engine 'slrum'; did you mean 'slurm'"):
        make_engine("slrum", Resources())


@pytest.mark.parametrize(("name", "program"), [("slurm", "sbatch"), ("mpi", "mpirun")])
def test_an_engine_that_is_not_installed(name, program, tmp_path):
    with pytest.raises(LaunchError, match=f"{program} is not on PATH; .*apt install"):
        make_engine(name, Resources(), environment={"PATH": str(tmp_path)}).check()


def test_ray_that_is_not_installed(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('not here')")
    environment = HOME | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with pytest.raises(LaunchError, match=r"Ray is not installed here .*pip install ray"):
        make_engine("ray", Resources(), environment=environment).check()


OPEN_MPI, HYDRA = "echo 'mpirun (Open MPI) 4.1.4'", "echo HYDRA build details:"


@pytest.mark.parametrize(
    ("version", "words"), [(OPEN_MPI, "-x HOME -x JAX_PLATFORMS"), (HYDRA, "-genvlist HOME,JAX_PLATFORMS")]
)
def test_mpirun_is_given_names_and_no_values(version, words, clients):
    engine = make_engine("mpi", Resources(nodes=2, processes=2, hosts="a,b,c"), environment=clients(mpirun=version))
    shown = engine.render_submission((), Path("runs/x"))
    assert words in shown and "PANAX_SECRET" in shown and "a,b " in shown
    for value in ("token of mine", "HF_TOKEN", "/home/me", "old"):
        assert value not in shown


def test_what_a_launch_names_is_passed_too(clients):
    engine = make_engine("mpi", Resources(env=("HF_TOKEN",)), environment=clients(mpirun=OPEN_MPI))
    shown = engine.render_submission((), Path())
    assert "-x HF_TOKEN" in shown and "token of mine" not in shown


def test_mpi_sees_what_is_wrong_before_it_starts(clients, monkeypatch):
    environment = clients(mpirun=OPEN_MPI)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LaunchError, match=r"Open MPI refuses to run as root by default; .*OMPI_ALLOW_RUN_AS_ROOT"):
        make_engine("mpi", Resources(), environment=environment).check()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="nodes=2, and hosts names 1: a"):
        make_engine("mpi", Resources(nodes=2, processes=2, hosts="a"), environment=environment).check()


def test_an_mpirun_that_fails_explains_why(clients):
    environment = clients(mpirun=f"[ $1 = --version ] && {OPEN_MPI} && exit; echo no such host: a; exit 3")
    placed = make_engine("mpi", Resources(nodes=2, processes=2), environment=environment).start_agents(
        "127.0.0.1:1", SECRET
    )
    deadline = time.monotonic() + 10
    while not placed.failure() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert placed.failure().startswith("mpirun ended with exit code 3: no such host: a\nexpected 2 machines: name them")
    with pytest.raises(LaunchError, match="can't bring node 1 back"):
        placed.replace(1)
    placed.close()
    placed.close()


def slurm(given: dict, environment: dict[str, str]) -> Engine:
    return make_engine("slurm", Resources(**given), environment=environment)


def test_the_batch_script(tmp_path, clients, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {
        "nodes": 2,
        "processes": 8,
        "accelerator": "gpu",
        "time": "1-00:00:00",
        "partition": "big",
        "array": "0-3%1",
    }
    arguments = ["launch", "my recipe.py", "--name", "try-%a", "--on", "slurm"]
    engine = slurm(variables, clients())
    text = engine.render_submission(arguments, tmp_path / "50%")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line
    )
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "1" and options["gpus-per-node"] == "4"
    assert options["cpus-per-task"] == "4" and options["time"] == "1-00:00:00" and options["signal"] == "B:TERM@90"
    # Each task of an array has its own log; a percent sign of the folder's own is kept.
    assert options["output"] == f"{tmp_path}/50%%/job/slurm-%A_%a.out" and "requeue" in options
    assert options["export"] == "HOME,JAX_PLATFORMS,PATH" and "token" not in text and "old" not in text
    assert "account" not in options and "mem" not in options
    last = text.splitlines()[-1]
    environment = {"SLURM_ARRAY_TASK_ID": "2"}
    words = subprocess.run(
        ["bash", "-c", last.replace("exec ", "printf '%s\\n' ")], env=environment, capture_output=True, text=True
    )
    assert words.stdout.splitlines() == [
        sys.executable,
        "-m",
        "panax",
        *(word.replace("%a", "2") for word in arguments),
    ]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_job_that_is_no_array_keeps_its_percent_signs(clients):
    assert slurm({}, clients()).render_submission(["a", "%a"], Path("x")).splitlines()[-1].endswith("-m panax a %a")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"time": "00:02:00"}, "too short: Panax saves 90 s before the limit.*use 00:05:00"),
        ({"array": "a"}, "array='a'; expected indices"),
        ({"accelerator": "tpu"}, "Slurm allocates only GPUs and CPUs"),
        ({"partition": "shrt"}, "Slurm has no partition 'shrt'; did you mean 'short'"),
        ({"nodes": 3, "processes": 3}, "nodes=3, and the partition short has 2"),
        ({"time": "02:00:00"}, "time='02:00:00' exceeds the limit of the partition short, which is 1:00:00"),
    ],
)
def test_what_slurm_does_not_have(given, expected, clients):
    environment = clients(sbatch="", sinfo="printf 'short*|1:00:00|1\\nshort*|1:00:00|1\\nlong|infinite|8\\n'")
    with pytest.raises(LaunchError, match=expected):
        slurm(given, environment).check()
    slurm({"nodes": 8, "processes": 8, "partition": "long", "time": "9-00:00:00"}, environment).check()


def test_slurm_that_is_not_reached_or_has_no_default(clients):
    with pytest.raises(
        LaunchError, match=r"Slurm can't be queried; launch from a login node.*\n.*sinfo.* failed: no route"
    ):
        slurm({}, clients(sbatch="", sinfo="echo no route >&2; exit 1")).check()
    with pytest.raises(LaunchError, match="no default partition; choose one: long"):
        slurm({}, clients(sbatch="", sinfo="echo 'long|infinite|8'")).check()


def test_submitting_writes_the_script_and_states_the_jobs_id(tmp_path, clients):
    engine = slurm({}, clients(sbatch=f"cat $2 > {tmp_path}/given; echo '42;cluster'"))
    assert engine.is_queued() and engine.submit(["launch", "x"], tmp_path / "run") == "42"
    assert (tmp_path / "given").read_text() == (tmp_path / "run/job/slurm.sh").read_text()


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({"SLURM_JOB_NUM_NODES": "3"}, "nodes=2, and the allocation 7 has 3; use --nodes 3"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous job"),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "72(x1),36", "SLURM_JOB_NODELIST": "a,b"},
            r"nodes differ: a,b have 72\(x1\),36 processors",
        ),
    ],
)
def test_an_allocation_that_does_not_fit(has, expected):
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "72(x2)"}
    check_allocation(allocation, 2)
    with pytest.raises(LaunchError, match=expected):
        check_allocation(allocation | has, 2)


def test_in_an_allocation_srun_is_given_names_and_no_values(tmp_path, clients):
    told = tmp_path / "told"
    environment = clients(
        scontrol='[ "$2" = hostnames ] && printf "a\\nb\\n" || echo "NodeName=b NodeAddr=127.0.0.1 Port=1"',
        srun=f'echo "$@" >> {told}; env >> {told}; sleep 60',
    )
    engine = slurm({"nodes": 2, "processes": 2}, environment | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]"})
    assert not engine.is_queued() and engine.listen_address() == ("127.0.0.1", 0)
    placed = engine.start_agents("127.0.0.1:1", SECRET)
    try:
        placed.replace(1)
        with pytest.raises(LaunchError, match="nodes 0 to 1; there is no node 2"):
            placed.replace(2)
        deadline = time.monotonic() + 10
        while not told.exists() or told.read_text().count(SECRET) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lines = [shlex.split(line) for line in told.read_text().splitlines() if line.startswith("--nodes")]
        assert sorted(words[0] for words in lines) == ["--nodes=1", "--nodes=2"] and placed.failure() == ""
        assert all(
            "--export=HOME,JAX_PLATFORMS,PATH,PANAX_SUPERVISOR,PANAX_SECRET,PANAX_NODE" in words for words in lines
        )
        assert "--nodelist=b" in next(words for words in lines if words[0] == "--nodes=1")
        assert not any(SECRET in word for words in lines for word in words)
    finally:
        for each in placed._later.values():
            each.close(0.0)
        placed._all.close(0.0)
        placed.close()


def test_a_client_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("panax.cluster.engines.client.ANSWER_SECONDS", 0.2)
    with pytest.raises(LaunchError, match="`sleep 60` gave no answer in 0 s"):
        run_client(["sleep", "60"], HOME)


def test_a_followed_client_ends_in_any_case(monkeypatch):
    monkeypatch.setattr("panax.cluster.engines.client.END_SECONDS", 0.2)
    client = ClientProcess(["/bin/sh", "-c", "trap '' TERM; echo here; exec sleep 60"], HOME)
    deadline = time.monotonic() + 10
    while client.log_tail() != "here":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.failure() == ""
    client.close(0.0)
    assert client.failure() == "sh ended by SIGKILL: no output" and not Path(f"/proc/{client.pid}").exists()


def test_the_supervisors_address_is_the_one_on_the_way_to_a_node():
    assert local_address("127.0.0.2").startswith("127.0.0.")
    assert local_address("no-such-host.invalid") == local_address()


TETHERED = """
import os, subprocess, sys, time
tethered = [sys.executable, "-m", "panax.cluster.engines.tether", "sh", "-c", "echo $$; sleep 60"]
child = subprocess.Popen(tethered, stdin=subprocess.PIPE)
time.sleep(float(sys.argv[1]))
os._exit(0)
"""


def test_a_tethered_command_ends_with_its_parent():
    run = subprocess.run(
        [sys.executable, "-c", TETHERED, "1"], stdout=subprocess.PIPE, text=True, timeout=30, env=dict(os.environ)
    )
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(run.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_tethered_command_ends_with_its_tether():
    command = [sys.executable, "-m", "panax.cluster.engines.tether", "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_tethered_command_gives_its_exit_code():
    command = [sys.executable, "-m", "panax.cluster.engines.tether", "sh", "-c"]
    for script, code in (("exit 7", 7), ("kill -9 $$", 137)):
        with subprocess.Popen([*command, script], stdin=subprocess.PIPE) as process:
            assert process.wait(20) == code
