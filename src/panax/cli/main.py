"""`panax`: the command line. One clear message and an exit code for everything that a user can cause."""

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

from .. import __version__
from ..cluster.node.worker import STACKS_VARIABLE, install_guards
from ..core.errors import RecipeError, suggest_name
from ..system.allocator import keep_freed_memory, restart_with_huge_pages
from ..system.streams import repair_streams, tolerate_output_errors, write_last_words
from .failures import TRACEBACK, report_error, warn
from .plugins import skip_absent_plugins, suppress_plugin_warnings

USAGE = """\
usage: panax COMMAND ...

  train RECIPE           train; the same command again resumes the run
    [--data PATH...]       on these files or folders of text
    [--field.sub value]    with another value of any setting
    [--fresh]              start over, setting an earlier run aside
    [--accept-changes]     resume with other settings or data
    [--check]              measure the hardware first; stop if something is odd
    [--fast-dev-run]       two steps of everything, to see that it runs
  launch RECIPE          train in several processes, started again if they fail
    --processes N          in all
    [--on slurm|ray|mpi|kubernetes] [--nodes M] [--dry-run]
  status|logs|stop RUN   of a run: its state, its processes' output;
                         save and end it
  cordon|uncordon RUN NODE
                         take a node out of a launched run, put it back
  inspect RECIPE         parameters, layout, bytes, FLOPs; a step's messages and
                         memory; takes the flags of train; nothing is trained
    [--target h100x64]     for devices that you don't have
    [--no-compile]         only what tracing shows
  check [RECIPE]         measure devices, links, clocks and disks first, and
                         name anomalies; a profile that inspect reads
    [--full]               and run every kernel, layouts, a checkpoint and a
                           benchmark on this device
  sweep RECIPE --SETTING A,B
                         train with each value: one table, one chart
  find lr RECIPE         a learning rate, by a short run in which it rises
  find batch RECIPE      the largest micro-batch that fits; nothing is run
  data show RECIPE       data as the model sees it: the first batch, as text
  generate RUN           continue a text (--prompt TEXT) with a trained model
  serve RUN              a server of OpenAI's interface for it
  evaluate RUN           its losses and metrics, on its held-out data
    [--data PATH...]       or on other data
  export RUN DIR         write a trained model in Hugging Face's layout
  merge SOURCE DIR       write the sum of a model and its adapters: peft:DIR,
                         or a run with --lora
  checkpoint ls|verify|diff|convert|rm
                         list, check and compare checkpoints; to
                         safetensors or another store
  at RUN STEP            a step again, to the bit: its batch, rows, activations,
    [--without-row I]      gradients, updates, the first value that is not
    [--set SETTING=VALUE]  finite; what if one thing were changed
  branch RUN --at STEP --name NEW
                         a run that begins at that checkpoint, with another
    [--set SETTING=VALUE]  setting, on the same data and random bits
  report RUN [RUN...]    one page about a run, or several side by side: curves,
    [--rate PRICE]         time, incidents, cost
  simulate [RUN] --devices N
                         goodput on N devices, and how often to save, from a
                         measured run's stage times and a failure rate
  compare vit|decoder|moe|recipe:NAME
                         the same training in PyTorch, plain JAX, Flax and
                         here, side by side: a report
  compare RUN [RUN...] --until-loss X
                         runs up to a held-out loss: steps, time, cost
  recipes                list what can be trained: recipes, published models

RECIPE is a name, a published model (preset:llama3_8b), or a Python file of
yours (my_recipe.py). A recipe is code: run one only if you trust it.
`panax train RECIPE --help` lists its settings with their defaults, `panax
COMMAND --help` describes a command, `panax --version` prints the version.
An error is one message; with --traceback, a command shows its origin.

exit codes: 0 done, 1 error, 2 recipe or layout, 3 data, 4 checkpoint,
5 training, 6 launch; after saving: 129 closed terminal, 130 Ctrl-C, 143 SIGTERM
"""


def _command(name: str) -> Callable[[Sequence[str]], int]:
    # Imported when chosen: `panax --help` should not wait for jax.
    if name == "train":
        from .commands.train import train

        return train
    if name == "sweep":
        from .commands.sweep import sweep

        return sweep
    if name == "inspect":
        from .commands.inspect import inspect

        return inspect
    if name == "check":
        from .commands.check import check_hardware

        return check_hardware
    if name == "find":
        from .commands.find import find

        return find
    if name == "data":
        from .commands.data import data

        return data
    if name == "generate":
        from .commands.generate import generate

        return generate
    if name == "serve":
        from .commands.serve import serve

        return serve
    if name == "evaluate":
        from .commands.evaluate import evaluate

        return evaluate
    if name == "merge":
        from .commands.merge import merge

        return merge
    if name == "export":
        from .commands.export import export

        return export
    if name == "checkpoint":
        from .commands.checkpoint import checkpoint

        return checkpoint
    if name == "launch":
        from .commands.launch import launch

        return launch
    if name in ("status", "stop", "logs", "cordon", "uncordon"):
        from .commands import jobs

        return getattr(jobs, name)
    if name == "at":
        from .commands.history.at import open_step

        return open_step
    if name == "branch":
        from .commands.history.branch import make_branch

        return make_branch
    if name == "report":
        from .commands.report import report

        return report
    if name == "simulate":
        from .commands.simulate import simulate

        return simulate
    if name == "compare":
        from .commands.compare import compare

        return compare
    from .commands.train import recipes

    return recipes


COMMANDS = (
    "train", "launch", "status", "logs", "stop", "cordon", "uncordon", "sweep", "find", "inspect", "check", "data", "generate",
    "serve", "evaluate", "export", "merge", "checkpoint", "at", "branch", "report", "simulate", "compare",
    "recipes",
)  # fmt: skip

JAX_FREE_COMMANDS = ("launch", "status", "logs", "stop", "cordon", "uncordon", "report", "simulate")
"""Commands that do not import jax."""

TRAINING_COMMANDS = ("train", "sweep", "find", "branch")
"""Commands that train in this process."""

OUTPUT_OPTIONAL_COMMANDS = ("train", "launch", "sweep", "branch")
"""Commands that continue if their output can't be written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code; see the usage text.
    """
    repair_streams()
    as_program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] and arguments[0] in TRAINING_COMMANDS:
        if as_program:
            restart_with_huge_pages()
        # Before any thread starts, otherwise it has no effect.
        keep_freed_memory()
    # `guard` handles the log of a launched worker.
    outlasts = arguments[:1] and arguments[0] in OUTPUT_OPTIONAL_COMMANDS and not os.environ.get(STACKS_VARIABLE)
    with tolerate_output_errors() if outlasts else contextlib.nullcontext():
        return _ended(arguments, as_program=as_program)


def _ended(arguments: list[str], *, as_program: bool) -> int:
    with_traceback = TRACEBACK in arguments
    arguments = [each for each in arguments if each != TRACEBACK]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
            sys.stdout.flush()
            return 0 if arguments else 2
        if arguments[0] in ("-V", "--version"):
            print(f"panax {__version__}")
            sys.stdout.flush()
            return 0
        if arguments[0] not in COMMANDS:
            raise RecipeError(f"unknown command {arguments[0]!r}; {suggest_name(arguments[0], COMMANDS)}")
        install_guards()
        # Of any library: the location in its code does not help users.
        warnings.showwarning = lambda message, *_: warn(f"warning: {message}")
        if arguments[0] not in JAX_FREE_COMMANDS:
            skip_absent_plugins()
        with suppress_plugin_warnings(), _pause_gc(for_good=as_program):
            command = _command(arguments[0])
        code = command(arguments[1:])
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        code = report_error(error, with_traceback=with_traceback)
        if _others_wait():
            # At exit JAX would wait for the other processes, which may wait for this one.
            write_last_words()
            os._exit(code)
        return code


@contextlib.contextmanager
def _pause_gc(*, for_good: bool) -> Iterator[None]:
    """Pause garbage collection during imports, a third of their time.

    Args:
        for_good: Exclude the imported objects from later collections.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if collects:
            gc.enable()


def _others_wait() -> bool:
    joining = sys.modules.get("panax.job.join")
    return joining is not None and joining.is_joined()


if __name__ == "__main__":
    sys.exit(main())
