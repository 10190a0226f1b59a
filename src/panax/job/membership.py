"""Membership of this process in a job, read from the environment variables of its launcher."""

import dataclasses
import re
import zlib
from collections.abc import Mapping

from ..core.errors import RecipeError

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")

_FIRST_PORT, _PORTS = 65536 - 4096, 4096
"""A job's port is derived from its id, in the ephemeral range, as JAX does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """Position of this process in a job of several.

    Attributes:
        coordinator: "host:port" of process 0, where all processes meet.
        processes: Number of processes.
        index: Index of this process, from 0.
        local_index: Index of this process among those of its host; None if unknown.
        local_processes: Number of processes on its host; None if unknown.
        bind: Address at which process 0 listens; None for that of the coordinator's host.
        local_devices: GPUs of this host that this process uses; None for all visible ones.
        started_by: Name of the launcher, for messages.
    """

    coordinator: str
    processes: int
    index: int
    local_index: int | None = None
    local_processes: int | None = None
    bind: str | None = None
    local_devices: tuple[int, ...] | None = None
    started_by: str = "by hand"

    def __post_init__(self) -> None:
        split_address(self.coordinator, "the coordinator")
        if self.processes < 2:
            raise RecipeError(f"processes={self.processes}; expected at least 2: a process alone joins nothing")
        if not 0 <= self.index < self.processes:
            raise RecipeError(
                f"index={self.index} of processes={self.processes}; expected 0 to {self.processes - 1}, each once"
            )

    def __str__(self) -> str:
        return f"process {self.index} of {self.processes} ({self.started_by})"


def split_address(address: str, name: str) -> tuple[str, int]:
    """Split "host:port" into the host and the port.

    >>> split_address("[fe80::1]:1234", "it")
    ('[fe80::1]', 1234)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and host[0] != "["):
        raise RecipeError(f"{name} is {address!r}; expected host:port, as in node1:7733")
    return host, int(port)


def detect_membership(environment: Mapping[str, str]) -> Membership | None:
    """Return this process's membership of a job according to the environment; None for a single process.

    The first source that is present is used: Panax's variables, or those of torchrun, a Slurm step, Open MPI,
    MPICH or Intel MPI. `PANAX_COORDINATOR` alone provides the address for each of these.

    Raises:
        RecipeError: Variables are missing, contradict each other, or are not numbers.
    """
    variables = _Variables(environment)
    for source in (_panax, _torchrun, _slurm, _open_mpi, _pmi):
        membership = source(variables)
        if membership is _ALONE:
            return None
        if isinstance(membership, Membership):
            return membership
    if "PANAX_COORDINATOR" in variables:
        raise RecipeError(
            "PANAX_COORDINATOR is set without this process's index; set PANAX_PROCESSES and PANAX_PROCESS too"
        )
    return None


class _Alone:
    """A job of one process."""


_ALONE = _Alone()

_Found = Membership | _Alone | None
"""Result of a source; None if the source is absent."""


class _Variables:
    """Environment variables; an empty one counts as unset."""

    def __init__(self, environment: Mapping[str, str]):
        self._values = {name: value.strip() for name, value in environment.items()}

    def __contains__(self, name: str) -> bool:
        return bool(self._values.get(name))

    def text(self, name: str) -> str | None:
        return self._values.get(name) or None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is not None and not (text.isascii() and text.isdecimal()):
            raise RecipeError(f"{name} is {text!r}; expected a whole number from 0")
        return None if text is None else int(text)

    def count_and_index(self, count: str, index: str) -> tuple[int, int] | None:
        """Return the number of processes and the index of this one; None if neither is set."""
        processes, process = self.number(count), self.number(index)
        if processes is None and process is None:
            return None
        if processes is None or process is None:
            there, missing = (count, index) if process is None else (index, count)
            raise RecipeError(f"{there} is set and {missing} is not; set both, or unset both for a single process")
        if processes < 1:
            raise RecipeError(f"{count} is {processes}; expected at least 1")
        if process >= processes:
            raise RecipeError(f"{index} is {process}, and {count} is {processes}; expected 0 to {processes - 1}")
        return processes, process

    def devices(self, local_index: int | None, local_processes: int | None) -> tuple[int, ...] | None:
        """Return one GPU for each process of a host, unless each process already sees only its own."""
        if local_index is None or local_processes is None or local_processes == 1:
            return None
        shown = self.text("CUDA_VISIBLE_DEVICES")
        if shown is not None and len(shown.split(",")) < local_processes:
            return None
        return (local_index,)

    def member(
        self, place: tuple[int, int], coordinator: str, local: tuple[int | None, int | None], started_by: str
    ) -> Membership:
        """Return this process's membership for launchers that do not assign devices.

        Args:
            place: Number of processes, and index of this process.
            local: Index of this process among those of its host, and their number.
        """
        return Membership(
            coordinator=coordinator,
            processes=place[0],
            index=place[1],
            local_index=local[0],
            local_processes=local[1],
            local_devices=self.devices(*local),
            bind=self.text("PANAX_BIND"),
            started_by=started_by,
        )

    def local(self, index: str, count: str | None) -> tuple[int | None, int | None]:
        """Return the index of this process on its host, and the number of processes there, as far as they are
        set."""
        local_index, local_processes = self.number(index), None if count is None else self.number(count)
        if local_index is not None and local_processes is not None and local_index >= local_processes:
            raise RecipeError(
                f"{index} is {local_index}, and {count} is {local_processes}; expected 0 to {local_processes - 1}"
            )
        return local_index, local_processes


def _panax(variables: _Variables) -> _Found:
    place = variables.count_and_index("PANAX_PROCESSES", "PANAX_PROCESS")
    if place is None:
        return None
    if place[0] == 1:
        return _ALONE
    coordinator = variables.text("PANAX_COORDINATOR")
    if coordinator is None:
        raise RecipeError("PANAX_PROCESSES is set and PANAX_COORDINATOR is not; set it to host:port of process 0")
    split_address(coordinator, "PANAX_COORDINATOR")
    # The setter of these variables shows each process its devices.
    return Membership(
        coordinator=coordinator,
        processes=place[0],
        index=place[1],
        local_index=variables.number("PANAX_LOCAL_PROCESS"),
        local_processes=variables.number("PANAX_LOCAL_PROCESSES"),
        bind=variables.text("PANAX_BIND"),
        started_by="PANAX_PROCESS",
    )


def _torchrun(variables: _Variables) -> _Found:
    place = variables.count_and_index("WORLD_SIZE", "RANK")
    if place is None:
        return None
    if place[0] == 1:
        return _ALONE
    host, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    override = variables.text("PANAX_COORDINATOR")
    if override is None and (host is None or port is None):
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise RecipeError(f"RANK and WORLD_SIZE are set and {missing} is not; set it to that of process 0")
    local_index, local_processes = variables.local("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    coordinator = override or f"{bracket_host(host or '')}:{port}"
    split_address(coordinator, "PANAX_COORDINATOR" if override else "MASTER_ADDR:MASTER_PORT")
    return variables.member(place, coordinator, (local_index, local_processes), "RANK")


def _slurm(variables: _Variables) -> _Found:
    # The shell of salloc and a batch script have the job's variables and no step, or a step of a single task.
    nodes = variables.text("SLURM_STEP_NODELIST")
    if nodes is None or "SLURM_PROCID" not in variables:
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    place = variables.count_and_index(count, "SLURM_PROCID")
    if place is None or place[0] == 1:
        return _ALONE
    hosts = expand_nodes(nodes)
    job = variables.number("SLURM_JOB_ID")
    if job is None:
        raise RecipeError("SLURM_PROCID is set and SLURM_JOB_ID is not; start the processes by srun")
    # Steps of one job may run at the same time.
    step = variables.number("SLURM_STEP_ID") or 0
    host = hosts[0] if len(hosts) > 1 else "127.0.0.1"
    local_index = variables.number("SLURM_LOCALID")
    local_processes = _local_tasks(variables.text("SLURM_STEP_TASKS_PER_NODE"), variables.number("SLURM_NODEID"))
    return variables.member(
        place,
        variables.text("PANAX_COORDINATOR") or f"{host}:{_FIRST_PORT + (job * 7 + step) % _PORTS}",
        (local_index, local_processes),
        "srun",
    )


def _open_mpi(variables: _Variables) -> _Found:
    place = variables.count_and_index("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if place is None:
        return None
    if place[0] == 1:
        return _ALONE
    local_index, local_processes = variables.local("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    coordinator = variables.text("PANAX_COORDINATOR") or _address_of_mpirun(variables, local_processes == place[0])
    if coordinator is None:
        raise RecipeError(
            "Open MPI does not state the host of process 0; set PANAX_COORDINATOR to its host and a free port: "
            "mpirun -x PANAX_COORDINATOR=HOST:PORT ..."
        )
    return variables.member(place, coordinator, (local_index, local_processes), "mpirun")


def _address_of_mpirun(variables: _Variables, one_host: bool) -> str | None:
    """Return the address of mpirun's host, which has process 0 by default. Open MPI 4 reports it, Open MPI 5
    does not.

    The value is similar to `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`.
    """
    uri = variables.text("OMPI_MCA_orte_hnp_uri")
    job = variables.text("PMIX_NAMESPACE") if uri is None else uri.partition(";")[0]
    if job is None:
        return None
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    if one_host:
        return f"127.0.0.1:{port}"
    host = re.search(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)", uri or "")
    return None if host is None else f"{bracket_host(host.group(1) or host.group(2))}:{port}"


def _pmi(variables: _Variables) -> _Found:
    place = variables.count_and_index("PMI_SIZE", "PMI_RANK")
    if place is None:
        return None
    if place[0] == 1:
        return _ALONE
    coordinator = variables.text("PANAX_COORDINATOR")
    if coordinator is None:
        raise RecipeError(
            "PMI_RANK is set, as by MPICH or Intel MPI, which don't state the host of process 0; set PANAX_COORDINATOR to its "
            "host and a free port"
        )
    local_index, local_processes = variables.local("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return variables.member(place, coordinator, (local_index, local_processes), "PMI_RANK")


def bracket_host(host: str) -> str:
    """Return a host in the form that precedes a port.

    >>> bracket_host("fe80::1"), bracket_host("node1")
    ('[fe80::1]', 'node1')
    """
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def expand_nodes(nodes: str) -> list[str]:
    """Expand a list of hosts in Slurm's format.

    >>> expand_nodes("a[01-03,7],b1")
    ['a01', 'a02', 'a03', 'a7', 'b1']
    >>> expand_nodes("rack[1-2]n[08-09]-ib")
    ['rack1n08-ib', 'rack1n09-ib', 'rack2n08-ib', 'rack2n09-ib']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        before, *rest = re.split(r"\[([^\]]*)\]", part)
        named = [before]
        for numbers, text in zip(rest[::2], rest[1::2]):
            named = [f"{name}{number}{text}" for name in named for number in _numbers(numbers, nodes)]
        hosts += named
    if not hosts or nodes.count("[") != nodes.count("]"):
        raise RecipeError(f"SLURM_STEP_NODELIST is {nodes!r}; expected a list of hosts, as in node[01-04]")
    return hosts


def _numbers(ranges: str, nodes: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise RecipeError(f"SLURM_STEP_NODELIST is {nodes!r}; expected a list of hosts, as in node[01-04]")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _local_tasks(tasks_per_node: str | None, node: int | None) -> int | None:
    """Return the number of tasks of a step on the node with this index: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node or ""):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None
