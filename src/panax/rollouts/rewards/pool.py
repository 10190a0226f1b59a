"""`RewardPool`: reward functions, called in processes of this host, so that none of them can stop a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ..calls.pool import Call, CalledFunction, CallPool
from .reward import Reward, Verdict


class RewardPool(CallPool):
    """Processes that rate answers until `close`, or until this object or program ends.

    Each process imports the rewards' functions once. It receives answers and records as JSON and replies with
    numbers; nothing is pickled, and nothing listens on a port. A function that raises, returns no finite number, or
    does not return in time fails for that answer alone; a process that does not survive a call is killed with
    everything that it has started, and another takes its place, which imports the modules again.

    Attributes:
        rewards: The rewards, in the order of the verdicts of an answer.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        processes: int = 2,
        *,
        memory_bytes: int | None = None,
        others: Sequence[CalledFunction] = (),
    ):
        """Start the processes, and wait until each has imported the functions.

        Args:
            processes: Number of answers that are rated at once, 1 to 64.
            memory_bytes: Maximum size of a process's data; by default an equal share of the free memory of the host,
                and at least 1 GiB.
            others: Functions of an environment, which `run` calls.

        Raises:
            RecipeError: A function can't be imported, with the last lines of the traceback; or the arguments are
                invalid.
        """
        self.rewards = tuple(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{names.count(name)} rewards are called {name!r}; give each its own Reward.name")
        self._functions = [CalledFunction(reward.location, "reward", reward.seconds) for reward in self.rewards]
        super().__init__([*self._functions, *others], processes, memory_bytes=memory_bytes)

    def score(
        self,
        answers: Sequence[tuple[str, Mapping[str, Any]]],
        episodes: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        stop_at_failure: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[list[Verdict]]:
        """Rate answers with every reward; the order of the verdicts does not depend on which process is faster.

        Args:
            answers: Texts, each with the record of its prompt.
            episodes: The conversations of answers of several turns, for functions with a parameter `episode`; None if an
                answer has one turn.
            stop_at_failure: True to begin no further call once a function has failed, for instance if it hangs for
                every answer. The first error in the result is that of a function that was called.
            on_wait: Called several times a second until all answers are rated; if it raises, the calls that run are given up.

        Returns:
            For each answer, one verdict for each reward.

        Raises:
            TrainingError: The pool is closed, or a process can't be started again.
        """
        calls = [
            Call(function, {"answer": answer, "record": dict(record), "episode": episode})
            for (answer, record), episode in zip(answers, episodes or [None] * len(answers), strict=True)
            for function in self._functions
        ]
        outcomes = iter(self.run(calls, stop_at_failure=stop_at_failure, on_wait=on_wait))
        return [
            [
                Verdict(value, f"reward {reward.name} {error}" if error else "")
                for reward, (value, error) in zip(self.rewards, outcomes, strict=False)
            ]
            for _ in answers
        ]

    def __enter__(self) -> "RewardPool":
        return self
