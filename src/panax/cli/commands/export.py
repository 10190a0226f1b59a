"""`panax export`: a trained model as a folder that Hugging Face's libraries load."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ...adapters.huggingface import save, save_adapter, save_gguf
from ...adapters.huggingface.gguf import KINDS
from ...adapters.huggingface.hub import find_here
from ...core.errors import RecipeError
from ...models import Decoder, DecoderTask, Vit
from ...run.folder.trained_model import LoadedModel, load_model
from ...spmd.composite.low_rank import merge_low_rank
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax

DTYPES = ("float32", "bfloat16", "float16")


def cast_weights(params: Any, dtype: str) -> Any:
    """Round all weights to a dtype, once."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _base(init: str) -> Path | None:
    """Return the folder of the released model from which a run began, if it is on this machine."""
    kind, _, where = init.partition(":")
    return find_here(where) if kind == "hf" else None


def _write_gguf(trained: LoadedModel, directory: Path, kind: str) -> int:
    """Write a decoder as a GGUF file, next to its tokenizer's files."""
    if not isinstance(trained.params, Decoder):
        raise RecipeError(
            f"{trained.url} holds a vision transformer; GGUF files are of decoders, export without --gguf"
        )
    path, tokenizer = directory / f"model-{kind}.gguf", trained.tokenizer
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save(folder)
        save_gguf(path, trained.params, kind, tokenizer=None if tokenizer is None else folder, like=trained.released)
    if tokenizer is not None:
        # After the file, so that a model that GGUF can't express leaves nothing.
        tokenizer.save(directory)
    print(f"{trained.url} written to {path}; llama.cpp runs it")
    return 0


def _write_adapter(trained: LoadedModel, directory: str) -> int:
    """Write a decoder's adapters alone, in PEFT's layout."""
    lora = trained.task.adapter if isinstance(trained.task, DecoderTask) else None
    if lora is None:
        raise RecipeError(f"{trained.url} has no adapters; export the model itself, without --adapter")
    base = trained.init.partition(":")[2]
    save_adapter(directory, trained.params, lora, base=base, like=trained.released)
    print(
        f"adapters of {trained.url} written to {directory}; PeftModel.from_pretrained(base, {directory!r}) loads them"
    )
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's weights, configuration and tokenizer in Hugging Face's layout."""
    parser = Parser(prog="panax export", description="Write a trained model in Hugging Face's layout.")
    parser.add_argument("checkpoint", help="a run's folder (its best checkpoint is used), or a checkpoint's own")
    parser.add_argument("directory", help="where to write; a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; by default the checkpoint's")
    parser.add_argument("--base", help="the released model's folder, if the run's no longer exists")
    parser.add_argument(
        "--gguf", choices=KINDS, help="write one GGUF file for llama.cpp instead, with matrices of this type"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a run with --lora alone, for PEFT, instead of the sum",
    )
    options = parser.parse_args(arguments)
    if options.adapter and (options.gguf, options.dtype, options.base) != (None, None, None):
        raise RecipeError("--adapter writes the adapters as they were trained; leave out --gguf, --dtype and --base")
    if options.gguf is not None and options.dtype is not None:
        raise RecipeError("--dtype has no effect with --gguf, which has a type of its own; leave it out")
    start_jax()
    trained = load_model(options.checkpoint, warn)
    if not isinstance(trained.params, Decoder | Vit):
        raise RecipeError(
            f"{trained.url} holds neither a decoder nor a vision transformer; only those have a Hugging Face layout"
        )
    if options.adapter:
        return _write_adapter(trained, options.directory)
    if options.gguf is not None:
        return _write_gguf(trained, Path(options.directory), options.gguf)
    merged = merge_low_rank(trained.params)
    params = merged if options.dtype is None else cast_weights(merged, options.dtype)
    ids = {} if trained.tokenizer is None else trained.tokenizer.special_ids
    save(
        options.directory,
        params,
        trained.state,
        token_ids=ids,
        classes=trained.classes,
        like=trained.released,
        towers=options.base or _base(trained.init),
    )
    if trained.tokenizer is not None:
        trained.tokenizer.save(options.directory)
    loader = "AutoModelForCausalLM" if isinstance(trained.params, Decoder) else "AutoModelForImageClassification"
    print(f"{trained.url} written to {options.directory}; {loader}.from_pretrained({options.directory!r}) loads it")
    return 0
