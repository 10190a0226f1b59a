"""What utilization divides by: the most that registers ever did, not what a busy machine gives now."""

import jax
import pytest

from panax.kernels.cpu import native
from panax.metrics import throughput


@pytest.fixture
def rates(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[float] = []
    monkeypatch.setattr(throughput, "measure_loop", lambda dtype: found.pop(0))
    return found


def test_a_busy_machine_lowers_no_peak(rates):
    rates += [200e9, 20e9, 250e9, 240e9]
    peaks = [throughput.find_peak_flops(jax.devices()[:1], "float32") for _ in range(4)]
    assert [peak.flops_per_second for peak in peaks] == [200e9, 200e9, 250e9, 250e9]
    assert "20 now: its clock is slower" in peaks[1].source and "now" not in peaks[3].source


def test_a_cache_that_is_no_number_is_left(rates, tmp_path):
    rates += [1e9, 2e9]
    throughput.find_peak_flops(jax.devices()[:1], "float32")
    [file] = (tmp_path / "panax" / "kernels").glob("peak-*")
    file.write_text("[]")
    assert throughput.find_peak_flops(jax.devices()[:1], "float32").flops_per_second == 2e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_registers_are_measured(dtype):
    program = native.peak_loop(dtype)
    assert program is not None and float(program()) > 1e8
    throughput.measure_loop.cache_clear()
    assert throughput.measure_loop(dtype) > 1e8


def test_without_c_files_a_product_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(throughput, "peak_loop", lambda dtype: None)
    throughput.measure_loop.cache_clear()
    monkeypatch.setattr(throughput, "measure_matmul", lambda dtype: 1e9)
    peak = throughput.find_peak_flops(jax.devices()[:1], "float32")
    throughput.measure_loop.cache_clear()
    assert peak.flops_per_second == 1e9 and "the fastest float32 product ever measured" in peak.source


def test_every_kernel_that_is_there_is_measured():
    assert throughput.measure_matmul("float32", size=256, rounds=1) > 1e8
