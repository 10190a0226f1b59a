"""`panax evaluate`: losses and metrics of a trained model, and its scores on files of questions."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ...core.errors import RecipeError
from ...generate import Sampling
from ...generate.scoring import AnswerFormat, score_file
from ...generate.scoring.score_record import to_record
from ...job.join import check_single_process
from ...metrics.console import plain_console, wrap_line
from ...metrics.page.html import write_page
from ...metrics.report.questions import question_sections
from ...run.folder.trained_model import load_model
from ...run.reporting.evaluation import evaluate_loaded_model
from ...run.reporting.generation import check_generates
from ...system.replacement import replace_file
from ..engine_flags import add_engine_flags, create_engine, read_mesh
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax


def evaluate(arguments: Sequence[str]) -> int:
    """Print losses and metrics of a checkpoint, on its run's held-out data or on other data."""
    options = parser().parse_args(arguments)
    if options.tasks:
        return _evaluate_tasks(options)
    for flag in ("samples", "report"):
        if getattr(options, flag):
            raise RecipeError(f"--{flag} is the file for the answers to --tasks; pass that too, or remove it")
    check_single_process("panax evaluate")
    start_jax()
    trained = load_model(options.run, warn, newest=True, base=options.base)
    fields = {name: value for name in ("text", "prompt", "answer") if (value := getattr(options, name)) is not None}
    if fields and not options.data:
        raise RecipeError(
            f"{', '.join(f'--{name}' for name in fields)} names a field of the data in --data; pass that too"
        )
    console = plain_console()
    results = evaluate_loaded_model(
        trained,
        options.data,
        options.batches,
        fields=fields,
        say=lambda line: console.print(Text(wrap_line(line), style="dim")),
    )
    print(f"checkpoint  {trained.url}")
    averaged = " (averaged parameters)" if {"ema_decay", "averaged"} & results.keys() else ""
    print(f"data        {' '.join(options.data) if options.data else 'held out by the run'}{averaged}")
    width = max(map(len, results))
    for name, value in results.items():
        if name not in ("ema_decay", "averaged"):
            print(f"{name:{width}}  {value:.6g}")
    return 0


def _evaluate_tasks(options: argparse.Namespace) -> int:
    """Print a model's scores on files of questions."""
    if options.data or options.batches is not None:
        raise RecipeError("--tasks and --data exclude each other; pass one of them")
    for flag in ("samples", "report"):
        file = getattr(options, flag)
        if file and any(Path(file).resolve() == Path(task).resolve() for task in options.tasks):
            raise RecipeError(f"--{flag} {file} is one of --tasks, which it would replace; choose another file")
    sampling = Sampling(tokens=options.tokens, temperature=options.temperature, n=options.n, seed=options.seed)
    answers = AnswerFormat(options.pattern)
    check_single_process("panax evaluate")
    start_jax()
    trained = load_model(options.run, warn, newest=True, mesh=read_mesh(options), base=options.base)
    model = trained.text_model
    tokenizer = check_generates(model)
    engine = create_engine(trained, options, rows=options.rows, length=options.length)
    print(f"checkpoint  {trained.url}")
    lines: list[str] = []
    records: list[dict[str, Any]] = []
    for path in options.tasks:
        result = score_file(engine, tokenizer, Path(path), sampling, chat=options.chat, answers=answers)
        print(f"{path}, {len(result.samples)} questions")
        for name, estimate in result.scores.items():
            interval = "" if math.isnan(estimate.low) else f"  95 %: {estimate.low:.4g} to {estimate.high:.4g}"
            print(f"  {name:16}  {estimate.value:.4g}{interval}")
        if result.refused:
            print(f"  {result.refused} of {len(result.samples)} questions could not be asked, and no score counts them")
        if result.cut:
            print(f"  {result.cut} answers were cut after {sampling.tokens} tokens (--tokens)")
        records.append(to_record(path, result))
        lines += [json.dumps({"task": path, **sample.to_json()}, ensure_ascii=False) for sample in result.samples]
    if options.samples:
        replace_file(Path(options.samples), "".join(f"{line}\n" for line in lines))
        print(f"each answer is in {options.samples}")
    if options.report:
        page = write_page(options.report, f"Questions to {trained.url}", question_sections({"files": records}))
        print(f"a page with the first answers is in {page}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = Parser(
        prog="panax evaluate", description="Losses and metrics of a trained model, on its newest checkpoint."
    )
    parser.add_argument(
        "run",
        help="a run's folder (its newest checkpoint is used), a checkpoint's own, or for --tasks hf:DIR, hf:ORG/NAME or peft:DIR",
    )
    parser.add_argument(
        "--data", nargs="+", metavar="PATH", help="files, folders or globs (default: the data held out by the run)"
    )
    parser.add_argument(
        "--text", metavar="FIELD", help="the field of a record that holds the text (default: the run's)"
    )
    parser.add_argument("--prompt", metavar="FIELD", help="the field with the text before the answer")
    parser.add_argument("--answer", metavar="FIELD", help="the field with the text to learn")
    parser.add_argument("--batches", type=int, help="at most N batches (default: as in the run; for other data, all)")
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="FILE",
        help="JSON lines of texts, of multiple choices, or of questions with answers",
    )
    parser.add_argument("--samples", metavar="FILE", help="write the answer and the scores of each question of --tasks")
    parser.add_argument(
        "--report", metavar="FILE", help="write an HTML page with the scores and first answers of --tasks"
    )
    parser.add_argument("--chat", action="store_true", help="ask each prompt of --tasks as a message")
    parser.add_argument("--pattern", metavar="REGEX", help="the answer is its last match in the generated text")
    parser.add_argument("--tokens", type=int, default=128, help="of a generated answer, at most (default: 128)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of generated answers (default: 0, the likeliest)"
    )
    parser.add_argument("--n", type=int, default=1, help="answers to each question, for pass@k (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of generated answers (default: 0)")
    parser.add_argument("--rows", type=int, default=8, help="questions at the same time (default: 8)")
    parser.add_argument(
        "--length", type=int, help="positions of question and answer (default: the model's, at most 2048)"
    )
    add_engine_flags(parser)
    return parser
