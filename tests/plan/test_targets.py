"""Names of hardware that is not there."""

import pytest
from jax.experimental import topologies

from panax.core.errors import RecipeError
from panax.core.install_hints import install_command
from panax.plan import parse_target, target_devices
from panax.plan.search.targets import CHIPS


@pytest.mark.parametrize(
    ("name", "kind", "count", "slices", "topology", "fast"),
    [
        ("h100x1", "h100", 1, 1, "1x1x1", 1),
        ("h100x4", "h100", 4, 1, "1x1x4", 4),
        ("H100x64", "h100", 64, 1, "1x8x8", 8),
        ("h200x8", "h200", 8, 1, "1x1x8", 8),
        ("a100x16", "a100", 16, 1, "1x2x8", 8),
        ("v4-8", "v4", 4, 1, "2x2x1", 4),
        ("v4-8192", "v4", 4096, 1, "16x16x16", 4096),
        ("v5p-64", "v5p", 32, 1, "2x4x4", 32),
        ("v5px32", "v5p", 32, 1, "2x4x4", 32),
        ("v5p-12288", "v5p", 6144, 1, "16x16x24", 6144),
        ("v5e-1", "v5e", 1, 1, "1x1", 1),
        ("v5e-16", "v5e", 16, 1, "4x4", 16),
        ("v5e-256x4", "v5e", 1024, 4, "16x16", 256),
        ("v6e-8", "v6e", 8, 1, "2x4", 8),
    ],
)
def test_a_name_states_kind_count_and_arrangement(name, kind, count, slices, topology, fast):
    target = parse_target(name)
    assert (target.name, target.kind, target.count, target.num_slices) == (name, kind, count, slices)
    assert (target.topology, target.devices_per_fast_domain) == (topology, fast)
    assert target.target.platform == ("tpu" if kind.startswith("v") else "gpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000x8", "did you mean 'h100'"),
        ("v5-8", "did you mean 'v5"),
        ("gaudi", "known: a100, h100, h200, v4, v5e, v5p, v6e"),
        ("", "known: a100"),
        ("h100", "no number of devices; expected for example h100x64"),
        ("v5p", "no number of devices; expected for example v5p-64"),
        ("h100-8", "GPUs are written as h100x64"),
        ("h100x12", "12 H100s don't fill hosts of 8; use 1 to 8, or a multiple of 8"),
        ("h100x0", "don't fill hosts"),
        ("v5p-7", "unknown slice 'v5p-7'; there are v5p-8, v5p-16,"),
        ("v5e-512", "v5e-256, and several of them: v5e-64x2"),
        ("v4-12288", "v4-8192, and several"),
        ("v5e-16x0", "unknown slice"),
    ],
)
def test_what_does_not_exist_is_refused(name, message):
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")):
        parse_target(name)


def test_figures_are_of_one_device_in_bytes_and_seconds():
    for kind, chip in CHIPS.items():
        assert 15e9 < chip.memory_bytes < 200e9, kind
        # A device computes for hundreds of operations in the time in which it reads a byte, and is slower the farther it sends.
        assert 100 < chip.peak_flops / chip.memory_bandwidth < 700, kind
        assert chip.memory_bandwidth > chip.fast_bandwidth > 3 * chip.slow_bandwidth, kind


@pytest.mark.parametrize(
    ("name", "error"),
    [
        # As jax 0.10 says it.
        ("v5e-16", RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")),
        ("h100x8", NotImplementedError("topology not implemented for cuda")),
    ],
)
def test_without_the_compilers_the_error_explains_what_to_install(name, error, monkeypatch):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(RecipeError) as raised:
        target_devices(parse_target(name))
    message = str(raised.value)
    assert name in message and str(error) in message
    assert install_command("aot") in message and "JAX_PLATFORMS=cpu" in message
