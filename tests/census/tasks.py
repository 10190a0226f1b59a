"""One small instance of every public task that takes batches, with a batch for each: what the census asks its questions of."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tiny
from models import recommenders

from panax.core import Task
from panax.core.params.logical import batch_row_axes
from panax.layers import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, DlrmTask, TwoTowerTask, VitConfig, VitTask
from panax.optim import RowSgd, Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig

ROWS = 16


class Case(NamedTuple):
    """A task, and how a batch for it is drawn from a seed."""

    task: Task
    draw: Callable[[int], dict[str, np.ndarray]]

    @property
    def axes(self) -> Mapping[str, Any]:
        return self.task.leaf_axes(batch_row_axes(self.draw(0)))


def _mixture() -> DecoderTask:
    feed_forward = MoE(experts=4, active=2, ffn=8, balance=0.1, z_loss=0.01, balance_scope="sequence")
    model = DecoderConfig(
        vocab_size=96, max_length=32, embed=16, num_layers=2, heads=2, ffn=16, feed_forward=feed_forward
    )
    return DecoderTask(model=model)


def _pictures(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (ROWS, 8, 8, 3)).astype(np.uint8),
        "label": rng.integers(0, 10, ROWS).astype(np.int32),
        "label_mixed": rng.integers(0, 10, ROWS).astype(np.int32),
        "mix": rng.random(ROWS).astype(np.float32),
        "loss_mask": (np.arange(ROWS) < ROWS - 2).astype(np.float32),
    }


def _vit() -> VitTask:
    model = VitConfig(image_size=8, patch=4, num_classes=10, embed=16, num_layers=2, heads=2, ffn=16)
    return VitTask(model=model)


CASES: dict[str, Case] = {
    "decoder": Case(DecoderTask(model=tiny.CONFIG), tiny.batch),
    "mixture": Case(_mixture(), tiny.batch),
    "vit": Case(_vit(), _pictures),
    "dlrm": Case(recommenders.dlrm(), recommenders.clicks),
    "towers": Case(recommenders.towers(), recommenders.visits),
    "sasrec": Case(recommenders.sasrec(), recommenders.histories),
    "hstu": Case(recommenders.hstu(), recommenders.histories),
}


def make_step(case: Case, *, mesh: Mapping[str, int] | None = None, **config: Any) -> CompiledStep:
    """A step of plain gradient descent, so that differences of gradients show in the parameters."""
    optimizer = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    tables = isinstance(case.task, DlrmTask | TwoTowerTask)
    rows = RowSgd(schedule=Schedule(peak=0.1, decay="constant")) if tables else None
    program = Program.create(
        case.task, optimizer, num_steps=10, config=StepConfig(clip_norm=None, **config), embedding_optimizer=rows
    )
    sizes = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1) | dict(mesh or {})
    placement = Placement.create(MeshShape(**sizes), devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return CompiledStep(program, placement, case.axes, shapes_allowed=8)


@functools.cache
def step_of(name: str) -> CompiledStep:
    """A step that only takes batches: nothing is compiled before it is run."""
    return make_step(CASES[name])
