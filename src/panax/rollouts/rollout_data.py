"""`RolloutData`: an experiment's data, if the model makes it itself: prompts, rewards, and how answers are drawn."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from ..core import Task
from ..core.batch_checks import EXPERTS_LEAF, KEPT_COUNT_LEAF, KEPT_LEAF
from ..core.errors import DataError, RecipeError
from ..core.sanitize import make_printable
from ..core.validation import Validated
from ..data import ExampleSource, PretrainedTokenizer, Tokenizer, split_by_hash
from ..data.files.cache import cache_directory
from ..data.teacher.teacher_rows import TEACHER_LEAVES
from ..generate import Sampling
from ..generate.prompts import encode_conversation
from .advantages import Baseline, Scale, check_advantage_settings
from .environments.reasoning_gym_prompts import ReasoningGym
from .environments.reply_tokens import ReplyEncoder
from .environments.text_environment import TextEnvironment
from .environments.tool_environment import ToolEnvironment
from .environments.turns import Message, OpenedEnvironment
from .gae import Gae
from .packing import MAX_SHAPES
from .prompts import PROMPT, PromptFiles, Record
from .rewards.reward import Reward
from .rewards.reward_model import RewardModel
from .rows import ID_LEAVES, rollout_axes
from .teacher import Teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutData(Validated):
    """Prompts to which the model draws answers, and rewards by which it learns from them.

    A rollout draws `samples` answers to each of `batch_size` prompts. The task's objective is
    `panax.models.PolicyGradient`. Held-out prompts are answered greedily in evaluations.

    Attributes:
        prompts: Records with prompts.
        rewards: Functions and reward models that judge an answer; the sum of their values by weight is its reward. They may be
            () with a teacher.
        tokenizer: The model's tokenizer.
        teacher: A model that rates each action, for distillation on the model's own draws.
        batch_size: Number of prompts of a rollout.
        samples: Number of answers to each prompt.
        tokens: Maximum number of tokens of an answer; with an environment, of one turn.
        prompt_tokens: Maximum number of tokens of a prompt.
        temperature: Divisor of the logits, for the draws and in the loss.
        top_k: Draw among the k most likely tokens; 0: among all. The tokens among which each action was drawn are recorded, and
            the loss is of the probabilities among these: see `PolicyGradient.replay_sampling`.
        top_p: Draw among the most likely of these, as many as have this probability together; 1: all. It needs a `top_k`, the
            maximum number of tokens that are recorded.
        overlong: Number of last tokens, of `tokens`, in which an answer loses reward: from 0 at the first of them to 1 at the
            last (DAPO, arXiv:2503.14476, equation 13); 0 for no penalty. With an environment, of `environment.tokens`, of
            which the replies take a part.
        stop_ids: Tokens at which an answer ends, beside those of the tokenizer.
        chat: Render prompts as conversations by the tokenizer's chat template; conversations are, whatever it is.
        baseline: Rewards with which that of an answer is compared; see `compute_advantages`.
        scale: Divisor of the difference; see `compute_advantages`.
        gae: Advantages from values of the model's value head in place of comparing answers (PPO).
        refills: Maximum number of further batches of prompts that are answered for a rollout in which answers to a prompt all
            have the same reward, to take other prompts in place of it (dynamic sampling of DAPO, arXiv:2503.14476).
        asynchronous: Draw each rollout before the update by the one before it, by parameters that are one rollout old, so that
            rewards are asked for while the model learns. See `PolicyGradient.correction`.
        epochs: Number of times that a rollout's answers are learned from.
        minibatches: Number of updates in each of these; `num_steps` counts updates. With more than one update in all, the
            task's objective needs `several_updates=True`.
        packing: Pack answers into rows for the updates. Their number follows the answers' lengths, in a few sizes, each of
            which is compiled when it comes first; otherwise there is one answer in each row, padded to the longest allowed.
        failed_rewards: "stop" ends the run if a reward or the environment fails; "exclude" leaves the answer out of the loss.
        processes: Number of processes that run the rewards and the environment.
        rows: Number of answers that are drawn at the same time.
        held_out: Fraction of the prompts that is held out.
        seed: Seed of the order of the prompts and of the draws.
        max_bad_records: Maximum number of records that are no prompts, and skipped.
        environment: What replies to the model's turns, so that an answer has several; None for answers of one turn.
    """

    prompts: PromptFiles | ReasoningGym
    rewards: tuple[Reward | RewardModel, ...]
    tokenizer: PretrainedTokenizer
    teacher: Teacher | None = None
    batch_size: int = 32
    samples: int = 8
    tokens: int = 128
    prompt_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    overlong: int = 0
    stop_ids: tuple[int, ...] = ()
    chat: bool = False
    baseline: Baseline = "group"
    scale: Scale = "group"
    gae: Gae | None = None
    refills: int = 0
    asynchronous: bool = False
    epochs: int = 1
    minibatches: int = 1
    packing: bool = True
    failed_rewards: Literal["stop", "exclude"] = "stop"
    processes: int = 2
    rows: int = 64
    held_out: float = 0.05
    seed: int = 0
    max_bad_records: int = 0
    environment: TextEnvironment | ToolEnvironment | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1), ("samples", 1), ("tokens", 1), ("prompt_tokens", 1), ("processes", 1), ("rows", 1),
            ("max_bad_records", 0), ("overlong", 0), ("refills", 0), ("epochs", 1), ("minibatches", 1), ("top_k", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise RecipeError(f"data.{name}={getattr(self, name)}; expected {least} or more")
        if not self.temperature > 0.0:
            raise RecipeError(f"data.temperature={self.temperature}; expected a positive number: answers are drawn")
        if not 0.0 < self.top_p <= 1.0:
            raise RecipeError(f"data.top_p={self.top_p}; expected a probability above 0, at most 1")
        if self.top_p < 1.0 and not self.top_k:
            raise RecipeError(
                f"data.top_p={self.top_p} needs data.top_k, the maximum number of tokens that are kept and recorded of each "
                f"action; set it, such as to 64"
            )
        if self.environment is not None and self.environment.tokens < self.tokens:
            raise RecipeError(
                f"data.environment.tokens={self.environment.tokens} are those of all turns and replies; expected at least "
                f"data.tokens={self.tokens}, those of one turn"
            )
        if self.overlong >= self.answer_tokens:
            name = "data.tokens" if self.environment is None else "data.environment.tokens"
            raise RecipeError(f"data.overlong={self.overlong}; expected less than {name}={self.answer_tokens}")
        if self.num_answers % self.minibatches:
            raise RecipeError(
                f"data.minibatches={self.minibatches} does not divide the {self.num_answers} answers of a rollout (batch_size "
                f"times samples)"
            )
        if self.asynchronous and self.refills:
            raise RecipeError(
                f"data.refills={self.refills} needs the rewards of a rollout before the next one is drawn; remove it, or "
                f"data.asynchronous"
            )
        if not 0.0 <= self.held_out < 1.0:
            raise RecipeError(f"data.held_out={self.held_out}; expected a fraction of the prompts, from 0 to below 1")
        check_advantage_settings(self.baseline, self.scale)
        if self.gae is not None:
            self._check_gae()
        if not self.rewards and self.teacher is None:
            raise RecipeError(
                "data.rewards is empty; pass at least one Reward(function=...) or RewardModel(run=...), or a teacher"
            )
        if not self.rewards and (self.refills or self.overlong):
            name = "refills" if self.refills else "overlong"
            raise RecipeError(f"data.{name}={getattr(self, name)} has no effect without data.rewards; remove it")
        names = [reward.name for reward in self.rewards]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RecipeError(f"two rewards have the name {twice[0]!r}; set Reward(name=...) of one")
        if self.rewards and self.gae is None and self.samples == 1 and self.baseline in ("group", "others"):
            raise RecipeError(
                f"data.samples=1 with data.baseline={self.baseline!r} gives every answer an advantage of 0; draw more answers to "
                f'each prompt, or set data.baseline="batch"'
            )

    def _check_gae(self) -> None:
        for name, default in (("baseline", "group"), ("scale", "group"), ("refills", 0)):
            if getattr(self, name) != default:
                raise RecipeError(
                    f"data.{name}={getattr(self, name)!r} compares the answers to a prompt, and has no effect with data.gae; "
                    f"remove one of both"
                )
        if not self.rewards:
            raise RecipeError(
                "data.gae estimates the rewards to come, and data.rewards is empty; pass one, or remove gae"
            )

    @property
    def length(self) -> int:
        """Return the positions of a row, a multiple of 8."""
        return -(-(self.prompt_tokens + self.answer_tokens) // 8) * 8

    @property
    def answer_tokens(self) -> int:
        """Return the maximum number of tokens after a prompt."""
        return self.tokens if self.environment is None else self.environment.tokens

    @property
    def max_actions(self) -> int:
        """Return the maximum number of actions of an answer."""
        return min(self.answer_tokens, self.tokens * (1 if self.environment is None else self.environment.turns))

    @property
    def num_answers(self) -> int:
        """Return the number of answers of a rollout."""
        return self.batch_size * self.samples

    @property
    def functions(self) -> tuple[Reward, ...]:
        """Return the rewards that are functions."""
        return tuple(reward for reward in self.rewards if isinstance(reward, Reward))

    @property
    def reward_models(self) -> tuple[RewardModel, ...]:
        """Return the rewards that are models."""
        return tuple(reward for reward in self.rewards if isinstance(reward, RewardModel))

    @property
    def updates(self) -> int:
        """Return the number of updates that learn from one rollout."""
        return self.epochs * self.minibatches

    @property
    def kept(self) -> int:
        """Return the number of tokens that are recorded of each action; 0 for none."""
        distills = self.teacher is not None and self.teacher.top_k > 0
        return 0 if distills else self.top_k

    @property
    def shapes(self) -> int:
        """Return the maximum number of different shapes of the batches that a step takes."""
        return MAX_SHAPES if self.packing else 1

    def sampling(self) -> Sampling:
        """Return the settings of draws."""
        return Sampling(
            tokens=self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_ids=self.stop_ids,
        )

    def greedy_sampling(self) -> Sampling:
        """Return the settings of evaluations."""
        return Sampling(tokens=self.tokens, temperature=0.0, stop_ids=self.stop_ids)

    def batch_shapes(self, task: Task) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the largest batch that a step takes, before its rows are packed."""
        shape = (self.num_answers // self.minibatches, self.length)
        needs = task.rollout_needs
        record = () if needs is None or needs.experts is None else needs.experts
        integral = {*ID_LEAVES, EXPERTS_LEAF, KEPT_LEAF, KEPT_COUNT_LEAF, TEACHER_LEAVES[0]}
        further = {
            EXPERTS_LEAF: record,
            KEPT_LEAF: (self.kept,),
            **dict.fromkeys(TEACHER_LEAVES, (0 if self.teacher is None else self.teacher.top_k,)),
        }
        return {
            name: jax.ShapeDtypeStruct((*shape, *further.get(name, ())), np.int32 if name in integral else np.float32)
            for name in rollout_axes(task)
        }

    def open(self) -> "OpenedRollouts":
        """Read the prompts and the tokenizer, and open the environment.

        Raises:
            DataError: A file can't be read, or holds no prompts.
            RecipeError: The tokenizer has no chat template, and a prompt is a conversation; or it does not fit the environment,
                or that can't be opened.
        """
        tokenizer = self.tokenizer.load()
        environment = replies = None
        if self.environment is not None:
            environment = self.environment.open(tokenizer)
            replies = ReplyEncoder(tokenizer, environment, self.stop_ids)
        prompts = self.prompts.open(cache_directory(None), self.max_bad_records)
        training, held_out = split_by_hash(prompts, self.held_out)
        rollouts = OpenedRollouts(
            self,
            tokenizer,
            prompts.records,
            ExampleSource(training, batch_size=self.batch_size, seed=self.seed),
            None if held_out is None else ExampleSource(held_out, batch_size=self.batch_size, epochs=1),
            environment,
            replies,
        )
        if replies is not None:
            kinds = {rollouts.is_chat(record) for record in rollouts.records}
            if True in kinds:
                replies.check_chat()
            if False in kinds:
                replies.check_text()
        return rollouts


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRollouts:
    """Open prompts.

    Attributes:
        records: All records, by the indices that the sources yield.
        train: Endless batches of prompts, which resume exactly.
        held_out: One pass over the held-out prompts; None if there are none.
        environment: What replies to turns; None without one.
        replies: Encodes its replies; None without one.
    """

    settings: RolloutData
    tokenizer: Tokenizer
    records: Sequence[Record]
    train: ExampleSource
    held_out: ExampleSource | None
    environment: OpenedEnvironment | None = None
    replies: ReplyEncoder | None = None

    def describe(self, prompts: Sequence[int], count: int) -> Iterator[str]:
        """Yield lines about the prompts, and about the first `count` of a rollout.

        Args:
            prompts: Indices of the rollout's prompts.
        """
        held_out = 0 if self.held_out is None else self.held_out.examples.num_examples
        settings = self.settings
        yield (
            f"{self.train.examples.num_examples:,} prompts, {held_out:,} more are held out; a rollout is {settings.samples} "
            f"answers of at most {settings.answer_tokens:,} tokens to each of {settings.batch_size:,} prompts"
        )
        for index in prompts[:count]:
            prompt = make_printable(str(self.records[index][PROMPT]))
            yield f"\n{len(self.encode(index)):,} tokens: {prompt}"
            for name, value in self.records[index].items():
                if name != PROMPT:
                    yield f"  {name}: {make_printable(str(value))[:200]}"

    def is_chat(self, record: Record) -> bool:
        """Return True if the chat template renders the prompt of a record."""
        return self.settings.chat or not isinstance(record[PROMPT], str)

    def read_messages(self, index: int) -> list[Message]:
        """Return a prompt as messages; a text is a user's message."""
        prompt = self.records[index][PROMPT]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def encode(self, index: int) -> tuple[int, ...]:
        """Return the tokens of a prompt.

        Raises:
            DataError: The prompt is empty, or longer than `prompt_tokens`.
            RecipeError: The tokenizer has no chat template, or that fails.
        """
        record, tokenizer = self.records[index], self.tokenizer
        prompt = record[PROMPT]
        if self.is_chat(record):
            tools = () if self.environment is None else self.environment.tools
            ids = encode_conversation(tokenizer, self.read_messages(index), tools)
        else:
            ids = [*tokenizer.start_of_document, *tokenizer.encode(prompt)]
        if not 1 <= len(ids) <= self.settings.prompt_tokens:
            raise DataError(
                f"prompt {index} has {len(ids)} tokens ({str(prompt)[:60]!r}); expected 1 to data.prompt_tokens="
                f"{self.settings.prompt_tokens}: raise it, or remove the prompt"
            )
        return tuple(ids)
