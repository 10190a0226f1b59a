"""An experiment's settings from flags; an error is one sentence that suggests the intended flag."""

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from ..core.errors import RecipeError, suggest_name
from ..run import Experiment
from .flag_aliases import ADVICE, FLAG_ALIASES

_BOX = "│"


def read_settings(base: Experiment, flags: Sequence[str], prog: str) -> Experiment:
    """Return an experiment with other values of its settings; `--help` among the flags lists them and exits.

    Args:
        prog: The command, as typed by the user.

    Raises:
        RecipeError: A flag is unknown, lacks its value, or has an invalid one.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            experiment, unknown = tyro.cli(
                Experiment,
                default=base,
                args=list(flags),
                prog=prog,
                description="",
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise _refused(_sentence(stderr.getvalue()), prog) from None
    if unknown:
        raise _refused(_of_unknown(unknown, base), prog)
    return experiment


def _refused(sentence: str, prog: str) -> RecipeError:
    return RecipeError(f"{sentence}{'' if sentence.endswith('?') else ';'} `{prog} --help` lists all settings")


def flag_names(value: Any, prefix: str = "--") -> Iterator[str]:
    """Yield the flags of a dataclass's fields, including those of nested dataclasses.

    >>> from panax.optim import Schedule
    >>> sorted(flag_names(Schedule(peak=0.1)))[:2]
    ['--base-batch', '--cycles']
    """
    for field in dataclasses.fields(value):
        name = f"{prefix}{field.name.replace('_', '-')}"
        held = getattr(value, field.name)
        if dataclasses.is_dataclass(held) and not isinstance(held, type):
            yield from flag_names(held, f"{name}.")
        else:
            yield name


def _of_unknown(unknown: Sequence[str], base: Experiment) -> str:
    flag, *_ = [each for each in unknown if each.startswith("--")] or [""]
    if not flag:
        return f"{unknown[0]!r} belongs to no flag: a setting is given as --field.sub VALUE"
    flag = flag.partition("=")[0].replace("_", "-")
    # The others are objects, which flags can't express.
    known = {name for name in flag_names(base) if "." in name or _is_value(getattr(base, name[2:].replace("-", "_")))}
    # For example `--optimizer.lr`: another library's name in one of our groups.
    usual = f"--{flag.rpartition('.')[2].removeprefix('--')}"
    if usual in ADVICE:
        return f"unknown setting {flag}: {ADVICE[usual]}"
    if FLAG_ALIASES.get(usual, "").split(" ")[0] in known:
        return f"unknown setting {flag}; use {FLAG_ALIASES[usual]}"
    same = sorted(name for name in known if name.rpartition(".")[2] == flag.rpartition(".")[2])
    if same:
        return f"unknown setting {flag}; did you mean {' or '.join(same)}?"
    group = flag.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == group and group]
    hint = suggest_name(flag, known)
    if hint.startswith("known"):
        hint = suggest_name(flag, beside) if beside else "no setting has a name like it"
    return f"unknown setting {flag}; {hint}"


def _is_value(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _sentence(box: str) -> str:
    """Return the message in one of tyro's boxes, without the title and the list of settings below its line."""
    lines = [line.strip() for line in box.splitlines() if line.strip()]
    # With box-drawing characters, or without them, if a terminal lacks them: then a line is below the title
    # too.
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.strip(f"{_BOX} ").strip("─-") == "":
            parts.append([])
        elif not line.startswith(("╭", "╰")):
            parts[-1].append(line.strip(_BOX).strip())
    part = parts[0] if lines and lines[0].startswith("╭") else parts[1] if len(parts) > 1 else parts[0]
    return " ".join(part).rstrip(".") or "a flag can't be read"
