"""`panax merge`: adapters added to the model that they belong to, as a model of its own."""

from collections.abc import Sequence

from ...core.errors import RecipeError
from ...models import Decoder
from ...models.merged_lora import has_adapters
from ...run.folder.trained_model import load_model
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax
from .export import add_merge_flags, write_model


def merge(arguments: Sequence[str]) -> int:
    """Write the sum of a model and its adapters in Hugging Face's layout."""
    parser = Parser(prog="panax merge", description="Add adapters to the model that they belong to.")
    parser.add_argument(
        "source",
        help="an adapter in PEFT's layout, peft:DIR; or a run with --lora (its best checkpoint is used), or a checkpoint of one",
    )
    parser.add_argument("directory", help="where to write; a new or empty folder")
    add_merge_flags(parser)
    options = parser.parse_args(arguments)
    start_jax()
    trained = load_model(options.source, warn, base=options.base)
    if not isinstance(trained.params, Decoder) or not has_adapters(trained.params):
        raise RecipeError(f"{trained.url} has no adapters to merge; panax export writes it as it is")
    write_model(trained, options.directory, options)
    return 0
