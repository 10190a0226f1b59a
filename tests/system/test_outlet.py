"""Who does not read holds up no work, and receives a count of dropped ones; one that has gone is not an error."""

import io
import os
import select
import time

from panax.system.outlet import Outlet


def pipe():
    reading, writing = os.pipe()
    return reading, os.fdopen(writing, "w", encoding="utf-8")


def all_of(reading):
    found = b""
    while data := os.read(reading, 1 << 16):
        found += data
    os.close(reading)
    return found.decode()


def test_text_comes_in_its_order():
    reading, stream = pipe()
    stream.write("before\n")
    outlet = Outlet(stream)
    for number in range(100):
        outlet.write(f"{number} é\n")
    outlet.close(20)
    stream.close()
    assert all_of(reading) == "before\n" + "".join(f"{number} é\n" for number in range(100))


def test_a_stream_that_nobody_reads_holds_nothing_up_and_what_is_left_out_is_counted():
    reading, stream = pipe()
    outlet = Outlet(stream, max_waiting=10_000)
    began = time.monotonic()
    for number in range(20_000):
        outlet.write(f"line {number:010}\n")
    outlet.close(0.1)
    assert time.monotonic() - began < 10
    data, written, left_out = b"", 0, 0
    # While the pipe still took some, there was room again and again: several lines count what was left out.
    while written + left_out < 20_000 and select.select([reading], [], [], 20)[0]:
        data += os.read(reading, 1 << 16)
        lines = data[: data.rfind(b"\n") + 1].decode().splitlines()
        written = len([line for line in lines if line.startswith("line")])
        left_out = sum(int(line.split()[1].replace(",", "")) for line in lines if "left out" in line)
    stream.close()
    os.close(reading)
    assert written + left_out == 20_000 and left_out > 10_000


def test_a_stream_that_has_gone_takes_nothing_more():
    reading, stream = pipe()
    os.close(reading)
    outlet = Outlet(stream)
    outlet.write("nobody\n")
    outlet.close(20)
    assert outlet.gone
    outlet.write("nobody\n")
    stream.close()


def test_a_stream_without_a_descriptor_is_written_at_once():
    stream = io.StringIO()
    outlet = Outlet(stream)
    outlet.write("here\n")
    assert stream.getvalue() == "here\n"
    outlet.close()
    stream.close()
    outlet.write("gone\n")
    assert outlet.gone
