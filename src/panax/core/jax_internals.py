"""What Panax takes of JAX that is private to it: the one file that may. Read in jax 0.10.2 and 0.12.0."""

import copy
import ctypes
import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import cache_key, compilation_cache, compiler, config, distributed, xla_bridge  # noqa: TID251
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage] # noqa: TID251

_PARAMETERS = (
    "backend", "computation", "devices", "compile_options", "host_callbacks", "executable_devices", "pgle_profiler",
)  # fmt: skip

original = compiler.compile_or_get_cached
"""JAX's own way to an executable: from its persistent cache, if that is on, or compiled."""


def backend_runs() -> bool:
    """Whether JAX has found its devices: from then on processes can't be joined any more."""
    return xla_bridge.backends_are_initialized()


def connect_over_loopback() -> bool:
    """Have processes on CPUs connect over loopback, and not by this host's name; False where this JAX connects them otherwise."""
    library = getattr(xla_bridge, "_jax", None)
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if library is None or make is None:
        return False
    library.make_gloo_tcp_collectives = functools.partial(make, hostname="127.0.0.1")
    return True


def leave_preemption_to_the_end() -> None:
    """At exit, don't wait for JAX's preemption service: where SIGTERM came after the last step, it waits for processes that left.

    What it uses stays until the process ends, since a thread of it may go on; the client is shut down as ever.
    """
    state = distributed.global_state
    manager, client = state.preemption_sync_manager, state.client
    if manager is None:
        return
    for kept in (manager, client):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.preemption_sync_manager = None


def coordination() -> Any:
    """The client of the job's coordination service, with a key-value store; None for a process alone."""
    return distributed.global_state.client


def replace_compiling(compile_: Callable[..., Any]) -> bool:
    """Have JAX call this in place of `original`, with the same arguments; False where this JAX calls it otherwise."""
    if tuple(inspect.signature(original).parameters) != _PARAMETERS:
        return False
    compiler.compile_or_get_cached = compile_
    return True


def is_plain(backend: Any, host_callbacks: Any) -> bool:
    """Whether a program runs on devices of this process, and is the same whenever it is compiled from the same text.

    Programs for devices that are not here can't be read back, Python callbacks are addresses in this process, and a profile
    that guides optimisation changes the program.
    """
    guided = config.enable_pgle.value or config.compilation_cache_expect_pgle.value
    return type(backend) is xla_client.Client and not host_callbacks and not guided


def key_of(computation: Any, devices: np.ndarray, options: Any, backend: Any) -> str | None:
    """A hash of all that decides a program but the machine, the same in every process; None where JAX can't make one.

    JAX's own has the machine's topology in it, which for CPUs names the process that asks, and would make others wait for a
    program that never comes. A program of one device has the same key on each.
    """
    if devices.size == 1 and options.device_assignment is not None:
        options = copy.deepcopy(options)
        options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), np.int64))
    try:
        if backend.platform != "cpu":
            return compilation_cache.get_cache_key(computation, devices, options, backend)
        found = hashlib.sha256()
        # An enumeration in 0.10.2, a flag in 0.12.0.
        ignored: Any = cache_key.IgnoreCallbacks.NO if hasattr(cache_key, "IgnoreCallbacks") else False
        cache_key._hash_computation(found, computation, ignored)
        cache_key._hash_platform(found, backend)
        cache_key._hash_xla_flags(found, cache_key.get_flag_prefixes())
        cache_key._hash_serialized_compile_options(found, options)
        return found.hexdigest()
    except RuntimeError:  # JAX's own way then is to go without its cache
        return None


def compile_uncached(backend: Any, computation: Any, executable_devices: Any, options: Any, host_callbacks: Any) -> Any:
    """An executable, whatever caches hold."""
    return compiler.backend_compile_and_load(backend, computation, executable_devices, options, host_callbacks)


def load_executable(backend: Any, program: bytes, executable_devices: Any, options: Any) -> Any:
    """The executable that `serialize` gave as bytes, on these devices."""
    return backend.deserialize_executable(program, executable_devices, options)
