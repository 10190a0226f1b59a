"""A standby worker as seen by its agent: started before it is needed, so that a restart does not wait for
imports.

It receives one line of JSON on its standard input: the arguments, the environment, and the output files.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...job.heartbeat import DESCRIPTOR
from ...system import json_reader
from ...system.children import kill_group
from .worker import AGENT_VARIABLE, LIFELINE_VARIABLE


class StandbyProcess:
    """A process that has been started and waits for its command.

    Attributes:
        process: The process, leader of a separate process group.
        pipe: Pipe of its future heartbeats.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lifeline: int):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        variables = {
            DESCRIPTOR: str(writing),
            LIFELINE_VARIABLE: str(lifeline),
            AGENT_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment, **variables},
                pass_fds=(writing, lifeline),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.pipe = reading

    @property
    def is_waiting(self) -> bool:
        """Return True if the process is still running."""
        return self.process.poll() is None

    def become(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, stacks: Path) -> bool:
        """Send the process the command to run; return True if it was sent.

        Args:
            arguments: Arguments of `panax`.
            environment: Variables in addition to those of the process.
            log: File for the process's output from now on.
            stacks: File for the process's stacks, written on request.
        """
        order = {"arguments": [*arguments], "environment": {**environment}, "log": str(log), "stacks": str(stacks)}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.close()
        except OSError:
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the process, because it was not needed or can't be used."""
        kill_group(self.process.pid)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        os.close(self.pipe)


class StandbyPool:
    """Standby workers of a node for the next start.

    Args:
        lifeline: The pipe that ends with the agent.
    """

    def __init__(self, lifeline: int):
        self._lifeline = lifeline
        self._waiting: list[StandbyProcess] = []

    def refill(self, count: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start standby workers up to `count`, or fewer if the system refuses another process."""
        self._waiting = [spare for spare in self._waiting if spare.is_waiting or spare.end()]
        with contextlib.suppress(OSError):
            while len(self._waiting) < count:
                self._waiting.append(StandbyProcess(command, environment, self._lifeline))

    def take(self) -> StandbyProcess | None:
        """Remove and return a standby worker; None if none is left."""
        while self._waiting:
            spare = self._waiting.pop()
            if spare.is_waiting:
                return spare
            spare.end()
        return None

    def close(self) -> None:
        """End the standby workers that were not needed."""
        for spare in self._waiting:
            spare.end()
        self._waiting = []


def parse_order(line: bytes) -> dict[str, Any]:
    """Parse the order that an agent has sent to a standby worker."""
    found = json_reader.parse(line)
    if not isinstance(found, dict) or not {"arguments", "environment", "log", "stacks"} <= found.keys():
        raise ValueError("expected a line of JSON with arguments, environment, log and stacks, as an agent writes it")
    return found
