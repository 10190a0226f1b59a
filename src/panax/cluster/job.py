"""A job: what is launched, where, and what is done when it fails."""

import dataclasses
import enum
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError


class Stragglers(enum.StrEnum):
    """What is done about a host that is slower than the others."""

    IGNORE = "ignore"
    WARN = "warn"
    CORDON = "cordon"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """What a supervisor does when a job fails or makes no progress.

    Attributes:
        max_restarts: Restarts of a run, at most.
        max_without_progress: Failures in a row of which none has taken a step beyond the one before, at most.
        backoff_seconds: Before a restart that follows a failure without progress; doubled each time, up to a minute.
        stall_seconds: Without a step, a batch or a change of phase, until a worker counts as hanging.
        start_seconds: The same before the first step, where compiling may take long.
        agents_seconds: For the engine's nodes to be there, once it has granted them.
        replace_seconds: For a lost node to come back, until the job goes on without it.
        min_nodes: The fewest that it goes on with.
        save_seconds: For the coordinated save when the job is stopped; what runs then is killed.
        stragglers: Of a host that is slower than the others: say so, take its node out of the job, or nothing.
        slow_factor: A host is slow if it takes so many times what the others take,
        slow_probes: in so many probes in a row.
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
"""For the processes that an agent has started to join; the variable gives them more."""

PROCESSES_VARIABLE = "PANAX_WHOLE"
"""The processes of the whole job; where there are fewer, it goes on without some of its nodes."""

CONTINUATION_VARIABLE = "PANAX_GOES_ON"
"""Whether the attempt before ended only to get a new layout: what lies between was spent on that."""

FIRST_START_FLAGS = ("--fresh", "--check", "--check=warn")
"""Flags of `panax train` that count for the first of all starts of one job alone: a run starts over, hardware is checked."""

PANAX_COMMAND = (sys.executable, "-m", "panax")
TRAIN_COMMAND = (*PANAX_COMMAND, "train")
STANDBY_COMMAND = (sys.executable, "-m", "panax.cli.standby")
"""A worker that waits: it becomes any command of `panax`."""


def panax_arguments(command: Sequence[str]) -> Sequence[str]:
    """The arguments of a command of `panax`."""
    return command[len(PANAX_COMMAND) :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is launched.

    Attributes:
        arguments: As those of `panax train`: a recipe and its flags.
        folder: The run's folder; the job's own files are in `job` there.
        name: The run's.
        num_steps: The steps of the run.
        processes: In all.
        nodes: That the processes are divided over.
        devices: Simulated devices of each process on CPU; None: as the environment says.
        port: Of JAX's coordinator; None: any that is free.
        program: What each worker runs with the arguments.
        spare: What runs a worker that waits for a restart; empty for none. It has to become what `program` is.
        submission: What tells this job from others of its folder, where an engine may start it again.
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
                f"--processes {self.processes} is not divisible by --nodes {self.nodes}: each node gets as many processes; "
                f"processes is the number in all"
            )

    def command(self, *, begun: bool = False, layout: Sequence[str] = ()) -> list[str]:
        """What a worker runs.

        Args:
            begun: This job has set aside what an earlier run left: started again, it resumes from its own checkpoints.
            layout: Flags in the place of those that the job has for it.
        """
        arguments = [each for each in self.arguments if not (begun and each in FIRST_START_FLAGS)]
        return [*self.program, *(_without_layout(arguments) if layout else arguments), *layout]

    @property
    def shown(self) -> str:
        """The run as a person would type it."""
        return shlex.join(["panax", "train", *self.arguments])

    @property
    def place(self) -> Path:
        """Of the job's own files: logs, stacks, status, incidents."""
        return self.folder / "job"

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    def environment(self) -> dict[str, str]:
        """What workers get beside what tells them their place in the job."""
        # Whoever does not come within these seconds of the first one does not come.
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
    """Arguments of `panax train` without those that say how the model lies on the devices.

    >>> _without_layout(["gpt2", "--mesh.fsdp", "-1", "--step.micro-batches=2", "--fresh", "--mesh", "auto", "--seed", "3"])
    ['gpt2', '--fresh', '--seed', '3']
    """
    kept, of_layout = [], False
    for each in arguments:
        if each.startswith("--"):
            flag, equals, _ = each.partition("=")
            of_layout = _OF_LAYOUT.fullmatch(flag) is not None
            if not of_layout:
                kept.append(each)
            of_layout = of_layout and not equals
        elif not of_layout:
            kept.append(each)
        else:
            of_layout = False
    return kept


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
"""Environment variables that may be written to a report, a log or a manifest; no other one ever is."""


def filter_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """The variables that may be shown."""
    environment = dict(os.environ) if environment is None else environment
    return {name: environment[name] for name in ALLOWED_VARIABLES if name in environment}


def write_json(path: Path, value: Any) -> None:
    """Write JSON in the place of a file, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(beside, path)
