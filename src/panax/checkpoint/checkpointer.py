"""Checkpoints of one run: when they are saved, retried, kept and removed.

Training waits for the copy to host memory; a thread writes the files. One save is in flight at a time. A save
that fails is retried, then given up with a warning: the run continues, and the checkpoints before it are
untouched.
"""

import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from ..core.errors import CheckpointError, DamagedError, PanaxError, StoreError
from ..job.agreement import any_process, broadcast_text, is_process_zero
from ..job.heartbeat import heartbeat
from ..stores import LocalStore, Store, open_store
from .branches import live_branches
from .checkpoint_index import CheckpointIndex, parse_step, step_folder
from .chunk_reader import Checkpoint
from .commit import SaveAttempt, commit, discard, publish_part, remove, sweep, write_part
from .config import CheckpointConfig
from .manifest import Manifest
from .restoration import raise_on_all_processes
from .run_record import FOLDER as RECORD_FOLDER
from .snapshot import Snapshot, plan_save

LogFn = Callable[[str], None]


_LOOK_SECONDS = 1.0


class Checkpointer:
    """The checkpoints of one run, in one store. One job writes to it at a time; every process of the job has
    one of these.

    Attributes:
        damaged_steps: Steps of damaged checkpoints.
    """

    def __init__(
        self,
        where: str | Path | Store,
        config: CheckpointConfig | None = None,
        attachments: Mapping[str, str] | None = None,
        say: LogFn = print,
    ) -> None:
        """
        Args:
            attachments: File name to text, put into every checkpoint so that it can be used alone: the
                model's description, the tokenizer.
            say: Called with messages for the user, a line at a time.
        """
        self.store: Store = open_store(where) if isinstance(where, str | Path) else where
        self.attachments = dict(attachments or {})
        self.config = config or CheckpointConfig()
        self._say = say
        self._saved = CheckpointIndex(self.store, say)
        self.damaged_steps: set[int] = set()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._warned_unremoved = False
        self._failure: CheckpointError | None = None
        self._name = ""
        self._attempts: Counter[int] = Counter()

    def acquire(self, kernels: str = "", compute_dtype: str = "") -> None:
        """Record this job as the only one that writes here, and read which step the previous job saved last.

        The first process of a job calls it, before the first save. From then on, a job that had claimed the
        location earlier saves no more checkpoints.

        Args:
            kernels: Kernels for work on CPU, to be recorded.
            compute_dtype: Compute dtype of the task, if that was left to the devices; to be recorded.

        Raises:
            CheckpointError: The contents contradict the list that the store returns.
            StoreError: The store can't be read or written.
        """
        self._saved.acquire(kernels, compute_dtype)

    def run_name(self) -> str:
        """Return the name of this run since its first job, in every process. The first process must have
        called `acquire`."""
        return broadcast_text(self._saved.run)

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints here, ascending."""
        return self._saved.steps()

    def folder(self, step: int) -> str:
        """Return the name of the checkpoint of `step`, below the store's root."""
        return step_folder(step)

    def url(self, step: int) -> str:
        """Return the address that the checkpoint of `step` has or would have."""
        return self._saved.url(step)

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of a step.

        Raises:
            CheckpointError: The checkpoint does not exist, or its manifest is damaged.
            StoreError: The store can't be read.
        """
        return self._saved.open(step)

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def best_first(self) -> Iterator[Checkpoint]:
        """Yield checkpoints in the order in which to use their model: by held-out loss, then newest first."""
        steps = self.steps()
        for step in dict.fromkeys([*self._saved.evaluated_steps(steps), *reversed(steps)]):
            yield self.open(step)

    def best(self) -> int | None:
        """Return the step of the checkpoint with the lowest held-out loss, otherwise of the newest."""
        evaluated_steps = self._saved.evaluated_steps(self.steps())
        return evaluated_steps[0] if evaluated_steps else self.latest()

    def newest_first(self) -> Iterator[Checkpoint]:
        """Yield checkpoints to resume from, newest first; one with a damaged manifest is skipped with a warning.

        All processes of a job yield the checkpoints that the first process has listed, and skip any that one
        of the processes can't use.

        Raises:
            CheckpointError: The newest one is of another format version.
            StoreError: The store can't be read (in a job of several processes: CheckpointError), so that an
                older checkpoint can't be used either. If one process raises, all do.
        """
        steps: list[int] = []
        with raise_on_all_processes():
            steps = sorted(self._saved.manifests, reverse=True)[:64]
        for step in map(int, broadcast_text(" ".join(map(str, steps))).split()):
            try:
                with raise_on_all_processes():
                    self._saved.refresh_step(step)
                    checkpoint = self.open(step)
            except DamagedError as error:
                self.mark_damaged(step, error)
            else:
                yield checkpoint

    def mark_damaged(self, step: int, error: CheckpointError) -> None:
        """Warn that a checkpoint is damaged, and exclude it from the checkpoints that `config` keeps."""
        self._say(f"warning: the checkpoint of step {step} is not used: {error}")
        self.damaged_steps.add(step)

    def prepare(self, tree: Any) -> None:
        """Allocate the host memory for saving a state like `tree`, so that the first save need not wait for
        it."""
        plan = plan_save(tree)
        if self._snapshot is None or self._snapshot.plan != plan:
            self._snapshot = Snapshot(plan)

    def save(
        self,
        tree: Any,
        step: int,
        host: Mapping[str, Any],
        metric: float | None = None,
        *,
        must: bool = False,
        back_to: int | None = None,
    ) -> bool:
        """Copy `tree` to the host and write it in the background. Every process of the job calls it.

        Returns when the copy is made: the arrays may then be donated.

        Args:
            must: Wait for a save in progress even if `when_busy` is skip.
            back_to: Also keep the newest checkpoints of this step or before, `keep_last` of them: the run may
                have to roll back.

        Returns:
            True if a save was started; False if it was skipped.
        """
        if self.config.when_busy == "skip" and not must and any_process(self._busy()):
            self._say(f"the checkpoint of step {step} is skipped: the one before is still being written")
            return False
        self.wait()
        self.prepare(tree)
        assert self._snapshot is not None
        self._name = self._name or broadcast_text(secrets.token_hex(4))
        self._attempts[step] += 1
        number = self._attempts[step]
        attempt = SaveAttempt(
            self.folder(step),
            self._name if number == 1 else f"{self._name}-{number}",
            jax.process_index(),
            jax.process_count(),
        )
        self._failure = None
        self._snapshot.begin()
        # A daemon: a process that must end (Ctrl-C twice) does not hang on a store; its leftovers are not a
        # checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(attempt, step, dict(host), metric, back_to), name="panax-save", daemon=True
        )
        self._thread.start()
        # The thread writes each file as soon as its arrays are copied.
        self._snapshot.copy(tree)
        return True

    def wait(self) -> None:
        """Wait for the save in progress, if any. A failure has been reported, and `finish` raises it."""
        if self._thread is not None:
            with heartbeat().during("save"):
                # Its own deadlines end it: those of the store's requests, and that of waiting for other
                # processes.
                while self._thread.is_alive():
                    self._thread.join(_LOOK_SECONDS)
            self._thread = None

    def finish(self) -> None:
        """Wait for the save in progress.

        Raises:
            CheckpointError: The last save failed. The checkpoints before it are untouched.
        """
        self.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def remove_abandoned(self, is_kept: Callable[[Manifest], bool]) -> list[int]:
        """Remove the checkpoints of a history that the run has abandoned. Every process of the job calls it,
        with no save in progress.

        Returns:
            The removed steps in the first process; an empty list in the others.

        Raises:
            CheckpointError: Another job has taken over this location; in a job of several processes also: the
                store rejected a request.
            StoreError: The store rejected a request. The next job can remove the remaining checkpoints.
        """
        assert self._thread is None
        removed: list[int] = []
        with raise_on_all_processes():
            if is_process_zero():
                removed = [step for step in reversed(self.steps()) if not is_kept(self.open(step).manifest)]
                if removed:
                    needed = live_branches(self.store)
                    removed = [step for step in removed if step not in needed]
                if removed:
                    self._remove(removed)
        if not is_process_zero():
            self._saved.invalidate()
        return removed

    def _remove(self, steps: list[int]) -> None:
        self._saved.check_claim()
        for step in steps:
            remove(self.store, self.folder(step))
            del self._saved.manifests[step]
            self.damaged_steps.discard(step)
        self._saved.record_removal(steps)

    def close(self) -> None:
        """Wait for the save in progress, without retrying after failures."""
        self._closing.set()
        self.wait()

    def sweep(self) -> None:
        """Remove half-written files of earlier processes. Called by the one job that writes here, before it
        saves."""
        if not is_process_zero():
            return
        folders = [folder for folder in self.store.folders() if parse_step(folder) is not None]
        try:
            sweep(self.store, folders)
            if isinstance(self.store, LocalStore):
                self.store.sweep([*folders, RECORD_FOLDER])
        except StoreError as error:
            self._warn_unremoved(error)

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _write(
        self, attempt: SaveAttempt, step: int, host: Mapping[str, Any], metric: float | None, back_to: int | None = None
    ) -> None:
        assert self._snapshot is not None
        snapshot = self._snapshot
        attachments = self.attachments if attempt.process == 0 else {}
        try:
            part = self._with_retries(
                f"saving step {step}",
                lambda: write_part(
                    self.store, attempt, snapshot, step=step, attachments=attachments, host=host, metric=metric
                ),
            )
            if attempt.process != 0:
                self._with_retries(f"saving step {step}", lambda: publish_part(self.store, attempt, part))
                return
            manifest = self._with_retries(f"committing step {step}", lambda: self._commit(attempt, part))
        except (PanaxError, OSError) as error:
            self._give_up(attempt, step, error)
            return
        except BaseException as error:
            # A bug of the program itself: the thread ends with it, and the run must not believe that this was
            # saved.
            self._failure = CheckpointError(f"saving step {step} to {self.store.url} failed: {error!r}")
            raise
        self.damaged_steps.discard(step)
        try:
            self._saved.manifests[step] = manifest
            self._prune(step, attempt, back_to)
            self._warned_unremoved = False
        except (PanaxError, OSError) as error:
            self._warn_unremoved(error)

    def _warn_unremoved(self, error: Exception) -> None:
        """Warn once that the store rejects removals; saves continue."""
        if not self._warned_unremoved:
            self._warned_unremoved = True
            self._say(
                f"warning: checkpoints that are no longer needed could not be removed; this is retried after each "
                f"save: {error}"
            )

    def _commit(self, attempt: SaveAttempt, part: Manifest) -> Manifest:
        """Commit, unless another job has taken over this location, and update the run's record."""
        self._saved.check_claim()
        manifest = commit(self.store, attempt, part, self.config.commit_seconds, self._closing.is_set)
        self._saved.record_commit(manifest.step)
        return manifest

    def _with_retries(self, what: str, action: Callable[[], Any]) -> Any:
        for number in range(self.config.retries + 1):
            try:
                return action()
            except (StoreError, OSError) as error:
                if isinstance(error, CheckpointError) or number == self.config.retries or self._closing.is_set():
                    raise
                pause = random.uniform(0.0, self.config.retry_seconds * 2**number)
                self._say(f"warning: {what} failed and is retried in {pause:.1f} s: {error}")
                self._closing.wait(pause)
        raise AssertionError("unreachable")

    def _give_up(self, attempt: SaveAttempt, step: int, error: Exception) -> None:
        try:
            undamaged = [saved_step for saved_step in self.steps() if saved_step not in self.damaged_steps]
            consequence = (
                f"the checkpoint of step {undamaged[-1]} is undamaged"
                if undamaged
                else "there is no earlier checkpoint"
            )
        except PanaxError:
            consequence = "earlier checkpoints could not be listed"
        self._failure = CheckpointError(
            f"saving step {step} to {self.store.url} failed: {error}; {consequence}. Fix this, or choose another location with "
            f"--checkpoint.directory, and run the same command again"
        )
        self._say(f"warning: {self._failure}")
        try:
            if attempt.process == 0:
                if not discard(self.store, attempt):
                    self._say(f"warning: {self.url(step)} may still be committed; the next run checks it")
            else:
                self.store.write(attempt.failure(attempt.process), [str(error).encode()])
        except (PanaxError, OSError) as further:
            self._say(f"warning: its partial files could not be removed: {further}")

    def _prune(self, newest: int, attempt: SaveAttempt, back_to: int | None) -> None:
        # Leftovers of an earlier attempt at this step, which its manifest has replaced.
        sweep(self.store, [attempt.folder])
        good = [step for step in self.steps() if step not in self.damaged_steps]
        keep = (
            set(good[-self.config.keep_last :])
            | set(self._saved.evaluated_steps(good)[: self.config.keep_best])
            | {newest}
        )
        keep |= set([step for step in good if back_to is not None and step <= back_to][-self.config.keep_last :])
        keep |= set(live_branches(self.store)) if len(keep) < len(self._saved.manifests) else set()
        for step, manifest in list(self._saved.manifests.items()):
            forever = self.config.keep_every and step % self.config.keep_every == 0 and step in good
            # A damaged one is left for a user to inspect until newer ones have replaced it.
            damaged = isinstance(manifest, CheckpointError) or step in self.damaged_steps
            if step not in keep and not forever and not (damaged and step > newest):
                remove(self.store, self.folder(step))
                del self._saved.manifests[step]
