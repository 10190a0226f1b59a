"""The frozen weights of a base model, which checkpoints name by checksums instead of holding them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from ...checkpoint import Checkpoint, restore
from ...checkpoint.manifest import Manifest
from ...checkpoint.restoration import raise_on_all_processes
from ...core import TrainState, named_leaves
from ...core.errors import CheckpointError, PanaxError, RecipeError
from ...core.params.axes import path_name
from ...core.params.checksums import compute_checksums
from ...system.files import absolute_path, expand_user
from ..preparation import PreparedRun
from .addresses import RELEASED_PREFIX, base_name, is_released

BASE = "base"
"""Name under which a checkpoint stores its base."""

PARAMS = "params."

BaseReader = Callable[[str], Mapping[str, jax.Array]]
"""Reads the parameters of the model at an address, by name."""


@dataclasses.dataclass(frozen=True)
class NamedBase:
    """Weights that a run has loaded and never changes.

    Attributes:
        init: The address that they are read from, as `Experiment.init`.
        checksums: Of each parameter, by its name.
    """

    init: str
    checksums: Mapping[str, int]

    @classmethod
    def of(cls, manifest: Manifest) -> "NamedBase | None":
        """Return the base that a checkpoint names; None if it holds all of its weights.

        Raises:
            CheckpointError: The entry can't be read.
        """
        entry = manifest.host.get(BASE)
        if entry is None:
            return None
        try:
            init, checksums = entry["init"], entry["checksums"]
            if not (isinstance(init, str) and init.startswith(RELEASED_PREFIX)):
                raise ValueError(f"init={init!r}; expected {RELEASED_PREFIX} with a folder or a name")
            if not all(type(total) is int for total in checksums.values()):
                raise ValueError("expected a whole number as each checksum")
            return cls(init, dict(checksums))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the manifest of step {manifest.step} names a base that can't be read: {error!r}"
            ) from error

    def to_host(self) -> Mapping[str, Any]:
        """Return the entry of a checkpoint's host state."""
        return {BASE: {"init": self.init, "checksums": dict(self.checksums)}}

    def leave_out(self, state: TrainState) -> TrainState:
        """Return a state without these weights."""
        return dataclasses.replace(state, params=_without(state.params, self.checksums.keys()))


def find_base(prepared: PreparedRun, state: TrainState) -> NamedBase | None:
    """Return the weights that checkpoints of a run leave out; None if they hold all.

    Args:
        state: The first state, with frozen weights as `Experiment.init` has them.

    Raises:
        RecipeError: `checkpoint.base="named"` is set, and no weight is both loaded from a released model and frozen.
    """
    experiment = prepared.experiment
    choice, task = experiment.checkpoint.base, prepared.task
    has_adapters = getattr(task, "adapter", None) is not None
    if choice == "stored" or (choice == "auto" and not (has_adapters and is_released(experiment.init))):
        return None
    if not is_released(experiment.init):
        raise RecipeError(
            f'checkpoint.base="named" is for weights that init=hf:... loads, and init is {experiment.init!r}; leave it "auto"'
        )
    from ...adapters.huggingface.loader import parameters_left

    loaded = eqx.filter(state.params, parameters_left(task, state.params), inverse=True)
    frozen = eqx.filter(loaded, prepared.step.program.trainable, inverse=True)
    checksums = compute_checksums(frozen)
    if not checksums:
        raise RecipeError(
            'checkpoint.base="named" names weights that do not change, and this run trains all of them; leave it "auto"'
        )
    return NamedBase(_base_address(experiment.init), checksums)


def resumed_base(prepared: PreparedRun, manifest: Manifest) -> NamedBase | None:
    """Return the weights that a checkpoint names, and that are left out of those after it: at the address from which they
    were read now."""
    base, init = NamedBase.of(manifest), prepared.experiment.init
    return (
        base
        if base is None or not init.startswith(RELEASED_PREFIX)
        else dataclasses.replace(base, init=_base_address(init))
    )


def _base_address(init: str) -> str:
    from ...adapters.huggingface.hub import find_model

    name = base_name(init)
    # A folder is found again from another one, and is not taken for a name in a hub.
    where = absolute_path(name) if expand_user(name).is_dir() else find_model(name).where
    return f"{RELEASED_PREFIX}{where}"


def read_base(task: Any, init: str, abstract: tuple[Any, Any]) -> Mapping[str, jax.Array]:
    """Read the parameters of a released model, by name; those that it lacks are left out.

    Args:
        init: An address, `hf:DIR` or `hf:ORG/NAME[@REVISION]`.
        abstract: The task's parameters and model state, with shardings.

    Raises:
        CheckpointError: The model is not on this machine and can't be downloaded, or is damaged.
        RecipeError: It is another model than the task's.
    """
    from ...adapters.huggingface.hub import find_model
    from ...adapters.huggingface.loader import load

    params, _ = load(find_model(init.removeprefix(RELEASED_PREFIX)).folder, task, *abstract)
    return {name: leaf for name, leaf in named_leaves(params).items() if isinstance(leaf, jax.Array)}


def restore_with_base(
    checkpoint: Checkpoint,
    abstract: Any,
    shardings: Any,
    read: BaseReader,
    *,
    init: str = "",
    part: bool = False,
) -> Any:
    """Read a checkpoint as `panax.checkpoint.restore` does, and the weights that it names from its base.

    Args:
        read: Reads the base's parameters, onto the layout of `shardings`.
        init: Address to read the base from; "": the one that the checkpoint names.

    Raises:
        CheckpointError: As for `restore`; or the base can't be read, or is another model.
    """
    base = NamedBase.of(checkpoint.manifest)
    if base is None:
        return restore(checkpoint, abstract, shardings, part=part)
    expected = named_leaves(abstract)
    checksums = {name: total for name, total in base.checksums.items() if PARAMS + name in expected}
    left_out = {PARAMS + name for name in checksums}
    stored = restore(checkpoint, _without(abstract, left_out), _without(shardings, left_out), part=part)
    leaves = dict(named_leaves(stored))
    if checksums:
        loaded = _read_checked(checkpoint, init or base.init, checksums, read)
        leaves |= {PARAMS + name: leaf for name, leaf in loaded.items()}
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in expected])


def _read_checked(
    checkpoint: Checkpoint, init: str, checksums: Mapping[str, int], read: BaseReader
) -> Mapping[str, jax.Array]:
    """Read a checkpoint's base, and compare it with its checksums."""
    try:
        with raise_on_all_processes():
            weights = read(init)
    except PanaxError as error:
        raise CheckpointError(
            f"{checkpoint.url} holds trained weights alone, beside the model {init}, which can't be read: {error}. If it has "
            f"moved, name its folder: --base DIR, or --init hf:DIR to train on"
        ) from error
    missing = sorted(checksums.keys() - weights.keys())
    actual = compute_checksums({name: weights[name] for name in checksums if name in weights})
    # A dictionary sorts its keys, which have dots.
    changed = missing or sorted(name for name, total in checksums.items() if actual[name] != total)
    if changed:
        more = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        raise CheckpointError(
            f"{init} is not the model that {checkpoint.url} was trained beside: {changed[0]}{more} "
            f"{'is missing' if missing else 'has another checksum'}; name the folder of the right one: --base DIR, or "
            f"--init hf:DIR to train on"
        )
    return {name: weights[name] for name in checksums}


def _without(tree: Any, names: Any) -> Any:
    """Return a tree with None in the place of leaves of these names."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: None if path_name(path) in names else leaf, tree)
