"""Published models by name as experiments that are ready to run, but for their data."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..adapters.huggingface.hub import find_model
from ..core.errors import DataError, RecipeError, suggest_name
from ..data import Arrays, BytePairTokenizer, ExampleData, ImageFolder, PretrainedTokenizer, TextData
from ..models import PRESETS, PUBLISHED_PARAMETERS, VIT_PRESETS, VIT_PUBLISHED_PARAMETERS, DecoderTask, VitTask
from ..optim import AdamW, Schedule
from ..run import EvaluateConfig, Experiment
from ..run.blank_data import NoData
from ..run.data_override import replace_data
from ..run.folder.addresses import base_name, is_released
from ..run.folder.attachments import TOKENIZER
from ..run.folder.trained_model import find_checkpoints
from ..stores import is_remote, redact_address
from ..system.files import expand_user

PARAMETERS = PUBLISHED_PARAMETERS | VIT_PUBLISHED_PARAMETERS
"""Every preset's name, and its number of parameters."""

MOST_TOKENS = 2048
"""In a row, unless the model is for shorter ones."""

VOCABULARY = 32768
"""Of a tokenizer that is trained on the data, unless the model's is smaller."""


IMAGES = "a folder of images, a folder in it for each class"


class NoImages(NoData):
    """Placeholder for the images of a preset."""

    def fill(self, experiment: Experiment) -> Experiment:
        """Return the experiment with black images, as many as a batch has."""
        task, data = experiment.task, experiment.data
        assert isinstance(task, VitTask) and isinstance(data, ExampleData)
        size, rows = task.model.image_size, data.batch_size
        image, label = np.zeros((rows, size, size, task.model.channels), np.uint8), np.zeros(rows, np.int32)
        examples = Arrays({"image": image, "label": label}, num_classes=task.model.num_classes)
        return dataclasses.replace(experiment, data=dataclasses.replace(data, examples=examples, held_out=0))


def preset(
    name: str,
    *,
    data: str | Path | Sequence[str | Path] | Any = None,
    init: str = "",
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Experiment:
    """Return an experiment with a published model, from scratch or from its released weights.

    The settings are common defaults: AdamW, bfloat16 computation with float32 parameters, rows of up to 2,048
    tokens, and a tenth of the learning rate if `init` names weights. Change them with `dataclasses.replace`, or
    by flags.

    Args:
        name: As `panax recipes` lists it.
        data: Paths, as for `panax.data.make_corpus` (for an image model, one folder of images), or any value of
            `Experiment.data`. None leaves the data open: it must be set before training.
        init: As in `Experiment.init`. The tokenizer of `hf:DIR` is its tokenizer.json; without weights, a
            tokenizer is trained on the data.
        say: Called with a line about the tokenizer if the choice is not obvious; by default the line is a
            warning.
        settings: Other fields of the experiment, such as `num_steps`.

    Raises:
        RecipeError: The preset does not exist, or a setting is invalid.
        DataError: A path can't be read.
    """
    if name not in PARAMETERS:
        raise RecipeError(f"unknown preset {name!r}; {suggest_name(name, PARAMETERS)}")
    defaults: dict[str, Any] = {
        "name": name,
        "init": init,
        "optimizer": AdamW(schedule=Schedule(peak=3e-5 if init else 3e-4, warmup_steps=100)),
        "evaluate": EvaluateConfig(every=100, batches=50),
    }
    paths = paths_of(data)
    if name in VIT_PRESETS:
        experiment = Experiment(**defaults | _images(name, paths) | settings)
    else:
        experiment = Experiment(**defaults | _texts(name, init) | settings)
        experiment = replace_data(experiment, *paths) if paths else experiment
    if data is not None and not paths:
        return dataclasses.replace(experiment, data=data)
    tokenizer = getattr(experiment.data, "tokenizer", None)
    if paths and isinstance(tokenizer, BytePairTokenizer):
        (say or _warned)(
            f"{name}: a tokenizer of {tokenizer.vocab_size:,} tokens is trained on the data; the published one comes with "
            f"--init hf:DIR (init='hf:DIR')"
        )
    return experiment


def _warned(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def paths_of(data: Any) -> list[str | Path]:
    """Return the paths in `data`; an empty list if it is something else."""
    if isinstance(data, str | Path):
        return [data]
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | Path) for each in data):
        return list(data)
    return []


def _texts(name: str, init: str) -> dict[str, Any]:
    model = PRESETS[name]
    tokenizer = _find_tokenizer(init) or BytePairTokenizer(vocab_size=min(VOCABULARY, model.vocab_size))
    length = min(MOST_TOKENS, model.max_length)
    data = TextData(corpus=NoData(preset=name, kind="texts"), tokenizer=tokenizer, sequence_length=length)
    return {"task": DecoderTask(model=model, compute_dtype="bfloat16"), "data": data}


def _find_tokenizer(init: str) -> PretrainedTokenizer | None:
    """Return the tokenizer stored with the weights; None if the run begins without weights."""
    where = init.partition(":")[2]
    if not where:
        return None
    if is_released(init):
        where = str(find_model(base_name(init)).folder)
        file = expand_user(where) / TOKENIZER
        # A folder that is missing is another error, which is said where its weights are read.
        is_readable = file.is_file() or not file.parent.is_dir()
    else:
        checkpoint = next(find_checkpoints(where))
        entry = checkpoint.manifest.attachments.get(TOKENIZER)
        is_readable = entry is not None and not is_remote(checkpoint.url)
        file = Path(checkpoint.url, entry.file if entry is not None else TOKENIZER)
    if not is_readable:
        raise DataError(
            f"{redact_address(where)} has no {TOKENIZER} that can be read here, without which its weights mean nothing; put it "
            f"there, or write a recipe with PretrainedTokenizer(path=...)"
        )
    return PretrainedTokenizer(path=where if is_released(init) else str(file))


def _images(name: str, paths: Sequence[str | Path]) -> dict[str, Any]:
    # Without data it has the published head, so that it can be looked at.
    model = dataclasses.replace(VIT_PRESETS[name], num_classes=0) if paths else VIT_PRESETS[name]
    if len(paths) > 1:
        raise RecipeError(f"{name} takes one folder of images; got {len(paths)} paths")
    examples = ImageFolder(path=str(paths[0]), size=model.image_size) if paths else NoImages(preset=name, kind=IMAGES)
    return {
        "task": VitTask(model=model, compute_dtype="bfloat16"),
        "data": ExampleData(examples=examples, held_out=0.02),
    }
