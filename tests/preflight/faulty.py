"""`panax check` in several processes, each with a fault of its own: another clock, another library, a network that is slow."""

import collections
import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launching import environment, free_port, one_job_at_a_time

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
/* A clock that is ahead by CLOCK_AHEAD seconds, for whoever asks for the time of day. */
static long ahead(void) { const char *s = getenv("CLOCK_AHEAD"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, at);
    if (which == CLOCK_REALTIME) at->tv_sec += ahead();
    return result;
}
"""


def clock_library(folder: Path) -> Path:
    """A library to preload into a process, to set its clock off."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def odd_library(folder: Path, name: str, version: str) -> Path:
    """A folder for PYTHONPATH, in which a library has another version."""
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def checked(
    folder: Path,
    processes: int,
    arguments: Sequence[str] = (),
    *,
    prefixes: Mapping[int, Sequence[str]] | None = None,
    variables: Mapping[int, Mapping[str, str]] | None = None,
    address: str = "127.0.0.1",
    seconds: float = 120,
) -> dict[str, Any]:
    """What `panax check --json` printed in process 0 of several.

    Args:
        prefixes: What runs a process's command, by its number.
        variables: Of its environment, beside those of all.
        address: Where process 0 listens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, children = free_port(), []
    base = environment(1, Path(__file__).parent) | {"PANAX_CACHE": str(folder / "cache")}
    base["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    command = [sys.executable, "-m", "panax", "check", "--json", *arguments]
    with one_job_at_a_time():
        for index in range(processes):
            process_variables = dict((variables or {}).get(index, {}))
            if "PYTHONPATH" in process_variables:
                process_variables["PYTHONPATH"] = os.pathsep.join([process_variables["PYTHONPATH"], base["PYTHONPATH"]])
            place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            place |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            env = base | {name: str(value) for name, value in place.items()} | process_variables
            with open(folder / f"{index}.out", "w") as out, open(folder / f"{index}.err", "w") as err:
                run = [*(prefixes or {}).get(index, ()), *command]
                children.append(subprocess.Popen(run, stdout=out, stderr=err, env=env, cwd=folder))
        deadline = time.monotonic() + seconds
        try:
            codes = [child.wait(max(1, deadline - time.monotonic())) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
    errors = "\n".join((folder / f"{index}.err").read_text()[-2000:] for index in range(processes))
    assert codes == [0] * processes, f"exit codes {codes}\n{errors}"
    # JSON and nothing else, whatever the libraries in C say.
    assert not any((folder / f"{index}.out").read_text() for index in range(1, processes))
    return json.loads((folder / "0.out").read_text())


def kinds(found: Mapping[str, Any]) -> set[str]:
    return {each["kind"] for each in found["findings"]}


def of_kind(found: Mapping[str, Any], kind: str) -> list[dict[str, str]]:
    return [each for each in found["findings"] if each["kind"] == kind]


class Hosts:
    """Network namespaces that are joined by a bridge, each with a name and an address, as hosts of a cluster are.

    It takes root. Names are resolved by a hosts file of their own.
    """

    def __init__(self, folder: Path, count: int, delays: Mapping[int, float]):
        self.delays, self.relays = delays, []
        self.tag = f"px{os.getpid()}"
        self.count, self.bridge = count, f"{self.tag}b"
        self.hosts = folder / "hosts"
        self.addresses = [f"10.213.7.{index + 1}" for index in range(count)]
        lines = ["127.0.0.1 localhost", *(f"{each} host{i}" for i, each in enumerate(self.addresses))]
        self.hosts.write_text("\n".join(lines) + "\n")

    def name(self, index: int) -> str:
        return f"{self.tag}n{index}"

    def start(self) -> None:
        _remove_leftovers()
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"link set {self.bridge} up")
        for index, address in enumerate(self.addresses):
            name = self.name(index)
            _ip(f"netns add {name}")
            if index in self.delays:
                self.relays.append(Relay(f"{name}v", f"{name}t", self.delays[index]))
                _ip(f"link set {name}t netns {name} name eth0")
            else:
                _ip(f"link add {name}v type veth peer name eth0 netns {name}")
            _ip(f"link set {name}v master {self.bridge} up")
            _ip(f"-n {name} addr add {address}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    def limit(self, index: int, megabits: float) -> None:
        """Have a host send no more than so much a second."""
        shape = f"root tbf rate {megabits}mbit burst 64kb latency 400ms"
        subprocess.run(["ip", "netns", "exec", self.name(index), *f"tc qdisc add dev eth0 {shape}".split()], check=True)

    def limit_to(self, index: int, other: int, megabits: float) -> None:
        """Have a host send no more than so much a second to one other host."""
        for words in (
            "qdisc add dev eth0 root handle 1: htb default 2",
            "class add dev eth0 parent 1: classid 1:1 htb rate 100gbit",
            "class add dev eth0 parent 1:1 classid 1:2 htb rate 100gbit",
            f"class add dev eth0 parent 1:1 classid 1:3 htb rate {megabits}mbit burst 64kb",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {self.addresses[other]} flowid 1:3",
        ):
            subprocess.run(["ip", "netns", "exec", self.name(index), "tc", *words.split()], check=True)

    def free(self, index: int) -> None:
        """Let a host send as fast as it can again."""
        words = ["tc", "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(["ip", "netns", "exec", self.name(index), *words], check=True)

    def cut(self, index: int) -> None:
        """Pull a host's cable."""
        _ip(f"link set {self.name(index)}v down")

    def prefix(self, index: int) -> list[str]:
        """What runs a command on a host."""
        inside = f'mount --bind {shlex.quote(str(self.hosts))} /etc/hosts && hostname host{index} && exec "$@"'
        return ["ip", "netns", "exec", self.name(index), "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]

    def stop(self) -> None:
        for relay in self.relays:
            relay.stop()
        for index in range(self.count):
            subprocess.run(["ip", "netns", "del", self.name(index)], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{self.name(index)}v"], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def _remove_leftovers() -> None:
    """Remove the hosts of tests that were killed: their bridges have the addresses of these."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    for pid in {pid for pid in re.findall(r"\bpx(\d+)[bn]", links) if not Path("/proc", pid).exists()}:
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        for name in re.findall(rf"\bpx{pid}n\d+", spaces):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"px{pid}b"], capture_output=True)


class Relay:
    """Two network devices of which each sends on what the other one receives, some time later."""

    def __init__(self, first: str, second: str, delay_seconds: float):
        self._delay = delay_seconds
        self._taps = [_tap(first), _tap(second)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        while not self._ended.is_set():
            left = waiting[0][0] - time.monotonic() if waiting else 0.1
            readable, _, _ = select.select(self._taps, [], [], max(0.0, min(left, 0.1)))
            for tap in readable:
                other = self._taps[1 - self._taps.index(tap)]
                waiting.append((time.monotonic() + self._delay, other, os.read(tap, 65536)))
            while waiting and waiting[0][0] <= time.monotonic():
                _, tap, frame = waiting.popleft()
                with contextlib.suppress(OSError):  # a device that is not up yet
                    os.write(tap, frame)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        for tap in self._taps:
            os.close(tap)


def _tap(name: str) -> int:
    """A new network device with frames that are read from, and written to, a file."""
    set_interface, tap, no_header = 0x400454CA, 0x0002, 0x1000
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, set_interface, struct.pack("16sH22x", name.encode(), tap | no_header))
    return descriptor


@contextlib.contextmanager
def hosts(folder: Path, count: int, delays: Mapping[int, float] | None = None) -> Iterator[Hosts]:
    """Hosts that are gone afterwards; what is sent to and from some of them comes so many seconds later."""
    found = Hosts(folder, count, delays or {})
    try:
        found.start()
        yield found
    finally:
        found.stop()


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
