"""`panax export`: a trained model as a folder that Hugging Face's libraries load."""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...adapters.huggingface import save, save_adapter, save_gguf
from ...adapters.huggingface.gguf import KINDS
from ...core.errors import RecipeError
from ...models import Decoder, DecoderTask, Vit
from ...models.merged_lora import check_merged, compare_merged, has_adapters, merge_adapters
from ...run.folder.addresses import base_folder, base_name, is_released
from ...run.folder.trained_model import LoadedModel, load_model
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax

DTYPES = ("float32", "bfloat16", "float16")


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
    base = base_name(trained.init) if is_released(trained.init) else ""
    save_adapter(directory, trained.params, lora, base=base, like=trained.released)
    print(
        f"adapters of {trained.url} written to {directory}; PeftModel.from_pretrained(base, {directory!r}) loads them"
    )
    return 0


def add_merge_flags(parser: Parser) -> None:
    """Add the flags of a command that writes a whole model."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; by default the checkpoint's")
    parser.add_argument(
        "--base", help="the released model's folder, where adapters are beside it, or other towers, and it has moved"
    )
    parser.add_argument(
        "--accept-difference",
        action="store_true",
        help="write the sum of matrices and adapters though its predictions differ from those of the adapters",
    )


def write_model(trained: LoadedModel, directory: str, options: Namespace) -> None:
    """Write a whole model in Hugging Face's layout, with its tokenizer; adapters are merged, and the sum compared with them.

    Raises:
        RecipeError: The merged model predicts other tokens, and `--accept-difference` is not set.
    """
    params = merge_adapters(trained.params, options.dtype)
    if has_adapters(trained.params):
        difference = compare_merged(trained.params, params)
        check_merged(difference, accept=options.accept_difference)
        print(f"merged: {difference.describe()}")
    ids = {} if trained.tokenizer is None else trained.tokenizer.special_ids
    save(
        directory,
        params,
        trained.state,
        token_ids=ids,
        classes=trained.classes,
        like=trained.released,
        towers=options.base or base_folder(trained.init),
    )
    if trained.tokenizer is not None:
        trained.tokenizer.save(directory)
    loader = "AutoModelForCausalLM" if isinstance(trained.params, Decoder) else "AutoModelForImageClassification"
    print(f"{trained.url} written to {directory}; {loader}.from_pretrained({directory!r}) loads it")


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's weights, configuration and tokenizer in Hugging Face's layout."""
    parser = Parser(prog="panax export", description="Write a trained model in Hugging Face's layout.")
    parser.add_argument(
        "checkpoint",
        help="a run's folder (its best checkpoint is used), or a checkpoint's own, or an adapter in PEFT's layout, peft:DIR",
    )
    parser.add_argument("directory", help="where to write; a new or empty folder")
    add_merge_flags(parser)
    parser.add_argument(
        "--gguf", choices=KINDS, help="write one GGUF file for llama.cpp instead, with matrices of this type"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a run with --lora alone, for PEFT, instead of the sum",
    )
    options = parser.parse_args(arguments)
    if options.adapter and (options.gguf, options.dtype) != (None, None):
        raise RecipeError("--adapter writes the adapters as they were trained; leave out --gguf and --dtype")
    if options.gguf is not None and options.dtype is not None:
        raise RecipeError("--dtype has no effect with --gguf, which has a type of its own; leave it out")
    start_jax()
    trained = load_model(options.checkpoint, warn, base=options.base)
    if not isinstance(trained.params, Decoder | Vit):
        raise RecipeError(
            f"{trained.url} holds neither a decoder nor a vision transformer; only those have a Hugging Face layout"
        )
    if options.adapter:
        return _write_adapter(trained, options.directory)
    if options.gguf is not None:
        return _write_gguf(trained, Path(options.directory), options.gguf)
    write_model(trained, options.directory, options)
    return 0
