"""MPI: one `mpirun` starts one agent on each machine. Open MPI, and implementations with Hydra: MPICH, Intel
MPI.

Agents do not use MPI: mpirun only starts processes on machines set up for MPI programs.
"""

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import LaunchError
from .client import ClientProcess, is_local_host, local_address, require, run_client
from .engine import AGENT_COMMAND, AGENTS_SECONDS
from .environment import SECRET, SUPERVISOR, forwarded_variables
from .resources import Resources

USED_RESOURCES = frozenset({"hosts"})

INSTALL_ADVICE = (
    "install Open MPI (`apt install openmpi-bin`) or MPICH (`apt install mpich`), or load the cluster's module for it"
)

MANAGER_PREFIXES = (
    "COBALT_",
    "FI_",
    "HYDRA_",
    "I_MPI_",
    "LSB_",
    "LSF_",
    "OMPI_",
    "PBS_",
    "PE_",
    "PMIX_",
    "PRTE_",
    "SGE_",
    "SLURM_",
    "UCX_",
)
"""Prefixes of variables that configure mpirun, and pass it the allocated machines."""

ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class Mpi:
    """Agents under one `mpirun`."""

    agents_seconds = AGENTS_SECONDS

    def __init__(
        self, resources: Resources, *, agent: Sequence[str] = AGENT_COMMAND, environment: Mapping[str, str] = os.environ
    ):
        self._resources, self._agent = resources, tuple(agent)
        self._passed = forwarded_variables(environment, resources.env)
        own = {name: value for name, value in environment.items() if name.startswith(MANAGER_PREFIXES)}
        self._environment = {**own, **self._passed}

    def check(self) -> None:
        mpirun = require("mpirun", INSTALL_ADVICE, self._environment)
        hydra = self._is_hydra(mpirun)
        missing = [name for name in ROOT_VARIABLES if self._environment.get(name) != "1"]
        if os.geteuid() == 0 and not hydra and missing:
            raise LaunchError(
                f"Open MPI refuses to run as root by default; run as another user, or set {' and '.join(missing)} to 1"
            )
        hosts = self._hosts
        if hosts and len(hosts) < self._resources.nodes:
            raise LaunchError(f"nodes={self._resources.nodes}, and hosts names {len(hosts)}: {', '.join(hosts)}")

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        return shlex.join(self._command())

    def is_queued(self) -> bool:
        return False

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        raise LaunchError("mpirun has no queue; it places processes now")

    def secret(self) -> str:
        return secrets.token_hex(32)

    def listen_address(self) -> tuple[str, int]:
        if self._resources.address:
            return self._resources.address, 0
        elsewhere = [host for host in self._hosts if not is_local_host(host)]
        if elsewhere:
            return local_address(elsewhere[0]), 0
        return ("127.0.0.1" if self._hosts or self._resources.nodes == 1 else local_address()), 0

    def start_agents(self, supervisor: str, secret: str) -> "MpiAgents":
        environment = {**self._environment, SUPERVISOR: supervisor, SECRET: secret}
        return MpiAgents(ClientProcess(self._command(), environment), self._resources.nodes)

    @property
    def _hosts(self) -> list[str]:
        return [host for host in self._resources.hosts.split(",") if host]

    def _is_hydra(self, mpirun: str) -> bool:
        return (
            "Open MPI" not in (version := run_client([mpirun, "--version"], self._environment))
            and "OpenRTE" not in version
        )

    def _command(self) -> list[str]:
        """Build the mpirun command. Only variables' names are passed; mpirun takes the values from its
        environment, so that no process list shows them."""
        mpirun = require("mpirun", INSTALL_ADVICE, self._environment)
        nodes = str(self._resources.nodes)
        names = [*self._passed, SUPERVISOR, SECRET]
        hosts = ",".join(self._hosts[: self._resources.nodes])
        if self._is_hydra(mpirun):
            host_options = ["-hosts", hosts] if hosts else []
            # An agent that is lost does not end the others.
            return [
                mpirun,
                "-n",
                nodes,
                "-ppn",
                "1",
                *host_options,
                "-disable-auto-cleanup",
                "-genvlist",
                ",".join(names),
                *self._agent,
            ]
        host_options = ["--host", hosts] if hosts else []
        exported = [word for name in names for word in ("-x", name)]
        # The processes that an agent starts may use all of its machine.
        alone = ["--map-by", "ppr:1:node", "--bind-to", "none", "--enable-recovery"]
        return [mpirun, "-n", nodes, *alone, *host_options, *exported, *self._agent]


class MpiAgents:
    """Agents under one `mpirun`, which has to end before a lost machine can be replaced."""

    def __init__(self, mpirun: ClientProcess, nodes: int):
        self._mpirun, self._nodes = mpirun, nodes

    def failure(self) -> str:
        found = self._mpirun.failure()
        if found and self._nodes > 1:
            found += (
                f"\nexpected {self._nodes} machines: name them with hosts, or launch from an allocation of that size"
            )
        return found

    def log_tail(self) -> str:
        return self._mpirun.log_tail()

    def replace(self, node: int) -> None:
        raise LaunchError(f"mpirun can't bring node {node} back; launch again, with other hosts if the machine is gone")

    def start_over(self, *, preempted: bool = False) -> int | None:
        return None

    def close(self) -> None:
        self._mpirun.close()
