"""Start of a run: its folder, its lock, and the state it continues from."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checkpoint import Checkpoint, Checkpointer, MemoryTier, exclusive_writer, raise_on_all_processes
from ..checkpoint.branches import live_branches, read_origin
from ..checkpoint.manifest import Manifest
from ..checkpoint.run_record import read_record
from ..core.errors import CheckpointError, DamagedError
from ..data.loading.class_agreement import find_class_names
from ..job.agreement import broadcast_text, is_process_zero
from ..kernels import TimedKernels, choose_by_timing, timed_kernels_in_force
from ..kernels.compute_dtype import AUTO
from ..stores import open_store
from ..system import json_reader
from ..system.lock import describe_owner, open_locked
from .compile_ahead import compile_ahead
from .experiment import Experiment
from .folder.addresses import base_folder
from .folder.attachments import CLASSES, MODEL, RELEASED
from .folder.base_model import find_base, resumed_base
from .folder.branch_settings import check_branch_settings
from .folder.description import serialize_config
from .folder.initial_state import init_state
from .folder.previous_run import RUN_FILES, SETTINGS, archive_run, check_same_run, find_resume_position
from .folder.restoration import restore_state
from .opened_data import LogFn
from .parts.run_start import RunStart
from .preparation import PreparedRun
from .recovery.best_evaluation import BEST, BestEvaluation
from .recovery.skipped_batches import (
    DataProgress,
    Rollback,
    append_rollback_log,
    format_batch_numbers,
    matches_history,
    read_rollbacks,
)
from .versions import report_versions

KERNELS = "kernels.json"


def checkpoint_location(experiment: Experiment) -> str:
    """Return the folder or address of a run's checkpoints."""
    return experiment.checkpoint.directory or str(Path(experiment.folder) / "checkpoints")


def choose_kernels(experiment: Experiment, say: LogFn, *, fresh: bool, detail: LogFn = lambda line: None) -> str:
    """Decide and report which kernels are used when only timing can decide; a resumed run reuses its choice
    on a machine of the same kind.

    Returns the dtype that the run has computed in so far if its task leaves that to the devices; "" if
    nothing is recorded.

    Every process of the job calls it, before anything is traced.

    Args:
        detail: Called with the measurements.

    Raises:
        StoreError: The location of the checkpoints can't be read.
    """
    recorded = {"kernels": "", "compute_dtype": ""}
    with raise_on_all_processes():
        if is_process_zero() and not fresh:
            # An invalid record is reported and rewritten when the location is claimed.
            with contextlib.suppress(CheckpointError):
                record = read_record(open_store(checkpoint_location(experiment)))
                if record is not None:
                    recorded = {"kernels": record.kernels, "compute_dtype": record.compute_dtype}

    def report_choice(chosen: TimedKernels) -> None:
        for line in chosen.details():
            detail(line)
        say(chosen.summary())

    agreed = json_reader.parse(broadcast_text(json.dumps(recorded)))
    choose_by_timing(agreed["kernels"], report_choice)
    return agreed["compute_dtype"]


@contextlib.contextmanager
def open_folder(prepared: PreparedRun, say: LogFn, *, fresh: bool = False) -> Iterator[Checkpointer]:
    """Create the run's folder, lock it and its checkpoints against a second job, and yield its checkpointer.

    In a job of many processes the first one holds the locks.

    Args:
        fresh: Archive the files of an earlier run.

    Raises:
        CheckpointError: The folder can't be written, or another job trains in it or writes to the same
            checkpoints.
    """
    experiment = prepared.experiment
    folder, config = Path(experiment.folder), experiment.checkpoint
    where = checkpoint_location(experiment)
    with contextlib.ExitStack() as locks:
        with raise_on_all_processes():
            if is_process_zero():
                locks.enter_context(_locked(folder))
                reject_symlinks(folder)
                locks.enter_context(exclusive_writer(where))
                if fresh:
                    _check_no_branches(where)
                    archive_run(experiment, say)
        checkpointer = Checkpointer(where, config, build_attachments(prepared), say)
        with raise_on_all_processes():
            if is_process_zero():
                chosen = prepared.task.compute_dtype if experiment.task.compute_dtype == AUTO else ""
                checkpointer.acquire(timed_kernels_in_force(), chosen)
                checkpointer.sweep()
        try:
            yield checkpointer
        except BaseException:
            checkpointer.close()
            raise
        # The exception that ended the run is the one to show, not that of a save that failed as well.
        checkpointer.finish()


def _check_no_branches(where: str) -> None:
    """Check that no branch needs a checkpoint that `--fresh` would move.

    Raises:
        CheckpointError: A branch does.
    """
    needed = live_branches(open_store(where))
    if needed:
        names = ", ".join(each.name for references in needed.values() for each in references)
        raise CheckpointError(
            f"the checkpoints in {where} are the beginning of {names}; start over under another --name instead"
        )


def reject_symlinks(folder: Path) -> None:
    """Check that the run's own files are not links, through which a write would overwrite other data.

    Raises:
        CheckpointError: A file is a link.
    """
    for name in RUN_FILES:
        if (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a link to {os.readlink(folder / name)}, and a run's own files aren't written through links; "
                f"remove it, or choose another folder with --directory"
            )


@contextlib.contextmanager
def open_memory(prepared: PreparedRun, checkpointer: Checkpointer, say: LogFn) -> Iterator[MemoryTier | None]:
    """Open the copies of this run in the memory of hosts, if it has any; they are removed when the run ends
    without an error, since the store then has the last state."""
    config = prepared.experiment.checkpoint.memory
    if not config.every:
        yield None
        return
    memory = MemoryTier(config, checkpointer.run_name(), say)
    try:
        yield memory
    except BaseException:
        memory.close(forget=False)
        raise
    memory.close(forget=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_locked(folder / ".lock")
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process is training in {folder}; wait for it, stop it, or choose another folder with --directory"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"can't write to the run's folder {folder}: {error}; choose another with --directory"
        ) from error
    with lock:
        with contextlib.suppress(OSError):
            lock.truncate(0)
            lock.write(describe_owner().encode())
        yield


def build_attachments(prepared: PreparedRun) -> dict[str, str]:
    """Return the files that every checkpoint has in addition to arrays, so that it can be used alone."""
    files = {
        SETTINGS: json.dumps(serialize_config(prepared.experiment), indent=1),
        MODEL: json.dumps(serialize_config(prepared.task), indent=1),
    }
    if kernels := timed_kernels_in_force():
        files[KERNELS] = kernels
    if classes := find_class_names(prepared.data.train):
        files[CLASSES] = json.dumps({"label": classes})
    released = base_folder(prepared.experiment.init)
    if released is not None:
        with contextlib.suppress(OSError):
            files[RELEASED] = (released / "config.json").read_text(encoding="utf-8")
    tokenizer = prepared.data.tokenizer
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            (tokenizer if released is None else tokenizer.add_generation_config(str(released))).save(folder)
            files |= {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}
    return files


def find_start(
    prepared: PreparedRun,
    checkpointer: Checkpointer,
    memory: MemoryTier | None,
    say: LogFn,
    *,
    accept_changes: bool = False,
) -> RunStart:
    """Restore the newest undamaged state, from the memory of hosts or from the store, or initialize (or load) the
    first state.

    Args:
        accept_changes: Resume a run that had other settings or data.

    Raises:
        DataError: The data has changed, and that is not accepted.
        CheckpointError: The checkpoint is of another model or run, the store can't be read, or all
            checkpoints are damaged.
    """
    rollbacks = read_rollbacks(checkpointer.store)
    newest_start = restore_newest(
        prepared, checkpointer, memory, say, rollbacks=rollbacks, accept_changes=accept_changes
    )
    start = (
        newest_start
        or start_branch(prepared, checkpointer, say)
        or start_fresh(prepared, checkpointer, say, rollbacks or ())
    )
    if start.progress.rollbacks:
        _finish_rollback(prepared, checkpointer, start.progress, say)
    return start


def _finish_rollback(prepared: PreparedRun, checkpointer: Checkpointer, progress: DataProgress, say: LogFn) -> None:
    """Complete a rollback that was cut short, and report the skipped batches."""
    rollbacks = progress.rollbacks
    removed = checkpointer.remove_abandoned(lambda manifest: matches_history(manifest, rollbacks))
    if removed:
        say(f"checkpoints of the steps that were taken back are removed: steps {', '.join(map(str, removed))}")
    if progress.skipped_batches:
        say(f"rollbacks so far: {len(rollbacks)}; they skip {format_batch_numbers(sorted(progress.skipped_batches))}")
    if is_process_zero():
        try:
            append_rollback_log(Path(prepared.folder), rollbacks)
        except OSError as error:
            say(f"warning: the list of rollbacks can't be written: {error}")


def restore_newest(
    prepared: PreparedRun,
    checkpointer: Checkpointer,
    memory: MemoryTier | None,
    say: LogFn,
    *,
    rollbacks: Sequence[Rollback] | None = None,
    at_most: int | None = None,
    accept_changes: bool = False,
) -> RunStart | None:
    """Restore the newest undamaged state, from the memory of hosts or from the store; None if there is none.

    Args:
        rollbacks: Rollbacks of the run so far: a state that has trained on batches they skip is not used.
            None: those in the checkpoints.
        at_most: Ignore states after this step.

    Raises:
        DataError: The data has changed, and that is not accepted.
        CheckpointError: The checkpoint is of another model or run, or the store can't be read.
    """

    def is_usable(manifest: Manifest) -> bool:
        return (at_most is None or manifest.step <= at_most) and matches_history(manifest, rollbacks or ())

    def known(start: RunStart) -> RunStart:
        if rollbacks is None:
            return start
        return dataclasses.replace(start, progress=dataclasses.replace(start.progress, rollbacks=tuple(rollbacks)))

    remembered = None if memory is None else memory.newest(is_usable)
    for checkpoint in checkpointer.newest_first():
        if not is_usable(checkpoint.manifest):
            continue
        if remembered is not None and remembered.manifest.step >= checkpoint.manifest.step:
            start = start_from_memory(prepared, remembered, say, accept_changes)
            if start is not None:
                return known(start)
            remembered = None
        try:
            start = start_from_checkpoint(prepared, checkpoint, say, accept_changes)
            released = checkpoint.attachment(RELEASED)
        except DamagedError as error:
            checkpointer.mark_damaged(checkpoint.manifest.step, error)
            continue
        if released is not None:
            checkpointer.attachments.setdefault(RELEASED, released)
        return known(start)
    start = None if remembered is None else start_from_memory(prepared, remembered, say, accept_changes)
    return None if start is None else known(start)


def start_fresh(
    prepared: PreparedRun, checkpointer: Checkpointer, say: LogFn, rollbacks: Sequence[Rollback] = ()
) -> RunStart:
    """Initialize (or load) the first state, with the data from its beginning.

    Raises:
        CheckpointError: There are checkpoints, and all are damaged.
    """
    if checkpointer.damaged_steps:
        raise CheckpointError(
            f"no checkpoint in {checkpointer.store.url} is undamaged; inspect them with `panax checkpoint verify`, then "
            f"remove them, or start from step 0 with --fresh"
        )
    state = init_state(prepared, say)
    progress = DataProgress(rollbacks=tuple(rollbacks))
    return RunStart(state, 0, None, None, progress=progress, base=find_base(prepared, state))


def start_branch(prepared: PreparedRun, checkpointer: Checkpointer, say: LogFn) -> RunStart | None:
    """Restore the checkpoint of another run at which this one branched off; None if this run is not a branch.

    Raises:
        CheckpointError: That checkpoint does not exist any more, or is of settings that may not change at a branch.
    """
    origin = read_origin(checkpointer.store)
    if origin is None or checkpointer.damaged_steps:
        return None
    checkpoint = origin.open()
    check_branch_settings(prepared.experiment, checkpoint)
    start = start_from_checkpoint(prepared, checkpoint, say, accept_changes=True)
    return dataclasses.replace(start, stored_step=None)


def start_from_checkpoint(
    prepared: PreparedRun, checkpoint: Checkpoint, say: LogFn, accept_changes: bool = False
) -> RunStart:
    """Return the state of a checkpoint as a start, and report changes since."""
    with raise_on_all_processes():
        check_same_run(prepared.experiment, checkpoint, accept_changes=accept_changes, say=say)
    report_versions(checkpoint, say)
    position = find_resume_position(prepared, checkpoint, accept_changes=accept_changes, say=say)
    step = checkpoint.manifest.step
    compile_ahead(prepared, prepared.experiment.num_steps - step)
    state = restore_state(prepared, checkpoint, say)
    say(f"resuming from step {step} of {prepared.experiment.num_steps}: {checkpoint.url}")
    hooks = checkpoint.manifest.host.get("hooks")
    progress = DataProgress.from_manifest(checkpoint.manifest)
    # With other data, the same numbers are other batches.
    changed = position is None and checkpoint.manifest.host["data"] is not None
    return RunStart(
        state,
        step,
        position,
        step,
        hooks if isinstance(hooks, dict) else {},
        DataProgress(rollbacks=progress.rollbacks, data=progress.data + 1) if changed else progress,
        checkpoint.url,
        BestEvaluation.of(checkpoint.manifest.host.get(BEST)),
        resumed_base(prepared, checkpoint.manifest),
        checkpoint.manifest.host,
    )


def start_from_memory(
    prepared: PreparedRun, checkpoint: Checkpoint, say: LogFn, accept_changes: bool = False
) -> RunStart | None:
    """Return the state of the copy in memory as a start; None, with a warning, if the copy can't be used."""
    try:
        return dataclasses.replace(start_from_checkpoint(prepared, checkpoint, say, accept_changes), stored_step=None)
    except CheckpointError as error:
        say(f"warning: the copy of step {checkpoint.manifest.step} in memory is not used: {error}")
        return None
