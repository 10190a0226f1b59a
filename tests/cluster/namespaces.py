"""`panax launch` over hosts that are network namespaces: an engine that starts an agent in each.

    python namespaces.py FOLDER HOSTS ARGUMENTS of panax launch...

Lines on standard input do something to the hosts while the job runs: `limit INDEX MEGABITS`,
`limit_to INDEX OTHER MEGABITS`, `free INDEX`, `cut INDEX`.
"""  # fmt: skip

import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "preflight"))

from faulty import Hosts, hosts

import panax.cli.commands.launch
from panax.cluster.engines import AGENT_COMMAND
from panax.cluster.engines.environment import NODE, SECRET, SUPERVISOR

ADDRESS = "10.213.7.200"
"""Of the supervisor, at the bridge that joins the hosts."""


class Placed:
    """An agent on each host."""

    def __init__(self, cluster: Hosts, supervisor: str, secret: str):
        self._agents = []
        for index in range(cluster.count):
            environment = {**os.environ, SUPERVISOR: supervisor, SECRET: secret, NODE: str(index)}
            command = [*cluster.prefix(index), *AGENT_COMMAND]
            self._agents.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def failure(self) -> str:
        return ""

    def log_tail(self) -> str:
        return ""

    def replace(self, node: int) -> None:
        raise AssertionError("no host is lost here")

    def close(self) -> None:
        for agent in self._agents:
            agent.kill()
            agent.wait()


class Namespaces:
    """The engine."""

    agents_seconds = 60.0

    def __init__(self, cluster: Hosts):
        self._cluster = cluster

    def check(self) -> None:
        """All is there."""

    def is_queued(self) -> bool:
        return False

    def secret(self) -> str:
        return "s" * 32

    def listen_address(self) -> tuple[str, int]:
        return ADDRESS, 0

    def start_agents(self, supervisor: str, secret: str) -> Placed:
        return Placed(self._cluster, supervisor, secret)


def do(cluster: Hosts) -> None:
    """Content of standard input."""
    for line in sys.stdin:
        what, index, *more = line.split()
        if what == "limit":
            cluster.limit(int(index), float(more[0]))
        elif what == "limit_to":
            cluster.limit_to(int(index), int(more[0]), float(more[1]))
        elif what == "free":
            cluster.free(int(index))
        else:
            assert what == "cut", what
            cluster.cut(int(index))


def main() -> int:
    folder, count, *arguments = sys.argv[1:]
    with hosts(Path(folder), int(count)) as cluster:
        subprocess.run(["ip", "addr", "add", f"{ADDRESS}/24", "dev", cluster.bridge], check=True)
        threading.Thread(target=do, args=(cluster,), daemon=True).start()
        panax.cli.commands.launch.make_engine = lambda name, resources: Namespaces(cluster)
        return panax.cli.commands.launch.launch([*arguments, "--on", "mpi", "--nodes", count, "--processes", count])


if __name__ == "__main__":
    sys.exit(main())
