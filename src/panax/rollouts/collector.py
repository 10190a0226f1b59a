"""`Collector`: draws answers to prompts, asks for their rewards, and returns the rows from which the model learns."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from ..core.errors import TrainingError
from ..generate import GenerationEngine, GenerationRequest, Sampling
from ..generate.sampling import MAX_SEED
from .advantages import compute_advantages
from .answers import SampledAnswer, count_actions, describe_episodes
from .drawn_answers import DrawnAnswers
from .draws import draw_answers
from .episodes import AskReplies, EpisodeSampler
from .journal import Journal
from .prompts import PROMPT
from .replies import ReplySource
from .rewards.pool import RewardPool
from .rewards.reward import Verdict, weigh_verdicts
from .rollout_data import OpenedRollouts
from .rows import make_rows
from .verdicts import AskedRewards, RewardSource, ScoreByModels


@dataclasses.dataclass(frozen=True)
class JudgedAnswers:
    """Answers to one batch of prompts, those of each prompt together.

    Attributes:
        indices: Index of each answer's prompt among all records.
        verdicts: One for each answer and reward.
        values: Sum of each answer's rewards by weight.
        counted: False for answers without a reward.
        seconds: Time of drawing and of rewarding.
        reply_seconds: Time of the environment.
    """

    answers: Sequence[SampledAnswer]
    indices: Sequence[int]
    verdicts: Sequence[Sequence[Verdict]]
    values: Float[np.ndarray, " answers"]
    counted: Bool[np.ndarray, " answers"]
    seconds: tuple[float, float]
    reply_seconds: float = 0.0

    def signals(self, samples: int) -> list[bool]:
        """Return, for each prompt, True if its counted answers have different rewards."""
        groups = zip(self.values.reshape(-1, samples), self.counted.reshape(-1, samples), strict=True)
        return [len(set(values[counted].tolist())) > 1 for values, counted in groups]


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """Answers with their rewards, and the batch made of them.

    Attributes:
        indices: Index of each answer's prompt among all records.
        batch: Leaves of the batch that a step takes.
        rewards: Sum of each answer's rewards by weight; NaN for one that is left out.
        metrics: Figures to log.
    """

    answers: Sequence[SampledAnswer]
    indices: Sequence[int]
    batch: Mapping[str, np.ndarray]
    rewards: np.ndarray
    metrics: Mapping[str, float]


class Collector:
    """Draws rollouts. In a job of many processes each of them makes the same calls; the first one asks for rewards.

    Attributes:
        rewards: Asks for rewards.
    """

    def __init__(
        self,
        rollouts: OpenedRollouts,
        create_engine: Callable[[], GenerationEngine],
        pool: RewardPool | None,
        say: Callable[[str], None],
        on_progress: Callable[[], None] = lambda: None,
        score_by_models: ScoreByModels | None = None,
    ):
        """
        Args:
            create_engine: Creates an engine of the current parameters.
            pool: Asks for the rewards that are functions; None without any, and in all processes but the first.
            on_progress: Called with each token, and several times a second while rewards are awaited; an exception from it
                abandons the draws.
            score_by_models: Returns the values of the rewards that are models; every process calls it. None without any.
        """
        self._rollouts, self._settings = rollouts, rollouts.settings
        self.rewards = RewardSource(rollouts, pool, score_by_models, say)
        self._create_engine, self._say, self._on_progress = create_engine, say, on_progress
        self._episodes = self._replies = None
        if rollouts.environment is not None:
            self._episodes = EpisodeSampler(rollouts, on_progress)
            self._replies = ReplySource(rollouts.environment, pool, say, on_progress, self._settings.failed_rewards)

    def collect(self, number: int, step: int, prompts: Sequence[int], journal: Journal) -> JudgedAnswers:
        """Draw answers to prompts, and reward them; replies and rewards are in the journal when this returns.

        Args:
            number: Number of the batch of prompts, from 1 in the data's order.
            step: Steps taken before.

        Raises:
            DataError: A prompt is too long.
            TrainingError: A reward or the environment failed, and `failed_rewards` is "stop".
        """
        return self.judge(self.rewards.begin(self.draw(number, step, prompts, journal), journal), journal)

    def draw(self, number: int, step: int, prompts: Sequence[int], journal: Journal) -> DrawnAnswers:
        """Draw answers to prompts; replies are in the journal when this returns. See `collect`."""
        settings, clock = self._settings, time.perf_counter
        began = clock()
        replies = self._replies
        ask = None if replies is None else lambda asked: replies.ask_once(asked, number, step, journal)
        seeds = draw_seeds(settings.seed, number, len(prompts), settings.samples)
        answers = self._draw(prompts, settings.sampling(), seeds, ask)
        waited = 0.0 if self._episodes is None else self._episodes.seconds
        indices = [prompts[answer.group] for answer in answers]
        return DrawnAnswers(number, step, answers, indices, clock() - began - waited, waited)

    def judge(self, asked: AskedRewards, journal: Journal) -> JudgedAnswers:
        """Return the answers with their rewards, which are in the journal when this returns.

        Raises:
            TrainingError: A reward or the environment failed, and `failed_rewards` is "stop".
        """
        began, drawn = time.perf_counter(), asked.drawn
        verdicts = self.rewards.finish(asked, journal, self._on_progress)
        values, counted = self._combine(verdicts, drawn.indices, drawn.answers)
        seconds = drawn.seconds, time.perf_counter() - began
        return JudgedAnswers(drawn.answers, drawn.indices, verdicts, values, counted, seconds, drawn.reply_seconds)

    def assemble(self, parts: Sequence[JudgedAnswers]) -> RolloutBatch:
        """Make a rollout of the answers to one batch of prompts or several.

        Of several, prompts with different rewards of their answers are taken first, in the order of their drawing, and then
        others, as many as one batch has.
        """
        settings, began, samples = self._settings, time.perf_counter(), self._settings.samples
        signals = [signal for part in parts for signal in part.signals(samples)]
        groups = sorted(sorted(range(len(signals)), key=lambda group: not signals[group])[: settings.batch_size])
        rows = [row for group in groups for row in range(group * samples, (group + 1) * samples)]
        drawn, indices, verdicts = (
            [each for part in parts for each in getattr(part, name)] for name in ("answers", "indices", "verdicts")
        )
        values, counted = (
            np.concatenate([getattr(part, name) for part in parts])[rows] for name in ("values", "counted")
        )
        answers = [dataclasses.replace(drawn[row], group=place // samples) for place, row in enumerate(rows)]
        result = compute_advantages(
            values,
            np.array([answer.group for answer in answers]),
            counted,
            baseline=settings.baseline,
            scale=settings.scale,
        )
        batch = make_rows(answers, result.values.astype(np.float32), counted, settings.length, settings.kept)
        metrics = {
            **self._describe(answers, [verdicts[row] for row in rows], values, counted),
            "seconds/draw": sum(part.seconds[0] for part in parts),
            "seconds/reward": sum(part.seconds[1] for part in parts),
            "seconds/rows": time.perf_counter() - began,
        }
        if self._episodes is not None:
            metrics["seconds/environment"] = sum(part.reply_seconds for part in parts)
        if settings.rewards and settings.gae is None:
            metrics["groups_without_signal"] = 1.0 - sum(signals[group] for group in groups) / len(groups)
        if settings.refills:
            metrics["prompts_drawn"] = float(len(signals))
        return RolloutBatch(answers, [indices[row] for row in rows], batch, np.where(counted, values, np.nan), metrics)

    def evaluate(self, prompts: Sequence[int]) -> tuple[Sequence[SampledAnswer], Mapping[str, float]]:
        """Answer prompts greedily, or without rewards by draws that are the same each time; return the answers and figures
        of their rewards.

        Raises:
            DataError: A prompt is too long.
            TrainingError: A reward or the environment failed, and `failed_rewards` is "stop".
        """
        settings = self._settings
        ask = None if self._replies is None else self._replies.ask
        seeds = draw_seeds(settings.seed, 0, len(prompts), 1)
        sampling = settings.greedy_sampling() if settings.rewards else settings.sampling()
        answers = self._draw(prompts, sampling, seeds, ask)
        indices = [prompts[answer.group] for answer in answers]
        verdicts = self.rewards.ask(indices, answers, self._on_progress)
        values, counted = self._combine(verdicts, indices, answers)
        return answers, self._describe(answers, verdicts, values, counted)

    def _draw(
        self, prompts: Sequence[int], sampling: Sampling, seeds: Sequence[Sequence[int]], ask: AskReplies | None
    ) -> list[SampledAnswer]:
        """Draw answers to prompts, with one for each of a prompt's seeds; those of a prompt together.

        Args:
            ask: Asks the environment; None without one.
        """
        if self._episodes is not None and ask is not None:
            return self._episodes.sample(self._create_engine(), prompts, sampling, seeds, ask)
        encoded = [self._rollouts.encode(index) for index in prompts]
        sampling = dataclasses.replace(sampling, n=len(seeds[0]))
        requests = [
            GenerationRequest(ids, sampling, tuple(of_prompt)) for ids, of_prompt in zip(encoded, seeds, strict=True)
        ]
        completions = {
            (each.number, each.sample): each
            for each in draw_answers(self._create_engine(), requests, self._on_progress)
        }
        return [
            SampledAnswer.from_completion(encoded[group], group, completions[group, sample])
            for group in range(len(prompts))
            for sample in range(sampling.n)
        ]

    def _combine(
        self, verdicts: Sequence[Sequence[Verdict]], indices: Sequence[int], answers: Sequence[SampledAnswer]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each answer's reward, and whether it counts.

        Raises:
            TrainingError: A reward failed, and `failed_rewards` is "stop".
        """
        rewards = self._settings.rewards
        values, counted = np.zeros(len(verdicts), np.float64), np.ones(len(verdicts), bool)
        failures = []
        for place, verdict in enumerate(verdicts):
            total = weigh_verdicts(rewards, verdict)
            counted[place], values[place] = total is not None, total or 0.0
            values[place] -= self._penalty(answers[place])
            if total is None:
                failures.append((place, next(each.error for each in verdict if each.value is None)))
        if failures:
            place, error = failures[0]
            prompt = self._rollouts.records[indices[place]][PROMPT]
            what = f"{error}. Prompt: {str(prompt)[:200]!r}; answer: {answers[place].text[:200]!r}"
            if self._settings.failed_rewards == "stop":
                raise TrainingError(
                    f"an answer has no reward: {what}. Mend the function, or leave such answers out with "
                    f'data.failed_rewards="exclude"'
                )
            self._say(
                f"warning: {len(failures)} of {len(verdicts)} answers have no reward, and are left out of the loss; the first: "
                f"{what}"
            )
        return values, counted

    def _penalty(self, answer: SampledAnswer) -> float:
        """Return the penalty for the length of an answer, which its reward loses."""
        overlong, tokens = self._settings.overlong, self._settings.answer_tokens
        return max(0.0, (len(answer.tokens) - tokens + overlong) / overlong) if overlong else 0.0

    def _describe(
        self,
        answers: Sequence[SampledAnswer],
        verdicts: Sequence[Sequence[Verdict]],
        values: np.ndarray,
        counted: np.ndarray,
    ) -> dict[str, float]:
        lengths = [len(answer.actions) for answer in answers]
        metrics = {
            "tokens": float(count_actions(answers)),
            "length/mean": float(np.mean(lengths)),
            "length/max": float(max(lengths)),
            "truncated": float(np.mean([answer.is_truncated for answer in answers])),
            "failed_rewards": float(np.mean(~counted)),
            **describe_episodes([answer.episode for answer in answers if answer.episode is not None]),
        }
        if counted.any() and self._settings.rewards:
            metrics |= {"reward": float(values[counted].mean()), "reward_deviation": float(values[counted].std())}
        for place, reward in enumerate(self._settings.rewards):
            known = [value for verdict in verdicts if (value := verdict[place].value) is not None]
            if known:
                metrics[f"reward/{reward.name}"] = float(np.mean(known))
        return metrics


def draw_seeds(seed: int, number: int, count: int, samples: int) -> list[list[int]]:
    """Return the seeds of the answers to each prompt: functions of the run's seed and the rollout's number alone.

    >>> draw_seeds(0, 1, 2, 4) == draw_seeds(0, 1, 2, 4) != draw_seeds(0, 2, 2, 4)
    True
    """
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
    return draws.integers(0, MAX_SEED, (count, samples), endpoint=True).tolist()
