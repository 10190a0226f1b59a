"""Trained models loaded from a checkpoint alone: task, parameters, tokenizer."""

import dataclasses
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from ...checkpoint import MANIFEST, Checkpoint, Checkpointer, open_checkpoint
from ...core import Task, TrainState, named_leaves
from ...core.errors import CheckpointError, DamagedError, RecipeError, describe_type
from ...core.state import average_dtype
from ...data.text.tokenizer import PretrainedTokenizer, Tokenizer
from ...generate import GenerationEngine
from ...kernels import choose_by_timing
from ...mesh import MeshShape, Placement
from ...mesh.model_places import choose_places, with_shardings
from ...stores import join_url, open_store
from ...system import json_reader
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..reporting.evaluation import evaluate_loaded_model, evaluate_result
from ..reporting.generation import TextModel, create_engine, generate_text
from .addresses import ADAPTER_PREFIX, RELEASED_PREFIX
from .attachments import CLASSES, MODEL, RELEASED, TOKENIZER
from .base_model import read_base, restore_with_base
from .description import deserialize_task
from .previous_run import SETTINGS

AVERAGED = "averaged"
"""Name of the averages in a state."""


def _warned(line: str) -> None:
    warnings.warn(line, stacklevel=4)


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """The contents of a checkpoint without optimizer state, on one device, or for generation on a mesh.

    Attributes:
        url: The checkpoint's address.
        params: The parameters; the averaged ones, if the run had an average.
        state: The task's model state.
        tokenizer: None if the run had none.
        averaged: True if the parameters are averages.
        classes: Names of the labels of the run's data, by index; () if they are not known.
        released: The config.json of the released model from which the run began; None if it began otherwise.
        init: The weights from which the run began, as `Experiment.init`.
        placement: The mesh of the arrays; None for one device.
    """

    url: str
    task: Task
    params: Any
    state: Any
    tokenizer: Tokenizer | None
    averaged: bool = False
    classes: tuple[str, ...] = ()
    released: dict[str, Any] | None = None
    init: str = ""
    placement: Placement | None = None

    def __repr__(self) -> str:
        return f"LoadedModel({type(self.task).__name__}, {self.url})"

    def generate(self, prompt: str, **settings: Any) -> str:
        """Generate text after `prompt` with the model; settings as for `panax.run.generate_text`.

        Raises:
            RecipeError: The model is not a text model with a tokenizer, or a setting is out of range.
        """
        return generate_text(self.text_model, prompt, **settings)

    @property
    def text_model(self) -> TextModel:
        """Return the values that text is generated with."""
        return TextModel(self.task, self.params, self.state, self.tokenizer, self.placement)

    def create_engine(
        self,
        *,
        rows: int = 8,
        length: int | None = None,
        at_least: int = 0,
        dtype: str | None = None,
        drafts: int = 0,
    ) -> GenerationEngine:
        """Create an engine that generates with the model; see `panax.generate.GenerationEngine`.

        Args:
            at_least: In place of `length`: a row has this many positions, or a few more.
            dtype: Dtype of activations and caches; float32 by default.
            drafts: See `GenerationEngine`.

        Raises:
            RecipeError: The model is not a text model with a tokenizer, or a setting is out of range.
        """
        return create_engine(self.text_model, rows=rows, length=length, at_least=at_least, dtype=dtype, drafts=drafts)

    def evaluate(self, data: Any = None, batches: int | None = None) -> dict[str, float]:
        """Compute losses and metrics on the data that the run held out, or on `data`; as `panax.evaluate`."""
        return evaluate_loaded_model(self, data, batches)


def find_checkpoints(where: str, *, newest: bool = False) -> Iterator[Checkpoint]:
    """Yield the checkpoint at an address, or those of a run's folder, the best or the newest one first.

    Raises:
        CheckpointError: The checkpoint does not exist, or its manifest is damaged.
    """
    if any(entry.path == MANIFEST for entry in open_store(where).list()):
        yield open_checkpoint(where)
        return
    has_checkpoint = False
    for folder in (join_url(where, "checkpoints"), where):
        checkpointer = Checkpointer(folder)
        for checkpoint in checkpointer.newest_first() if newest else checkpointer.best_first():
            has_checkpoint = True
            yield checkpoint
    if not has_checkpoint:
        raise CheckpointError(
            f"{where} holds no checkpoint; name a folder like runs/quickstart, or runs/quickstart/checkpoints/step_00000100"
        )


def load_model(
    where: str | Path,
    say: LogFn = _warned,
    *,
    newest: bool = False,
    mesh: MeshShape | None = None,
    base: str | Path | None = None,
) -> LoadedModel:
    """Read the model of a checkpoint, by default the best undamaged one; optimizer state is not read.

    Args:
        where: A run's folder, or a checkpoint's own folder or address; or a released decoder, `hf:DIR` or
            `hf:ORG/NAME[@REVISION]`; or an adapter of one in PEFT's layout, `peft:DIR`.
        say: Called with a line for each damaged checkpoint; by default it is a warning.
        newest: Read the newest undamaged checkpoint instead of the best.
        mesh: Read each shard to its device, for generation on a mesh; None for one device.
        base: Folder or hub name of the released model beside which adapters were trained, if it has moved. None: the address
            in the checkpoint, or in the adapter's settings.

    Raises:
        CheckpointError: There is no checkpoint, all are damaged, or it is of a model that can't be built from
            a file; or its base model can't be read, or is another.
        LayoutError: A weight is not divisible over the mesh, or there are not enough devices.
        RecipeError: The model generates on one device.
    """
    if str(where).startswith(RELEASED_PREFIX):
        if base is not None:
            raise RecipeError(f"base={str(base)!r} is for adapters, and {where} is a whole model; leave it out")
        return _load_released_model(str(where).removeprefix(RELEASED_PREFIX), mesh)
    if str(where).startswith(ADAPTER_PREFIX):
        return _load_adapted_model(str(where), mesh, base)
    damaged = None
    for checkpoint in find_checkpoints(str(where), newest=newest):
        try:
            return read_model(checkpoint, mesh, "" if base is None else f"{RELEASED_PREFIX}{base}")
        except DamagedError as error:
            damaged = error
            say(f"warning: the checkpoint of step {checkpoint.manifest.step} is not used: {error}")
    assert damaged is not None
    raise damaged


def _load_released_model(where: str, mesh: MeshShape | None) -> LoadedModel:
    """Read a released decoder with its tokenizer, in float32."""
    from ...adapters.huggingface.released_decoder import read_released_decoder

    released = read_released_decoder(where, mesh)
    address = f"{RELEASED_PREFIX}{released.where}"
    return LoadedModel(
        address, released.task, released.params, released.state, released.tokenizer, placement=released.placement
    )


def _load_adapted_model(address: str, mesh: MeshShape | None, base: str | Path | None) -> LoadedModel:
    """Read an adapter in PEFT's layout with its base and tokenizer, in float32."""
    from ...adapters.huggingface.low_rank.released_adapter import find_adapter

    adapter = find_adapter(address.removeprefix(ADAPTER_PREFIX), base)
    task = adapter.task
    abstract, abstract_state = jax.eval_shape(task.init, jax.random.key(0))
    places = choose_places(task, abstract, abstract_state, mesh)
    laid_out = with_shardings((abstract, abstract_state), (places.params, places.state))
    params, state = adapter.load(task, *laid_out)
    has_own = (adapter.folder / TOKENIZER).is_file()
    tokenizer = PretrainedTokenizer(path=str(adapter.folder if has_own else adapter.base.folder)).load()
    tokenizer = tokenizer.add_generation_config(adapter.base.folder)
    init = f"{RELEASED_PREFIX}{adapter.base.where}"
    return LoadedModel(
        address, task, params, state, tokenizer, released=adapter.raw, init=init, placement=places.placement
    )


def read_model(checkpoint: Checkpoint, mesh: MeshShape | None = None, base: str = "") -> LoadedModel:
    """Read the model of this checkpoint.

    Args:
        mesh: As for `load_model`.
        base: As for `read_weights`.

    Raises:
        CheckpointError: The checkpoint is damaged, or of a model that can't be built from a file.
    """
    choose_by_timing()
    task = read_task(checkpoint)
    params, model_state = jax.eval_shape(task.init, jax.random.key(0))
    places = choose_places(task, params, model_state, mesh)
    params, model_state = read_weights(task, checkpoint, params, model_state, places.params, places.state, base)
    averaged = any(name.startswith(f"{AVERAGED}.") for name in checkpoint.manifest.arrays)
    return LoadedModel(
        checkpoint.url,
        task,
        params,
        model_state,
        read_tokenizer(checkpoint),
        averaged,
        read_class_names(checkpoint),
        _read_released(checkpoint),
        _read_init(checkpoint),
        places.placement,
    )


def read_task(checkpoint: Checkpoint) -> Task:
    """Read the task of a checkpoint.

    Raises:
        CheckpointError: It is of a model that can't be built from a file.
    """
    description = checkpoint.attachment(MODEL)
    if description is None:
        raise CheckpointError(f"{checkpoint.url} has no {MODEL}: it was not saved by a run, so its model is unknown")
    return deserialize_task(description, f"{MODEL} of {checkpoint.url}")


def _read_init(checkpoint: Checkpoint) -> str:
    try:
        settings = json_reader.parse(checkpoint.attachment(SETTINGS) or "{}", constants=True)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.url}: {SETTINGS} can't be read: {error}") from error
    init = settings.get("init", "") if isinstance(settings, dict) else ""
    return init if isinstance(init, str) else ""


def _read_released(checkpoint: Checkpoint) -> dict[str, Any] | None:
    text = checkpoint.attachment(RELEASED)
    if text is None:
        return None
    try:
        raw = json_reader.parse(text, constants=True)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.url}: {RELEASED} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{checkpoint.url}: {RELEASED} holds {describe_type(raw)}; expected an object")
    return raw


def read_class_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the class names of a run's labels from its checkpoint; () if it has none.

    Raises:
        CheckpointError: The attachment does not contain a list of names.
    """
    if CLASSES not in checkpoint.manifest.attachments:
        return ()
    try:
        return tuple(map(str, json_reader.parse(checkpoint.attachment(CLASSES) or "")["label"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{CLASSES} of {checkpoint.url} does not list the classes of labels: {error!r}"
        ) from error


def read_weights(
    task: Task,
    checkpoint: Checkpoint,
    params: Any,
    model_state: Any,
    param_places: Any,
    state_places: Any,
    base: str = "",
) -> tuple[Any, Any]:
    """Read parameters and model state from a checkpoint: the averages if there are any, since the run was
    evaluated with them.

    Args:
        task: The task of `params`.
        params: Abstract parameters.
        model_state: Abstract model state.
        param_places: A sharding for each parameter.
        state_places: A sharding for each leaf of the model state.
        base: Address of the base model that the checkpoint names; "": the one in the checkpoint.
    """

    def read(init: str) -> Mapping[str, jax.Array]:
        return read_base(task, init, with_shardings((params, model_state), (param_places, state_places)))

    prefix = f"{AVERAGED}."
    averaged = {name.removeprefix(prefix) for name in checkpoint.manifest.arrays if name.startswith(prefix)}
    names = jax.tree.unflatten(jax.tree.structure(params), list(named_leaves(params)))

    def pick(tree: Any, chosen: bool) -> Any:
        return jax.tree.map(lambda name, leaf: leaf if (name in averaged) == chosen else None, names, tree)

    def widened(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, average_dtype(leaf.dtype))

    abstract = {
        "params": pick(params, False),
        AVERAGED: jax.tree.map(widened, pick(params, True)),
        "model_state": model_state,
    }
    places = {"params": pick(param_places, False), AVERAGED: pick(param_places, True), "model_state": state_places}
    restored_parts = restore_with_base(checkpoint, abstract, places, read, init=base, part=True)

    def chosen(average: Any, leaf: Any, plain: Any) -> Any:
        return plain if average is None else average.astype(leaf.dtype)

    merged = jax.tree.map(
        chosen, restored_parts[AVERAGED], params, restored_parts["params"], is_leaf=lambda leaf: leaf is None
    )
    return merged, restored_parts["model_state"]


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Read a checkpoint's tokenizer; None if its run had none."""
    if TOKENIZER not in checkpoint.manifest.attachments:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in checkpoint.manifest.attachments:
            Path(folder, name).write_text(checkpoint.attachment(name) or "", encoding="utf-8")
        return PretrainedTokenizer(path=folder).load()


def evaluate(run: Any, data: Any = None, batches: int | None = None) -> dict[str, float]:
    """Compute the losses and metrics of a trained model, under the names that training reports.

    Args:
        run: A run's folder (its newest checkpoint is used), a checkpoint's folder or address, the result of
            `fit`, or the result of `panax.load`. If the run has averaged parameters, these are evaluated.
        data: Paths (all of their data is used, read like the run's data, with its fields, columns, tokenizer,
            classes and ids), settings such as `TextData` or `ExampleData`, a source, or an iterable of
            batches. None: the run's held-out data, which gives the figures that the run ended with.
        batches: At most this many; None: all of `data`, or for held-out data the run's
            `evaluate.batches`. 0: all.

    Raises:
        RecipeError: There is nothing to evaluate on, or the data does not suit the model.
        CheckpointError: There is no checkpoint, or its model can't be built from a file.
    """
    if isinstance(run, str | Path):
        run = load_model(run, newest=True)
    if isinstance(run, LoadedModel):
        return evaluate_loaded_model(run, data, batches)
    prepared, state = getattr(run, "prepared", None), getattr(run, "state", None)
    if not isinstance(prepared, PreparedRun) or not isinstance(state, TrainState):
        raise RecipeError(
            f"{describe_type(run)} can't be evaluated; expected a run's folder, or what fit or load returned"
        )
    return evaluate_result(prepared, state, data, batches)
