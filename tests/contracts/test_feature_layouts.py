"""Features of open models train on every layout as on one device, forward and backward."""

import pytest
import tiny

from panax.models import DecoderTask
from panax.testing import check_task

LAYOUTS = ({"context": 2, "tensor": 2}, {"stage": 2, "fsdp": 2})
MORE = ({"fsdp": 2, "tensor": 2}, {"tensor": 4}, {"stage": 2, "tensor": 2}, {"replica": 2, "expert": 2})


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(LAYOUTS, marks=pytest.mark.full), pytest.param(MORE, marks=pytest.mark.slow)],
    ids=["two", "four"],
)
@pytest.mark.parametrize("name", tiny.FEATURES)
def test_trains_like_one_device(name: str, layouts: tuple[dict[str, int], ...]) -> None:
    report = check_task(DecoderTask(model=tiny.FEATURES[name]), tiny.batch(rows=8), layouts=layouts)
    assert len(report.compared) == len(layouts), report.left_out
