"""Peak rate of a device by precision, the denominator of model FLOPs utilization."""

from collections.abc import Iterable
from typing import NamedTuple

from panax.core.finite_stats import max_finite

DATA_SHEETS: dict[str, dict[str, float]] = {
    # Dense FLOP/s of one device from NVIDIA's data sheets: bfloat16 and TF32 of tensor cores, float32 without them.
    "H100": {"bf16": 989e12, "tf32": 494e12, "f32": 67e12},
    "H200": {"bf16": 989e12, "tf32": 494e12, "f32": 67e12},
    "A100": {"bf16": 312e12, "tf32": 156e12, "f32": 19.5e12},
    "L4": {"bf16": 121e12, "tf32": 60e12, "f32": 30.3e12},
}


class PeakRate(NamedTuple):
    """A peak rate, and its source."""

    flops_per_second: float
    source: str


def peak_rate(
    device: str, precision: str, products: Iterable[float | None], registers: Iterable[float | None] = ()
) -> PeakRate | None:
    """Return the data sheet's rate of a known accelerator; for a CPU that of its registers, else of the
    fastest matmul of any column.

    Args:
        products: FLOP/s of a large matmul in this precision, measured in this run.
        registers: FLOP/s of multiplications and additions on registers alone.

    >>> peak_rate("NVIDIA H100 80GB HBM3", "bf16-mixed", []).flops_per_second / 1e12
    989.0
    """
    for name, rates in DATA_SHEETS.items():
        if name in device.replace("-", " ").split():
            kind = precision.removesuffix("-mixed")
            return PeakRate(rates[kind], f"{rates[kind] / 1e12:.0f} TFLOP/s, {kind} data sheet of {name}")
    register_rate = max_finite((rate for rate in registers if rate), default=None)
    if register_rate is not None:
        return PeakRate(
            register_rate,
            f"{register_rate / 1e9:,.0f} GFLOP/s, the most that this processor's threads multiply and add on registers alone",
        )
    measured = max_finite((rate for rate in products if rate), default=None)
    if measured is None:
        return None
    return PeakRate(
        measured,
        f"{measured / 1e9:,.0f} GFLOP/s, the fastest large {precision} product of any column's framework in this run",
    )
