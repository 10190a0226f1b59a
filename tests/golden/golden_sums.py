"""Golden runs of gradients that are compressed, delayed, or agreed on after some local steps."""

import warnings
from pathlib import Path

import jax
import numpy as np
from rows import Row, rows_of_step

from panax.comms import Comms
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.train import CompiledStep, Program, StepConfig

STEPS = 4
# An array of fewer than 4,096 elements travels in float32: these have more.
MODEL = DecoderConfig(vocab_size=128, max_length=32, embed=64, num_layers=2, heads=4, ffn=128)
COMMS = {
    "int8": Comms(compress="int8", rounding="stochastic"),
    "sign": Comms(compress="sign"),
    "bfloat16_in_backward": Comms(compress="bfloat16", sums="in_backward"),
    "delayed": Comms(compress="int8", delayed=True),
    "local_steps": Comms(compress="int4", local_steps=2),
    "fragments": Comms(local_steps=2, fragments=2, overlap_steps=1),
}
AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))


def batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, MODEL.vocab_size, (8, 33)).astype(np.int32)
    mask = (random.random((8, 32)) < np.linspace(0.3, 1, 8)[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def step_for(name: str) -> CompiledStep:
    optimizer = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))
    program = Program.create(
        DecoderTask(model=MODEL), optimizer, num_steps=10, config=StepConfig(micro_batches=2), comms=COMMS[name]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of meshes that suit no network
        placement = Placement.create(MeshShape(replica=2, fsdp=2), devices=jax.devices()[:4])
    return CompiledStep(program, placement, AXES)


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_step(step_for(name), map(batch, range(STEPS)))
