"""`panax checkpoint`: list, verify and compare checkpoints; convert them to another place or format; remove
one."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from ...checkpoint import Checkpoint, Checkpointer, open_checkpoint, parse_step
from ...checkpoint.branches import check_no_branch, live_branches
from ...checkpoint.commit import is_link, remove
from ...checkpoint.conversion import copy_checkpoint, export_tensors, import_tensors, reject_pickled
from ...checkpoint.manifest import MANIFEST_FILE
from ...core.errors import CheckpointError
from ...core.former_names import with_present_names
from ...metrics.console import plain_console, wrap_line
from ...run.folder.description import diff_configs
from ...run.folder.previous_run import SETTINGS
from ...stores import is_remote, join_url, open_store, redact_address
from ...system import json_reader
from ...system.json_reader import JsonError
from ..parser import Parser


def checkpoint(arguments: Sequence[str]) -> int:
    """Run one of the subcommands; return its exit code."""
    options = vars(parser().parse_args(arguments))
    return {"ls": ls, "verify": verify, "diff": diff, "convert": convert, "rm": rm}[options.pop("command")](**options)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommands and their flags."""
    parser = Parser(prog="panax checkpoint", description=(__doc__ or "").split(": ", 1)[1])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    where = "a run's folder or that of its checkpoints; or one checkpoint's own; or an address: s3://bucket/run"
    one = "a checkpoint's own folder or address, or a run's (its newest checkpoint is used)"
    add = commands.add_parser("ls", help="list the checkpoints of a run, or the arrays of one checkpoint")
    add.add_argument("where", help=where)
    add = commands.add_parser(
        "verify", help="read everything and compare it with its checksums; exit code 4 if anything is wrong"
    )
    add.add_argument("where", help=where)
    add = commands.add_parser("diff", help="differences between two checkpoints; exit code 1 if there are any")
    add.add_argument("first", help=one)
    add.add_argument("second", help=one)
    add = commands.add_parser(
        "convert", help="write a checkpoint as safetensors or to another store; or safetensors as a checkpoint"
    )
    add.add_argument("source", help=one + "; or a folder of safetensors")
    add.add_argument("target", help="a new folder or address")
    add.add_argument(
        "--format", choices=("safetensors", "panax"), help="of the target (default: the one that the source is not)"
    )
    add.add_argument("--prefix", help="only arrays with names that begin so (default for safetensors: params.)")
    add = commands.add_parser("rm", help="remove a checkpoint")
    add.add_argument("where", help="the checkpoint's own folder or address")
    add.add_argument("--force", action="store_true", help="even if no other checkpoint of its run is undamaged")
    return parser


def ls(where: str) -> int:
    """Print a table of the checkpoints, or of one checkpoint's arrays."""
    if _is_checkpoint(where):
        print("\n".join(_format_arrays(open_checkpoint(where))))
        return 0
    console = plain_console()
    checkpointer = _checkpointer(where)
    table = Table(
        "step",
        Column("saved", no_wrap=True),
        "GB",
        "arrays",
        "files",
        "loss",
        Column("", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    needed = live_branches(checkpointer.store)
    names = [name for name in checkpointer.store.folders() if parse_step(name) is not None]
    if not names:
        raise CheckpointError(
            f"{redact_address(where)} holds no checkpoint; name a run's folder, or its folder of checkpoints"
        )
    for name in names:
        step = parse_step(name)
        assert step is not None
        try:
            manifest = checkpointer.open(step).manifest
        except CheckpointError:
            committed = any(entry.path == f"{name}/{MANIFEST_FILE}" for entry in checkpointer.store.list(name))
            table.add_row(
                str(step), "", "", "", "", "", "damaged manifest: see verify" if committed else "not committed"
            )
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved))
        loss = "" if manifest.metric is None else f"{manifest.metric:.4f}"
        notes = ["best"] if checkpointer.best() == step and loss else []
        if step in needed:
            notes.append(f"kept for {', '.join(each.name for each in needed[step])}")
        table.add_row(
            str(step),
            saved,
            f"{manifest.nbytes / 1e9:.3f}",
            str(len(manifest.arrays)),
            str(len(manifest.files)),
            loss,
            ", ".join(notes),
        )
    console.print(f"{checkpointer.store.url}")
    console.print(table)
    return 0


def _format_arrays(stored: Checkpoint) -> list[str]:
    """Format two lines for each array, with its full name on a separate line, for searching."""
    arrays = stored.manifest.arrays
    lines = ["array", f"  {'MB':>10}  {'chunks':>6}  dtype and shape"]
    for name, entry in arrays.items():
        dtype = entry.dtype if entry.key_impl is None else f"key ({entry.key_impl}) "
        lines += [name, f"  {entry.nbytes / 1e6:10.3f}  {len(entry.chunks):6}  {dtype}{list(entry.shape)}"]
    return lines


def verify(where: str) -> int:
    """Read a checkpoint, or all checkpoints of a run; return 4 if one is not complete."""
    checkpoints = [open_checkpoint(where)] if _is_checkpoint(where) else _all(_checkpointer(where))
    failed = False
    for each in checkpoints:
        if isinstance(each, CheckpointError):
            print(wrap_line(f"DAMAGED  {each}", 9))
            failed = True
            continue
        started = time.perf_counter()
        problems = each.verify()
        speed = each.bytes_read / 1e6 / (time.perf_counter() - started)
        for problem in problems:
            print(wrap_line(f"DAMAGED  {problem}", 9))
        arrays, size = len(each.manifest.arrays), each.manifest.nbytes / 1e9
        verdict = (
            f"DAMAGED  {each.url}: {len(problems)} problems"
            if problems
            else f"whole    {each.url}: {arrays} arrays, {size:.3f} GB"
        )
        print(wrap_line(f"{verdict}, {speed:.0f} MB/s", 9))
        failed |= bool(problems)
    return CheckpointError.exit_code if failed else 0


def _all(checkpointer: Checkpointer) -> list[Checkpoint | CheckpointError]:
    checkpoints: list[Checkpoint | CheckpointError] = []
    for name in checkpointer.store.folders():
        step = parse_step(name)
        if step is not None and any(e.path == f"{name}/{MANIFEST_FILE}" for e in checkpointer.store.list(name)):
            try:
                checkpoints.append(checkpointer.open(step))
            except CheckpointError as error:
                checkpoints.append(error)
    if not checkpoints:
        raise CheckpointError(
            f"{checkpointer.store.url} holds no checkpoint; name a run's folder, like runs/quickstart"
        )
    return checkpoints


def diff(first: str, second: str) -> int:
    """Compare arrays by name, and settings; return 1 if anything differs."""
    one, two = _one(first), _one(second)
    a, b = one.manifest, two.manifest
    lines = [] if a.step == b.step else [f"step: {a.step} -> {b.step}"]
    lines += [f"setting {line}" for line in diff_configs(_settings(one), _settings(two))]
    lines += [f"only in {one.url}: {name}" for name in a.arrays if name not in b.arrays]
    lines += [f"only in {two.url}: {name}" for name in b.arrays if name not in a.arrays]
    same = 0
    for name in a.arrays:
        if name in b.arrays:
            line = _compared(one, two, name)
            same += line is None
            lines += [] if line is None else [line]
    for line in lines:
        print(wrap_line(line))
    print(f"{same} arrays are bitwise the same; {len(lines)} differences")
    return 1 if lines else 0


def _compared(one: Checkpoint, two: Checkpoint, name: str) -> str | None:
    a, b = one.manifest.arrays[name], two.manifest.arrays[name]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{name}: {a.dtype}{list(a.shape)} -> {b.dtype}{list(b.shape)}"
    left, right = one.read(name), two.read(name)
    if left.tobytes() == right.tobytes():
        return None
    x, y = left.astype(np.float64), right.astype(np.float64)
    changed = np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y)))
    both = np.isfinite(x) & np.isfinite(y)
    max_change, largest = (np.max(np.abs(values), initial=0.0) for values in (x[both] - y[both], x[both]))
    description = (
        f"{name}: {changed:,} of {left.size:,} values differ, by at most {max_change:.3g} (of at most {largest:.3g})"
    )
    # NaN and infinities have no distance; if only one side has them, they are the difference.
    bad = [np.count_nonzero(~np.isfinite(values)) for values in (x, y)]
    return description if not any(bad) else f"{description}; {bad[0]:,} -> {bad[1]:,} are not finite"


def convert(source: str, target: str, format: str | None, prefix: str | None) -> int:
    """Write a checkpoint elsewhere, in this format or the other."""
    tensors = (
        not is_remote(source) and Path(source).is_dir() and next(Path(source).glob("*.safetensors"), None) is not None
    )
    if not is_remote(source) and Path(source).is_dir() and not tensors:
        reject_pickled(Path(source))
    to = format or ("panax" if tensors else "safetensors")
    if tensors:
        if to == "safetensors":
            raise CheckpointError(f"{source} holds safetensors already; copy them, or give --format panax")
        manifest = import_tensors(source, open_store(target))
        print(f"{len(manifest.arrays)} arrays of {source} written to {target}")
        return 0
    source_checkpoint = _one(source)
    if to == "panax":
        count = len(copy_checkpoint(source_checkpoint, open_store(target), prefix=prefix or "").arrays)
    elif is_remote(target):
        raise CheckpointError(
            f"safetensors are written to a folder of this machine, not to {target}; copy them from there"
        )
    else:
        count = len(export_tensors(source_checkpoint, target, prefix="params." if prefix is None else prefix))
    print(f"{count} arrays of {source_checkpoint.url} written to {target}")
    return 0


def rm(where: str, force: bool) -> int:
    """Remove one checkpoint; not the last complete one of its run, unless forced."""
    parent, _, name = where.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
    step = parse_step(name)
    if step is None or not store.list(name):
        raise CheckpointError(
            f"{redact_address(where)} is not a checkpoint's own folder; expected one like "
            f"runs/quickstart/checkpoints/step_00000100"
        )
    others = [other for other in Checkpointer(parent or ".").steps() if other != step]
    if not others and not force:
        raise CheckpointError(f"{where} is the last checkpoint of its run; pass --force to remove it nevertheless")
    check_no_branch(store, step)
    target = os.readlink(where.rstrip("/")) if is_link(store, name) else ""
    remove(store, name)
    print(f"{where} removed: a link to {target}; {target} stays" if target else f"{where} removed")
    return 0


def _is_checkpoint(where: str) -> bool:
    return any(entry.path == MANIFEST_FILE for entry in open_store(where).list())


def _checkpointer(where: str) -> Checkpointer:
    inside = join_url(where, "checkpoints")
    return Checkpointer(inside if open_store(inside).folders() else where)


def _one(where: str) -> Checkpoint:
    if _is_checkpoint(where):
        return open_checkpoint(where)
    checkpointer = _checkpointer(where)
    step = checkpointer.latest()
    if step is None:
        raise CheckpointError(f"{where} holds no checkpoint; name a run's folder, or a checkpoint's own")
    return checkpointer.open(step)


def _settings(found: Checkpoint) -> dict:
    try:
        return with_present_names(json_reader.parse_as(dict, found.attachment(SETTINGS) or "{}", constants=True))
    except JsonError as error:
        raise CheckpointError(f"{SETTINGS} of {found.url} can't be read: {error}") from error
