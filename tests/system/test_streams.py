"""Standard streams of a command: there in any case, of every letter, and no reason for work to end or to wait."""

import os
import pty
import subprocess
import sys
import time

import pytest

WORK = """
import sys
from pathlib import Path
from panax.system.streams import tolerate_output_errors, write_last_words, repair_streams
repair_streams()
with tolerate_output_errors():
    for number in range(LINES):
        print(f"line {number} é", flush=True)
        print("said", file=sys.stderr)
    sys.stdout.buffer.write(b"bytes\\n")
Path(sys.argv[1]).write_text("done")
"""


def work(tmp_path, *, lines=50, before=(), **how):
    done = tmp_path / "done"
    command = [*before, sys.executable, "-c", WORK.replace("LINES", str(lines)), str(done)]
    process = subprocess.run(command, timeout=60, check=False, **how)
    return process, done.exists()


def test_what_is_printed_comes_in_its_order_and_encoding(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    process, done = work(tmp_path, capture_output=True, env=environment)
    expected = "".join(f"line {number} é\n" for number in range(50)) + "bytes\n"
    assert done and process.returncode == 0
    assert process.stdout.decode("latin-1") == expected and process.stderr == b"said\n" * 50


def test_what_is_flushed_comes_before_what_others_write(tmp_path):
    code = (
        "import os, sys\n"
        "from panax.system.streams import tolerate_output_errors\n"
        "with tolerate_output_errors():\n"
        "    for number in range(50):\n"
        "        print('out', number, flush=True)\n"
        "        print('err', number, file=sys.stderr, flush=True)\n"
        "        os.write(1, f'other {number}\\n'.encode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "".join(f"out {n}\nerr {n}\nother {n}\n" for n in range(50))


def test_letters_that_an_encoding_lacks_come_as_codes(tmp_path):
    process, done = work(tmp_path, lines=1, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done and process.stdout == b"line 0 \\xe9\nbytes\n"


def test_work_continues_where_a_disk_is_full(tmp_path):
    with open("/dev/full", "wb") as full:
        process, done = work(tmp_path, stdout=full, stderr=full)
    assert done and process.returncode == 0


def test_work_continues_without_standard_streams(tmp_path):
    process, done = work(tmp_path, before=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    assert done and process.returncode == 0


def test_work_continues_where_nobody_reads(tmp_path):
    controller, terminal = pty.openpty()
    began = time.monotonic()
    try:
        process, done = work(tmp_path, lines=20_000, stdout=terminal, stderr=terminal)
    finally:
        os.close(controller)
        os.close(terminal)
    assert done and process.returncode == 0 and time.monotonic() - began < 40


def test_work_continues_where_the_reader_has_gone(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process, done = work(tmp_path, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done and process.returncode == 0 and b"Broken" not in process.stderr


def test_a_file_never_takes_a_closed_streams_number(tmp_path):
    code = (
        "import os\n"
        "from panax.system.streams import repair_streams\n"
        "repair_streams()\n"
        "assert os.open(os.devnull, os.O_RDONLY) > 2\n"
        "os.write(2, b'lost')\n"
    )

    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(command, timeout=60, check=True)


@pytest.mark.parametrize("wrapped", [False, True])
def test_last_words_are_heard_before_a_process_ends_at_once(wrapped):
    code = (
        "import contextlib, os, sys\n"
        "from panax.system.streams import tolerate_output_errors, write_last_words\n"
        f"with tolerate_output_errors() if {wrapped} else contextlib.nullcontext():\n"
        "    print('before', file=sys.stderr)\n"
        "    write_last_words('the end\\n')\n"
        "    os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and done.stderr == "before\nthe end\n"
