"""Resources that a job requests from an engine, checked before the engine is called."""

import dataclasses
import re

from ...core.errors import LaunchError

ACCELERATORS = ("cpu", "gpu", "tpu")

SIGNAL_SECONDS = 90
"""Seconds between the signal to save and the end set by an engine: a time limit, or the announced loss of a
node."""

_WORD = re.compile(r"[A-Za-z0-9_.,:@%+=/\[\]&|*()-]+")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d\d):(\d\d)")
_MEMORY = re.compile(r"[1-9]\d*[MGT]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that a job requests from an engine. A field that an engine does not use must have its default
    there.

    Attributes:
        nodes: Machines; one agent runs on each.
        processes: Number of processes in total, equally many per node.
        devices: Devices of each process. On CPU they are simulated and not requested from the engine.
        accelerator: Type of the devices: "cpu", "gpu" or "tpu".
        cpus: Processor cores of each node; None: one for each process.
        memory: Memory of each node: "64G".
        time: Time limit after which the engine ends the job: HH:MM:SS, or D-HH:MM:SS.
        env: Names of environment variables to forward to nodes in addition to the usual ones.
        address: Address at which the supervisor listens; empty: the address of this machine that nodes can
            reach.
        hosts: MPI: the machines, separated by commas; empty: those that mpirun knows of.
        partition: Slurm's partition.
        account: Slurm's account.
        constraint: Slurm: features that each node must have.
        array: Slurm: indices of a job array; `%a` in the launched arguments is the index of a task.
        image: Kubernetes: the container image, with Panax in it.
        namespace: Kubernetes: the namespace; empty: that of kubectl's context.
        claim: Kubernetes: the volume claim for the run's folder, which all pods mount at `mount`.
        mount: Kubernetes: the mount path; the command runs in this folder.
        queue: Kubernetes: Kueue's local queue.
        node_selector: Kubernetes: labels that a node must have, each KEY=VALUE.
    """

    nodes: int = 1
    processes: int = 1
    devices: int | None = None
    accelerator: str = "cpu"
    cpus: int | None = None
    memory: str = ""
    time: str = ""
    env: tuple[str, ...] = ()
    address: str = ""
    hosts: str = ""
    partition: str = ""
    account: str = ""
    constraint: str = ""
    array: str = ""
    image: str = ""
    namespace: str = ""
    claim: str = ""
    mount: str = "/runs"
    queue: str = ""
    node_selector: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "processes", "devices", "cpus"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise LaunchError(f"{name}={value!r}; expected a whole number of at least 1")
        if self.processes % self.nodes:
            raise LaunchError(
                f"processes={self.processes} is not divisible by nodes={self.nodes}: each node runs the same number "
                f"of processes, and `processes` counts all of them"
            )
        if self.accelerator not in ACCELERATORS:
            raise LaunchError(f"accelerator={self.accelerator!r}; expected one of {', '.join(ACCELERATORS)}")
        if self.memory and not _MEMORY.fullmatch(self.memory):
            raise LaunchError(f"memory={self.memory!r}; expected a whole number with M, G or T, for each node: 64G")
        if self.time:
            parse_time_limit(self.time)
        for name in self.env:
            if not _NAME.fullmatch(name):
                raise LaunchError(f"env={name!r}; expected the name of an environment variable, without a value")
        for each in self.node_selector:
            if each.count("=") != 1 or each.startswith("="):
                raise LaunchError(f"node_selector={each!r}; expected KEY=VALUE")
        words = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        # They occur in scripts, where a space or a new line ends a value.
        for name, value in words + [("node_selector", each) for each in self.node_selector]:
            if isinstance(value, str) and value and not _WORD.fullmatch(value):
                raise LaunchError(f"{name}={value!r}; expected one word of letters, digits and punctuation")

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    @property
    def cpus_per_node(self) -> int:
        return self.cpus or self.processes_per_node

    @property
    def accelerators_per_node(self) -> int:
        """Return the number of GPUs or TPUs of a node: 0 on CPU."""
        return 0 if self.accelerator == "cpu" else (self.devices or 1) * self.processes_per_node

    def check_used(self, engine: str, used: frozenset[str]) -> None:
        """Raise an error if a field is set that has no effect on this engine.

        Raises:
            LaunchError: A field has no effect; the message names it, and the fields that the engine uses.
        """
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default and field.name not in used | COMMON_RESOURCES:
                raise LaunchError(
                    f"{field.name}={getattr(self, field.name)!r} has no effect on {engine}; it takes {', '.join(sorted(used))}"
                )


COMMON_RESOURCES = frozenset({"nodes", "processes", "devices", "accelerator", "env", "address"})


def parse_time_limit(time: str) -> int:
    """Convert a time limit to seconds.

    Raises:
        LaunchError: The limit is not HH:MM:SS, or D-HH:MM:SS.

    >>> parse_time_limit("01:30:00"), parse_time_limit("2-00:00:00")
    (5400, 172800)
    """
    found = _TIME.fullmatch(time)
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()) if found else (0, 0, 60, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if minutes > 59 or seconds > 59 or (days and hours > 23) or total == 0:
        raise LaunchError(f"time={time!r}; expected HH:MM:SS or D-HH:MM:SS, for example 04:00:00 or 2-00:00:00")
    return total
