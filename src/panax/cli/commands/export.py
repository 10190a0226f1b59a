"""`panax export`: a trained model as a folder that Hugging Face's libraries load."""

from collections.abc import Sequence

from ...adapters.huggingface import save
from ...core.errors import RecipeError
from ...models import Decoder, Vit
from ...run.folder.trained_model import load_model
from ..main import warn
from ..parser import Parser
from ..plugins import start_jax


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's weights, configuration and tokenizer in Hugging Face's layout."""
    parser = Parser(prog="panax export", description="Write a trained model in Hugging Face's layout.")
    parser.add_argument("checkpoint", help="a run's folder (its best checkpoint is taken), or a checkpoint's own")
    parser.add_argument("directory", help="where to write; a new or empty folder")
    options = parser.parse_args(arguments)
    start_jax()
    trained = load_model(options.checkpoint, warn)
    if not isinstance(trained.params, Decoder | Vit):
        raise RecipeError(
            f"{trained.url} holds neither a decoder nor a vision transformer; only those have a Hugging Face layout"
        )
    ids = {} if trained.tokenizer is None else trained.tokenizer.special_ids
    save(options.directory, trained.params, trained.state, token_ids=ids, classes=trained.classes)
    if trained.tokenizer is not None:
        trained.tokenizer.save(options.directory)
    loader = "AutoModelForCausalLM" if isinstance(trained.params, Decoder) else "AutoModelForImageClassification"
    print(f"{trained.url} written to {options.directory}; {loader}.from_pretrained({options.directory!r}) loads it")
    return 0
