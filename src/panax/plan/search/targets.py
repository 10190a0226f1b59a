"""Hardware that is not attached: its speeds, and devices that programs can be compiled for without it.

A target has Google's name, `v5p-64`, or a kind and a number of devices, `h100x64`. Google's number counts
cores for v4 and v5p, two per chip, and chips for v5e and v6e: `v5p-64` and `v5px32` are both 32 chips, which
are 32 devices. `v5e-256x4` is four slices of `v5e-256`, connected by the data center's network.
"""

import dataclasses
import math
import os
import re
from typing import Any

from ...core.errors import RecipeError, suggest_name
from ...core.install_hints import install_command
from ...core.layout.target import Target
from .gpu_descriptions import DESCRIPTIONS

GB = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Speeds of one kind of device, by its maker's figures.

    Attributes:
        memory_bytes: Memory of one device.
        peak_flops: FLOP/s of dense bfloat16 multiplications with float32 sums.
        memory_bandwidth: Bytes per second between a device's cores and its memory.
        fast_bandwidth: Bytes per second that a device sends to others of its fast domain, over all of its
            links together.
        slow_bandwidth: Bytes per second that a device sends to one outside of it, its share of the host's
            network.
        fast_domain: Maximum number of devices joined by the fast network: a host's GPUs, a slice of a TPU
            pod.
        cores: Number that Google's name counts for one chip.
    """

    memory_bytes: int
    peak_flops: float
    memory_bandwidth: float
    fast_bandwidth: float
    slow_bandwidth: float
    fast_domain: int
    cores: int = 1


CHIPS = {
    # NVIDIA's data sheets, SXM boards; the memory is the driver's report. NVLink figures are halved: they
    # count both directions. Across hosts: the DGX reference designs, one network card for each GPU (400
    # Gbit/s for an H100 or H200, 200 for an A100).
    "h100": Chip(84_929_347_584, 989e12, 3.35e12, 450 * GB, 50 * GB, 8),
    "h200": Chip(151_397_597_184, 989e12, 4.8e12, 450 * GB, 50 * GB, 8),
    "a100": Chip(85_100_068_864, 312e12, 2.04e12, 300 * GB, 25 * GB, 8),
    # cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. Interconnect figures are halved: they count both directions.
    # Across slices: the pod's (v5e, v6e) or the chip's (v5p) data center network; v4's is not published, its
    # hosts are assumed to be like v5p's. v4's links: 6 of 50 GB/s (arXiv:2304.01433, table 4). v5p: the
    # largest slice that is scheduled, of a pod of 8,960.
    "v4": Chip(32 * GIB, 275e12, 1.2e12, 300 * GB, 6.25 * GB, 4096, cores=2),
    "v5e": Chip(16 * GIB, 197e12, 0.819e12, 200 * GB, 3.125 * GB, 256),
    "v5p": Chip(95 * GIB, 459e12, 2.765e12, 600 * GB, 6.25 * GB, 6144, cores=2),
    "v6e": Chip(32 * GIB, 918e12, 1.638e12, 400 * GB, 12.5 * GB, 256),
}

# The slices that Google offers, by number of chips; cloud.google.com/tpu/docs/{v5e,v5p}. Some slices of the
# larger chips also exist in other shapes.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A number of devices of one kind, to compile for without having them.

    Attributes:
        name: Name as requested.
        kind: One of `CHIPS`.
        count: Devices, over all slices.
        num_slices: TPU slices joined by the data center's network.
    """

    name: str
    kind: str
    count: int
    num_slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def target(self) -> Target:
        """Return the target that kernels are chosen for."""
        return Target("cuda" if self.kind in DESCRIPTIONS else "tpu", architecture=self.kind, devices=self.count)

    @property
    def memory_bytes(self) -> int:
        """Return the memory of each device."""
        return self.chip.memory_bytes

    @property
    def devices_per_fast_domain(self) -> int:
        """Return how many of these devices reach each other without the slow network."""
        return min(self.chip.fast_domain, self.count // self.num_slices)

    @property
    def topology(self) -> str:
        """Return the arrangement of one slice, `4x4`, or of GPUs as slices x hosts x devices."""
        if self.kind not in DESCRIPTIONS:
            return _shapes(self.kind)[self.count // self.num_slices]
        each = min(self.count, self.chip.fast_domain)
        return f"1x{self.count // each}x{each}"


def _shapes(kind: str) -> dict[int, str]:
    """Return the shape of a slice by its number of chips."""
    shapes = _CUBIC if CHIPS[kind].cores == 2 else _FLAT
    sizes = {math.prod(map(int, shape.split("x"))): shape for shape in shapes}
    return {size: shape for size, shape in sizes.items() if size <= CHIPS[kind].fast_domain}


def parse_target(name: str) -> Hardware:
    """Parse the name of a target.

    Raises:
        RecipeError: The hardware does not exist, or not in this number.

    >>> parse_target("h100x64").topology
    '1x8x8'
    >>> parse_target("v5p-64").count
    32
    >>> parse_target("v5e-16x2")
    Hardware(name='v5e-16x2', kind='v5e', count=32, num_slices=2)
    """
    match = re.fullmatch(r"([a-z]+\d+[a-z]*?)(?:(x)(\d+)|-(\d+)(?:x(\d+))?)", name.strip().lower())
    kind = match.group(1) if match else re.split(r"[-x]", name.strip().lower())[0]
    if kind not in CHIPS:
        raise RecipeError(f"unknown target {name!r}; {suggest_name(kind, CHIPS)} (a target is h100x64 or v5p-64)")
    if match is None:
        example = f"{kind}x64" if kind in DESCRIPTIONS else f"{kind}-64"
        raise RecipeError(f"the target {name!r} has no number of devices; expected for example {example}")
    if kind in DESCRIPTIONS:
        return _gpus(name, kind, match.group(3))
    slices = int(match.group(5) or 1)
    chips = int(match.group(3)) if match.group(2) else int(match.group(4)) // CHIPS[kind].cores
    shapes = _shapes(kind)
    if chips not in shapes or slices < 1 or (not match.group(2) and int(match.group(4)) % CHIPS[kind].cores):
        counts = ", ".join(f"{kind}-{size * CHIPS[kind].cores}" for size in shapes)
        raise RecipeError(f"unknown slice {name!r}; there are {counts}, and several of them: {kind}-64x2")
    return Hardware(name, kind, chips * slices, slices)


def _gpus(name: str, kind: str, number: str | None) -> Hardware:
    if number is None:
        raise RecipeError(f"the target {name!r} is not understood; GPUs are written as {kind}x64")
    count, each = int(number), CHIPS[kind].fast_domain
    if count < 1 or (count > each and count % each):
        raise RecipeError(
            f"{name}: {count} {kind.upper()}s don't fill hosts of {each}; use 1 to {each}, or a multiple of {each}"
        )
    return Hardware(name, kind, count)


def target_devices(hardware: Hardware) -> list[Any]:
    """Return devices to compile for: they can be used in a mesh, but hold no data.

    If no platform is chosen yet, jax is restricted to the CPU: an attached accelerator is neither used nor
    waited for.

    Raises:
        RecipeError: The compiler for that hardware is not installed.
    """
    import jax
    from jax.experimental import topologies

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    # The library locks a TPU that is not there, and a second process would wait for it in vain.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        if hardware.target.platform == "gpu":
            description = topologies.get_topology_desc(
                platform="cuda",
                topology_name=hardware.kind,
                target_config=DESCRIPTIONS[hardware.kind],
                topology=hardware.topology,
            )
        else:
            options: dict[str, Any] = {"num_slices": hardware.num_slices} if hardware.num_slices > 1 else {}
            if hardware.kind == "v4":
                # Both cores of a chip as one device, as programs run there.
                options["chip_config_name"] = "megacore"
            if hardware.topology == "1x1":
                options["chips_per_host_bounds"] = (1, 1, 1)
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{hardware.kind}:{hardware.topology}", **options
            )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RecipeError(
            f"can't compile for {hardware.name} here: {str(error).splitlines()[0]}. Install the compilers with "
            f"`{install_command('aot')}`, and set JAX_PLATFORMS=cpu before the program starts"
        ) from error
    devices = list(description.devices)
    assert len(devices) == hardware.count, f"{hardware.topology} has {len(devices)} devices, not {hardware.count}"
    return devices
