"""Joining the processes of a job, no matter how they were started."""

import atexit
import dataclasses
import importlib.metadata
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

from ..core.errors import JoinError, RecipeError
from .membership import LOOPBACK, Membership, bracket_host, detect_membership, split_address
from .rendezvous import RendezvousInfo, rendezvous

SECONDS = "PANAX_JOIN_SECONDS"
"""Environment variable with the time for which processes wait for each other."""

SECRET = "PANAX_SECRET"
"""Environment variable with the secret of a job, by which its processes authenticate each other."""

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
"""Environment variables, in upper or lower case, by which gRPC uses a proxy."""

PROXY_FREE = "no_grpc_proxy"
"""Environment variable that names the hosts which gRPC reaches without a proxy."""

_USUAL_SECONDS = 60.0

_joined: Membership | None = None


def join(
    coordinator: str | None = None,
    *,
    processes: int | None = None,
    index: int | None = None,
    bind: str | None = None,
) -> Membership | None:
    """Join the processes of a job, before JAX is used: afterwards `jax.devices()` are the devices of all processes.

    Without arguments the job is read from the environment: that of `panax launch`, torchrun, `srun`, or
    `mpirun`. A single process joins nothing. A second call changes nothing.

        panax.join()
        panax.join("node1:7733", processes=4, index=0)

    Args:
        coordinator: "host:port" of process 0, with a port that is free on its host; the same in every process.
        processes: Number of processes.
        index: Index of this process, from 0.
        bind: Address at which process 0 listens; by default that of the coordinator's host.

    Returns:
        This process's membership of the job; None for a single process.

    Raises:
        RecipeError: The arguments or the environment are contradictory, JAX runs already, or process 0 can't
            listen.
        JoinError: The other processes did not arrive within 60 seconds, or within `PANAX_JOIN_SECONDS`.
    """  # fmt: skip
    import jax

    global _joined
    place = _requested_membership(coordinator, processes, index, bind)
    if _joined is not None:
        if place is not None and place != _joined:
            raise RecipeError(
                f"panax.join() has already joined as {_joined} and can't join again as {place}; call it once"
            )
        return _joined
    if place is None or jax.distributed.is_initialized():
        # A process that has called jax.distributed.initialize has joined already.
        return None
    _initialize(place)
    _joined = place
    return place


def is_joined() -> bool:
    """Return True if this process has joined others."""
    return _joined is not None


def num_local_processes() -> int:
    """Return the number of the job's processes on this host, as far as their launcher reports it; else 1."""
    if _joined is None:
        return 1
    on_loopback = split_address(_joined.coordinator, "coordinator")[0] in LOOPBACK
    return _joined.local_processes or (_joined.processes if on_loopback else 1)


def this_membership() -> Membership | None:
    """Return this process's membership of a job, read from the environment."""
    return detect_membership(os.environ)


def check_single_process(action: str) -> None:
    """Check that this is a single process.

    Raises:
        RecipeError: According to the environment, this is one of several processes, which would repeat the work.
    """
    membership = this_membership()
    if membership is not None:
        raise RecipeError(
            f"{action} runs in one process, and this is {membership}; run it once, without a launcher of several processes"
        )


def _requested_membership(
    coordinator: str | None, processes: int | None, index: int | None, bind: str | None
) -> Membership | None:
    if coordinator is None and processes is None and index is None:
        membership = this_membership()
        return membership if membership is None or bind is None else dataclasses.replace(membership, bind=bind)
    if coordinator is None or processes is None or index is None:
        raise RecipeError("join takes a coordinator, processes and index together, or none of them")
    if processes == 1 and index == 0:
        return None
    return Membership(coordinator=coordinator, processes=processes, index=index, bind=bind)


def _initialize(place: Membership) -> None:
    import jax

    from ..core.jax_internals import connect_over_loopback, is_backend_initialized, skip_preemption_wait_at_exit

    if is_backend_initialized():
        raise RecipeError(
            f"this is {place}, and JAX has been used before the processes were joined; call panax.join() before anything "
            f"that makes an array or asks for devices, at the top of the recipe's file"
        )
    seconds = join_seconds(os.environ)
    address = listening_address(place) if place.index == 0 else place.coordinator
    roll = RendezvousInfo(place, _facts(), seconds, os.environ.get(SECRET, "").encode())
    rendezvous(roll, address)
    host, _ = split_address(place.coordinator, "the coordinator")
    if any(name.lower() in PROXIES for name in os.environ):
        os.environ[PROXY_FREE] = _without_proxy(os.environ, host)
    if not os.environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if host in LOOPBACK:
            # All processes are on this host, and its name may not resolve.
            connect_over_loopback()
    try:
        jax.distributed.initialize(
            # The host's name may resolve elsewhere to an address at which process 0 does not listen.
            address if place.index == 0 and not _is_wildcard(address) else place.coordinator,
            place.processes,
            place.index,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(seconds)),
            coordinator_bind_address=address,
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise JoinError(f"JAX could not join {place} at {place.coordinator}: {reason}") from error
    # Before JAX's own actions at exit, since it is registered after them.
    atexit.register(skip_preemption_wait_at_exit)


def _without_proxy(environment: Mapping[str, str], host: str) -> str:
    """Return the hosts that gRPC reaches without the proxy of `http_proxy`, including the coordinator.

    >>> _without_proxy({"no_proxy": "a.b,c"}, "127.0.0.1")
    'a.b,c,127.0.0.1'
    """
    before = environment.get(PROXY_FREE) or environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    return ",".join([*filter(None, before.split(",")), host.strip("[]")])


def join_seconds(environment: Mapping[str, str]) -> float:
    """Return the time to wait for the other processes.

    >>> join_seconds({"PANAX_JOIN_SECONDS": "5"})
    5.0
    """
    text = environment.get(SECONDS) or str(_USUAL_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise RecipeError(f"{SECONDS} is {text!r}; expected seconds, 1 to 86400")
    return seconds


def listening_address(place: Membership) -> str:
    """Return the address at which process 0 listens: loopback if the coordinator is there, else one address
    of this host, never all of them.

    Raises:
        RecipeError: The coordinator's name does not resolve here, or does not determine this host's address.
    """
    host, port = split_address(place.coordinator, "the coordinator")
    if place.bind is not None:
        named = place.bind if place.bind.rpartition(":")[2].isdecimal() and place.bind.count(":") in (1,) else ""
        if named or place.bind.startswith("["):
            split_address(place.bind, "bind")
            return place.bind
        return f"{bracket_host(place.bind)}:{port}"
    if host in LOOPBACK:
        return f"{'[::1]' if '::1' in host else '127.0.0.1'}:{port}"
    try:
        resolved = [entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise RecipeError(
            f"the coordinator's host {host} can't be resolved here ({error.strerror}); pass its address, or set PANAX_BIND"
        ) from error
    addresses = [str(each).partition("%")[0] for each in resolved]
    outside = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    if not outside and place.local_processes != place.processes:
        # For example if /etc/hosts maps the host's name to 127.0.1.1, which means another host elsewhere.
        outside = _own_addresses()
        if len(outside) != 1:
            raise RecipeError(
                f"the coordinator's name {host} is {addresses[0]} on its own host, which other hosts can't reach; set "
                f"PANAX_BIND on process 0 to its address in the job's network: {', '.join(outside) or 'none is up here'}"
            )
    return f"{bracket_host((outside or addresses)[0])}:{port}"


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host's network interfaces, except loopback."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        each.address
        for name in sorted(up)
        for each in psutil.net_if_addrs().get(name, ())
        if each.family == socket.AF_INET
    ]
    return [each for each in addresses if not ipaddress.ip_address(each).is_loopback]


def _is_wildcard(address: str) -> bool:
    return address.rpartition(":")[0] in ("0.0.0.0", "[::]")


def _facts() -> dict[str, str]:
    """Return the facts that must be the same in all processes of a job."""
    # Imported, it would be a room below this one.
    version = sys.modules[__name__.partition(".")[0]].__version__
    return {"panax": version, **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}}
