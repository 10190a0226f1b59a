"""A released model, by its folder or its name in a hub, as an experiment that continues its training."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..adapters.huggingface import config_from
from ..adapters.huggingface.config import read_json
from ..adapters.huggingface.hub import find_model
from ..adapters.huggingface.low_rank.released_adapter import check_all_layers, find_adapter
from ..adapters.huggingface.quantized import is_nf4
from ..core.errors import DataError, RecipeError
from ..data import PretrainedTokenizer, TextData
from ..models import DecoderConfig, DecoderTask, LoRA
from ..optim import AdamW, Schedule
from ..run import EvaluateConfig, Experiment
from ..run.blank_data import NoData
from ..run.data_override import replace_data
from ..run.folder.attachments import TOKENIZER
from .experiments import MOST_TOKENS, paths_of

OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "*.tiktoken", "vocab.json")
"""Files of tokenizers in other forms than tokenizer.json."""


def released_model(
    where: str | Path,
    *,
    data: str | Path | Sequence[str | Path] | Any = None,
    lora: int | LoRA | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Experiment:
    """Return an experiment that fine-tunes a released model, with its own tokenizer and chat template.

    The settings are common defaults: AdamW with a peak learning rate of 2e-5 (2e-4 for adapters) after 20 steps
    of warm-up, rows of up to 2,048 tokens, and computation in bfloat16 if the devices have instructions for it.
    Change them with `dataclasses.replace`, or by flags.

    Args:
        where: A folder in Hugging Face's layout, or `ORG/NAME[@REVISION]`: a model in the local cache of `huggingface_hub`,
            or one that this library downloads if installed. The experiment records the commit.
        data: Paths, as for `panax.data.make_corpus` (conversations are rendered by the model's template), or
            any value of `Experiment.data`. None leaves the data open: it must be set before training.
        lora: Rank of adapters beside all matrices of the layers, with a gain of 2, or their settings: they are trained, and
            the model is frozen; by a rank, in 4 bits if bitsandbytes has stored it in NF4. None: all of the model is trained.
        say: Called with a line about the model, if `where` does not identify it fully.
        settings: Other fields of the experiment, such as `num_steps`.

    Raises:
        CheckpointError: The model is not on this machine, and can't be downloaded.
        RecipeError: Models of this family can't be loaded; the message names the missing parts.
        DataError: The model has no readable tokenizer, or a path can't be read.
    """
    model = find_model(str(where))
    config = config_from(model.folder)
    if not isinstance(config, DecoderConfig):
        raise RecipeError(f"{where} is a vision transformer; train it with preset:NAME --init hf:{model.folder}")
    check_tokenizer(model.folder)
    if say is not None and model.where != str(where):
        say(f"{where} is {model.where}, in {model.folder}")
    name = re.sub(r"[^\w.-]", "-", Path(model.where.partition("@")[0]).name) or "model"
    adapter = lora
    if isinstance(adapter, int):
        base = "nf4" if is_nf4(read_json(model.folder)) else "same"
        adapter = dataclasses.replace(LoRA.of_rank(adapter), base=base)
    defaults: dict[str, Any] = {
        "name": name,
        "init": f"hf:{model.where}",
        "task": DecoderTask(model=config, compute_dtype="auto", adapter=adapter),
        "data": TextData(
            corpus=NoData(
                preset=f"hf:{where}", kind="texts or conversations", function=f"panax.released_model({str(where)!r})"
            ),
            tokenizer=PretrainedTokenizer(path=str(model.folder)),
            sequence_length=min(MOST_TOKENS, config.max_length),
        ),
        "optimizer": AdamW(schedule=Schedule(peak=2e-5 if adapter is None else 2e-4, warmup_steps=20)),
        "evaluate": EvaluateConfig(every=100, batches=50),
    }
    experiment = Experiment(**defaults | settings)
    if data is None:
        return experiment
    paths = paths_of(data)
    if paths:
        return replace_data(experiment, *paths)
    return dataclasses.replace(experiment, data=data)


def adapted_model(
    where: str | Path,
    *,
    data: str | Path | Sequence[str | Path] | Any = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Experiment:
    """Return an experiment that trains an adapter in PEFT's layout further, beside the released model that it names.

    Args:
        where: The adapter's folder.
        settings: Other fields of the experiment; the other arguments are those of `released_model`.

    Raises:
        CheckpointError: A file of the adapter is missing or broken, or its base can't be found.
        RecipeError: The adapter has a key that changes the model and is not implemented, or covers some layers of a stack.
        DataError: The base has no readable tokenizer, or a path can't be read.
    """
    adapter = find_adapter(where)
    check_all_layers(adapter)
    own = {"name": re.sub(r"[^\w.-]", "-", adapter.folder.resolve().name) or "adapter", "init": f"peft:{where}"}
    return released_model(adapter.base.where, data=data, lora=adapter.lora, say=say, **own | settings)


def check_tokenizer(folder: Path) -> None:
    """Raise a DataError if a folder has no tokenizer.json; for other tokenizer files, the message contains the
    conversion command."""
    if (folder / TOKENIZER).is_file():
        return
    other = next((file.name for pattern in OTHER_TOKENIZERS for file in sorted(folder.glob(pattern))), None)
    if other is None:
        raise DataError(
            f"{folder} has no {TOKENIZER}; its weights mean nothing without the tokens that they were trained on"
        )
    raise DataError(
        f'{folder} has {other} and no {TOKENIZER}; convert it once, where transformers is installed: python -c "from '
        f"transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
