"""Features of open models train on every layout as on one device, forward and backward."""

import pytest
import tiny

from panax.models import DecoderTask
from panax.testing import check_task

LAYOUTS = ({"context": 2, "tensor": 2}, {"stage": 2, "fsdp": 2})
MORE = ({"fsdp": 2, "tensor": 2}, {"tensor": 4}, {"stage": 2, "tensor": 2}, {"replica": 2, "expert": 2})

TOGETHER = {
    "delta nets and experts, a gated shared one",
    tiny.CONVOLUTIONS,
    tiny.CHUNKS,
    tiny.SUBLAYERS,
    tiny.SIDE_BY_SIDE,
    tiny.ALIBI,
    tiny.LEARNED,
}
"""Features of which each has a case of its own, or with layouts that take long."""


def cases() -> list:
    """Each feature on one of the two layouts in `full`, and on all others in `slow`."""
    result = []
    for number, name in enumerate(tiny.FEATURES):
        first, tier = LAYOUTS[number % 2], pytest.mark.slow if name in TOGETHER else pytest.mark.full
        result.append(pytest.param(name, (first,), marks=tier, id=f"{name}-one"))
        others = (LAYOUTS[(number + 1) % 2], *MORE)
        # Each alone if all of them together would take minutes.
        for at, layouts in enumerate([(each,) for each in others] if name in TOGETHER else [others]):
            result.append(pytest.param(name, layouts, marks=pytest.mark.slow, id=f"{name}-others{at or ''}"))
    return result


@pytest.mark.parametrize(("name", "layouts"), cases())
def test_trains_like_one_device(name: str, layouts: tuple[dict[str, int], ...]) -> None:
    report = check_task(DecoderTask(model=tiny.FEATURES[name]), tiny.batch(rows=8), layouts=layouts)
    assert len(report.compared) == len(layouts), report.left_out
