"""What a job asks an engine for, checked before any engine is asked."""

import dataclasses
import re

from ...core.errors import LaunchError

ACCELERATORS = ("cpu", "gpu", "tpu")

SIGNAL_SECONDS = 90
"""Between the signal to save and the end that an engine sets: a time limit, or the loss of a node that is told before."""

_WORD = re.compile(r"[A-Za-z0-9_.,:@%+=/\[\]&|*()-]+")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d\d):(\d\d)")
_MEMORY = re.compile(r"[1-9]\d*[MGT]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a job asks an engine for. A field that an engine does not use must keep its default there.

    Attributes:
        nodes: Machines; one agent runs on each.
        processes: In all; each node runs as many.
        devices: Of each process. On CPU they are simulated and nothing is asked of the engine for them.
        accelerator: What the devices are: "cpu", "gpu" or "tpu".
        cpus: Processor cores of each node; None: one for each process.
        memory: Of each node: "64G".
        time: The limit after which the engine ends the job: HH:MM:SS, or D-HH:MM:SS.
        env: Names of environment variables that nodes get beside the usual ones.
        address: Where the supervisor listens; empty: the address of this machine that nodes reach.
        hosts: MPI: the machines, separated by commas; empty: those that mpirun knows of.
        partition: Slurm's.
        account: Slurm's.
        constraint: Slurm: features that each node must have.
        array: Slurm: indices of a job array; `%a` in the launched arguments is the index of a task.
        image: Kubernetes: the container's, with Panax in it.
        namespace: Kubernetes': empty: that of kubectl's context.
        claim: Kubernetes: the volume claim for the run's folder, which all pods mount at `mount`.
        mount: Kubernetes: where; the command runs in this folder.
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
                f"processes={self.processes} is not divisible by nodes={self.nodes}: each node runs as many processes, and "
                f"`processes` counts all of them"
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
        # They stand in scripts, which take a space or a new line for the end of a value.
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
        """GPUs or TPUs of a node: 0 on CPU."""
        return 0 if self.accelerator == "cpu" else (self.devices or 1) * self.processes_per_node

    def check_used(self, engine: str, used: frozenset[str]) -> None:
        """Refuse a field that has a value, and no effect on this engine.

        Raises:
            LaunchError: Which, and what the engine takes.
        """
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default and field.name not in used | COMMON_RESOURCES:
                raise LaunchError(
                    f"{field.name}={getattr(self, field.name)!r} has no effect on {engine}; it takes {', '.join(sorted(used))}"
                )


COMMON_RESOURCES = frozenset({"nodes", "processes", "devices", "accelerator", "env", "address"})


def parse_time_limit(time: str) -> int:
    """The seconds of a time limit.

    Raises:
        LaunchError: It is not HH:MM:SS, or D-HH:MM:SS.

    >>> parse_time_limit("01:30:00"), parse_time_limit("2-00:00:00")
    (5400, 172800)
    """
    found = _TIME.fullmatch(time)
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()) if found else (0, 0, 60, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if minutes > 59 or seconds > 59 or (days and hours > 23) or total == 0:
        raise LaunchError(f"time={time!r}; expected HH:MM:SS or D-HH:MM:SS, for example 04:00:00 or 2-00:00:00")
    return total
