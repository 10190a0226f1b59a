"""Compilation target: a chip by platform, vendor and architecture, with traits of its compiler.

The target is that of the mesh, which need not be attached. Platform-independent code reads `Target.traits`
and never compares platform names; a PJRT plug-in unknown to Panax works under its name, with the traits
of an unknown chip.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlatformTraits:
    """How programs for a platform are best written; the defaults are those of an unknown chip.

    Attributes:
        own_memory: Devices have separate memory; otherwise they share the host's.
        unrolled_layers: Stacks of up to this many layers run faster unrolled than as a loop.
        cheap_branches: A branch costs less than computing both sides. On an accelerator the host may wait for
            the condition.
        keeps_barriers: XLA respects `optimization_barrier` when it merges equal operations.
        optimizes_small: Full optimization also pays off for programs of many small kernels: initialization of
            the state, and steps of tasks that collect their own data.
        permutes_apart: A permutation among some devices of a mesh does not wait for the others.
        scatters_in_order: A scatter-add processes its rows in order, not by atomic additions in any order.
        ragged_exchange: XLA has an all-to-all with parts of different sizes.
        experts_in_one_loop: The float32 feed-forward of all experts runs faster as one loop over chunks of
            rows.
        flat_matmuls: A float32 contraction runs faster as a matmul of two matrices.
        scores_in_cache: Number of float32 attention scores to compute at a time; None for all rows at once.
        rings: Devices have coordinates in an interconnect, and a mesh axis should follow its rings.
        fast_domain: Number of devices joined by the fast network, unless something more precise is known;
            None for all.
        logits_bytes: Bytes of float32 logits to compute at a time in a cross-entropy. Larger chunks read and
            write the head's gradient less often.
    """

    own_memory: bool = True
    unrolled_layers: int = 0
    cheap_branches: bool = False
    keeps_barriers: bool = True
    optimizes_small: bool = True
    permutes_apart: bool = True
    scatters_in_order: bool = False
    ragged_exchange: bool = False
    experts_in_one_loop: bool = False
    flat_matmuls: bool = False
    scores_in_cache: int | None = None
    rings: bool = False
    fast_domain: int | None = 8
    logits_bytes: int = 2**29


_TRAITS = {
    "gpu": PlatformTraits(ragged_exchange=True),
    "tpu": PlatformTraits(scatters_in_order=True, ragged_exchange=True, rings=True, fast_domain=None),
    "cpu": PlatformTraits(
        own_memory=False,
        scatters_in_order=True,
        # A loop copies all residuals of the backward pass into stacked buffers on one core: a third of a
        # float32 step.
        unrolled_layers=12,
        # A select reads and writes the whole state once more: twice the update's time.
        cheap_branches=True,
        # jax 0.10 to 0.12: XLA on CPU removes barriers first, which defeats `jax.checkpoint`.
        keeps_barriers=False,
        # Compilation took longer than the rest of state initialization; with this, PPO's step compiled in a
        # quarter less time and ran as fast.
        optimizes_small=False,
        # jax 0.10: a step hangs if some stages permute and others do not.
        permutes_apart=False,
        experts_in_one_loop=True,
        flat_matmuls=True,
        # 4 MiB: about the fastest from 0.25 to 16 MiB.
        scores_in_cache=2**20,
        # 2,048 tokens, a vocabulary of 16,384, bfloat16: 185 ms at 32 MiB, 246 ms at 128 MiB.
        logits_bytes=2**25,
    ),
}

_IN_FLOAT32 = MappingProxyType({"float32": "float32"})
_IN_BFLOAT16 = MappingProxyType({"float32": "float32", "bfloat16": "bfloat16"})
# "bfloat16" alone would be TF32 on a GPU.
_IN_TF32 = MappingProxyType({"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"})
_WITHOUT_TF32 = ("k80", "m40", "m60", "p4", "p40", "p100", "v100", "t4")

_ALIASES = {"cuda": ("gpu", "nvidia"), "gpu": ("gpu", "nvidia"), "rocm": ("gpu", "amd"), "tpu": ("tpu", "google")}
_VENDORS = ("nvidia", "amd", "intel")
_TPUS = {"v5lite": "v5e", "v5": "v5p", "v6lite": "v6e"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of devices of one kind.

    Attributes:
        platform: "cpu", "gpu", "tpu", or the name of another PJRT plug-in. "cuda" and "rocm" become "gpu"
            with their vendor; a "gpu" without a vendor is NVIDIA's.
        vendor: "nvidia", "amd", "intel" or "google"; empty if unknown.
        architecture: The vendor's name of the chip: "h100", "mi300x", "v5e"; empty if unknown.
        devices: Number of devices in the mesh, over all processes.

    >>> Target("cuda")
    Target(platform='gpu', vendor='nvidia', architecture='', devices=1)
    """

    platform: str
    vendor: str = ""
    architecture: str = ""
    devices: int = 1

    def __post_init__(self) -> None:
        name = self.platform.lower()
        platform, vendor = _ALIASES.get(name, (name, ""))
        object.__setattr__(self, "platform", platform)
        object.__setattr__(self, "vendor", self.vendor or vendor)

    def __str__(self) -> str:
        return f"{self.platform} ({self.architecture})" if self.architecture else self.platform

    @property
    def matmul_precisions(self) -> Mapping[str, str]:
        """Return the precisions in which the target can multiply float32 operands, each with JAX's name for it
        (`jax_default_matmul_precision`).

        >>> list(Target("tpu").matmul_precisions), list(Target("gpu", architecture="h100").matmul_precisions)
        (['float32', 'bfloat16'], ['float32', 'tf32', 'bfloat16'])
        """
        if self.platform == "tpu":
            return _IN_BFLOAT16
        if self.platform == "gpu" and self.vendor == "nvidia" and self.architecture not in _WITHOUT_TF32:
            return _IN_TF32
        return _IN_FLOAT32

    @property
    def default_matmul_precision(self) -> str:
        """Return the precision that XLA uses by default: the fastest that is customary on the platform."""
        return {"tpu": "bfloat16"}.get(self.platform, "tf32" if "tf32" in self.matmul_precisions else "float32")

    @property
    def multiplies_bfloat16(self) -> bool | None:
        """Return True if the target has bfloat16 matmul instructions; None for CPUs, where it depends on the
        processor."""
        if self.platform == "cpu":
            return None
        return self.platform == "tpu" or (self.platform == "gpu" and self.architecture not in _WITHOUT_TF32)

    @property
    def traits(self) -> PlatformTraits:
        return _TRAITS.get(self.platform, PlatformTraits())


def device_target(device: Any, devices: int = 1) -> Target:
    """Return the target of a JAX device, attached or only described."""
    return _derived(device.platform, getattr(device, "device_kind", ""), devices)


@functools.lru_cache(maxsize=64)
def _derived(platform: str, kind: str, devices: int) -> Target:
    vendor = next((vendor for vendor in _VENDORS if kind.lower().startswith(vendor)), "")
    return Target(platform, vendor, parse_architecture(kind), devices)


def parse_architecture(kind: str) -> str:
    """Return the architecture named in a JAX device kind.

    >>> [parse_architecture(kind) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "TPU v5 lite", "TPU7x", "cpu")]
    ['h100', 'a100', 'v5e', 'v7x', '']
    """
    kind = kind.lower()
    tpu = re.fullmatch(r"tpu ?v?(\d+\w*)( lite)?.*", kind)
    if tpu:
        name = f"v{tpu.group(1)}{'lite' if tpu.group(2) else ''}"
        return _TPUS.get(name, name)
    words = re.split(r"[\s-]+", kind)
    return next((word for word in words if re.fullmatch(r"[a-z]+\d+[a-z]*", word)), "")
