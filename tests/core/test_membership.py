"""Which process of a job this is, by the variables of each thing that starts processes."""

import pytest

from panax.core import RecipeError
from panax.job.join import join_seconds, listening_address
from panax.job.membership import Membership, detect_membership, expand_nodes

PANAX = {"PANAX_COORDINATOR": "10.0.0.1:7733", "PANAX_PROCESSES": "4", "PANAX_PROCESS": "2", "PANAX_LOCAL_PROCESS": "0"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "a[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2141126657",
    "OMPI_MCA_orte_hnp_uri": "2141126656.0;tcp://192.0.2.2,10.1.0.1:60657;tcp6://[fd00::2]:48517",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PANAX_COORDINATOR": "node1:7733"}


@pytest.mark.parametrize(
    ("environment", "host", "place"),
    [
        (PANAX, "10.0.0.1", (4, 2, 0, None)),
        (TORCHRUN, "node1", (4, 3, 1, (1,))),
        (SLURM, "a01", (4, 3, 1, (1,))),
        (OPEN_MPI, "192.0.2.2", (4, 1, 1, (1,))),
        (PMI, "node1", (2, 1, None, None)),
        (PANAX | SLURM | TORCHRUN, "10.0.0.1", (4, 2, 0, None)),
        (TORCHRUN | SLURM, "node1", (4, 3, 1, (1,))),
        (SLURM | {"PANAX_COORDINATOR": "b:1"}, "b", (4, 3, 1, (1,))),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "5"}, "node1", (4, 3, 1, None)),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "node1", (4, 3, 1, (1,))),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "node1", (4, 3, 0, None)),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, "[fe80::1]", (4, 3, 1, (1,))),
        # All tasks on one node: nothing need leave the host.
        (SLURM | {"SLURM_STEP_NODELIST": "a01", "SLURM_STEP_TASKS_PER_NODE": "4"}, "127.0.0.1", (4, 3, 1, None)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1", (4, 1, 1, (1,))),
    ],
)
def test_each_source_states_the_place(environment, host, place):
    found = detect_membership(environment)
    assert found is not None
    assert found.coordinator.rpartition(":")[0] == host
    assert (found.processes, found.index, found.local_index, found.local_devices) == place


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PANAX_PROCESSES": "1", "PANAX_PROCESS": "0"},
        {"RANK": "", "WORLD_SIZE": ""},
        # A batch script and the shell of salloc: the job's tasks, but no step of several.
        {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "1"},
    ],
)
def test_a_process_alone(environment):
    assert detect_membership(environment) is None


def test_processes_and_steps_of_one_job_meet_at_their_own_port():
    def port(**more):
        found = detect_membership(SLURM | {name: str(value) for name, value in more.items()})
        assert found is not None
        return int(found.coordinator.rpartition(":")[2])

    assert port(SLURM_PROCID=0) == port(SLURM_PROCID=3) > 61000
    assert len({port(), port(SLURM_STEP_ID=1), port(SLURM_JOB_ID=72)}) == 3


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        (TORCHRUN | {"RANK": "4"}, "RANK is 4, and WORLD_SIZE is 4; expected 0 to 3"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'; expected a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; expected a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; expected at least 1"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is not"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "expected host:port"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, and LOCAL_WORLD_SIZE is 2"),
        (PANAX | {"PANAX_COORDINATOR": ""}, "PANAX_COORDINATOR is not"),
        (PANAX | {"PANAX_COORDINATOR": "node1"}, "PANAX_COORDINATOR is 'node1'; expected host:port"),
        ({"PANAX_COORDINATOR": "node1:1"}, "is set without this process's index"),
        (PMI | {"PANAX_COORDINATOR": ""}, "set PANAX_COORDINATOR"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun -x PANAX_COORDINATOR"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1-x]"}, "SLURM_STEP_NODELIST is 'a[1-x]'"),
    ],
)
def test_what_contradicts_itself_is_one_message(environment, said):
    with pytest.raises(RecipeError) as raised:
        detect_membership(environment)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("nodes", ["", "a[1", "a]1", "a[3-1]", "a[]"])
def test_a_list_of_nodes_that_is_none(nodes):
    with pytest.raises(RecipeError, match="SLURM_STEP_NODELIST"):
        expand_nodes(nodes)


def test_process_0_listens_at_one_address():
    def at(coordinator, **more):
        return listening_address(Membership(coordinator=coordinator, processes=2, index=0, **more))

    assert at("localhost:81") == at("127.0.0.1:81") == "127.0.0.1:81"
    assert at("[::1]:81") == "[::1]:81"
    assert at("node1:81", bind="10.0.0.7") == "10.0.0.7:81"
    assert at("node1:81", bind="10.0.0.7:82") == "10.0.0.7:82"
    assert at("node1:81", bind="fe80::1") == "[fe80::1]:81"
    with pytest.raises(RecipeError, match=r"host no-such-host\.invalid can't be resolved"):
        at("no-such-host.invalid:81")


def test_a_name_that_is_loopback_at_home_is_not_where_other_hosts_come(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 81))])
    place = Membership(coordinator="node1:81", processes=2, index=0)
    for own, address in ((["10.0.0.7"], "10.0.0.7:81"), (["10.0.0.7", "10.1.0.7"], None)):
        monkeypatch.setattr("panax.job.join._own_addresses", lambda own=own: own)
        if address:
            assert listening_address(place) == address
        else:
            with pytest.raises(RecipeError, match=r"set PANAX_BIND .*10\.0\.0\.7, 10\.1\.0\.7"):
                listening_address(place)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e9"])
def test_a_time_to_wait_that_is_none(text):
    with pytest.raises(RecipeError, match="PANAX_JOIN_SECONDS"):
        join_seconds({"PANAX_JOIN_SECONDS": text})
