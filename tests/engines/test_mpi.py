"""Real mpirun, of Open MPI and MPICH: two nodes that are both this machine, reached by a shell in the place of ssh."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from engine_runs import command, environment, equals, run, steps
from placing import AGENT, Supervised, ended, is_alive, until, with_token

from panax.cluster.engines import Engine, Resources, make_engine
from panax.core.errors import LaunchError

pytestmark = pytest.mark.slow

SHELL = """#!/bin/bash
# In the place of ssh: the command runs here. Two of Open MPI's daemons must not share a folder.
while [[ $1 == -* ]]; do shift; done
export TMPDIR=$(mktemp -d /tmp/panax-$1-XXXX)
trap 'rm -rf "$TMPDIR"' EXIT
shift
sh -c "$*"
"""


@pytest.fixture(params=["openmpi", "mpich"])
def simulated(request, tmp_path) -> dict[str, str]:
    """Variables with which mpirun is the parameter's, and reaches any host's name on this machine."""
    program = shutil.which(f"mpirun.{request.param}")
    assert program, "the test needs two kinds of mpirun: tests/engines/install.sh mpi"
    # Hydra finds its other programs beside itself.
    shell = tmp_path / "shell"
    for path, script in ((tmp_path / "mpirun", f'#!/bin/sh\nexec {program} "$@"\n'), (shell, SHELL)):
        path.write_text(script)
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        # A folder of the tests' own may be too long for the sockets that Open MPI makes in it.
        "TMPDIR": "/tmp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": str(shell),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(shell),
    }


@pytest.fixture
def mpi(simulated):
    """Makes the engine."""
    environment = with_token() | simulated

    def make(**asked) -> Engine:
        return make_engine("mpi", Resources(address="127.0.0.1", **asked), agent=AGENT, environment=environment)

    return make


def test_one_agent_a_node_and_one_that_is_lost_leaves_the_other(mpi):
    engine = mpi(nodes=2, processes=4, hosts="nodea,nodeb")
    engine.check()
    with Supervised(engine) as supervised:
        agents = supervised.come(2)
        assert [agent.node for agent in agents] == ["0", "1"] and [agent.token for agent in agents] == ["-", "-"]
        shown = Path(f"/proc/{supervised.placed._mpirun.pid}/cmdline").read_text()
        assert "PANAX_SECRET" in shown and supervised.secret not in shown
        os.kill(agents[1].pid, signal.SIGKILL)
        until(lambda: not is_alive(agents[1].pid), "the killed agent ends")
        assert is_alive(agents[0].pid) and supervised.placed.failure() == ""
        with pytest.raises(LaunchError, match="mpirun can't bring node 1 back"):
            supervised.placed.replace(1)
    ended(*agents)
    assert not is_alive(supervised.placed._mpirun.pid)


def test_a_node_gets_a_variable_that_is_named(mpi):
    with Supervised(mpi(env=("HF_TOKEN",))) as supervised:
        (agent,) = supervised.come(1)
        assert agent.token == "secret-of-mine" and agent.node == "0"
    ended(agent)


def test_mpirun_without_its_agents_is_ended(mpi):
    """Agents that never come are ended with it."""
    engine = mpi()
    engine._agent = ("sleep", "600")
    placed = engine.place("127.0.0.1:1", "s")
    until(lambda: _children(placed._mpirun.pid), "mpirun has started something")
    assert placed.failure() == ""
    children = [int(pid) for pid in _children(placed._mpirun.pid).split()]
    placed._mpirun.close(0.0)
    until(lambda: not any(is_alive(pid) for pid in (placed._mpirun.pid, *children)), "mpirun and all of it ends")


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


# Hydra starts all agents on the one machine that it knows; the supervisor sees that they are of one host.
@pytest.mark.parametrize("simulated", ["openmpi"], indirect=True)
def test_fewer_nodes_than_asked_for(mpi):
    placed = mpi(nodes=2, processes=2).place("127.0.0.1:1", "s")
    until(lambda: placed.failure(), "mpirun fails", 30.0)
    assert (
        "more processes than the ppr" in placed.failure()
        and "expected 2 machines: name them with hosts" in placed.failure()
    )
    placed.close()


@pytest.mark.parametrize(
    "where", [(), ("--nodes", "2", "--hosts", "nodea,nodeb", "--address", "127.0.0.1")], ids=["one", "two"]
)
def test_a_run_by_mpirun_is_that_of_one_process(where, simulated, alone, tmp_path):
    env = environment(tmp_path) | simulated
    flags = ("--on", "mpi", "--processes", "2", "--devices", "1", *where)
    run(command("launch", "mpi", *steps(), *flags), tmp_path, env)
    equals(tmp_path / "runs/mpi", alone)


def test_a_mistake_of_the_recipe_is_not_tried_again(simulated, tmp_path):
    env = environment(tmp_path) | simulated
    flags = ("--on", "mpi", "--processes", "2", "--devices", "1", "--task.model.heads", "3")
    said = run(command("launch", "mpi", *steps(), *flags), tmp_path, env, code=2)
    assert "heads" in said and "attempt 2" not in said
