"""Slurm: a batch script that launches again inside its allocation, where `srun` starts one agent on each
node."""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import LaunchError, suggest_name
from .client import local_address, require, run_client
from .engine import AGENT_COMMAND, AGENTS_SECONDS
from .environment import NODE, SECRET, SUPERVISOR, forwarded_variables
from .resources import SIGNAL_SECONDS, Resources, parse_time_limit
from .slurm_agents import FOLDER_VARIABLE, SlurmAgents

USED_RESOURCES = frozenset({"cpus", "memory", "time", "partition", "account", "constraint", "array"})

INSTALL_ADVICE = "launch from a login node of the cluster, or install Slurm's client (`apt install slurm-client`)"

MIN_TIME_SECONDS = 300
"""Minimum time limit in seconds: Slurm's clock counts minutes, and the signal to save precedes the end."""

REQUEUEING_AGENT_COMMAND = (sys.executable, "-m", "panax.cluster.engines.slurm_agent")
"""Command of an agent on a node of a batch job: it requeues the job if its script is lost."""

_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")


class Slurm:
    """Outside an allocation, jobs are submitted; inside one, agents are placed."""

    agents_seconds = AGENTS_SECONDS

    def __init__(
        self, resources: Resources, *, agent: Sequence[str] = AGENT_COMMAND, environment: Mapping[str, str] = os.environ
    ):
        if resources.time and parse_time_limit(resources.time) < MIN_TIME_SECONDS:
            raise LaunchError(
                f"time={resources.time!r} is too short: Panax saves {SIGNAL_SECONDS} s before the limit, and Slurm counts "
                f"whole minutes; use 00:05:00 or more"
            )
        if resources.array and not _ARRAY.fullmatch(resources.array):
            raise LaunchError(f"array={resources.array!r}; expected indices as sbatch takes them: 0-3, 1,4,7 or 0-9%2")
        if resources.accelerator == "tpu":
            raise LaunchError("accelerator='tpu'; Slurm allocates only GPUs and CPUs")
        self._resources, self._agent, self._environment = resources, tuple(agent), dict(environment)
        self._passed = forwarded_variables(environment, resources.env)

    def check(self) -> None:
        if not self.is_queued():
            require("srun", INSTALL_ADVICE, self._environment)
            check_allocation(self._environment, self._resources.nodes)
            return
        require("sbatch", INSTALL_ADVICE, self._environment)
        try:
            output = run_client(["sinfo", "--noheader", "--format=%P|%l|%D"], self._environment)
        except LaunchError as error:
            raise LaunchError(f"Slurm can't be queried; {INSTALL_ADVICE}\n{error}") from error
        resources = self._resources
        rows = [row.split("|") for row in output.splitlines()]
        partitions = {row[0].rstrip("*"): row for row in rows if len(row) == 3}
        name = resources.partition or next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), "")
        if not name:
            raise LaunchError(f"the cluster has no default partition; choose one: {', '.join(partitions)}")
        if name not in partitions:
            raise LaunchError(f"Slurm has no partition {name!r}; {suggest_name(name, partitions)}")
        nodes = sum(int(row[2]) for row in rows if row[0].rstrip("*") == name)
        if resources.nodes > nodes:
            raise LaunchError(f"nodes={resources.nodes}, and the partition {name} has {nodes}")
        limit = partitions[name][1]
        if resources.time and limit != "infinite" and parse_time_limit(resources.time) > parse_time_limit(_full(limit)):
            raise LaunchError(f"time={resources.time!r} exceeds the limit of the partition {name}, which is {limit}")

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        return shlex.join(self._srun()) + "\n" if not self.is_queued() else self._script(arguments, folder)

    def is_queued(self) -> bool:
        return "SLURM_JOB_ID" not in self._environment

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        place = _place(folder)
        # Slurm does not start a job with unwritable output, and reports nothing.
        place.mkdir(parents=True, exist_ok=True)
        script = place / "slurm.sh"
        script.write_text(self._script(arguments, folder), encoding="utf-8")
        return run_client(["sbatch", "--parsable", str(script)], self._environment).strip().split(";")[0]

    def secret(self) -> str:
        return secrets.token_hex(32)

    def listen_address(self) -> tuple[str, int]:
        """Return the address to listen at, with any port: tasks of an array may share a node."""
        if self._resources.address:
            return self._resources.address, 0
        if self._resources.nodes == 1:
            return "127.0.0.1", 0
        here = self._environment.get("SLURMD_NODENAME", "")
        other = next((host for host in self._hosts() if host != here), "")
        match = re.search(
            r"\bNodeAddr=(\S+)", run_client(["scontrol", "--oneliner", "show", "node", other], self._environment)
        )
        return local_address(match.group(1) if match else other), 0

    def start_agents(self, supervisor: str, secret: str) -> "SlurmAgents":
        environment = {**self._environment, SUPERVISOR: supervisor, SECRET: secret}
        return SlurmAgents(self._srun(), environment, self._hosts(), self._extra_node_command())

    def _hosts(self) -> list[str]:
        nodes = self._environment["SLURM_JOB_NODELIST"]
        return run_client(["scontrol", "show", "hostnames", nodes], self._environment).split()

    def _srun(self) -> list[str]:
        """Build the srun command. Only variables' names are passed; srun takes the values from its
        environment, so that no process list shows them."""
        names = ",".join([*self._passed, SUPERVISOR, SECRET, NODE])
        nodes = str(self._resources.nodes)
        # Everything that the job has on a node, also if other steps run; losing one agent does not end the
        # others.
        alone = ["--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0", "--input=none", "--quiet"]
        if self._resources.nodes > 1:
            alone.append("--no-kill")
        share = f"--cpus-per-task={self._resources.cpus_per_node}"
        agent = REQUEUEING_AGENT_COMMAND if self._agent == AGENT_COMMAND else self._agent
        return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", *alone, share, f"--export={names}", *agent]

    def _extra_node_command(self) -> list[str]:
        """Return the command of the job that requests another node; empty for an interactive allocation,
        without a script."""
        folder = self._environment.get(FOLDER_VARIABLE, "")
        if self._resources.nodes == 1 or not folder:
            return []
        names = ",".join([*self._passed, SUPERVISOR, SECRET, NODE])
        options = {
            "job-name": f"panax-{_word(Path(folder).parent.name)}-node",
            "nodes": 1,
            "ntasks-per-node": 1,
            **self._node_requirements(),
            "chdir": os.getcwd(),
            "output": f"{folder.replace('%', '%%')}/slurm-%j.out",
            "signal": f"B:TERM@{SIGNAL_SECONDS}",
            "export": names,
        }
        flags = [f"--{name}={value}" for name, value in options.items() if value]
        return ["sbatch", "--parsable", "--no-requeue", *flags, f"--wrap=exec {shlex.join(self._agent)}"]

    def _node_requirements(self) -> dict[str, object]:
        """Return the requirements of a node, and the queue to request it from."""
        asked = self._resources
        return {
            "cpus-per-task": asked.cpus_per_node,
            "gpus-per-node": asked.accelerators_per_node,
            "mem": asked.memory,
            "time": asked.time,
            "partition": asked.partition,
            "account": asked.account,
            "constraint": asked.constraint,
        }

    def _script(self, arguments: Sequence[str], folder: Path) -> str:
        resources = self._resources
        task = "%A_%a" if resources.array else "%j"
        # Slurm expands patterns that begin with a percent sign.
        output = str(_place(folder)).replace("%", "%%")
        options = {
            "job-name": f"panax-{_word(folder.name)}",
            "nodes": resources.nodes,
            "ntasks-per-node": 1,
            **self._node_requirements(),
            "array": resources.array,
            "chdir": os.getcwd(),
            "output": f"{output}/slurm-{task}.out",
            "open-mode": "append",
            "signal": f"B:TERM@{SIGNAL_SECONDS}",
            "export": ",".join(self._passed) or "NONE",
        }
        lines = [f"#SBATCH --{name}={_quoted(str(value))}" for name, value in options.items() if value]
        words = [
            _argument(word) if resources.array else shlex.quote(word)
            for word in (sys.executable, "-m", "panax", *arguments)
        ]
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "#SBATCH --requeue",
                *(["#SBATCH --no-kill"] if resources.nodes > 1 else []),
                "# The first node's process launches the others'; its exit code is the job's.",
                f"export {FOLDER_VARIABLE}={shlex.quote(str(_place(folder)))}",
                f"exec {' '.join(words)}",
                "",
            ]
        )


def check_allocation(environment: Mapping[str, str], nodes: int) -> None:
    """Check that an allocation has the number of nodes that a job requests, and that they are alike.

    Raises:
        LaunchError: The number differs, or the nodes do.
    """
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise LaunchError("the allocation has several parts (a heterogeneous job); ask for one part of equal nodes")
    had = int(environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if had != nodes:
        raise LaunchError(
            f"nodes={nodes}, and the allocation {environment['SLURM_JOB_ID']} has {had}; use --nodes {had}"
        )
    cpus = environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    if "," in cpus:
        raise LaunchError(
            f"the allocation's nodes differ: {environment.get('SLURM_JOB_NODELIST', '')} have {cpus} processors; each "
            f"node runs the same number of processes, so ask for equal ones with cpus or constraint"
        )


def _place(folder: Path) -> Path:
    return folder.absolute() / "job"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text) or "run"


def _quoted(value: str) -> str:
    """Quote an option's value in a script's comment."""
    if any(each in value for each in '\n\r"\\'):
        raise LaunchError(f"a batch script can't hold {value!r}: it has a quote, a backslash or a line break")
    return f'"{value}"' if re.search(r"[\s#']", value) else value


def _argument(word: str) -> str:
    """Quote an argument of the command, with the index of the array's task in place of `%a`."""
    return '"${SLURM_ARRAY_TASK_ID}"'.join(shlex.quote(part) if part else "" for part in word.split("%a")) or "''"


def _full(limit: str) -> str:
    """Convert a time in sinfo's format to one with hours."""
    return limit if limit.count(":") == 2 else f"00:{limit}"
