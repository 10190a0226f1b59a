"""Panax trains large models on any number of accelerators, on JAX.

Nothing heavy is imported until it is used: a supervisor that only checks a layout never loads jax.
"""

from typing import TYPE_CHECKING

# Registers the axes of Panax's own layers, whichever room is imported first.
from . import layers as layers
from .core.lazy import lazy_getattr
from .core.serializable import register_serializable_module

if TYPE_CHECKING:
    from . import adapters, hooks
    from .core import Task, is_debugging
    from .job.join import join
    from .metrics.report import report, time_to_loss
    from .plan.goodput import simulate
    from .presets.experiments import preset
    from .presets.released_model import adapted_model, released_model
    from .run import (
        Experiment,
        Result,
        add_reference,
        add_teacher,
        at,
        branch,
        check,
        compile_step,
        evaluate,
        find_batch,
        find_lr,
        fit,
        load,
        open_run,
        sweep,
    )
    from .train import CompiledStep, Program

__version__ = "0.1.1"

__getattr__ = lazy_getattr(
    __name__,
    {
        "core": ("Task", "is_debugging"),
        "job.join": ("join",),
        "metrics.report": ("report", "time_to_loss"),
        "plan.goodput": ("simulate",),
        "presets.experiments": ("preset",),
        "presets.released_model": ("adapted_model", "released_model"),
        "run": ("Experiment", "Result", "check", "compile_step", "evaluate", "fit", "load", "open_run", "sweep"),
        "run.replay.branch": ("branch",),
        "run.replay.opened_step": ("at",),
        "run.tools.batch_search": ("find_batch",),
        "run.tools.lr_search": ("find_lr",),
        "run.tools.reference": ("add_reference",),
        "run.tools.teacher": ("add_teacher",),
        "train": ("CompiledStep", "Program"),
    },
    rooms=("adapters", "hooks"),
)

register_serializable_module(
    "panax.models", "DecoderTask", "DecoderConfig", "BaseWidth", "HeadSizes", "LoRA", "VitTask", "VitConfig"
)
register_serializable_module(
    "panax.models", "TextClassifierTask", "TextEmbedderTask", "RewardTask", "Distill", "Kto", "NextToken"
)
register_serializable_module("panax.models", "PolicyGradient", "Preference")
register_serializable_module(
    "panax.models", "DlrmTask", "DlrmConfig", "HstuConfig", "SequenceTask", "TwoTowerTask", "TwoTowerConfig"
)
register_serializable_module("panax.layers", "TablesConfig", "TableConfig", "FeatureConfig", "Growth")
register_serializable_module(
    "panax.layers",
    "DynamicScaling",
    "GateClamp",
    "LinearScaling",
    "LongScaling",
    "Rotary",
    "RotaryScaling",
    "YarnScaling",
    "Latent",
    "MoE",
)
register_serializable_module("panax.parallel", "Pipeline")
register_serializable_module(
    "panax.agents", "Dqn", "Ppo", "Sac", "Seeds", "PerceptronPolicy", "RecurrentPolicy", "DecoderPolicy"
)
# Not Gymnasium: it starts processes, which import modules by name.
register_serializable_module("panax.environments", "Acrobot", "Brax", "CartPole", "GridWorld", "Gymnax", "Pendulum")

__all__ = [
    "CompiledStep", "Experiment", "Program", "Result", "Task", "__version__", "adapted_model", "adapters", "add_reference",
    "add_teacher", "at", "branch", "check", "compile_step", "evaluate", "find_batch", "find_lr", "fit", "hooks", "is_debugging",
    "join", "load", "open_run", "preset", "released_model", "report", "simulate", "sweep", "time_to_loss",
]  # fmt: skip
