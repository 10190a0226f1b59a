"""`RewardSource`: the verdicts on the answers of a rollout, each asked for once, if need be while the model learns."""

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..checkpoint import raise_on_all_processes
from ..core.errors import DataError
from ..job.agreement import broadcast_text, is_process_zero
from ..system import json_reader
from .answers import SampledAnswer
from .drawn_answers import DrawnAnswers
from .journal import Journal, JournalEntry
from .rewards.pool import RewardPool
from .rewards.reward import Verdict
from .rewards.reward_model import merge_verdicts
from .rollout_data import OpenedRollouts

Verdicts = list[list[Verdict]]
"""One for each answer and reward."""

ScoreByModels = Callable[[Sequence[SampledAnswer]], np.ndarray]
"""Returns the value of each reward model, (answers, models); every process calls it."""

_WAIT_SECONDS = 0.1


@dataclasses.dataclass(eq=False)
class AskedRewards:
    """Rewards of a rollout that are asked for.

    Attributes:
        known: Verdicts of the journal, by the answer's index; only the first process knows them.
        places: Indices of the other answers.
        calls: Asks for these in the background; None to ask when the verdicts are needed.
        verdicts: Verdicts of all answers, once the journal has them; of other processes than the first, nothing.
    """

    drawn: DrawnAnswers
    known: dict[int, list[Verdict]]
    places: list[int]
    calls: "BackgroundCall | None" = None
    verdicts: Verdicts | None = None

    def cancel(self) -> None:
        """Give up the calls in the background."""
        if self.calls is not None:
            self.calls.cancel()


class RewardSource:
    """Asks for rewards. In a job of many processes each of them makes the same calls; the first one asks functions."""

    def __init__(
        self,
        rollouts: OpenedRollouts,
        pool: RewardPool | None,
        score_by_models: ScoreByModels | None,
        say: Callable[[str], None],
    ):
        """
        Args:
            pool: Asks for the rewards that are functions; None without any, and in all processes but the first.
            score_by_models: Scores by the rewards that are models; None without any.
        """
        self._rollouts, self._settings = rollouts, rollouts.settings
        self._pool, self._score_by_models, self._say = pool, score_by_models, say

    def ask(self, indices: Sequence[int], answers: Sequence[SampledAnswer], on_wait: Callable[[], None]) -> Verdicts:
        """Return verdicts that no journal has.

        Args:
            indices: Index of each answer's prompt among all records.
            on_wait: Called several times a second while rewards are awaited; an exception from it gives them up.
        """
        return _broadcast(self._prepare(range(len(answers)), indices, answers)(on_wait))

    def begin(self, drawn: DrawnAnswers, journal: Journal, *, in_background: bool = False) -> AskedRewards:
        """Ask for the rewards of a rollout that the journal does not have.

        Args:
            in_background: Ask functions at once, in a thread; otherwise `finish` does.
        """
        answers, number = drawn.answers, drawn.number
        digests = [answer.digest for answer in answers]
        entry = journal.find(number) if is_process_zero() else None
        # A failure that ended the run may have been mended.
        keeps_failures = self._settings.failed_rewards == "exclude"
        if entry is not None and entry.names != self._names:
            self._say(f"the rewards are others than those of rollout {number} before: they are asked for again")
            entry = None
        recorded = {} if entry is None else _recorded(entry, keeps_failures=keeps_failures)
        known = {place: recorded[place, digest] for place, digest in enumerate(digests) if (place, digest) in recorded}
        if entry is not None and (changed := sum(one != other for one, other in zip(digests, entry.digests))):
            self._say(
                f"warning: rollout {number} was drawn before this run was interrupted, and {changed} of {len(answers)} answers "
                f"are different now (the mesh, the kernels or the processor may have changed): their rewards are asked for again"
            )
        places = [place for place in range(len(answers)) if place not in known]
        # The first process knows which ones are missing.
        places = json_reader.parse(broadcast_text(json.dumps(places)))
        asked = AskedRewards(drawn, known, places)
        if in_background:
            asked.calls = BackgroundCall(self._prepare(places, drawn.indices, answers))
        return asked

    def settle(self, asked: AskedRewards, journal: Journal, on_wait: Callable[[], None]) -> None:
        """Wait for the rewards of a rollout; they are in the journal when this returns.

        Args:
            on_wait: See `ask`.

        Raises:
            TrainingError: A process for rewards can't be started again.
        """
        if asked.verdicts is not None:
            return
        drawn = asked.drawn
        if asked.calls is not None:
            asked_now = asked.calls.wait(on_wait)
        else:
            asked_now = self._prepare(asked.places, drawn.indices, drawn.answers)(on_wait)
        verdicts = asked.known | dict(zip(asked.places, asked_now, strict=True))
        ordered = [verdicts.get(place, []) for place in range(len(drawn.answers))]
        with raise_on_all_processes():
            if is_process_zero() and asked.places:
                digests = [answer.digest for answer in drawn.answers]
                journal.append([_entry(drawn, digests, self._names, ordered)])
        asked.verdicts = ordered

    def finish(self, asked: AskedRewards, journal: Journal, on_wait: Callable[[], None]) -> Verdicts:
        """Return the verdicts of each answer, in every process; see `settle`."""
        self.settle(asked, journal, on_wait)
        assert asked.verdicts is not None
        return _broadcast(asked.verdicts)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self._settings.rewards)

    def _prepare(
        self, places: Sequence[int], indices: Sequence[int], answers: Sequence[SampledAnswer]
    ) -> Callable[[Callable[[], None]], Verdicts]:
        """Ask reward models about some answers, and return the function that asks the others.

        Only the first process knows its result.
        """
        settings, records, pool = self._settings, self._rollouts.records, self._pool
        scored = [place for place in places if not describe_failure(answers[place])]
        by_models = None
        if self._score_by_models is not None and scored:
            by_models = self._score_by_models([answers[place] for place in scored])

        def ask(on_wait: Callable[[], None]) -> Verdicts:
            verdicts: Verdicts = [[] for _ in scored]
            if pool is not None and settings.functions and scored:
                rated = [(answers[place].text, records[indices[place]]) for place in scored]
                episodes = [answers[place].describe_episode() for place in scored]
                stops = settings.failed_rewards == "stop"
                verdicts = pool.score(rated, episodes, stop_at_failure=stops, on_wait=on_wait)
            if not is_process_zero():
                return [[] for _ in places]
            if by_models is not None:
                verdicts = [
                    merge_verdicts(settings.rewards, of_functions, of_models.tolist())
                    for of_functions, of_models in zip(verdicts, by_models, strict=True)
                ]
            known = dict(zip(scored, verdicts, strict=True))
            count = len(settings.rewards)
            return [known.get(place) or [Verdict(None, describe_failure(answers[place]))] * count for place in places]

        return ask


class BackgroundCall:
    """A function that runs in a thread, and can be given up."""

    def __init__(self, function: Callable[[Callable[[], None]], Verdicts]):
        """
        Args:
            function: Takes a function that it has to call several times a second, which raises if its result is not needed.
        """
        self._function, self._is_canceled = function, threading.Event()
        self._result: Verdicts | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, on_wait: Callable[[], None]) -> Verdicts:
        """Return the result; an exception of the function is raised here.

        Args:
            on_wait: Called several times a second; an exception from it leaves the function running.
        """
        while self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)
            on_wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Give the result up, and wait until the function has ended."""
        self._is_canceled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result = self._function(self._check)
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def _check(self) -> None:
        if self._is_canceled.is_set():
            raise _CanceledError


class _CanceledError(Exception):
    """The result of a function in the background is not needed."""


def describe_failure(answer: SampledAnswer) -> str:
    """Return why the environment failed in an answer; empty if it did not."""
    return "" if answer.episode is None else answer.episode.error


def _entry(
    drawn: DrawnAnswers, digests: Sequence[str], names: tuple[str, ...], verdicts: Sequence[Sequence[Verdict]]
) -> JournalEntry:
    errors = {
        place: "; ".join(each.error for each in verdict if each.error)
        for place, verdict in enumerate(verdicts)
        if any(each.error for each in verdict)
    }
    values = tuple(tuple(each.value for each in verdict) for verdict in verdicts)
    return JournalEntry(drawn.number, drawn.step, tuple(drawn.indices), tuple(digests), names, values, errors)


def _recorded(entry: JournalEntry, *, keeps_failures: bool) -> dict[tuple[int, str], list[Verdict]]:
    """Return the verdicts of an entry by the answer's index and digest."""
    return {
        (place, digest): [Verdict(value, entry.errors.get(place, "") if value is None else "") for value in values]
        for place, (digest, values) in enumerate(zip(entry.digests, entry.rewards, strict=True))
        if keeps_failures or None not in values
    }


def _broadcast(verdicts: Verdicts) -> Verdicts:
    """Return the verdicts of the first process, in every process."""
    text = json.dumps([[[each.value, each.error] for each in verdict] for verdict in verdicts])
    parsed = json_reader.parse(broadcast_text(text))
    if not isinstance(parsed, list):
        raise DataError(f"the first process sent {type(parsed).__name__} in place of rewards")
    return [[Verdict(value, error) for value, error in verdict] for verdict in parsed]
