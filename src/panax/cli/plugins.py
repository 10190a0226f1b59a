"""JAX's plugins for devices that are not present: they are not started, and their messages when they are
loaded are hidden.

The extra `aot` installs the plugins of NVIDIA's GPUs and of TPUs only for their compilers. On a machine
without these devices each start of JAX would show their errors, twenty lines in all.
"""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

from ..core.errors import RecipeError
from . import pass_lines

DEVICE_PATHS = {
    "xla_cuda": ("/dev/nvidia*", "/dev/dxg", "/dev/nvmap", "/dev/nvhost*"),
    "libtpu": ("/dev/accel*", "/dev/vfio/*"),
}
"""Plugins by name prefix; at least one of these Linux files exists if a plugin's devices do."""

VENDOR_IDS = {"xla_cuda": "0x10de", "libtpu": "0x1ae0"}
"""PCI vendor ids of the devices of a plugin. If such a device is present without a driver, the plugin's error is shown."""

HARMLESS_LINES = ("cudart_stub.cc", "before absl::InitializeLog() is called")
"""Fragments of lines that CUDA's plugin writes on a machine without a driver."""


LAST_WORDS_SECONDS = 2.0
"""Time to wait for a stream that is not read."""


@contextlib.contextmanager
def suppress_plugin_warnings(*, if_failed: bool = True) -> Iterator[None]:
    """Filter the error lines of absent devices' plugins from standard error while plugins are loaded.

    C libraries write these lines directly to the descriptor. Another process forwards the other lines, so that
    a library's output before an abort is not lost with this process.

    Args:
        if_failed: True to forward the other lines even if an exception ends the context, with a sufficient
            message of its own.
    """
    try:
        descriptor = sys.stderr.fileno()
        saved_stderr = os.dup(descriptor)
    except (OSError, ValueError, AttributeError):  # standard error is missing, or is not a file
        yield
        return
    end_marker = b"" if if_failed else f"panax: end of the output to suppress {secrets.token_hex(8)}\n".encode()
    command = [sys.executable, "-I", "-S", pass_lines.__file__, end_marker.decode().strip(), *HARMLESS_LINES]
    sys.stderr.flush()
    try:
        # In a separate session: Ctrl-C is for this process.
        forwarder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=saved_stderr, stderr=saved_stderr, start_new_session=True
        )
    except OSError:  # no more processes may be started here
        os.close(saved_stderr)
        yield
        return
    assert forwarder.stdin is not None
    os.dup2(forwarder.stdin.fileno(), descriptor)
    forwarder.stdin.close()
    try:
        yield
    except BaseException:
        sys.stderr.flush()
        os.write(descriptor, end_marker)
        raise
    finally:
        sys.stderr.flush()
        os.dup2(saved_stderr, descriptor)
        os.close(saved_stderr)
        with contextlib.suppress(subprocess.TimeoutExpired):
            forwarder.wait(LAST_WORDS_SECONDS)


def start_jax() -> None:
    """Initialize JAX's devices, without plugins' warnings; a recipe that joins several processes must join
    before.

    Raises:
        RecipeError: A platform in `JAX_PLATFORMS` has no device on this machine.
    """
    import jax

    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        with suppress_plugin_warnings(if_failed=not platforms):
            jax.devices()
    except Exception as error:
        if not platforms:
            raise
        first, _, _ = str(error).partition("\n")
        if "gloo" in first and "rv == 0" in first:
            raise RecipeError(
                f"processes on CPUs connect by their host's name, and {socket.gethostname()!r} does not resolve to an "
                f"address here; give it one in /etc/hosts"
            ) from error
        reason = f": {first}" if first else ""
        raise RecipeError(
            f"JAX_PLATFORMS={platforms} asks for a device that JAX does not find here; unset it, or set it to cpu{reason}"
        ) from error


def skip_absent_plugins() -> None:
    """Restrict JAX to the CPU if no platform is chosen, and all plugins are for devices that this machine
    certainly lacks."""
    if os.environ.get("JAX_PLATFORMS") or sys.platform != "linux":
        return
    plugins = _plugins()
    known = {each: next((name for name in DEVICE_PATHS if each.startswith(name)), None) for each in plugins}
    if plugins and all(name is not None and not _present(name) for name in known.values()):
        os.environ["JAX_PLATFORMS"] = "cpu"


def _plugins() -> set[str]:
    """Return the names of JAX's installed plugins, without importing them."""
    found = {entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")}
    folder = importlib.util.find_spec("jax_plugins")
    if folder is not None and folder.submodule_search_locations is not None:
        found |= {module.name for module in pkgutil.iter_modules(folder.submodule_search_locations)}
    return found | ({"libtpu"} if importlib.util.find_spec("libtpu") is not None else set())


def _present(plugin: str) -> bool:
    vendors = []
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            vendors.append(file.read().strip())
    return VENDOR_IDS[plugin] in vendors or any(map(glob.glob, DEVICE_PATHS[plugin]))
