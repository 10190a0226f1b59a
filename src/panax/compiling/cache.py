"""Compilation of each program once: cached on disk for the next start, and by one process of a job for the
others.

A program that spans several processes is compiled or read by the one with the lowest index, which sends it to
the others by JAX's coordination service. After a failure it sends an empty result, so that no process waits in
vain.
"""

import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..core import jax_internals as internals
from ..core.errors import RecipeError
from ..job.join import SECRET
from ..system import json_reader
from ..system.cache_directory import cache_directory
from ..system.cpu_info import describe_processor
from .program_files import ProgramFiles

GIGABYTES = "PANAX_COMPILATION_CACHE_GB"
"""Environment variable that bounds the folder of compiled programs; 0 disables it."""

_USUAL_GIGABYTES = 10.0
_PART_BYTES = 1 << 20
_ASK_MILLISECONDS = 5000
_WAIT_SECONDS = 1200.0
"""Maximum wait for a program that another process compiles; then each compiles its own."""


@dataclasses.dataclass(frozen=True)
class CompilationStats:
    """Statistics of this process's compilations since its start.

    Attributes:
        hits: Programs read from disk.
        received: Programs received from another process of the job.
        misses: Programs compiled.
        seconds: Time for all programs, including waits.
        longest: Programs with the longest compilations: (name, seconds).
    """

    hits: int = 0
    received: int = 0
    misses: int = 0
    seconds: float = 0.0
    longest: tuple[tuple[str, float], ...] = ()


class _Compiler:
    """Function that JAX calls to compile each program."""

    def __init__(self, files: ProgramFiles | None, say: Callable[[str], None]):
        self.files, self.say = files, say
        self.done = CompilationStats()
        self._lock = threading.Lock()
        self._published: set[str] = set()
        self._alike: dict[int, bool] = {}
        self._hits_of_jax = 0
        jax.monitoring.register_event_listener(self._count_cache_hit)

    def __call__(
        self,
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        host_callbacks: Any,
        executable_devices: Any,
        pgle_profiler: Any = None,
    ) -> Any:
        def by_jax() -> Any:
            return internals.original_compile(
                backend, computation, devices, compile_options, host_callbacks, executable_devices, pgle_profiler
            )

        start, name = time.perf_counter(), str(computation.operation.attributes["sym_name"]).strip('"')
        job = _Job(self, name, backend, computation, devices, compile_options, host_callbacks, executable_devices)
        is_cacheable = internals.is_cacheable(backend, host_callbacks)
        key = internals.program_key(computation, devices, compile_options, backend) if is_cacheable else None
        executable, kind = (by_jax(), "misses") if key is None else self._obtain(job, key, by_jax)
        self._count(kind, name, time.perf_counter() - start)
        return executable

    def _obtain(self, job: "_Job", key: str, by_jax: Callable[[], Any]) -> tuple[Any, str]:
        processes = sorted({device.process_index for device in job.devices.flat})
        client, process = internals.coordination_client(), jax.process_index()
        shared = client is not None and len(processes) > 1 and process in processes
        if shared and process != processes[0] and self._is_alike(client, processes[0]):
            executable, _ = self._read(job, key)
            if executable is not None:
                return executable, "hits"
            program = self._receive(client, key)
            executable = None if program is None else self._load(job, program)
            if program is not None and executable is not None:
                self._store(key, program)
                return executable, "received"
        publishes, program = shared and process == processes[0], None
        try:
            executable, kind, program = self._read_or_compile(job, key, by_jax)
            return executable, kind
        finally:
            # Also if it failed, or came from a cache of JAX.
            if publishes:
                self._publish(client, key, program)

    def _read_or_compile(self, job: "_Job", key: str, by_jax: Callable[[], Any]) -> tuple[Any, str, bytes | None]:
        """Read the executable from disk, or compile and store it; return it, "hits" or "misses", and its
        bytes for others.

        The bytes are those of a fresh executable. On CPU, a loaded one serializes to other bytes, which lack
        functions (jax 0.10.2).
        """
        if self.files is None:
            hits = self._hits_of_jax
            executable = by_jax()
            return (
                (executable, "misses", executable.serialize())
                if self._hits_of_jax == hits
                else (executable, "hits", None)
            )
        executable, program = self._read(job, key)
        if executable is not None:
            return executable, "hits", program
        executable = job.compile()
        program = executable.serialize()
        self._store(key, program)
        return executable, "misses", program

    def _store(self, key: str, program: bytes) -> None:
        """Store a program on disk for the next start, unless another process of this host has done so."""
        if self.files is None or self.files.has(key):
            return
        try:
            self.files.put(key, zlib.compress(program, 1))
        except OSError as error:
            self.say(f"warning: compiled programs are not kept any more: {error}")
            self.files = None

    def _read(self, job: "_Job", key: str) -> tuple[Any, bytes | None]:
        """Read the executable on disk, and its bytes."""
        if self.files is None:
            return None, None
        damaged = self.files.damaged
        try:
            data = self.files.get(key)
        except OSError as error:
            self.say(f"warning: compiled programs are not read any more: {error}")
            self.files = None
            return None, None
        if self.files.damaged > damaged:
            self.say(f"warning: a compiled program was damaged on disk, and is compiled again: {job.name}")
        if data is None:
            return None, None
        program = zlib.decompress(data)
        executable = self._load(job, program)
        if executable is None:
            self.files.remove(key)
        return executable, program

    def _load(self, job: "_Job", program: bytes) -> Any:
        try:
            return job.load(program)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self.say(f"warning: {job.name} could not be loaded, and is compiled again: {reason}")
            return None

    # Messages between the processes of a job. Keys are written once, and read by any number of processes.

    def _is_alike(self, client: Any, other: int) -> bool:
        """Return True if programs compiled by another process run here and equal those that this process
        would compile."""
        if other not in self._alike:
            theirs = _wait_for_value(client, f"panax/kind/{other}", _WAIT_SECONDS)
            self._alike[other] = theirs == process_fingerprint().encode()
        return self._alike[other]

    def introduce(self) -> None:
        """Publish a description of this process's target to the other processes of the job."""
        client = internals.coordination_client()
        if client is not None:
            client.key_value_set_bytes(f"panax/kind/{jax.process_index()}", process_fingerprint().encode())

    def _publish(self, client: Any, key: str, program: bytes | None) -> None:
        """Send a program to the other processes; None makes each of them compile it."""
        if key in self._published:
            return
        self._published.add(key)
        data = b"" if program is None else zlib.compress(program, 1)
        parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
        for number, part in enumerate(parts):
            client.key_value_set_bytes(f"panax/program/{key}/{number}", part)
        header = {"parts": len(parts), "proof": _proof(key, data)}
        client.key_value_set_bytes(f"panax/program/{key}", json.dumps(header).encode())

    def _receive(self, client: Any, key: str) -> bytes | None:
        """Receive a program from another process; None if that process has none, or it did not arrive in
        time."""
        header_bytes = _wait_for_value(client, f"panax/program/{key}", _WAIT_SECONDS)
        if header_bytes is None:
            self.say(f"warning: another process did not give a program within {_WAIT_SECONDS:g} s; it is compiled here")
            return None
        try:
            header = json_reader.parse_as(dict, header_bytes)
            count, proof = range(int(header["parts"])), str(header["proof"])
        except (ValueError, KeyError, TypeError):
            count, proof = range(0), ""
        parts = (_wait_for_value(client, f"panax/program/{key}/{number}", 60.0) or b"" for number in count)
        data = b"".join(itertools.takewhile(bool, parts))
        if not hmac.compare_digest(proof.encode(), _proof(key, data).encode()):
            self.say(
                "warning: a program from another process is incomplete or belongs to another job; compiling it here"
            )
            return None
        return zlib.decompress(data) if data else None

    def _count_cache_hit(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self._hits_of_jax += 1

    def _count(self, kind: str, name: str, seconds: float) -> None:
        with self._lock:
            done = self.done
            longest = done.longest
            if kind == "misses":
                longest = tuple(sorted((*longest, (name, seconds)), key=lambda each: -each[1])[:8])
            more: dict[str, Any] = {kind: getattr(done, kind) + 1}
            self.done = dataclasses.replace(done, seconds=done.seconds + seconds, longest=longest, **more)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A program to be compiled."""

    compiler: _Compiler
    name: str
    backend: Any
    computation: Any
    devices: Any
    options: Any
    host_callbacks: Any
    executable_devices: Any

    def compile(self) -> Any:
        return internals.compile_uncached(
            self.backend, self.computation, self.executable_devices, self.options, self.host_callbacks
        )

    def load(self, program: bytes) -> Any:
        return internals.load_executable(self.backend, program, self.executable_devices, self.options)


_compiler: _Compiler | None = None


def install_compile_cache(say: Callable[[str], None]) -> None:
    """Cache compiled programs on disk from now on, and compile those of several processes in one of them.

    A cache that the user has configured for JAX is preserved. A second call changes nothing.

    Args:
        say: Called with a line if the folder can't be used; the run continues without it.
    """
    global _compiler
    if _compiler is not None:
        _compiler.say = say
        return
    files = _files(say)
    if files is None and jax.process_count() == 1:
        return
    compiler = _Compiler(files, say)
    if not internals.replace_compile(compiler):
        say(
            f"warning: compiled programs are not cached: JAX {jax.__version__} compiles in a way that Panax does not support"
        )
        return
    _compiler = compiler
    compiler.introduce()


def compilation_stats() -> CompilationStats:
    """Return the number of programs that this process compiled, read and received so far; zeros without
    `install_compile_cache`."""
    return CompilationStats() if _compiler is None else _compiler.done


def max_bytes() -> int:
    """Return the maximum size of the folder of compiled programs, in bytes.

    Raises:
        RecipeError: `PANAX_COMPILATION_CACHE_GB` is not a number from 0.
    """
    text = os.environ.get(GIGABYTES) or str(_USUAL_GIGABYTES)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < 1e6:
        raise RecipeError(f"{GIGABYTES} is {text!r}; expected gigabytes, from 0 (off)")
    return int(gigabytes * 1e9)


def process_fingerprint() -> str:
    """Return a hash of everything, apart from their text, that compiled programs depend on: the processor,
    the versions and XLA's flags."""
    from importlib.metadata import version

    panax = sys.modules[__name__.partition(".")[0]].__version__
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")).split()
    # The number of simulated devices is part of each program.
    flags = sorted(flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count"))
    parts = (describe_processor(), panax, version("jax"), version("jaxlib"), *flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _files(say: Callable[[str], None]) -> ProgramFiles | None:
    chosen = jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]
    bound = max_bytes()
    if chosen or not bound:
        return None
    root = Path(cache_directory()) / "programs"
    try:
        return ProgramFiles(root, process_fingerprint(), bound)
    except OSError as error:
        say(f"warning: compiled programs are not kept in {root}: {error}; choose another folder with $PANAX_CACHE")
        return None


def _wait_for_value(client: Any, key: str, seconds: float) -> bytes | None:
    """Wait for a value of the coordination service; None if it does not arrive."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return client.blocking_key_value_get_bytes(key, _ASK_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            # Requested repeatedly with short time-outs, between which signals are handled.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None


def _proof(key: str, data: bytes) -> str:
    return hmac.new(os.environ.get(SECRET, "").encode(), key.encode() + b"\n" + data, hashlib.sha256).hexdigest()
