"""Each part of `panax check --full` on a TPU; skipped without one."""

import glob

import accelerators
import pytest

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(4000)]


def is_here() -> bool:
    # TPUs are character devices of their own, or behind VFIO; on other machines the latter has just its container.
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    if not is_here():
        pytest.skip("this machine has no TPU")
    return accelerators.full_check(tmp_path_factory.mktemp("full"), "tpu")


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", accelerators.named("tpu", metafunc.config.option.markexpr))


def test_part(parts, name):
    accelerators.judge(parts[name])


def test_no_part_is_without_a_case(parts):
    assert sorted(parts) == sorted(accelerators.named("tpu", ""))
