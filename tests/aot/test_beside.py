"""How much of what is sent hides behind products, in the schedules of programs for absent H100s."""

import pytest
from planned import plan

from panax.comms import Comms
from panax.mesh import Rules

HSDP = ("h100x64", {"replica": 8, "fsdp": 8}, 64)
TENSOR = ("h100x64", {"fsdp": 8, "tensor": 8}, 64)


def share(axis: str, *arguments, **options) -> tuple[float, int]:
    """(the share of the bytes over an axis that has products beside it, the bytes)."""
    found, _ = plan(*arguments, **options)
    large = [one for one in found.overlap if axis in one.collective.axes and one.collective.wire_bytes > 1e5]
    sent = sum(one.collective.total_wire_bytes for one in large)
    return sum(one.collective.total_wire_bytes for one in large if one.flops) / sent, sent


@pytest.mark.slow
def test_sums_in_the_backward_pass_hide_as_no_sums_at_the_end_do():
    at_end, usual = share("replica", *HSDP)
    early, sent = share("replica", *HSDP, comms=Comms(sums="in_backward"))
    assert at_end == 0 and early > 0.3
    assert sent == pytest.approx(usual, rel=1e-3)


@pytest.mark.slow
def test_overlapped_products_hide_more_than_gathers_before_them():
    gathered, _ = share("tensor", *TENSOR)
    overlapped, _ = share("tensor", *TENSOR, rules=Rules(overlap=True))
    assert overlapped > 2 * gathered
