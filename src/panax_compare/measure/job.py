"""Facts about the other processes of a column with several processes, from the environment, before any
framework is imported."""

import dataclasses
import os
import socket
import sys
from pathlib import Path

import numpy as np

RANK, PROCESSES, PORT = (f"PANAX_COMPARE_{name}" for name in ("RANK", "PROCESSES", "PORT"))
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclasses.dataclass(frozen=True)
class ColumnJob:
    """One process of a job on this machine.

    Attributes:
        port: Port on loopback where the processes meet.
    """

    rank: int
    processes: int
    port: int

    @classmethod
    def from_environment(cls) -> "ColumnJob":
        """Return the job of this process."""
        return cls(*(int(os.environ.get(name, default)) for name, default in _DEFAULTS.items()))

    @staticmethod
    def environment(rank: int, processes: int, port: int, devices: int) -> dict[str, str]:
        """Return the variables that `from_environment` and the frameworks read: loopback only, and the number
        of simulated devices, 1 for real ones."""
        variables = dict(zip(_DEFAULTS, map(str, (rank, processes, port))))
        if processes > 1:
            variables["GLOO_SOCKET_IFNAME"] = LOOPBACK
        if devices > 1:
            flags = os.environ.get("XLA_FLAGS", "")
            variables["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        return variables

    def local_rows(self, leaf: np.ndarray) -> np.ndarray:
        """Return this process's share of the rows of a batch."""
        share = len(leaf) // self.processes
        return leaf[self.rank * share : (self.rank + 1) * share]

    def pin_cores(self) -> None:
        """Restrict this process to an equal share of the cores, so that the processes of any two frameworks
        share them equally."""
        if self.processes == 1 or not hasattr(os, "sched_setaffinity"):
            return
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // self.processes)
        first = self.rank * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])


_DEFAULTS = {RANK: "0", PROCESSES: "1", PORT: "0"}


def find_free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def read_loopback_bytes() -> int | None:
    """Return the bytes sent over loopback so far, by all of this machine; None if the system does not count
    them."""
    counter = Path(f"/sys/class/net/{LOOPBACK}/statistics/tx_bytes")
    try:
        return int(counter.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
