"""Islands of a run: each trains by itself, exchanges updates with the others every few steps, and catches up
after an absence."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from ...comms.admission import compute_digest, update_norm
from ...comms.outer import GroupUpdate, decode_update, encode_update
from ...comms.outer_sync_store import OuterRound, OuterSyncStore, average_updates
from ...core import Position, TrainState, named_leaves
from ...core.errors import CheckpointError, DataError, RecipeError
from ...job.heartbeat import heartbeat
from ...stores import ObjectNotFoundError, open_store
from ..folder.description import serialize_config
from ..opened_data import LogFn
from ..parts.phases import RunEvent
from ..parts.run_part import RunPart, RunProgress
from ..parts.run_start import RunStart
from ..preparation import PreparedRun

PUBLISH_SECONDS = 20.0
"""Time for a member to publish the result of a round, if it can't be computed from the members' updates."""


class Island(RunPart):
    """One island of a run: the exchange with the other islands between its steps.

    Attributes:
        ahead: The round that the others have reached; None if this island is up to date. `catch_up` then
            returns the state from which to continue.
    """

    def __init__(self, prepared: PreparedRun, say: LogFn, hurry: Callable[[], bool], *, fresh: bool):
        """
        Args:
            hurry: Returns True if the run is to stop soon, so that no island is waited for.
            fresh: The run starts over.

        Raises:
            RecipeError: The run can't be an island.
            CheckpointError: The store is that of another run.
        """
        experiment = prepared.experiment
        _check(prepared)
        self._prepared, self._say = prepared, say
        self._comms, self._islands = experiment.comms, experiment.comms.islands
        self._place = OuterSyncStore(
            open_store(self._islands.store), self._islands, hurry=lambda: heartbeat().report_alive() or hurry()
        )
        self._place.open(_identity(prepared), fresh=fresh)
        self._wire = self._comms.wire if self._comms.compress else None
        self._agreed: GroupUpdate | None = None
        self._round = 0
        self._members: frozenset[int] = frozenset(range(self._islands.count))
        self.ahead: int | None = None

    def join(self, start: RunStart, skipped_batches: frozenset[int]) -> RunStart:
        """Return the state to begin from: that of the checkpoint, or the one that the others have reached
        meanwhile.

        Raises:
            CheckpointError: The checkpoint has been in more rounds than the store has records of,
                or islands begin from different parameters.
        """
        self._round, newest = self._rounds(start.step), self._place.latest_round()
        if self._round > newest:
            raise CheckpointError(
                f"the checkpoint of step {start.step} has been in {self._round} rounds, and {self._islands.store} records only "
                f"{newest}; "
                "give the location of the earlier rounds as comms.islands.store, or start over with --fresh and "
                "another location"
            )
        if newest > self._round:
            self.ahead = newest
            self._place.announce(newest + 1)
            return self.catch_up(start.state, start, skipped_batches)
        if newest > 0:
            self._agreed = self._wait_for_result(newest, self._local_params(start.state))
            return start
        self._agreed = (
            GroupUpdate.initial(self._local_params(start.state))
            if start.step == 0
            else self._wait_for_result(0, self._local_params(start.state))
        )
        if start.step == 0:
            self._place.publish(0, self._agreed.to_arrays())
            if compute_digest(self._wait_for_result(0, self._agreed.params).params) != compute_digest(
                self._agreed.params
            ):
                raise CheckpointError(
                    "islands begin from different parameters; start all of them with the same seed, init and model, and another "
                    "comms.islands.store"
                )
        return start

    def after_step(self, run: RunProgress) -> None:
        """Exchange updates with the other islands, if they meet after this step.

        Raises:
            StoreError: The store can't be read or written, after all retries.
        """
        run.state = self._exchange(run.state, run.step)
        if self.ahead is not None:
            run.handle(RunEvent.ISLANDS_AHEAD)

    def _exchange(self, state: TrainState, step: int) -> TrainState:
        """Return the state after a step, after which islands may meet.

        Raises:
            StoreError: The store can't be read or written, after all retries.
        """
        if step % self._comms.local_steps and step != self._prepared.experiment.num_steps:
            return state
        assert self._agreed is not None
        number, began = self._round + 1, time.monotonic()
        base, local_params = compute_digest(self._agreed.params), self._local_params(state)
        decided = self._decide_round(number, base, local_params)
        if decided is None:
            agreed = self._wait_for_result(number, local_params)
        else:
            present = frozenset(member.index for member in decided.members)
            self._report_members(number, step, decided, time.monotonic() - began)
            joined = self._islands.index in present or (not present and decided.base == base)
            newest = number if joined else self._place.latest_round()
            if newest > number:
                self.ahead = newest
                self._place.announce(newest + 1)
                return state
            agreed = self._compute_result(number, decided, self._agreed, base)
            if agreed is None:
                self._say(f"this island adopts the result of round {number}")
                agreed = self._wait_for_result(number, local_params)
            elif self._islands.index == decided.by:
                self._place.publish(number, agreed.to_arrays())
            if not joined:
                self._say(
                    f"island {self._islands.index} came too late for round {number}: it drops its update, adopts the result "
                    f"of the others, and joins them at step {step}"
                )
                self._place.announce(number + 1)
        self._place.drop_updates()
        self._agreed, self._round = agreed, number
        return self._with_params(state, agreed.params)

    def _decide_round(self, number: int, base: str, local_params: Mapping[str, np.ndarray]) -> OuterRound | None:
        """Contribute this island's update to a round and return the result; None if its record is damaged."""
        assert self._agreed is not None
        like = self._agreed.params
        try:
            if self._place.read_round(number) is None:
                moved = {
                    name: old.astype(np.float32) - local_params[name].astype(np.float32) for name, old in like.items()
                }
                chance = number * self._islands.count + self._islands.index if self._comms.rounds_at_random else None
                self._place.contribute(number, base, encode_update(moved, self._wire, chance))
            return self._place.decide(number, base, lambda arrays: update_norm(decode_update(arrays, self._wire, like)))
        except CheckpointError as error:
            self._say(f"{error}; this island adopts the result of the others")
            return None

    def catch_up(self, state: TrainState, start: RunStart, skipped_batches: frozenset[int]) -> RunStart:
        """Return the state of the others: their parameters, this island's optimizer state, and the data that
        follows.

        Args:
            start: The progress of this island; its state is not read.
            skipped_batches: Numbers of batches that are skipped.

        Raises:
            CheckpointError: The parameters that the islands agreed on are gone.
            DataError: The data ends before that step.
        """
        assert self.ahead is not None
        number, self.ahead = self.ahead, None
        step = min(number * self._comms.local_steps, self._prepared.experiment.num_steps)
        missed = step - start.step
        self._say(
            f"island {self._islands.index} is at step {start.step}, the others have met {number} times: it adopts "
            "their result, "
            f"and joins them at step {step}"
        )
        self._agreed, self._round = self._wait_for_result(number, self._local_params(state)), number
        position, num_drawn = _skip_ahead(
            self._prepared.data.train, start.position, start.progress.drawn, missed, skipped_batches
        )
        program = self._prepared.step.program
        skipped = program.transformation.on_skipped_step
        if skipped is None:
            self._say("the optimizer's learning rate continues from the steps that this island has taken itself")
        else:
            state = dataclasses.replace(state, optimizer_state=skipped(state.optimizer_state, missed))
        state = dataclasses.replace(state, step=state.step + jnp.asarray(missed, state.step.dtype))
        state = jax.device_put(self._with_params(state, self._agreed.params), self._prepared.step.shardings)
        return dataclasses.replace(
            start,
            state=state,
            step=step,
            position=position,
            stored_step=None,
            progress=dataclasses.replace(start.progress, drawn=num_drawn, skipped=()),
        )

    def _rounds(self, step: int) -> int:
        """Return the number of outer synchronizations up to the end of a step; the last one may come early."""
        full_rounds, rest = divmod(step, self._comms.local_steps)
        return full_rounds + (1 if rest and step == self._prepared.experiment.num_steps else 0)

    def _local_params(self, state: TrainState) -> dict[str, np.ndarray]:
        free = eqx.filter(state.params, self._prepared.step.program.trainable)
        return {name: np.asarray(leaf) for name, leaf in jax.device_get(named_leaves(free)).items()}

    def _with_params(self, state: TrainState, params: Mapping[str, np.ndarray]) -> TrainState:
        places = named_leaves(self._prepared.step.shardings.params)
        leaves, structure = jax.tree.flatten(state.params)
        names = list(named_leaves(state.params))
        leaves_on_devices = [
            jax.device_put(params[name], places[name]) if name in params else leaf for name, leaf in zip(names, leaves)
        ]
        return dataclasses.replace(state, params=structure.unflatten(leaves_on_devices))

    def _compute_result(self, number: int, decided: OuterRound, before: GroupUpdate, base: str) -> GroupUpdate | None:
        """Compute the result of a round from the updates of its members.

        Returns None if it can't be computed: they began from other parameters, or their updates are gone or
        damaged.
        """
        if decided.base != base or any(member.base != base for member in decided.members):
            return None
        if not decided.members:
            return before
        try:
            moved = [
                decode_update(self._place.read_update(number, member), self._wire, before.params)
                for member in decided.members
            ]
        except (ObjectNotFoundError, KeyError, ValueError) as error:
            self._say(f"what islands wrote for round {number} can't be read any more: {error}")
            return None
        return before.apply_outer_step(average_updates(moved), self._comms)

    def _wait_for_result(self, number: int, like: Mapping[str, np.ndarray]) -> GroupUpdate:
        """Return the result of a round, published by a member or computed from the updates of all members."""
        until = time.monotonic() + PUBLISH_SECONDS
        while True:
            group_update, reason = self._read_published(number, like)
            if (
                group_update is None
                and number > 0
                and (before := self._read_published(number - 1, like)[0]) is not None
            ):
                with contextlib.suppress(CheckpointError):  # damaged: the published result may still arrive
                    decided = self._place.read_round(number)
                    group_update = decided and self._compute_result(
                        number, decided, before, compute_digest(before.params)
                    )
            if group_update is not None:
                return group_update
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{self._islands.store} lacks the parameters agreed on in round {number}, and some of the updates "
                    f"for it ({reason}); start over with --fresh and another comms.islands.store"
                )
            heartbeat().report_alive()
            time.sleep(0.2)

    def _read_published(self, number: int, like: Mapping[str, np.ndarray]) -> tuple[GroupUpdate | None, str]:
        """Return (the published result of a round or None, the reason why it can't be used)."""
        try:
            arrays = self._place.read_result(number)
            return (None, "it is missing") if arrays is None else (GroupUpdate.of(arrays, like), "")
        except (KeyError, ValueError) as error:
            return None, f"it is damaged, or of another model: {error}"

    def _report_members(self, number: int, step: int, decided: OuterRound, seconds: float) -> None:
        """Report which islands have left or joined since the last round, and which were excluded now."""
        present = frozenset(member.index for member in decided.members)
        for index, reason in sorted(decided.left_out.items()):
            self._say(f"island {index} is dropped from round {number}, after step {step}: {reason}")
        for index in sorted(self._members - present - decided.left_out.keys()):
            self._say(
                f"island {index} was not in round {number}, after step {step}; the others waited {seconds:.1f} s and continue"
            )
        for index in sorted(present - self._members):
            self._say(f"island {index} is back in round {number}, after step {step}")
        self._members = present


def _skip_ahead(
    source: Any, position: Position | None, num_drawn: int, count: int, skipped: frozenset[int]
) -> tuple[Position | None, int]:
    """Return (the position of a source after `count` more steps, the number of the last batch)."""
    batches = source.batches(position)
    while count > 0:
        item = next(batches, None)
        if item is None:
            raise DataError(f"the data ended {count} steps before the one at which the others are; provide more")
        num_drawn, position = num_drawn + 1, item.position
        count -= num_drawn not in skipped
        heartbeat().report_alive()
    return position, num_drawn


def _identity(prepared: PreparedRun) -> str:
    """Return the identity of a run, equal for all of its islands: task, data, optimizer and settings that
    decide the result."""
    experiment = prepared.experiment
    parts = [serialize_config(part) for part in (prepared.task, experiment.data, experiment.optimizer)]
    comms = dataclasses.replace(
        experiment.comms,
        islands=dataclasses.replace(experiment.comms.islands, index=0, store="."),
    )
    settings = [*parts, serialize_config(comms), experiment.seed, list(experiment.frozen)]
    return f"{experiment.name} {xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True, default=str).encode())}"


def _check(prepared: PreparedRun) -> None:
    experiment, program = prepared.experiment, prepared.step.program
    setting = f"comms.islands.count={experiment.comms.islands.count}"
    for is_set, problem in (
        (jax.process_count() > 1, "an island is one process with all its devices; start it as one"),
        (program.has_average, "each island would average its parameters separately; set step.ema_decay to None"),
        (experiment.rollback.after > 0, "going back would undo a round; set rollback.after=0"),
        (bool(experiment.batch_ramp.parts), "a ramp gives batches that islands can't share; remove batch_ramp"),
        (experiment.debug, "debug runs alone; remove comms.islands"),
        (
            program.tables is not None,
            f"{type(prepared.task).__name__} has tables, which change by rows and would be sent whole; remove comms.islands",
        ),
        (
            bool(jax.tree.leaves(program.abstract.model_state)),
            f"{type(prepared.task).__name__} carries state in addition to its parameters, on which islands would not agree",
        ),
    ):
        if is_set:
            raise RecipeError(f"{setting}: {problem}")
