"""`launch`: runs a job from its start to its end, on any engine."""

import contextlib
import secrets

from .engines import Engine
from .job import Job
from .node.local import LocalAgents
from .supervisor.job_folder import JobFolder
from .supervisor.nodes import Nodes
from .supervisor.supervisor import Supervisor
from .supervisor.view import View

LOCAL = "local"


def launch(job: Job, engine: Engine | None = None, *, name: str = LOCAL, view: View | None = None) -> int:
    """Start a job's processes, monitor them, and start them again after a failure, according to the job's
    policy.

    Args:
        engine: The engine to run on; None: this machine.
        name: The engine's name.

    Returns:
        The exit code, like that of `panax train`; for a job that is given up, that of the process that
        failed.

    Raises:
        LaunchError: Nodes or processes can't be obtained.
    """
    view = view or View(job.num_steps)
    record = JobFolder(job)
    with contextlib.ExitStack() as opened:
        opened.enter_context(record.lock())
        record.begin(name)
        secret = secrets.token_hex(32) if engine is None else engine.secret()
        nodes = Nodes(secret, job.nodes)
        if engine is None:
            placed = LocalAgents(nodes, job.nodes, secret)
        else:
            listening = nodes.listen(*engine.listen_address())
            placed = engine.start_agents(listening, secret)
        # Agents end with their connection, then the engine cleans up its own processes.
        opened.callback(placed.close)
        opened.callback(nodes.close)
        code = Supervisor(job, nodes, placed, record, view).run()
    if nodes.again:
        placed.start_over(preempted=True)
    return code
