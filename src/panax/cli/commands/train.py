"""`panax train` and `panax recipes`."""

import contextlib
import inspect
import shutil
import signal
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ...core.errors import PanaxError, RecipeError
from ...core.install_hints import package_install_command
from ...core.sanitize import make_printable
from ...hooks import Samples
from ...job.agreement import is_process_zero
from ...job.heartbeat import heartbeat
from ...job.join import join
from ...job.start_time import count_from_process_start
from ...metrics import PrometheusTracker, Tracker
from ...metrics.console import open_console, plain_console, wrap_line
from ...plan.search.profile import profile_in
from ...presets.experiments import PARAMETERS
from ...run import Experiment, Result, add_reference, check, fit
from ...run.auto_mesh import LogFn
from ...run.tools.reference import needs_reference
from ..overrides import asks_for_help, experiment_from
from ..parser import Parser
from ..plugins import start_jax
from ..recipes import built_in_recipes

HELP = """\
  --data PATH...    train on these files, folders or globs of text
  --lora RANK       train adapters of this rank beside a decoder's matrices
  --preference LOSS  learn from pairs of answers: dpo, ipo, simpo, orpo,
                    ...; or by kto from answers labeled good or bad
  --tasks FILE...   ask the model these questions at the end, and every
                    --tasks-every N steps
  --fresh           train from step 0; an earlier run is set aside
  --accept-changes  resume with other settings or data
  --check           measure the hardware first, and stop if something is odd
  --check=warn      warn, and train
  --prometheus PORT  let a Prometheus server read all figures, at this host's
                    loopback (or at ADDRESS:PORT)
  --fast-dev-run    two steps of everything, to check that it runs
  --mesh auto       choose the layout over the devices
  --traceback       show the origin of an error
"""

SAMPLE_TOKENS = 96

START_FLAGS = {"fresh": "--fresh", "accept_changes": "--accept-changes", "fast_dev_run": "--fast-dev-run"}
"""Flags for how a run begins: they are not part of the experiment."""


PROMETHEUS = "--prometheus"

CHECK_FLAGS = ("--check", "--check=warn")
"""Flags of a check before the run: the first one stops if there are findings."""

NON_SETTING_FLAGS = (*START_FLAGS.values(), *CHECK_FLAGS)
"""Flags of `panax train` alone."""


def train(arguments: Sequence[str]) -> int:
    """Train a recipe's experiment, then show the result."""
    count_from_process_start()
    if asks_for_help(arguments, "train", HELP):
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise RecipeError(f"expected `panax train RECIPE`; the recipes are {', '.join(sorted(built_in_recipes()))}")
    arguments, endpoint = _without_endpoint(list(arguments))
    how = {name: flag in arguments for name, flag in START_FLAGS.items()}
    experiment = experiment_from([each for each in arguments if each not in NON_SETTING_FLAGS], "train")
    heartbeat().phase("join")
    join()
    start_jax()
    heartbeat().phase("prepare")
    console = plain_console()
    # The first process reports for all.
    console.quiet = not is_process_zero()
    say, progress = open_console(console)
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    if how["fast_dev_run"]:
        say(f"{experiment.name}: two steps of everything; nothing is kept")
    else:
        say(f"{experiment.name}: {experiment.num_steps} steps in {experiment.folder}")
    if any(flag in arguments for flag in CHECK_FLAGS):
        check_before_run(experiment, say, strict=CHECK_FLAGS[0] in arguments)
    if needs_reference(experiment):
        experiment = add_reference(experiment, say=say)
    result = fit(experiment, say=say, trackers=(progress, *endpoint), **how)
    if result.interrupted_by is not None:
        # The terminal may have gone.
        with contextlib.suppress(OSError):
            console.print(
                wrap_line(
                    f"stopped by {result.interrupted_by} after step {result.step} of {experiment.num_steps}; saved "
                    f"{result.checkpoint}\nthe same command again resumes from there"
                )
            )
        return 128 + signal.Signals[result.interrupted_by]
    if result.stopped:
        console.print(wrap_line(f"stopped after step {result.step} of {experiment.num_steps}: {result.stopped}"))
    try:
        show(result, console, has_files=not how["fast_dev_run"])
    except Exception as error:
        # The run is done and saved: showing it does not decide if it succeeded. The terminal may have gone.
        with contextlib.suppress(OSError):
            message = str(error) if isinstance(error, PanaxError) else f"{type(error).__name__}: {error}"
            say(f"warning: the run is done and saved ({result.checkpoint}); its summary is incomplete: {message}")
    return 0


def _without_endpoint(arguments: list[str]) -> tuple[list[str], tuple[Tracker, ...]]:
    """Return the other arguments, and the tracker requested by `--prometheus`."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == PROMETHEUS:
            remaining = arguments[number + 1 :]
            if not equals:
                value, *remaining = remaining or [""]
            return arguments[:number] + remaining, (PrometheusTracker.at(value),)
    return arguments, ()


def check_before_run(experiment: Experiment, say: LogFn, *, strict: bool) -> None:
    """Measure the hardware in the processes that will train on it, and save its profile in the run's folder.

    Raises:
        CheckError: `strict` is set, and there are findings.
    """
    say("measuring devices, links, clocks and disks")
    found = check(experiment, save=profile_in(experiment.folder), strict=strict)
    for each in found.findings:
        say(f"warning: {each}")
    say(f"checked in {found.profile.seconds:.0f} s: {len(found.findings) or 'no'} finding(s); profile in {found.kept}")


def show(result: Result, console: Console, *, has_files: bool) -> None:
    """Show the summary of a run: its quality, a sample, the paths of its files, next steps.

    Args:
        has_files: True if the run's files still exist.
    """
    prepared = result.prepared
    lines: list[str] = []
    if result.evaluation:
        entropy = prepared.data.unigram_entropy
        comparison = f" (token frequencies alone give {entropy:.4f})" if entropy is not None else ""
        if "return" in result.evaluation:
            interval = result.evaluation.get("return_ci95")
            within = "" if interval is None else f" +- {interval:.1f}"
            lines.append(f"mean return   {result.evaluation['return']:.1f}{within} (95 % of confidence)")
        elif "reward" in result.evaluation:
            lines.append(f"mean reward   {result.evaluation['reward']:.4f} of greedy answers to held-out prompts")
        elif "loss" in result.evaluation:
            lines.append(f"held-out loss {result.evaluation['loss']:.4f}{comparison}")
        if "bits_per_byte" in result.evaluation:
            lines.append(f"bits per byte {result.evaluation['bits_per_byte']:.3f} of held-out text")
    run_path = result.checkpoint if prepared.experiment.checkpoint.directory else prepared.experiment.folder
    install = "" if shutil.which("tensorboard") else f"   ({package_install_command('tensorboard')})"
    curves = f"tensorboard --logdir {prepared.experiment.folder}/tensorboard{install}"
    kept_lines = [f"checkpoint    {result.checkpoint}", f"curves        {curves}"]
    lines += kept_lines if has_files else ["it runs: data, steps, evaluation, saving; nothing of it was kept"]
    try:
        sampled = _sample(result)
    except Exception as error:
        # The run is done and saved: a sample does not decide if it succeeded.
        sampled = None
        message = str(error) if isinstance(error, PanaxError) else f"{type(error).__name__}: {error}"
        lines.append(f"warning: no sample: {message}")
    if sampled is not None:
        prompt, text, flags = sampled
        console.print("\na sample of the model's text, after a prompt in bold")
        console.print(prompt, style="bold", end="")
        console.print(make_printable(text), style="cyan")
        if has_files:
            lines.append(f"next          panax generate {run_path} --prompt {prompt!r}{flags}")
    console.print()
    for line in lines:
        console.print(wrap_line(line, 14))


def _sample(result: Result) -> tuple[str, str, str] | None:
    """Return a prompt, its continuation, sampled with the settings of the run's own samples, and the flags of
    `panax generate` for these settings."""
    task, data = result.prepared.task, result.prepared.data
    if data.tokenizer is None or not task.generates:
        return None
    # No space after the word: tokenizers attach a space to the word that follows.
    prompt = "def" if "Python" in type(_corpus(result.prepared.experiment)).__name__ else "The"
    length = data.facts.sequence_length or 2 * SAMPLE_TOKENS
    tokens = min(SAMPLE_TOKENS, max(length // 2, length - 32))
    samples = next((hook for hook in result.prepared.experiment.hooks if isinstance(hook, Samples)), Samples())
    defaults = Samples()
    flags = "".join(
        f" --{name.replace('_', '-')} {getattr(samples, name)}"
        for name in ("temperature", "top_k")
        if getattr(samples, name) != getattr(defaults, name)
    )
    text = result.generate(prompt, tokens=tokens, temperature=samples.temperature, top_k=samples.top_k)
    return prompt, text, flags


def _corpus(experiment: Experiment) -> Any:
    return getattr(experiment.data, "corpus", None)


def recipes(arguments: Sequence[str]) -> int:
    """List the recipes, each with the first line of its docstring, and the published models."""
    parser = Parser(prog="panax recipes", description="List recipes and published models, with their sizes.")
    parser.parse_args(arguments)
    print("recipes: panax train NAME")
    for name, recipe in sorted(built_in_recipes().items()):
        summary = (inspect.getdoc(recipe) or "").splitlines()[0]
        print(textwrap.fill(summary, 80, initial_indent=f"  {name:15} ", subsequent_indent=" " * 18))
    print("\npresets, and their parameters: panax train preset:NAME --data PATH...")
    entries = [f"{name:16} {format_parameter_count(PARAMETERS[name]):>7}" for name in PARAMETERS]
    rows = -(-len(entries) // 3)
    for row in range(rows):
        print("  " + "  ".join(entries[row::rows]).rstrip())
    return 0


def format_parameter_count(parameters: int) -> str:
    """Format a number of parameters.

    >>> [format_parameter_count(124_439_808), format_parameter_count(8_030_261_248), format_parameter_count(1_008_038_758_400)]
    ['124 M', '8.0 B', '1008 B']
    """
    billions = parameters / 1e9
    return (
        f"{parameters / 1e6:.0f} M"
        if billions < 0.9995
        else f"{billions:.1f} B"
        if billions < 99.95
        else f"{billions:.0f} B"
    )
