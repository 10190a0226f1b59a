"""`panax generate`: continue texts and answer messages with a trained model."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import DataError, RecipeError
from ...core.sanitize import make_printable
from ...generate import (
    AnsweringModel,
    Completion,
    Constraint,
    GenerationEngine,
    GenerationRequest,
    Grammar,
    JsonSchema,
    Regex,
    Sampling,
    answer_file,
    encode_conversation,
    encode_prompt,
)
from ...job.join import check_single_process
from ...run.folder.trained_model import LoadedModel, load_model
from ...run.reporting.generation import check_generates
from ..engine_flags import add_engine_flags, create_engine, read_mesh
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax

DEFAULT_ROWS = 8


def generate(arguments: Sequence[str]) -> int:
    """Print the continuation of a prompt, answer a file of prompts, or converse, by the model of a checkpoint."""
    options = _parser().parse_args(arguments)
    _check_inputs(options)
    sampling = _sampling(options)
    check_single_process("panax generate")
    start_jax()
    trained = load_model(options.checkpoint, warn, mesh=read_mesh(options), base=options.base)
    if options.prompts:
        return _answer_file(trained, sampling, options)
    if options.prompt is None:
        return _converse(trained, sampling, options)
    return _continue_prompt(trained, sampling, options)


def _parser() -> Parser:
    parser = Parser(prog="panax generate", description="Continue a text with a trained model.")
    parser.add_argument(
        "checkpoint",
        help="a run's folder (its best checkpoint is used), a checkpoint's own, or a released model, hf:DIR or hf:ORG/NAME, or "
        "an adapter, peft:DIR",
    )
    parser.add_argument("--prompt", help="the text to continue")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="answer a file: JSON lines or Parquet with `prompt`, or JSON lines with `messages`",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="for the answers to --prompts (default: FILE.answers.jsonl); continued if it exists",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a message, and the output an answer to it; without one: a conversation",
    )
    parser.add_argument("--tokens", type=int, default=128, help="how many tokens to add at most (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among the N likeliest tokens; 0: all (default: 50)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw among the likeliest tokens of this probability together (default: 1)",
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="leave out tokens below this share of the likeliest one's probability"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="of tokens in prompt or answer (default: 1, none)"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="subtracted for tokens in the answer")
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="subtracted each time a token is in the answer"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    constraint = parser.add_mutually_exclusive_group()
    constraint.add_argument("--schema", metavar="FILE", help="answer with JSON that is valid under a JSON schema")
    constraint.add_argument("--regex", metavar="TEXT", help="answer with a text that a regular expression matches")
    constraint.add_argument("--grammar", metavar="FILE", help="answer with a text of a grammar, in Lark's syntax")
    parser.add_argument("--seed", type=int, default=0, help="of the random draws (default: 0)")
    parser.add_argument("--n", type=int, default=1, help="how many answers to each prompt (default: 1)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with the answers, their ends and sizes"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=DEFAULT_ROWS,
        help=f"answers to --prompts at the same time (default: {DEFAULT_ROWS})",
    )
    parser.add_argument(
        "--length", type=int, help="positions of prompt and answer (default: the model's, at most 2048)"
    )
    add_engine_flags(parser)
    return parser


def _check_inputs(options: argparse.Namespace) -> None:
    if options.prompt is not None and options.prompts:
        raise RecipeError("--prompt and --prompts exclude each other; pass one of them")
    if options.prompt is None and not options.prompts and not options.chat:
        raise RecipeError(
            "there is nothing to continue; pass --prompt TEXT, --prompts FILE, or --chat for a conversation"
        )
    if options.output and not options.prompts:
        raise RecipeError("--output is the file for the answers to --prompts FILE; pass that too, or remove it")
    if options.prompts is None and options.prompt is None and (options.json or options.n > 1):
        raise RecipeError("a conversation has one answer at a time, as text; remove --json and --n, or pass --prompt")


def _sampling(options: argparse.Namespace) -> Sampling:
    names = (
        "tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "n",
    )  # fmt: skip
    values = {name: getattr(options, name) for name in names}
    return Sampling(**values, stop=tuple(options.stop), constraint=_constraint(options))


def _constraint(options: argparse.Namespace) -> Constraint | None:
    if options.schema:
        return JsonSchema(_read_text("--schema", options.schema))
    if options.grammar:
        return Grammar(_read_text("--grammar", options.grammar))
    return None if options.regex is None else Regex(options.regex)


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{flag} {path} can't be read: {error}") from error


def _continue_prompt(trained: LoadedModel, sampling: Sampling, options: argparse.Namespace) -> int:
    model = trained.text_model
    ids = encode_prompt(check_generates(model), options.prompt, chat=options.chat)
    engine = create_engine(trained, options, rows=min(sampling.n, options.rows), at_least=len(ids) + sampling.tokens)
    request = GenerationRequest(tuple(ids), sampling)
    before = "" if options.chat else options.prompt
    if sampling.n == 1 and not options.json:
        _print_stream(engine, request, before)
        return 0
    completions = engine.generate([request])
    for each in completions:
        _check_complete(each)
    if options.json:
        answers = [{"text": each.text, "finish": each.finish, "tokens": len(each.tokens)} for each in completions]
        print(json.dumps({"prompt": options.prompt, "answers": answers}, ensure_ascii=False))
        return 0
    for number, completion in enumerate(completions, start=1):
        print(f"{number} of {len(completions)}: {make_printable(before + completion.text)}")
    return 0


def _print_stream(engine: GenerationEngine, request: GenerationRequest, before: str) -> str:
    """Print an answer as it is generated, and return it."""
    # A model may generate control characters, and this output usually ends in a terminal.
    print(make_printable(before), end="", flush=True)
    text = ""
    for event in engine.stream([request]):
        text += event.text
        print(make_printable(event.text), end="", flush=True)
        if event.completion is not None:
            print()
            _check_complete(event.completion)
    return text


def _check_complete(completion: Completion) -> None:
    if completion.finish == "error":
        raise DataError(f"the answer ended after {len(completion.tokens)} tokens: {completion.error}")


def _answer_file(trained: LoadedModel, sampling: Sampling, options: argparse.Namespace) -> int:
    prompts = Path(options.prompts)
    if not prompts.is_file():
        raise DataError(f"{prompts} is not a file; --prompts takes JSON lines or Parquet with the field `prompt`")
    output = Path(options.output or f"{prompts}.answers.jsonl")
    model = trained.text_model
    tokenizer = check_generates(model)
    engine = create_engine(trained, options, rows=options.rows, length=options.length)
    summary = answer_file(
        AnsweringModel(engine, tokenizer, trained.url), prompts, output, sampling, chat=options.chat, report=print
    )
    print(f"{summary.prompts} prompts are answered in {output}")
    if summary.refused:
        raise DataError(f'{summary.refused} of {summary.prompts} prompts have no answer; their lines have an "error"')
    return 0


def _converse(trained: LoadedModel, sampling: Sampling, options: argparse.Namespace) -> int:
    """Answer messages from the terminal until it is closed."""
    model = trained.text_model
    tokenizer = check_generates(model)
    encode_conversation(tokenizer, [{"role": "user", "content": "-"}])
    engine = create_engine(trained, options, rows=1, length=options.length)
    messages: list[dict[str, str]] = []
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not message.strip():
            continue
        messages.append({"role": "user", "content": message})
        request = GenerationRequest(tuple(encode_conversation(tokenizer, messages)), sampling)
        engine.check(request)
        messages.append({"role": "assistant", "content": _print_stream(engine, request, "")})
