"""Errors of commands: one message, advice, and an exit code; a traceback only on request."""

import errno
import os
import sys
import traceback

from ..core.errors import PanaxError
from ..core.sanitize import make_printable
from ..job.heartbeat import heartbeat

TRACEBACK = "--traceback"

MEMORY_ADVICE = (
    "use more --step.micro-batches, --task.remat full, a smaller --data.batch-size or --data.sequence-length, or shard over more "
    "devices with --mesh.fsdp"
)


def warn(line: str) -> None:
    """Print a warning that does not end the command."""
    print(f"panax: {line}", file=sys.stderr)


def report_error(error: BaseException, *, with_traceback: bool) -> int:
    """Print the single message of an error to standard error; return its exit code."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output has gone (`panax recipes | head`): the final flush needs another target.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if with_traceback:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("panax: stopped at once; the last checkpoint is intact", file=sys.stderr)
        return 130
    message = format_error(error)
    code = error.exit_code if isinstance(error, PanaxError) else 1
    heartbeat().error(error, message, code)
    print(f"panax: error: {make_printable(message)}", file=sys.stderr)
    return code


def format_error(error: BaseException) -> str:
    """Return an error's message, with advice."""
    if isinstance(error, PanaxError):
        notes = [f"  {note}" for note in getattr(error, "__notes__", ()) if note.startswith("in model part")]
        return "\n".join([str(error), *notes])
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return f"out of memory; {MEMORY_ADVICE}"
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of device memory: {first}; {MEMORY_ADVICE}"
    kind = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        file_text = f": {error.filename!r}" if error.filename else ""
        return f"{error.strerror}{file_text}; check that the path exists, may be used, and has room. {_where(error)}"
    return f"{kind}. {_where(error)}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    location = f"It comes from {frames[-1].filename}, line {frames[-1].lineno}. " if frames else ""
    return f"{location}Run the same command with {TRACEBACK} to see how it came about"
