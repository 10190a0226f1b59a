"""A job: its command, its processes and nodes, and its policy for failures."""

import dataclasses
import enum
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import LaunchError


class Stragglers(enum.StrEnum):
    """Action for a host that is slower than the others."""

    IGNORE = "ignore"
    WARN = "warn"
    CORDON = "cordon"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Policy of a supervisor for a job that fails or makes no progress.

    Attributes:
        max_restarts: Maximum number of restarts of a run.
        max_without_progress: Maximum number of consecutive failures without a step beyond the previous
            failure's.
        backoff_seconds: Delay of a restart after a failure without progress; doubled each time, up to a
            minute.
        stall_seconds: Time without a step, a batch or a change of phase until a worker counts as hanging.
        start_seconds: The same limit before the first step, when compiling may take long.
        agents_seconds: Time for the engine's nodes to connect, once it has granted them.
        replace_seconds: Time for a lost node to return, until the job continues without it.
        min_nodes: Minimum number of nodes to continue with.
        save_seconds: Time for the coordinated save when the job is stopped; processes still running then are
            killed.
        stragglers: Action for a host that is slower than the others: warn, remove its node from the job, or
            ignore it.
        slow_factor: A host is slow if it takes this many times as long as the others,
        slow_probes: in this many probes in a row.
    """

    max_restarts: int = 20
    max_without_progress: int = 3
    backoff_seconds: float = 1.0
    stall_seconds: float = 300.0
    start_seconds: float = 1800.0
    agents_seconds: float = 25.0
    replace_seconds: float = 5.0
    min_nodes: int = 1
    save_seconds: float = 600.0
    stragglers: Stragglers | str = Stragglers.WARN
    slow_factor: float = 1.5
    slow_probes: int = 3

    def __post_init__(self) -> None:
        if self.stragglers not in tuple(Stragglers):
            raise LaunchError(f"policy.stragglers={self.stragglers!r}; expected {', '.join(Stragglers)}")
        object.__setattr__(self, "stragglers", Stragglers(self.stragglers))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "stragglers":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise LaunchError(f"policy.{field.name}={value!r}; expected a number of at least 0")
        if self.max_without_progress < 1:
            raise LaunchError("policy.max_without_progress=0; expected at least 1: the first failure counts")
        if self.slow_factor <= 1 or self.slow_probes < 1:
            raise LaunchError(
                f"policy.slow_factor={self.slow_factor}, policy.slow_probes={self.slow_probes}; expected more than 1, and at "
                f"least 1"
            )
        if self.min_nodes < 1:
            raise LaunchError("policy.min_nodes=0; expected at least 1")


JOIN, JOIN_SECONDS = "PANAX_JOIN_SECONDS", 25
"""Time for the processes that an agent has started to join, in seconds; the variable sets another time."""

PROCESSES_VARIABLE = "PANAX_WHOLE"
"""Variable with the number of processes of the full job; with fewer, the job continues without some of its
nodes."""

CONTINUATION_VARIABLE = "PANAX_GOES_ON"
"""Variable that is set if the previous attempt ended only to get a new layout: the time between was spent on
that."""

FIRST_START_FLAGS = ("--fresh", "--check", "--check=warn")
"""Flags of `panax train` that only apply to the first start of a job: a run starts over, hardware is
checked."""

PANAX_COMMAND = (sys.executable, "-m", "panax")
TRAIN_COMMAND = (*PANAX_COMMAND, "train")
STANDBY_COMMAND = (sys.executable, "-m", "panax.cli.standby")
"""Command of a waiting worker, which can become any command of `panax`."""


def panax_arguments(command: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a command of `panax`."""
    return command[len(PANAX_COMMAND) :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Description of a launched job.

    Attributes:
        arguments: Arguments of `panax train`: a recipe and its flags.
        folder: The run's folder; the job's files are in its subfolder `job`.
        name: Name of the run.
        num_steps: Number of steps of the run.
        processes: Number of processes in total.
        nodes: Number of nodes that the processes are divided over.
        devices: Simulated devices of each process on CPU; None: according to the environment.
        port: Port of JAX's coordinator; None: any free port.
        program: Command that each worker runs with the arguments.
        spare: Command of a standby worker for a restart; empty for none. It must be able to become `program`.
        submission: Id of this job among the jobs of its folder, if an engine may start it again.
    """

    arguments: tuple[str, ...]
    folder: Path
    name: str = ""
    num_steps: int = 0
    processes: int = 1
    nodes: int = 1
    devices: int | None = None
    port: int | None = None
    program: tuple[str, ...] = TRAIN_COMMAND
    spare: tuple[str, ...] = ()
    submission: str = ""
    policy: RestartPolicy = RestartPolicy()

    def __post_init__(self) -> None:
        if self.processes < 1 or self.nodes < 1 or (self.devices is not None and self.devices < 1):
            raise LaunchError(
                f"--processes {self.processes}, --nodes {self.nodes}, --devices {self.devices}: expected at least 1 of each"
            )
        if self.policy.min_nodes > self.nodes:
            raise LaunchError(f"--min-nodes {self.policy.min_nodes}; expected at most --nodes {self.nodes}")
        if self.processes % self.nodes:
            raise LaunchError(
                f"--processes {self.processes} is not divisible by --nodes {self.nodes}: each node gets the same "
                f"number of processes; --processes is the number in all"
            )

    def command(self, *, has_begun: bool = False, layout: Sequence[str] = ()) -> list[str]:
        """Return the command of a worker.

        Args:
            has_begun: True if this job has already moved an earlier run's files away: when started again, it
                resumes from its checkpoints.
            layout: Flags that replace the job's layout flags.
        """
        arguments = [each for each in self.arguments if not (has_begun and each in FIRST_START_FLAGS)]
        return [*self.program, *(_without_layout(arguments) if layout else arguments), *layout]

    @property
    def shown(self) -> str:
        """Return the run's command as a user would type it."""
        return shlex.join(["panax", "train", *self.arguments])

    @property
    def place(self) -> Path:
        """Return the folder of the job's files: logs, stacks, status, incidents."""
        return self.folder / "job"

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    def environment(self) -> dict[str, str]:
        """Return the environment variables of workers, except those with their position in the job."""
        # A process that does not join within this time after the first one is not expected any more.
        joining = {JOIN: os.environ.get(JOIN) or str(JOIN_SECONDS), PROCESSES_VARIABLE: str(self.processes)}
        if self.devices is None:
            return joining
        flags = [
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count=")
        ]
        return joining | {"XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={self.devices}"])}


_OF_LAYOUT = re.compile(r"--(mesh(\..+)?|step\.(micro[-_]batches|pad[-_]rows))")


def _without_layout(arguments: Sequence[str]) -> list[str]:
    """Return arguments of `panax train` without those of the model's layout on the devices.

    >>> _without_layout(["gpt2", "--mesh.fsdp", "-1", "--step.micro-batches=2", "--fresh", "--mesh", "auto", "--seed", "3"])
    ['gpt2', '--fresh', '--seed', '3']
    """
    remaining, is_layout_value = [], False
    for each in arguments:
        if each.startswith("--"):
            flag, equals, _ = each.partition("=")
            is_layout_value = _OF_LAYOUT.fullmatch(flag) is not None
            if not is_layout_value:
                remaining.append(each)
            is_layout_value = is_layout_value and not equals
        elif not is_layout_value:
            remaining.append(each)
        else:
            is_layout_value = False
    return remaining


ALLOWED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HOSTNAME",
    "JAX_PLATFORMS",
    "LD_LIBRARY_PATH",
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PANAX_CACHE",
    "PATH",
    "PYTHONPATH",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "TPU_NAME",
    "VIRTUAL_ENV",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
"""Environment variables that may be written to a report, a log or a manifest; others never are."""


def filter_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Return the variables that may be displayed."""
    environment = dict(os.environ) if environment is None else environment
    return {name: environment[name] for name in ALLOWED_VARIABLES if name in environment}
