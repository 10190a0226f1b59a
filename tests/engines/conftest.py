"""What one process learns, which runs on engines are compared with."""

import pytest
from engine_runs import command, environment, losses, run, steps


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> dict[int, float]:
    """The losses of one process with two devices."""
    folder = tmp_path_factory.mktemp("alone")
    env = environment(folder, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    run(command("train", "alone", *steps()), folder, env)
    found = losses(folder / "runs/alone")
    assert len(found) == int(steps()[1])
    return found
