"""Golden runs of recommenders' tables: by rows over a mesh, with each optimizer of rows, and growing."""

from pathlib import Path

import jax
from growing import keyed_batch, step_of
from recommending import BATCH_AXES, TinyRecommender, batch_of, tiny_tables
from rows import Row, rows_of_step

from panax.mesh import MeshShape, Placement
from panax.optim import LazyAdam, RowAdagrad, RowSgd, RowWiseAdagrad, Schedule, Sgd
from panax.train import CompiledStep, Program

STEPS = 4
SCHEDULE = Schedule(peak=0.1, decay="constant")
OPTIMIZERS = {
    "rows": RowWiseAdagrad(schedule=SCHEDULE),
    "lazy_adam": LazyAdam(schedule=SCHEDULE),
    "row_adagrad": RowAdagrad(schedule=SCHEDULE),
    "row_sgd": RowSgd(schedule=SCHEDULE),
}


def step_for(name: str) -> CompiledStep:
    if name == "growing":
        return step_of({"fsdp": 4}, 4)
    task = TinyRecommender(tables=tiny_tables(item="rows"))
    program = Program.create(task, Sgd(schedule=SCHEDULE), num_steps=STEPS, embedding_optimizer=OPTIMIZERS[name])
    placement = Placement.create(MeshShape(fsdp=2, tensor=2), devices=jax.devices()[:4])
    return CompiledStep(program, placement, BATCH_AXES)


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_step(step_for(name), map(keyed_batch if name == "growing" else batch_of, range(STEPS)))
