"""Uses of private JAX APIs; the only file that may contain any. Written against jax 0.10.2 and 0.12.0."""

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

original_compile = compiler.compile_or_get_cached
"""JAX's function that returns an executable: from its persistent cache if enabled, otherwise compiled."""


def is_backend_initialized() -> bool:
    """Return True if JAX has initialized its devices, after which processes can no longer join."""
    return xla_bridge.backends_are_initialized()


def connect_over_loopback() -> bool:
    """Make processes on CPUs connect over loopback instead of this host's name; return False if this JAX
    version connects differently.
    """
    library = getattr(xla_bridge, "_jax", None)
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if library is None or make is None:
        return False
    library.make_gloo_tcp_collectives = functools.partial(make, hostname="127.0.0.1")
    return True


def skip_preemption_wait_at_exit() -> None:
    """Do not wait for JAX's preemption service at exit: after a SIGTERM past the last step, it waits for
    processes that have left.

    Its resources stay allocated until the process ends, since one of its threads may continue; the client is
    shut down as usual.
    """
    state = distributed.global_state
    manager, client = state.preemption_sync_manager, state.client
    if manager is None:
        return
    for kept in (manager, client):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.preemption_sync_manager = None


def coordination_client() -> Any:
    """Return the client of the job's coordination service, which has a key-value store; None for a single
    process.
    """
    return distributed.global_state.client


def replace_compile(compile_: Callable[..., Any]) -> bool:
    """Make JAX call `compile_` instead of `original_compile`, with the same arguments; return False if this JAX
    version's signature differs.
    """
    if tuple(inspect.signature(original_compile).parameters) != _PARAMETERS:
        return False
    compiler.compile_or_get_cached = compile_
    return True


def is_cacheable(backend: Any, host_callbacks: Any) -> bool:
    """Return True if a program runs on devices of this process and compiles to the same result from the same
    text.

    Programs for devices that are not attached cannot be deserialized, Python callbacks are addresses in this
    process, and profile-guided optimization changes the program.
    """
    guided = config.enable_pgle.value or config.compilation_cache_expect_pgle.value
    return type(backend) is xla_client.Client and not host_callbacks and not guided


def program_key(computation: Any, devices: np.ndarray, options: Any, backend: Any) -> str | None:
    """Return a hash of everything that determines a program except the machine, equal in every process; None
    if JAX cannot compute one.

    JAX's own cache key contains the machine's topology. On CPUs this identifies the requesting process, so
    other processes would wait for a program that never arrives. A program of one device has the same key on
    each device.
    """
    if devices.size == 1 and options.device_assignment is not None:
        options = copy.deepcopy(options)
        options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), np.int64))
    try:
        if backend.platform != "cpu":
            return compilation_cache.get_cache_key(computation, devices, options, backend)
        digest = hashlib.sha256()
        # An enum in 0.10.2, a bool in 0.12.0.
        ignored: Any = cache_key.IgnoreCallbacks.NO if hasattr(cache_key, "IgnoreCallbacks") else False
        cache_key._hash_computation(digest, computation, ignored)
        cache_key._hash_platform(digest, backend)
        cache_key._hash_xla_flags(digest, cache_key.get_flag_prefixes())
        cache_key._hash_serialized_compile_options(digest, options)
        return digest.hexdigest()
    except RuntimeError:  # JAX itself skips its cache in this case.
        return None


def compile_uncached(backend: Any, computation: Any, executable_devices: Any, options: Any, host_callbacks: Any) -> Any:
    """Compile an executable, bypassing all caches."""
    return compiler.backend_compile_and_load(backend, computation, executable_devices, options, host_callbacks)


def load_executable(backend: Any, program: bytes, executable_devices: Any, options: Any) -> Any:
    """Deserialize an executable onto these devices."""
    return backend.deserialize_executable(program, executable_devices, options)
