"""Flags of other libraries, and their names here."""

from collections.abc import Sequence

from ..core.errors import RecipeError

FLAG_ALIASES = {
    "--accumulate": "--step.micro-batches",
    "--accumulate-grad-batches": "--step.micro-batches",
    "--amp": "--task.compute-dtype bfloat16",
    "--batch": "--data.batch-size",
    "--batch-size": "--data.batch-size",
    "--bf16": "--task.compute-dtype bfloat16",
    "--block-size": "--data.sequence-length",
    "--bs": "--data.batch-size",
    "--checkpoint-every": "--checkpoint.every",
    "--clip": "--step.clip-norm",
    "--clip-norm": "--step.clip-norm",
    "--compute-dtype": "--task.compute-dtype",
    "--context-length": "--data.sequence-length",
    "--context-parallel": "--mesh.context",
    "--context-parallel-size": "--mesh.context",
    "--cp": "--mesh.context",
    "--d-model": "--task.model.embed",
    "--data-parallel": "--mesh.replica",
    "--ddp": "--mesh.replica",
    "--dim": "--task.model.embed",
    "--dp": "--mesh.replica",
    "--dropout": "--task.model.dropout",
    "--dtype": "--task.compute-dtype",
    "--ep": "--mesh.expert",
    "--eval-every": "--evaluate.every",
    "--eval-steps": "--evaluate.every",
    "--expert-parallel": "--mesh.expert",
    "--expert-parallel-size": "--mesh.expert",
    "--grad-accum": "--step.micro-batches",
    "--grad-clip": "--step.clip-norm",
    "--gradient-accumulation-steps": "--step.micro-batches",
    "--gradient-checkpointing": "--task.remat full",
    "--gradient-clip-val": "--step.clip-norm",
    "--hidden-size": "--task.model.embed",
    "--layers": "--task.model.num-layers",
    "--learning-rate": "--optimizer.schedule.peak",
    "--log-every-n-steps": "--log-every",
    "--logging-steps": "--log-every",
    "--lr": "--optimizer.schedule.peak",
    "--max-grad-norm": "--step.clip-norm",
    "--max-lr": "--optimizer.schedule.peak",
    "--max-seq-length": "--data.sequence-length",
    "--max-steps": "--num-steps",
    "--micro-batches": "--step.micro-batches",
    "--mixed-precision": "--task.compute-dtype bfloat16",
    "--n-head": "--task.model.heads",
    "--n-layer": "--task.model.num-layers",
    "--num-heads": "--task.model.heads",
    "--num-layers": "--task.model.num-layers",
    "--out": "--directory",
    "--output": "--directory",
    "--output-dir": "--directory",
    "--pipeline-parallel": "--mesh.stage",
    "--pipeline-parallel-size": "--mesh.stage",
    "--pp": "--mesh.stage",
    "--precision": "--task.compute-dtype",
    "--remat": "--task.remat",
    "--replica": "--mesh.replica",
    "--run-dir": "--directory",
    "--save-every": "--checkpoint.every",
    "--save-steps": "--checkpoint.every",
    "--seq-len": "--data.sequence-length",
    "--seq-length": "--data.sequence-length",
    "--sequence-length": "--data.sequence-length",
    "--shard": "--mesh.fsdp",
    "--steps": "--num-steps",
    "--tensor": "--mesh.tensor",
    "--tensor-parallel": "--mesh.tensor",
    "--tensor-parallel-size": "--mesh.tensor",
    "--tensor-model-parallel-size": "--mesh.tensor",
    "--tp": "--mesh.tensor",
    "--train-iters": "--num-steps",
    "--vocab-size": "--data.tokenizer.vocab-size",
    "--warmup": "--optimizer.schedule.warmup-steps",
    "--warmup-steps": "--optimizer.schedule.warmup-steps",
    "--wd": "--optimizer.weight-decay",
    "--weight-decay": "--optimizer.weight-decay",
}
"""A flag of another library to its equivalent."""

ADVICE = {
    "--epochs": "a run is measured in steps: --num-steps, of --data.batch-size rows each",
    "--max-epochs": "a run is measured in steps: --num-steps, of --data.batch-size rows each",
    "--num-train-epochs": "a run is measured in steps: --num-steps, of --data.batch-size rows each",
    "--resume": "the same command again resumes; --fresh starts over",
    "--resume-from-checkpoint": "the same command again resumes; weights of another run are loaded by --init checkpoint:PLACE",
    "--ckpt-path": "the same command again resumes; weights of another run are loaded by --init checkpoint:PLACE",
    "--gpus": "all devices are used; a layout is chosen by --mesh auto, or set by --mesh.fsdp, --mesh.tensor, ...",
    "--devices": "all devices are used; a layout is chosen by --mesh auto, or set by --mesh.fsdp, --mesh.tensor, ...",
    "--device": "JAX_PLATFORMS=cpu (or cuda, tpu) before the command chooses the device",
    "--overwrite": "--fresh starts over, and sets an earlier run aside",
    "--overwrite-output-dir": "--fresh starts over, and sets an earlier run aside",
}
"""A flag of another library to the alternative here."""


def check_names(flags: Sequence[str]) -> None:
    """Check that no flag has another library's name.

    Raises:
        RecipeError: A flag has another library's name; the message gives Panax's name.
    """
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in FLAG_ALIASES:
            raise RecipeError(f"unknown flag {name}; use {FLAG_ALIASES[name]}")
        if name in ADVICE:
            raise RecipeError(f"unknown flag {name}: {ADVICE[name]}")
