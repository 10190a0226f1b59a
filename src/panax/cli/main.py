"""`panax`: the command line. One clear message and an exit code for everything that a user can cause."""

import sys
from collections.abc import Callable, Sequence

from ..core.errors import PanaxError, RecipeError, nearest
from .host_memory import keep_freed_memory

USAGE = """\
usage: panax COMMAND ...

  panax train RECIPE [--field.sub value ...]     train; the same command again goes on from where it stopped
  panax inspect RECIPE [--field.sub value ...]   parameters, layout, bytes, FLOPs, settings; what a step communicates and holds,
                [--target h100x64] [--no-compile]  compiled for the attached devices or for absent ones; nothing is trained
  panax generate CHECKPOINT --prompt TEXT        continue a text with a trained model
  panax export CHECKPOINT DIR                    write a trained model in Hugging Face's layout
  panax checkpoint ls|verify|diff|convert|rm     what is saved, is it whole, what differs; to safetensors or another store
  panax compare vit|decoder|moe|recipe:NAME      the same training in PyTorch, plain JAX, Flax and here, side by side: a report
                [--columns a,b --precision bf16]
  panax recipes                                  what there is to train

`panax train RECIPE --help` lists every field with its default. A recipe is a name, or a Python file: my_recipe.py

exit codes: 0 done, 1 error, 2 recipe or layout, 3 data, 4 checkpoint, 5 training, 130 Ctrl-C, 143 SIGTERM (both after saving)
"""


def _command(name: str) -> Callable[[Sequence[str]], int]:
    # Imported when chosen: `panax --help` should not wait for jax.
    if name == "train":
        keep_freed_memory()
        from .train import train

        return train
    if name == "inspect":
        from .inspect import inspect

        return inspect
    if name == "generate":
        from .generate import generate

        return generate
    if name == "export":
        from .export import export

        return export
    if name == "checkpoint":
        from .checkpoint import checkpoint

        return checkpoint
    if name == "compare":
        from .compare import compare

        return compare
    from .train import recipes

    return recipes


COMMANDS = ("train", "inspect", "generate", "export", "checkpoint", "compare", "recipes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code; see the usage text.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        if arguments[0] not in COMMANDS:
            raise RecipeError(f"there is no command {arguments[0]!r}; {nearest(arguments[0], COMMANDS)}")
        return _command(arguments[0])(arguments[1:])
    except PanaxError as error:
        print(f"panax: error: {_with_notes(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("panax: stopped at once; the last checkpoint is whole", file=sys.stderr)
        return 130
    except MemoryError:
        print(f"panax: error: out of memory; {MEMORY_ADVICE}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"panax: error: out of device memory: {str(error).splitlines()[0]}; {MEMORY_ADVICE}", file=sys.stderr)
        return 1


def warn(line: str) -> None:
    """Say something that does not end the command."""
    print(f"panax: {line}", file=sys.stderr)


MEMORY_ADVICE = (
    "use more --step.micro-batches, --task.remat full, a smaller --data.batch-size or --data.sequence-length, or shard over more "
    "devices with --mesh.fsdp"
)


def _with_notes(error: BaseException) -> str:
    notes = [f"  {note}" for note in getattr(error, "__notes__", ()) if note.startswith("in model part")]
    return "\n".join([str(error), *notes])


if __name__ == "__main__":
    sys.exit(main())
