"""What thirteen programs send and compute, read off their traces: the same integers on every JAX and on every processor.

The figures are in `programs_across_versions.json`. A change of Panax that changes what a program sends or computes changes them
too; `python tests/plan/test_programs_across_versions.py` then writes the file again. No other JAX may change them.
"""

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    # Figures depend on whether matrix multiplications are custom calls; the tests' own choice needs no compiler here.
    os.environ["PANAX_CPU_KERNELS"] = "xla"

import jax
import numpy as np
import pytest
from cpu_here import KERNELS

from panax.comms import Comms
from panax.core.layout.target import Target
from panax.core.task import Task
from panax.kernels.cpu import choice
from panax.kernels.grouped.rows import aligned_row_count, choose_tile
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, DlrmConfig, DlrmTask
from panax.optim import AdamW, Muon, Schedule, Soap
from panax.plan.walk.operations import measure_work
from panax.plan.walk.program import read_program
from panax.plan.walk.traffic import list_traffic, traffic_totals
from panax.train import CompiledStep, Program, StepConfig

RECORDED = Path(__file__).with_name("programs_across_versions.json")
ROWS, LENGTH, VOCABULARY = 8, 16, 96
TEXT_AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))


def decoder(feed_forward: MoE | None = None, **changes: Any) -> DecoderTask:
    sizes = {"embed": 16, "num_layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32} | changes
    if feed_forward is not None:
        sizes["feed_forward"] = feed_forward
    return DecoderTask(model=DecoderConfig(vocab_size=VOCABULARY, max_length=LENGTH, **sizes))


def experts(**changes: Any) -> DecoderTask:
    return decoder(MoE(**({"experts": 4, "active": 2} | changes)))


def recommender() -> DlrmTask:
    feature = FeatureConfig(leaf="user", capacity=2)
    table = TableConfig(name="user", rows=20_000, width=8, placement="rows", features=(feature,))
    return DlrmTask(model=DlrmConfig(tables=TablesConfig(tables=(table,)), numeric=3, bottom=(8,), top=(8,)))


def text_batch() -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0)
    tokens, targets = (drawn.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "loss_mask": np.ones((ROWS, LENGTH), np.float32)}


def click_batch() -> dict[str, np.ndarray]:
    return {
        "numeric": np.ones((ROWS, 3), np.float32),
        "user": np.zeros((ROWS, 2), np.int32),
        "label": np.ones(ROWS, np.float32),
        "loss_mask": np.ones(ROWS, np.float32),
    }


ADAMW, PLAIN = AdamW(schedule=Schedule(peak=1e-2, decay="constant")), Comms()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step on one mesh."""

    task: Task
    mesh: dict[str, int]
    optimizer: Any = ADAMW
    comms: Comms = PLAIN
    micro_batches: int = 1


CASES = {
    "dense": Case(task=decoder(), mesh={}),
    "dense, fsdp and tensor": Case(task=decoder(), mesh={"fsdp": 2, "tensor": 2}),
    "dense, context": Case(task=decoder(), mesh={"context": 2}),
    "dense, stage": Case(task=decoder(), mesh={"stage": 2}, micro_batches=2),
    "experts": Case(task=experts(), mesh={}),
    "experts, expert": Case(task=experts(), mesh={"expert": 2}),
    "experts, fsdp and tensor": Case(task=experts(), mesh={"fsdp": 2, "tensor": 2}),
    "experts with a capacity, context": Case(task=experts(capacity=1.0), mesh={"context": 2}),
    "experts that choose, context and expert": Case(task=experts(choice="expert"), mesh={"context": 2, "expert": 2}),
    "Soap, fsdp": Case(task=decoder(), mesh={"fsdp": 2}, optimizer=Soap()),
    "Muon, fsdp": Case(task=decoder(), mesh={"fsdp": 2}, optimizer=Muon()),
    "int8 sums, replica": Case(task=decoder(embed=64, ffn=128), mesh={"replica": 2}, comms=Comms(compress="int8")),
    "tables split by rows, fsdp": Case(task=recommender(), mesh={"fsdp": 2}),
}


def step_of(case: Case) -> tuple[CompiledStep, dict[str, jax.Array]]:
    """Make a step, and a batch on its devices."""
    tables = isinstance(case.task, DlrmTask)
    config = StepConfig(check_sums=True, micro_batches=case.micro_batches)
    program = Program.create(case.task, case.optimizer, num_steps=4, config=config, comms=case.comms)
    shape = MeshShape(**case.mesh)
    count = int(np.prod(list(case.mesh.values()) or [1]))
    placement = Placement.create(shape, devices=jax.devices()[:count])
    axes = case.task.batch_axes if isinstance(case.task, DlrmTask) else TEXT_AXES
    step = CompiledStep(program, placement, axes)
    return step, step.put(click_batch() if tables else text_batch())


def figures_of(case: Case) -> dict[str, Any]:
    """Trace a step, which checks its sums over devices too, and count."""
    step, batch = step_of(case)
    read = read_program(step.trace(batch).jaxpr)
    work = measure_work(read)
    assert work.flops.is_integer() and not work.unknown
    sent = traffic_totals(list_traffic(read, step.placement.sizes))
    return {
        "sent_bytes": {f"{kind} over {', '.join(over)}": size for (kind, over), size in sorted(sent.items())},
        "flops": int(work.flops),
    }


def use_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take one library's kernels for all work."""
    works = {f"{work}_{dtype}": name for work in choice.WORKS for dtype in choice.DTYPES}
    monkeypatch.setattr(choice, "_current", choice.CpuKernels(**works))


@pytest.mark.parametrize("name", CASES)
def test_a_program_sends_and_computes_what_was_recorded(name, monkeypatch):
    use_kernels(monkeypatch, "xla")  # As the file was written: a loop over groups counts one turn, so too few.
    assert figures_of(CASES[name]) == json.loads(RECORDED.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "xla"])
def test_grouped_kernels_count_every_row_and_no_more_than_the_buffer(kernels, monkeypatch):
    use_kernels(monkeypatch, kernels)
    tokens, embed, ffn, layers, experts, active = ROWS * LENGTH, 16, 32, 2, 4, 2
    of_a_row = 2 * 3 * 3 * embed * ffn * layers  # Three matrices; forward, and back by input and by weights.
    other = figures_of(CASES["dense"])["flops"] - tokens * of_a_row
    router = 2 * 3 * tokens * embed * experts * layers
    counted = figures_of(CASES["experts"])["flops"] - other - router
    tile = choose_tile(Target("cpu"), rows=tokens * active, groups=experts)
    assert tokens * active * of_a_row <= counted <= aligned_row_count(tokens * active, experts, tile) * of_a_row


def test_nothing_is_recorded_that_is_not_traced():
    assert json.loads(RECORDED.read_text(encoding="utf-8")).keys() == CASES.keys()


# Every mesh axis once, with a decoder, a mixture of experts, compressed sums and tables.
TRAINED = (
    "dense, fsdp and tensor",
    "dense, context",
    "dense, stage",
    "experts, expert",
    "int8 sums, replica",
    "tables split by rows, fsdp",
)


def losses_of(case: Case) -> list[float]:
    """Take two steps on the same batch."""
    step, batch = step_of(case)
    state, losses = step.init(0), []
    for _ in range(2):
        state, scalars = step(state, batch)
        losses.append(float(scalars["loss"]))
    return losses


@functools.cache
def losses_on_one_device(task: Task) -> list[float]:
    return losses_of(Case(task=task, mesh={}))


# Other tests of the default suite train on every axis; this one is for `tests/newest.txt`.
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_program_trains_as_on_one_device(name):
    found, alone = losses_of(CASES[name]), losses_on_one_device(CASES[name].task)
    # The first loss is of the same parameters; the second follows a step, of gradients rounded to 8 bits in one case.
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], alone[1], rtol=1e-3 if "int8" in name else 1e-5)
    assert found[1] < found[0]


if __name__ == "__main__":
    found = {name: figures_of(case) for name, case in CASES.items()}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{RECORDED.name}: {len(found)} programs, traced by jax {jax.__version__}\n")
