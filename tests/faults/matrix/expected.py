"""How each cell of the fault matrix ends: a fault of some kind, in some phase, in one of four nodes. Written before its runner.

A cell that turns out to end otherwise is changed here alone, in a commit of its own that says why. Faults come from outside the
job (signals, namespaces, an agent that is killed and not given back), or from a hook of the recipe that recovery never reads.
"""

import dataclasses
from typing import Literal

PHASES = ("start", "forward", "optimizer", "data", "save", "restore", "teardown")
"""start: until the first step has been compiled. forward: in the compiled step, before its gradients are summed. teardown: from
the last step on."""

Outcome = Literal["same", "shrunk", "saved", "stopped"]


@dataclasses.dataclass(frozen=True)
class End:
    """How a cell ends.

    Attributes:
        outcome: same: the run continues in the same layout to its end, bitwise as an undisturbed one. shrunk: with three nodes,
            bitwise as one that was made to change there. saved: all processes save at one step and the job ends; the same
            command again ends as `same`. stopped: the job ends within 60 seconds with this cause, the worker's last lines and
            what to do.
        cause: Of the incident, or of the end; empty where nothing is booked.
    """

    outcome: Outcome
    cause: str = ""


def expected() -> dict[tuple[str, str], End]:
    """Of each kind and phase."""
    hashes = {}
    for phase in PHASES:
        for kind, cause in (("SIGKILL", "killed"), ("SIGSEGV", "crashed"), ("SIGABRT", "crashed")):
            hashes[kind, phase] = End("same", cause)
        # A stopped process, and one whose thread never gives Python's lock back, look alike from outside.
        for kind in ("SIGSTOP", "hang with the lock"):
            hashes[kind, phase] = End("same", "hang")
        for kind in ("SIGTERM", "SIGINT"):
            # A process that reads its recipe does not take signals yet.
            hashes[kind, phase] = End("same", "killed") if phase == "start" else End("saved")
        hashes["exception", phase] = End("stopped", "exception")
        hashes["out of memory", phase] = End("stopped", "out of device memory")
        # A thread that draws batches is waited for only where a batch is missing.
        hashes["hang in data", phase] = End("same", "stalled data")
        # Whoever asks the job to end, as a batch system does.
        hashes["stop", phase] = End("saved")
        # A host that sleeps, and a terminal that is held: nothing is judged meanwhile, and nothing waits for it.
        for kind in ("suspended supervisor", "unread output"):
            hashes[kind, phase] = End("same")
        # An agent that nobody hears for 30 seconds has gone, though its workers wait in a collective.
        hashes["partition", phase] = End("shrunk", "lost host")
        hashes["slow link", phase] = End("same")
        hashes["lost node", phase] = End("shrunk", "lost host")
    # A step that is a link to where another run's lies; and a save that takes longer than a process may be silent.
    hashes["link", "restore"] = hashes["link", "save"] = hashes["long save", "save"] = End("same")
    for phase in ("forward", "optimizer"):
        # Only a step has values to corrupt; a checked one.
        hashes["corrupted value", phase] = End("same", "corrupted")
        # XLA on CPU tells an error of a program when its results are read; before that, all processes wait in a collective.
        for kind in ("exception", "out of memory"):
            hashes[kind, phase] = End("same", "stuck collective")
        # The main thread waits for the step; that another one holds the lock is not seen.
        hashes["hang with the lock", phase] = End("same", "stuck collective")
    # The others wait 25 seconds for a process that does not join, which is less than a start may take.
    for kind in ("SIGSTOP", "hang with the lock"):
        hashes[kind, "start"] = End("stopped", "processes did not join")
    # Ctrl-C is the supervisor's: agents ignore SIGINT, and their workers do until they take signals.
    hashes["SIGINT", "start"] = End("same")
    # Who raises there is the recipe; and a hook in the teardown.
    for kind in ("exception", "out of memory"):
        hashes[kind, "start"] = End("stopped", "user error")
    hashes["out of memory", "teardown"] = End("stopped", "exception")
    # Nobody knows a smaller layout before the whole job has drawn its first batch.
    hashes["partition", "start"] = End("stopped", "processes did not join")
    for kind, phase in (("lost node", "start"), ("lost node", "restore"), ("partition", "restore")):
        hashes[kind, phase] = End("stopped", "lost host")
    # The run has all its steps, and whoever ends then has nothing to save.
    for kind in ("hang in data", "slow link", "SIGTERM", "SIGINT"):
        hashes[kind, "teardown"] = End("same")
    return hashes
