"""The state before the first step: initialized, or with the weights of a checkpoint or a released model."""

import functools
from typing import Any

import equinox as eqx
import jax

from ...checkpoint import Checkpoint
from ...core import TrainState, logical_axes, named_leaves
from ...data.loading.class_agreement import find_class_names
from ...spmd.composite.low_rank import base_weights, random_mask, with_base_weights
from ...spmd.composite.quantized_weight import quantize_like, weight_shapes
from ..compile_ahead import compile_ahead
from ..opened_data import LogFn
from ..preparation import PreparedRun
from .addresses import ADAPTER_PREFIX, CHECKPOINT_PREFIX, RELEASED_PREFIX
from .base_model import PARAMS, NamedBase
from .trained_model import find_checkpoints, read_class_names, read_weights


def init_state(prepared: PreparedRun, say: LogFn) -> TrainState:
    """Return the state before the first step: initialized, or beginning with parameters that are loaded."""
    compile_ahead(prepared, prepared.experiment.num_steps)
    return load_state(prepared, say)


def load_state(prepared: PreparedRun, say: LogFn) -> TrainState:
    """Return the state as `init_state` does, without compiling the step."""
    experiment = prepared.experiment
    if not experiment.init:
        return prepared.step.init(experiment.seed)
    kind, _, where = experiment.init.partition(":")
    read = {RELEASED_PREFIX: _released_values, ADAPTER_PREFIX: _adapted_values, CHECKPOINT_PREFIX: _checkpoint_values}[
        f"{kind}:"
    ]
    return prepared.step.init(experiment.seed, read(prepared, where, say))


def _released_values(prepared: PreparedRun, where: str, say: LogFn) -> tuple[Any, Any]:
    """Return parameters and model state of a released model; parameters that it lacks are initialized, and no others."""
    from ...adapters.huggingface.hub import find_model
    from ...adapters.huggingface.loader import load, parameters_left

    say(f"starting from the weights in {where}")
    params, model_state = prepared.weight_places
    drawn = prepared.step.init_params(prepared.experiment.seed, parameters_left(prepared.task, params))
    return load(find_model(where).folder, prepared.task, eqx.combine(drawn, params), model_state)


def _adapted_values(prepared: PreparedRun, where: str, say: LogFn) -> tuple[Any, Any]:
    """Return parameters and model state of a released model with its adapter; nothing is initialized."""
    from ...adapters.huggingface.low_rank.released_adapter import check_all_layers, find_adapter

    adapter = find_adapter(where)
    check_all_layers(adapter)
    say(f"starting from the adapter in {where}, beside {adapter.base.where}")
    return adapter.load(prepared.task, *prepared.weight_places)


def _checkpoint_values(prepared: PreparedRun, where: str, say: LogFn) -> tuple[Any, Any]:
    """Return parameters and model state of a checkpoint; adapters and added parameters that it lacks are
    initialized, and nothing else."""
    checkpoint = next(find_checkpoints(where))
    say(f"starting from the weights in {checkpoint.url}")
    theirs, ours = read_class_names(checkpoint), find_class_names(prepared.data.train)
    if theirs and ours and theirs != ours:
        say(
            f"warning: these weights have {len(theirs)} classes ({', '.join(theirs[:8])}), and the data has "
            f"{len(ours)} ({', '.join(ours[:8])}): the head begins with other classes; name them in their order with classes="
        )
    added = _mask_added(prepared, checkpoint)
    drawn = prepared.step.init_params(prepared.experiment.seed, added)
    params, model_state = _stored_values(prepared, checkpoint, added)
    return eqx.combine(drawn, params), model_state


def _stored_values(prepared: PreparedRun, checkpoint: Checkpoint, added: Any) -> tuple[Any, Any]:
    """Return the values of a checkpoint, with initialized adapters if it lacks them.

    Args:
        added: True for parameters that are None in the result.
    """
    step = prepared.step
    abstract, places = step.program.abstract, step.shardings
    params, param_places, laid_out = (
        eqx.filter(tree, added, inverse=True) for tree in (abstract.params, places.params, prepared.weight_places[0])
    )
    plain = weight_shapes(base_weights(params))
    if not _lacks_adapters(checkpoint, params, plain):
        return read_weights(prepared.task, checkpoint, params, abstract.model_state, param_places, places.model_state)
    shardings = step.storage_shardings(plain, logical_axes(plain))
    weights, model_state = read_weights(
        prepared.task, checkpoint, plain, abstract.model_state, shardings, places.model_state
    )
    drawn = step.init_params(prepared.experiment.seed, random_mask(abstract.params))
    quantized = functools.partial(quantize_like, base_weights(params))
    bases = jax.jit(quantized, out_shardings=base_weights(param_places))(weights)
    return with_base_weights(eqx.combine(eqx.filter(drawn, added, inverse=True), laid_out), bases), model_state


def _mask_added(prepared: PreparedRun, checkpoint: Checkpoint) -> Any:
    """Return a tree with the structure of the parameters: True for those beside the model that a checkpoint lacks."""
    params = prepared.step.program.abstract.params
    lacking = set(prepared.task.added_parameters) - _stored_names(checkpoint)
    return jax.tree.unflatten(jax.tree.structure(params), [name in lacking for name in named_leaves(params)])


def _stored_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the parameters of a checkpoint, with those of its base."""
    base = NamedBase.of(checkpoint.manifest)
    there = {name.removeprefix(PARAMS) for name in checkpoint.manifest.arrays if name.startswith(PARAMS)}
    return there | (base.checksums.keys() if base is not None else set())


def _lacks_adapters(checkpoint: Checkpoint, params: Any, plain: Any) -> bool:
    """Return True if a checkpoint has the weights beside which there are to be adapters, and no adapters."""
    there = _stored_names(checkpoint)
    return not named_leaves(params).keys() <= there and named_leaves(plain).keys() <= there
