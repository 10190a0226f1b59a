"""Script that forwards lines of standard input to standard output, except harmless ones; it outlives a
process that is aborted.

    python -I -S pass_lines.py HELD PART...

HELD: "" forwards each line immediately. Otherwise all lines are held until the end of the input, and dropped
if the last line is HELD.
PART: Fragment of the lines to drop.
"""  # fmt: skip

import os
import sys


def main() -> None:
    held, *parts = map(os.fsencode, sys.argv[1:])
    waiting: list[bytes] = []
    for line in sys.stdin.buffer:
        if any(part in line for part in parts):
            continue
        waiting.append(line)
        if not held:
            _put(waiting.pop())
    if held and waiting and waiting[-1].strip() == held:
        return
    for line in waiting:
        _put(line)


def _put(line: bytes) -> None:
    try:
        while line:
            line = line[os.write(1, line) :]
    except OSError:  # its reader has ended, or its disk is full
        return


if __name__ == "__main__":
    main()
