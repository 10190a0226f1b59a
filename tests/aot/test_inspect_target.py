"""`panax inspect --target`: a recipe on hardware that is not there, its corpus unread."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
import tiny_recipe

from panax.cli.main import main
from panax.mesh import Placement
from panax.plan import ProgramTooLargeError, parse_target, plan_step, target_devices
from panax.plan.search.targets import CHIPS
from panax.train import CompiledStep, Program

RECIPE = str(Path(tiny_recipe.__file__))
SMALL = ("--task.model.num-layers", "1", "--task.model.windows", "0")


@pytest.fixture
def inspected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> str:
        assert main(["inspect", RECIPE, *arguments]) == 0
        assert not (tmp_path / "cache").exists(), "the corpus was read"
        return capsys.readouterr().out

    return run


# From jax 0.12 on; see kernels/attention/gpu.py.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_h100s(inspected, monkeypatch):
    monkeypatch.setitem(CHIPS, "h100", dataclasses.replace(CHIPS["h100"], memory_bytes=2**10))
    out = inspected("--target", "h100x8", "--mesh.fsdp", "8", *SMALL)
    assert "the vocabulary is assumed to be its tokenizer's maximum, 300" in " ".join(out.split())
    assert "fsdp=8 of h100x8" in out and "of 1.0 KiB on each device" in out
    assert re.search(r"all-gather +fsdp +\d+ ", out) and re.search(r"reduce-scatter +fsdp +\d+ ", out)
    # The warning is wrapped to the width of a terminal.
    said = " ".join(out.split())
    assert (
        "warning: the step does not fit" in said
        and "on each device, which has 1.0 KiB" in said
        and "--task.remat full" in said
    )


def test_tpus(inspected):
    out = inspected("--target=v5e-8", "--mesh.fsdp", "8", "--task.model.vocab-size", "512", *SMALL)
    assert "fsdp=8 of v5e-8" in out and "of 16.0 GiB on each device" in out and "vocabulary is assumed" not in out
    assert re.search(r"all-gather +fsdp +\d+ ", out) and "does not fit" not in out


def test_a_tpus_compiler_may_refuse_a_program():
    class Huge(CompiledStep):
        def lower(self, batch):
            place = self.placement.sharding()
            x = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32, sharding=place)
            return jax.jit(lambda x: (x @ x) @ (x.T @ x)).lower(x)

    placement = Placement.create(devices=target_devices(parse_target("v5e-1")))
    step = Huge(Program.create(tiny.task(), tiny.ADAMW, num_steps=4), placement, tiny.AXES)
    with pytest.raises(ProgramTooLargeError, match=r"exceeds available HBM|hbm"):
        plan_step(step, tiny.batch())
