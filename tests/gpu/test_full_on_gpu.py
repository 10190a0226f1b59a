"""Each part of `panax check --full` on a GPU; skipped without one."""

import os

import accelerators
import pytest

from panax.cluster.node.accelerators import list_visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(4000)]


def is_here() -> bool:
    return bool(list_visible_gpus({key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    if not is_here():
        pytest.skip("this machine has no GPU")
    return accelerators.full_check(tmp_path_factory.mktemp("full"), "gpu")


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", accelerators.named("gpu", metafunc.config.option.markexpr))


def test_part(parts, name):
    accelerators.judge(parts[name])


def test_no_part_is_without_a_case(parts):
    assert sorted(parts) == sorted(accelerators.named("gpu", ""))
