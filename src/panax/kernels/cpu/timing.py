"""Selection of the kernel for each kind of work on CPU: by instruction set, or by timing if necessary.

The C files' kernels reach 68 to 95 % of the register peak, on every instruction set that they support, so
they are used whenever they are available. Intel's library has matmuls for its matrix units, which the C files
lack: on such a processor, and with that library, all are timed, once for a processor and a set of versions,
and the choice is cached. There a candidate replaces XLA only if it is faster by a twentieth. In a job of many
processes the first one decides for all.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from panax.core.layout.target import Target
from panax.job.agreement import broadcast_text, gather_texts, is_process_zero
from panax.kernels.attention.attention import attention
from panax.kernels.cache import is_intact, kernels_folder, write_intact
from panax.kernels.cpu.choice import (
    DTYPES,
    WORKS,
    XLA,
    CpuKernels,
    Work,
    current_choice,
    is_chosen,
    read_environment_choice,
    use_choice,
    use_temporarily,
)
from panax.kernels.cpu.library import build_digest, instruction_set
from panax.kernels.cpu.native import INTEL, KERNELS, OWN, unavailable_reason
from panax.kernels.product import product, sum_rows
from panax.system.cpu_info import cpu_flags, describe_processor

from ...system import json_reader

_SAID = {"product": "matmul", "attention": "partial attention", "row_sums": "row sums"}

MATRIX_UNITS = "amx_bf16"
"""Flag of processors with Intel's matrix units."""

MARGIN = 1.05
"""Minimum speed of a candidate relative to XLA."""

ROUNDS = 5

Times = dict[str, dict[str, float]]
"""Seconds by kernel for each kind of work and dtype (`product_float32`)."""


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """A choice, and its source.

    Attributes:
        source: Description of the source, for users.
        times: The measured seconds; empty if none were measured.
    """

    kernels: CpuKernels
    source: str
    times: Times = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        """Format the line that a terminal shows at the start of a run."""
        parts = []
        for work in WORKS:
            usual, *others = ({dtype: self.kernels.of(work, dtype) for dtype in DTYPES}).items()
            other = "".join(f" ({name!r} in {dtype})" for dtype, name in others if name != usual[1])
            parts.append(f"{_SAID[work]} {usual[1]!r}{other}")
        return f"kernels on CPU: {', '.join(parts)}; {self.source}"

    def details(self) -> list[str]:
        """Format the lines of a run's log: the time of each kernel relative to the others."""
        lines = []
        for work in WORKS:
            parts = []
            for dtype in DTYPES:
                name, times = self.kernels.of(work, dtype), self.times.get(f"{work}_{dtype}", {})
                others = [f"{other} {times[other] / times[name]:.2f}" for other in times if other != name]
                parts.append(f"{name!r} in {dtype}" + (f" ({', '.join(others)} times as long)" if others else ""))
            lines.append(f"{_SAID[work]} on cpu runs {', '.join(parts)}")
        return lines


def choose_kernels(
    recorded: str = "",
    on_choice: Callable[[KernelSelection], None] = lambda chosen: None,
    devices: Sequence[Any] | None = None,
) -> None:
    """Choose the kernels of this job, unless this process has a choice already. Every process of the job
    calls it.

    Args:
        recorded: The `record` that the run began with, on any machine. It is used if it is from this kind of
            machine, so that a resumed run is bitwise the same.
        on_choice: Called with the choice, unless this process keeps an earlier one.
        devices: Devices of the programs, by default all of JAX's. Nothing is timed for other platforms.
    """
    if {jax.default_backend(), (jax.devices() if devices is None else devices)[0].platform} != {"cpu"}:
        return
    chosen = _chosen(recorded)
    if chosen is not None:
        use_choice(chosen.kernels)
        on_choice(chosen)


def current_record() -> str:
    """Return the record of the choice in force; empty if nothing runs on CPUs."""
    return build_record(current_choice()) if jax.default_backend() == "cpu" else ""


def build_record(kernels: CpuKernels) -> str:
    """Return the record of a choice in a run: the processor and versions that it was made for, and the
    kernels."""
    return json.dumps({"machine": machine_key(), **dataclasses.asdict(kernels)})


def machine_key() -> str:
    """Return an id of this processor, its threads, and the versions of all candidates."""
    intel = next((d.version for d in importlib.metadata.distributions(name="mkl")), "none")
    parts = (
        describe_processor(),
        os.cpu_count(),
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        intel,
        build_digest(),
    )
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


def _chosen(recorded: str) -> KernelSelection | None:
    forced = read_environment_choice()
    if forced is not None:
        return KernelSelection(forced, "as set by $PANAX_CPU_KERNELS")
    recorded_kernels = _recorded_kernels(recorded)
    if is_chosen() and recorded_kernels is None:
        return None
    # A kernel that some process lacks is not a candidate.
    unavailable = set(" ".join(gather_texts(" ".join(_list_unavailable()))).split())
    text = ""
    if is_process_zero():
        if recorded_kernels is not None and not recorded_kernels.list_unavailable():
            text = _as_text(KernelSelection(recorded_kernels, "as this run began"))
        else:
            text = _as_text(
                _select_by_instruction_set(unavailable)
                or _read_cached_choice(unavailable)
                or _select_by_timing(unavailable)
            )
    return _from_text(broadcast_text(text))


def _recorded_kernels(recorded: str) -> CpuKernels | None:
    """Return the kernels of a record from a machine like this one."""
    try:
        fields = json_reader.parse(recorded, constants=True) if recorded else {}
        if fields.pop("machine", None) != machine_key():
            return None
        return CpuKernels(**fields)
    except (ValueError, TypeError, AttributeError):
        return None


def _select_by_instruction_set(unavailable: set[str]) -> KernelSelection | None:
    """Select the C files' kernels if they are available; None if the candidates must be timed."""
    if MATRIX_UNITS in cpu_flags() and any(f"{INTEL}_{dtype}" not in unavailable for dtype in DTYPES):
        return None
    supported = {f"{work}_{dtype}": OWN for work in WORKS for dtype in DTYPES if f"{OWN}_{dtype}" not in unavailable}
    reason = unavailable_reason(OWN, "float32") or "some process of this job has no others"
    return KernelSelection(
        CpuKernels(**supported), f"by instruction set ({instruction_set()})" if supported else reason
    )


def _list_unavailable() -> list[str]:
    return [
        f"{kernel}_{dtype}" for kernel in KERNELS for dtype in DTYPES if unavailable_reason(kernel, dtype) is not None
    ]


def _read_cached_choice(unavailable: set[str]) -> KernelSelection | None:
    """Return the choice in this machine's cache, if there is one for the current versions."""
    try:
        file = _file(unavailable)
        text = file.read_text(encoding="utf-8") if is_intact(file) else None
    except OSError:
        return None  # it is measured again
    return None if text is None else _from_text(text)


def _write_cached_choice(chosen: KernelSelection, unavailable: set[str]) -> None:
    try:
        write_intact(_file(unavailable), _as_text(chosen).encode())
    except OSError:
        return  # a cache that can't be written costs the next run some seconds


def _file(unavailable: set[str]) -> Path:
    return (
        kernels_folder() / f"choice-{machine_key()}-{xxhash.xxh3_64_hexdigest(repr(sorted(unavailable)).encode())}.json"
    )


def _as_text(chosen: KernelSelection) -> str:
    return json.dumps(dataclasses.asdict(chosen))


def _from_text(text: str) -> KernelSelection:
    fields = json_reader.parse(text, constants=True)
    times = {str(work): {str(k): float(v) for k, v in each.items()} for work, each in fields["times"].items()}
    return KernelSelection(CpuKernels(**fields["kernels"]), str(fields["source"]), times)


def _select_by_timing(unavailable: set[str]) -> KernelSelection:
    # In a separate thread: if this thread is tracing, these programs must not become a part of the trace.
    with concurrent.futures.ThreadPoolExecutor(1, "panax-timing") as thread:
        times = thread.submit(_measure_times, unavailable).result()
    best = {name: _winner(each) for name, each in times.items()}
    when = time.strftime("%Y-%m-%d")
    chosen = KernelSelection(
        CpuKernels(**best), f"timed on {when}, {describe_processor().split(';')[0]}, {os.cpu_count()} threads", times
    )
    _write_cached_choice(chosen, unavailable)
    return chosen


def _winner(times: dict[str, float]) -> str:
    """Return the fastest kernel if it beats XLA by the margin, else XLA."""
    fastest = min(times, key=times.__getitem__)
    return fastest if times[fastest] * MARGIN <= times[XLA] else XLA


def _measure_times(unavailable: set[str]) -> Times:
    times: Times = {}
    for dtype in DTYPES:
        names = [XLA, *(kernel for kernel in KERNELS if f"{kernel}_{dtype}" not in unavailable)]
        best = CpuKernels()
        # Sums of rows are scheduled by XLA next to matmuls, so matmuls are chosen first.
        for work in WORKS:
            key = f"{work}_{dtype}"
            times[key] = _measure_seconds(work, dtype, names, best) if len(names) > 1 else {XLA: 0.0}
            best = dataclasses.replace(best, **{key: _winner(times[key])})
    return times


def _measure_seconds(work: Work, dtype: str, names: list[str], best: CpuKernels) -> dict[str, float]:
    """Measure the median seconds of a kind of work with each kernel, in turns; the other kinds use `best`."""
    programs = {}
    for name in names:
        with use_temporarily(dataclasses.replace(best, **{f"{work}_{dtype}": name})):
            function, *arguments = _WORKLOADS[work](jnp.dtype(dtype))
            programs[name] = functools.partial(jax.jit(function).lower(*arguments).compile(), *arguments)
        jax.block_until_ready(programs[name]())
    durations: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            durations[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in durations.items()}


def _drawn(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.device_put(
        np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype), jax.local_devices()[0]
    )


def _products(dtype: Any) -> tuple[Any, ...]:
    """Return the forward pass, and the gradients of both operands, of a layer of a small model."""

    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        return (
            product("ab,bc->ac", x, w, dtype),
            product("ac,bc->ab", g, w, dtype),
            product("ab,ac->bc", x, g, jnp.float32),
        )

    return run, _drawn(0, (1024, 768), dtype), _drawn(1, (768, 2048), dtype), _drawn(2, (1024, 2048), dtype)


def _attention(dtype: Any) -> tuple[Any, ...]:
    """Return the forward and backward pass, for four rows of 256 positions and twelve heads."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(functools.partial(attention, causal=False, target=Target("cpu")), q, k, v)
        return (out, *back(g))

    return run, *(_drawn(seed, (4, 256, 12, 64), dtype) for seed in range(4))


def _row_sums(dtype: Any) -> tuple[Any, ...]:
    """Return a layer with a bias and an activation, forward and backward: alone, a sum of rows does not show
    its cost."""

    def run(x: jax.Array, w: jax.Array, b: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        _, back = jax.vjp(jax.nn.gelu, product("ab,bc->ac", x, w, dtype) + b)
        (dh,) = back(g)
        return product("ac,bc->ab", dh, w, dtype), product("ab,ac->bc", x, dh, jnp.float32), sum_rows(dh)

    return run, *(_drawn(i, s, dtype) for i, s in enumerate(((1024, 768), (768, 2048), (1, 2048), (1024, 2048))))


_WORKLOADS: dict[Work, Callable[[Any], tuple[Any, ...]]] = {
    "product": _products,
    "attention": _attention,
    "row_sums": _row_sums,
}
