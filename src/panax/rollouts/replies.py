"""`ReplySource`: an environment's replies to the turns of a rollout, each asked for once."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Literal

from ..checkpoint import raise_on_all_processes
from ..core.errors import DataError, TrainingError
from ..job.agreement import broadcast_text, is_process_zero
from ..system import json_reader
from .calls.pool import CallPool
from .environments.turns import AskedTurn, OpenedEnvironment, TurnReply
from .journal import Journal
from .prompts import PROMPT
from .reply_entry import MAX_REPLIES_BYTES, ReplyEntry


class ReplySource:
    """Asks an environment. In a job of many processes each of them makes the same calls; the first one asks."""

    def __init__(
        self,
        environment: OpenedEnvironment,
        pool: CallPool | None,
        say: Callable[[str], None],
        on_progress: Callable[[], None],
        failed: Literal["stop", "exclude"],
    ):
        """
        Args:
            pool: Has the environment's functions; None in all processes but the first.
            on_progress: As for `Collector`.
            failed: "stop" to raise an error if the environment fails.
        """
        self._environment, self._pool, self._say = environment, pool, say
        self._on_progress, self._failed = on_progress, failed

    def ask(self, asked: Sequence[AskedTurn]) -> list[TurnReply]:
        """Ask for replies that no journal has.

        Raises:
            TrainingError: The environment failed, and `failed` is "stop".
        """
        replies = [TurnReply() for _ in asked]
        with raise_on_all_processes():
            replies = self._ask(asked)
        return self._check(asked, self._broadcast(replies))

    def ask_once(self, asked: Sequence[AskedTurn], number: int, step: int, journal: Journal) -> list[TurnReply]:
        """Return the replies of the journal, and ask for others; all are in the journal when this returns.

        Args:
            asked: Turns of the same number.
            number: Number of the rollout.
            step: Steps taken before.

        Raises:
            TrainingError: The environment failed, and `failed` is "stop".
        """
        turn = asked[0].turn
        known: dict[int, TurnReply] = {}
        entry = journal.find_replies(number, turn) if is_process_zero() else None
        if entry is not None and entry.environment != self._environment.name:
            self._say(f"the environment is another than that of rollout {number} before: it is asked again")
        elif entry is not None:
            for each in asked:
                digest, reply = entry.replies.get(each.place, ("", TurnReply()))
                # A failure that ended the run may have been mended.
                if digest == each.digest and (not reply.error or self._failed == "exclude"):
                    known[each.place] = reply
            changed = sum(entry.replies[each.place][0] != each.digest for each in asked if each.place in entry.replies)
            if changed:
                self._say(
                    f"warning: rollout {number} was drawn before this run was interrupted, and turn {turn} of {changed} answers "
                    f"is different now (the mesh, the kernels or the processor may have changed): the environment is asked again"
                )
        missing = [each for each in asked if each.place not in known]
        with raise_on_all_processes():
            if is_process_zero():
                replies = self._ask(missing)
                known |= {each.place: reply for each, reply in zip(missing, replies, strict=True)}
                if missing:
                    ordered = {each.place: (each.digest, known[each.place]) for each in asked}
                    journal.append([ReplyEntry(number, step, turn, self._environment.name, ordered)])
        return self._check(asked, self._broadcast([known.get(each.place, TurnReply()) for each in asked]))

    def _ask(self, asked: Sequence[AskedTurn]) -> list[TurnReply]:
        """Ask the environment; only the first process knows the result."""
        if self._pool is None or not asked:
            return [TurnReply() for _ in asked]
        return self._environment.reply(
            self._pool, asked, stop_at_failure=self._failed == "stop", on_wait=self._on_progress
        )

    def _broadcast(self, replies: Sequence[TurnReply]) -> list[TurnReply]:
        """Return the replies of the first process, in every process."""
        text = broadcast_text(json.dumps([dataclasses.asdict(reply) for reply in replies]))
        parsed = json_reader.parse(text, max_bytes=MAX_REPLIES_BYTES)
        if not isinstance(parsed, list):
            raise DataError(f"the first process sent {type(parsed).__name__} in place of replies")
        return [TurnReply.from_json(fields) for fields in parsed]

    def _check(self, asked: Sequence[AskedTurn], replies: list[TurnReply]) -> list[TurnReply]:
        failures = [(each, reply.error) for each, reply in zip(asked, replies, strict=True) if reply.error]
        if failures and self._failed == "stop":
            turn, error = failures[0]
            raise TrainingError(
                f"an answer has no reply: {error}. Prompt: {str(turn.record[PROMPT])[:200]!r}; turn {turn.turn} of the answer: "
                f"{turn.text[:200]!r}. Mend the environment, or leave such answers out with "
                f'data.failed_rewards="exclude"'
            )
        return replies
