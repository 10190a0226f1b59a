"""`panax generate`: continue a text with a trained model."""

from collections.abc import Sequence

from ...core.sanitize import make_printable
from ...job.join import check_single_process
from ...run.folder.trained_model import load_model
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax


def generate(arguments: Sequence[str]) -> int:
    """Print the prompt and its continuation by the model of a checkpoint."""
    parser = Parser(prog="panax generate", description="Continue a text with a trained model.")
    parser.add_argument("checkpoint", help="a run's folder (its best checkpoint is used), or a checkpoint's own")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=128, help="how many tokens to add (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among the N likeliest tokens; 0: all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the random draws (default: 0)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message, and the output an answer to it")
    options = parser.parse_args(arguments)
    check_single_process("panax generate")
    start_jax()
    trained = load_model(options.checkpoint, warn)
    # A model may generate control characters, and this output usually ends in a terminal.
    text = trained.generate(
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        chat=options.chat,
    )
    print(make_printable(text if options.chat else options.prompt + text))
    return 0
