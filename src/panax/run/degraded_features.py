"""Features that a launched job pauses while it has fewer processes than at launch: those that one replica or
device can't do.

Compressed sums, delayed updates and local steps need replicas, and repeated steps need other devices. If
only one is left, the job reports this, continues without these features, and resumes them when its nodes are
back.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from ..comms import Comms
from ..comms.settings import AUTO
from ..mesh import Placement
from ..train.compiled_step import CompiledStep
from ..train.program import Program

PROCESSES_VARIABLE = "PANAX_WHOLE"
"""Environment variable with the number of processes of the whole job."""


def count_missing_processes() -> int:
    """Return the number of processes missing from the job as launched; 0 if none is missing, or nothing was
    launched."""
    whole = os.environ.get(PROCESSES_VARIABLE, "")
    return max(int(whole) - jax.process_count(), 0) if whole.isdecimal() else 0


def pause_comms(program: Program, placement: Placement, say: Callable[[str], None]) -> Program:
    """Return the program, with plain sums of gradients if the replicas that its settings need are missing."""
    comms = program.comms
    over = ("replica",) if comms.local_steps > 1 else comms.over
    if comms.is_plain or not count_missing_processes() or over == (AUTO,):
        return program
    return program if math.prod(placement.sizes[axis] for axis in over) > 1 else drop_comms(program, say)


def drop_comms(program: Program, say: Callable[[str], None]) -> Program:
    """Return the program with plain sums of gradients, and report the change."""
    comms = program.comms
    setting = f"comms.local_steps={comms.local_steps}" if comms.local_steps > 1 else comms.active_setting
    say(
        f"{setting} pauses: of the job's processes {count_missing_processes()} are missing, and one replica is left. "
        "Gradients are added "
        f"up in float32 in every step until they are back"
    )
    return dataclasses.replace(program, comms=Comms())


def effective_verify_every(every: int, step: Any) -> int:
    """Return `verify.every`, or 0 while so few processes are left that there is no second device."""
    alone = isinstance(step, CompiledStep) and step.placement.devices.size < 2
    return 0 if alone and count_missing_processes() else every
