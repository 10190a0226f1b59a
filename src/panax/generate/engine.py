"""`GenerationEngine`: many requests at once through one model, each in a row of fixed caches.

A request waits until a row is free, keeps it until its answer ends, and is never interrupted. In each round, one chunk
of a prompt is run, or of several, and one token of every row with a complete prompt (continuous batching, Orca, OSDI 2022).
On a mesh, each group of devices that has rows of its own runs a chunk of its prompts.

With several processes, each of them creates the engine and makes the same calls.
"""

import collections
import dataclasses
from collections.abc import Generator, Iterable, Sequence

import jax
import numpy as np

from ..core.errors import RecipeError
from ..core.protocols import IncrementalModel
from ..data.text.tokenizer import Tokenizer
from ..kernels import Kernels
from ..mesh.placement import Placement
from .batching import Batching
from .constraints import Constraint
from .constraints.matchers import ConstraintCompiler
from .decode_steps import run_decode_steps
from .drafts import DraftLookup
from .draw import DrawnTokens, RowSettings
from .program_inputs import (
    read_scores,
    read_token,
    stack_chunks,
    stack_drafts,
    stack_ends,
    stack_settings,
    stack_tokens,
)
from .programs import (
    EngineState,
    PromptScores,
    copy_row,
    empty_state,
    read_row_experts,
    run_decode_step,
    run_draft_step,
    run_prompt_chunk,
)
from .request_checks import check_request
from .requests import Completion, GeneratedToken, GenerationRequest, StreamEvent
from .rows import EngineRow, PendingAnswer, choose_rows, first_prompts
from .shards import ProgramSettings, count_row_groups
from .text import AnswerText

DEFAULT_LENGTH = 2048
"""Positions of a row unless set, if the model has more."""

CHUNK = 64
"""Number of prompt tokens that are run at once unless set."""


class GenerationEngine:
    """Continues prompts with a model; all programs are compiled when it is created.

    Results don't depend on other requests, on their order or on the rows they get: seeds belong to requests.
    """

    def __init__(
        self,
        model: IncrementalModel,
        tokenizer: Tokenizer | None = None,
        *,
        rows: int = 8,
        length: int | None = None,
        chunk: int = CHUNK,
        placement: Placement | None = None,
        kernels: Kernels | None = None,
        drafts: int = 0,
        batching: Batching | None = None,
        kept: int = 0,
        compiles: bool = True,
    ):
        """Reserve the caches, and compile the programs.

        Args:
            model: See `Task.incremental_model`.
            tokenizer: For texts, stop texts and end tokens; without it, answers are tokens and end by their length.
            rows: Number of answers that are generated at the same time; on a mesh, rounded up to a multiple of the groups
                of devices that have rows of their own.
            length: Maximum positions of prompt and answer together; by default those of the model, at most 2048.
            chunk: Number of prompt tokens that are run at once.
            placement: The mesh and the sharding rules of the model's arrays, as `place_model` takes them; None for one
                device.
            kernels: Those that the model is trained with, if a recipe names them; `exact_policy` makes the log-probabilities
                of tokens equal to those of training, bit by bit.
            drafts: Guess this many tokens after the last one of each row, by what followed it before, and run all of them at
                once; those that are also drawn are kept. The tokens are the same, and a step takes longer.
            batching: Amounts of work of each round; None for the smallest.
            kept: Draw among at most this many of the tokens that a request's settings leave, and return which with each token
                (`GeneratedToken.kept`); 0 to draw among all, and return none.
            compiles: False if an engine with the same settings was created before in this process: its programs are not run
                on an empty row to compile them.

        Raises:
            RecipeError: A setting is out of range, or a layer of the model can't be run incrementally.
        """
        length = min(model.max_length, DEFAULT_LENGTH) if length is None else length
        for name, value in (("rows", rows), ("length", length), ("chunk", chunk)):
            if value < 1:
                raise RecipeError(f"{name}={value}; expected 1 or more")
        if length > model.max_length:
            raise RecipeError(f"length={length}; the model is for at most {model.max_length} positions")
        self._model, self._tokenizer = model, tokenizer
        if drafts < 0 or (drafts and not model.shares_prefixes):
            raise RecipeError(
                f"drafts={drafts}; expected 0 or more, and 0 for a model with recurrent layers: their state can't return to "
                f"the last token that is kept"
            )
        self._drafts, self._batching = drafts, batching or Batching()
        if drafts and self._batching.steps > 1:
            raise RecipeError(
                f"drafts={drafts} and steps={self._batching.steps} both draw several tokens of a row at once; choose one"
            )
        if not 0 <= kept <= model.vocab_size:
            raise RecipeError(f"kept={kept}; expected 0, or at most the vocabulary's {model.vocab_size} tokens")
        self._limit, self._chunk = length, min(chunk, length)
        # Whole chunks, so that the padding after a prompt has room, and the guesses after the last token.
        self._length = -(-(length + drafts) // self._chunk) * self._chunk
        placement = None if placement is None or placement.mesh.size == 1 else placement
        self._compiled_for = ProgramSettings(placement, kernels or Kernels(), kept)
        self._groups = count_row_groups(placement)
        self._rows = [EngineRow() for _ in range(-(-rows // self._groups) * self._groups)]
        self._prompts = min(self._batching.prompts, self._group_rows)
        self._end_ids = tuple(sorted(tokenizer.end_ids)) if tokenizer is not None else ()
        self._state: EngineState | None = None
        self._is_busy = False
        self._waiting: collections.deque[PendingAnswer] = collections.deque()
        self._next_number = self._next_order = 0
        self._last_admitted: PendingAnswer | None = None
        self._constraints = ConstraintCompiler(tokenizer, model.vocab_size)
        if compiles:
            self._compile()

    @property
    def limit(self) -> int:
        """Maximum positions of prompt and answer together."""
        return self._limit

    def check(self, request: GenerationRequest) -> None:
        """Check that the engine can answer a request.

        Raises:
            DataError, RecipeError: As `check_request` and `check_constraint`.
        """
        check_request(request, self._model, limit=self._limit, has_tokenizer=self._tokenizer is not None)
        self.check_constraint(request.sampling.constraint)

    def check_constraint(self, constraint: Constraint | None) -> None:
        """Check that the engine can answer under a constraint; it is compiled, which may take a second.

        Raises:
            RecipeError: llguidance is not installed, the tokenizer is of a kind that can't be constrained, or the
                constraint is invalid or too complex.
            DataError: No token can begin an answer.
        """
        self._constraints.begin(constraint)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Answer requests; the completions are in their order, `n` for each.

        Raises:
            DataError, RecipeError: As `check`.
        """
        done = [event.completion for event in self.stream(requests) if event.completion is not None]
        return sorted(done, key=lambda each: (each.number, each.sample))

    def stream(self, requests: Iterable[GenerationRequest]) -> Generator[StreamEvent, None, None]:
        """Answer requests, and yield each token as soon as it is drawn.

        Requests are read as rows become free, so there may be any number of them. Closing the iterator ends those in
        progress.

        Raises:
            DataError, RecipeError: As `check`; or another stream of this engine is still open.
        """
        if self._is_busy or not self.is_idle:
            raise RecipeError("the engine is in use by another stream; read that to its end or close it first")
        self._is_busy, self._next_number = True, 0
        try:
            following = iter(requests)
            has_more = True
            while has_more or not self.is_idle:
                while has_more and len(self._waiting) < len(self._rows):
                    request = next(following, None)
                    has_more = request is not None
                    if request is not None:
                        self.submit(request)
                yield from self.step()
        finally:
            self.cancel_all()
            self._is_busy = False

    def submit(self, request: GenerationRequest) -> int:
        """Add a request; `step` answers it. Returns the number by which events name it: one more than that of the request
        before.

        Raises:
            DataError, RecipeError: As `check`.
        """
        self.check(request)
        number, self._next_number = self._next_number, self._next_number + 1
        for sample in range(request.sampling.n):
            text = (
                None
                if self._tokenizer is None
                else AnswerText(self._tokenizer, request.sampling.stop, pieces=self._batching.pieces)
            )
            constraint = self._constraints.begin(request.sampling.constraint)
            lookup = DraftLookup(request.prompt) if self._drafts else None
            self._waiting.append(PendingAnswer(number, sample, request, text, constraint, lookup))
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; nothing happens if it is answered already."""
        self._waiting = collections.deque(each for each in self._waiting if each.number != number)
        for row in self._rows:
            if row.answer is not None and row.answer.number == number:
                row.answer = None

    def cancel_all(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._last_admitted = None
        for row in self._rows:
            row.answer = None

    @property
    def is_idle(self) -> bool:
        """Return True if no request is waiting or in progress."""
        return not self._waiting and not any(row.answer for row in self._rows)

    def step(self) -> list[StreamEvent]:
        """Run one chunk of a prompt and one token of every row with a complete prompt; return the new tokens."""
        if self._state is None:
            self._state = self._empty_state()
        try:
            while self._waiting and self._admit(self._waiting[0]):
                self._last_admitted = self._waiting.popleft()
            return [*self._run_prompts(), *self._run_rows()]
        except BaseException:
            # A program may have been interrupted, and its arrays are lost, and so is what was in progress.
            self._state = None
            self.cancel_all()
            for row in self._rows:
                row.prefix = ()
            raise

    def _admit(self, answer: PendingAnswer) -> bool:
        """Reserve a row for an answer; return False if no row is free."""
        if self._follow(answer):
            return True
        prompt, sampling, shares = answer.request.prompt, answer.request.sampling, self._model.shares_prefixes
        # A token is scored by the position before it, which is computed for that.
        shared = prompt[: sampling.scored_from] if sampling.prompt_log_probabilities else prompt
        chosen = choose_rows(self._rows, shared, self._chunk, shares=shares, groups=self._groups)
        if chosen is None:
            return False
        index, source, length = chosen
        if length and source != index:
            self._copy_row(source, index)
        answer.filled = answer.reused = length
        answer.order, self._next_order = self._next_order, self._next_order + 1
        answer.row, answer.leader = index, None
        self._rows[index] = EngineRow(answer, answer.request.prompt[:length])
        return True

    def _follow(self, answer: PendingAnswer) -> bool:
        """Reserve a row for an answer in the group of one to the same request that still runs the prompt.

        Returns False if there is none, if the program has no room for another, or if its group has no free row.
        """
        if self._batching.samples == 1 or answer.request.sampling.prompt_log_probabilities:
            return False
        last = self._last_admitted
        if last is None or last.number != answer.number:
            return False
        leader = last.leader or last
        # One that was canceled is in no row.
        if self._rows[leader.row].answer is not leader:
            return False
        if not leader.is_prefilling or answer.sample - leader.sample >= self._batching.samples:
            return False
        group = self._split_rows()[leader.row // self._group_rows]
        index = next((index for index in group if self._rows[index].answer is None), None)
        if index is None:
            return False
        answer.row, answer.leader, answer.reused = index, leader, 0
        self._rows[index] = EngineRow(answer, ())
        return True

    def _copy_row(self, source: int, target: int) -> None:
        assert self._state is not None
        group, sources, targets = target // self._group_rows, *np.zeros((2, self._groups), np.int32)
        sources[group], targets[group] = source % self._group_rows, target % self._group_rows
        self._state = copy_row(self._model, self._state, sources, targets, self._compiled_for)

    def _read_experts(self, row: EngineRow) -> np.ndarray:
        """Return the experts of each position of a row, (length, layer, active)."""
        assert self._state is not None
        index = next(place for place, each in enumerate(self._rows) if each is row)
        group, rows = index // self._group_rows, np.zeros(self._groups, np.int32)
        rows[group] = index % self._group_rows
        return jax.device_get(read_row_experts(self._model, self._state, rows, self._compiled_for))[group]

    def _split_rows(self) -> list[range]:
        """Return the indices of each group's rows."""
        size = self._group_rows
        return [range(first, first + size) for first in range(0, len(self._rows), size)]

    @property
    def _group_rows(self) -> int:
        """Number of rows of a group."""
        return len(self._rows) // self._groups

    def _run_prompts(self) -> list[StreamEvent]:
        """Run a chunk of the prompts that were admitted first in each group."""
        indices = [index for group in self._split_rows() for index in first_prompts(self._rows, group, self._prompts)]
        leaders = [None if index is None else self._rows[index].answer for index in indices]
        if not any(leaders):
            return []
        assert self._state is not None
        is_last = [each is not None and len(each.request.prompt) <= each.filled + self._chunk for each in leaders]
        followers = self._followers()
        # Those that get the prompt's cache with its last chunk.
        answers = [
            [] if each is None else [each, *followers.get(id(each), ())] if ends else [each]
            for each, ends in zip(leaders, is_last, strict=True)
        ]
        samples = self._batching.samples
        # Without a row: the first of the group, which is left as it is, or none of several.
        nothing = 0 if self._prompts * samples == 1 else self._group_rows
        places = [
            [*(each.row % self._group_rows for each in shared), *[nothing] * (samples - len(shared))]
            for shared in answers
        ]
        chunk = stack_chunks(leaders, places, self._chunk, self._model.vocab_size)
        padded = [each for shared in answers for each in [*shared, *[None] * (samples - len(shared))]]
        settings = stack_settings(padded, self._constraints)
        self._state, drawn, scores = run_prompt_chunk(self._model, self._state, chunk, settings, self._compiled_for)
        # The host waits for what it needs alone.
        of_scores = jax.device_get(scores) if chunk.wants_scores else None
        of_drawn = jax.device_get(drawn) if any(is_last) else None
        for place, leader in enumerate(leaders):
            if leader is not None:
                self._fill(leader, of_scores, place)
        events = []
        for place, answer in enumerate(padded):
            if answer is not None and of_drawn is not None and is_last[place // samples]:
                row, leader = self._rows[answer.row], answer.leader or answer
                row.prefix = self._rows[leader.row].prefix
                answer.filled, answer.leader = len(answer.request.prompt), None
                events.append(self._accept(row, of_drawn, place))
        return events

    def _followers(self) -> dict[int, list[PendingAnswer]]:
        """Return the answers that wait for the prompt of another one, by the identity of that."""
        followers: dict[int, list[PendingAnswer]] = {}
        for row in self._rows:
            if row.answer is not None and row.answer.leader is not None:
                followers.setdefault(id(row.answer.leader), []).append(row.answer)
        return followers

    def _fill(self, answer: PendingAnswer, scores: PromptScores | None, place: int) -> None:
        """Note that a chunk of a prompt was run.

        Args:
            place: Index of the prompt among those that were run together.
        """
        row, prompt = self._rows[answer.row], answer.request.prompt
        following = prompt[answer.filled + 1 :][: self._chunk]
        size = len(prompt[answer.filled :][: self._chunk])
        answer.filled += size
        if size == self._chunk:
            row.prefix = prompt[: answer.filled]
        if scores is not None and answer.request.sampling.prompt_log_probabilities:
            # `following` ends where the chunk does, and begins one token after it does.
            skipped = max(0, answer.request.sampling.scored_from - (answer.filled - size + 1))
            answer.prompt_scores += read_scores(following, scores, place)[skipped:]

    def _run_rows(self) -> list[StreamEvent]:
        """Continue every row with a complete prompt, by one token or several."""
        answers = [row.answer if row.answer is not None and row.answer.tokens else None for row in self._rows]
        if not any(answers):
            return []
        assert self._state is not None
        settings = stack_settings(answers, self._constraints)
        if self._drafts:
            return self._run_drafts(answers, settings)
        inputs, steps = stack_tokens(answers, self._rows), self._batching.steps
        if steps == 1:
            self._state, drawn = run_decode_step(self._model, self._state, inputs, settings, self._compiled_for)
            drawn = jax.device_get(drawn)
            return [
                self._accept(row, drawn, index)
                for index, (answer, row) in enumerate(zip(answers, self._rows, strict=True))
                if answer is not None
            ]
        ends = stack_ends(answers, self._end_ids)
        self._state, drawn, sizes = run_decode_steps(
            self._model, self._state, inputs, settings, ends, self._compiled_for, steps
        )
        drawn, sizes = jax.device_get((drawn, sizes))
        events = []
        for index, (answer, row) in enumerate(zip(answers, self._rows, strict=True)):
            for place in range(sizes[index]):
                if answer is None or row.answer is not answer:
                    break
                events.append(self._accept(row, drawn, (index, place)))
        return events

    def _run_drafts(self, answers: Sequence[PendingAnswer | None], settings: RowSettings) -> list[StreamEvent]:
        """Run the last token of each row with the guesses after it, and accept tokens as far as guesses are equal to them."""
        assert self._state is not None
        inputs = stack_drafts(answers, self._rows, self._drafts)
        self._state, drawn = run_draft_step(self._model, self._state, inputs, settings, self._compiled_for)
        drawn = jax.device_get(drawn)
        events = []
        for index, (answer, row) in enumerate(zip(answers, self._rows, strict=True)):
            for place in range(0 if answer is None else int(inputs.size[index])):
                events.append(self._accept(row, drawn, (index, place)))
                guess = inputs.tokens[index, place + 1] if place < self._drafts else -1
                if row.answer is not answer or drawn.token[index, place] != guess:
                    break
        return events

    def _accept(self, row: EngineRow, drawn: DrawnTokens, index: int | tuple[int, int]) -> StreamEvent:
        """Add a drawn token to a row's answer, and free the row if the answer ends.

        Args:
            index: See `read_token`.
        """
        answer = row.answer
        assert answer is not None
        token = read_token(drawn, index, answer.request.sampling)
        text, finish = answer.accept(token, self._end_ids)
        if finish is None:
            return StreamEvent(answer.number, answer.sample, token, text)
        if answer.text is not None:
            text += answer.text.finish()
            finish = "stop" if answer.text.is_stopped else finish
        row.answer = None
        # A token that ends an answer is not in it.
        is_in_answer = bool(answer.tokens) and answer.tokens[-1] is token
        completion = answer.complete(finish, None if is_in_answer else token)
        if self._model.records_experts:
            # The last token was drawn, but not run.
            size = len(answer.request.prompt) + len(completion.actions) - 1
            completion = dataclasses.replace(completion, experts=self._read_experts(row)[:size])
        return StreamEvent(answer.number, answer.sample, token if is_in_answer else None, text, completion)

    def _empty_state(self) -> EngineState:
        return empty_state(self._model, len(self._rows), self._length, self._compiled_for)

    def _compile(self) -> None:
        """Compile all programs by running them on a row without a request."""
        self._state = self._empty_state()
        nothing = PendingAnswer(0, 0, GenerationRequest((0,)), None, row=0)
        self._rows[0].answer = nothing
        self._run_prompts()
        self._rows[0].answer = nothing
        nothing.tokens = [GeneratedToken(0, 0.0, 0.0)]
        self._run_rows()
        if self._model.shares_prefixes and self._group_rows > 1:
            self._copy_row(0, 1)
        if self._model.records_experts:
            self._read_experts(self._rows[0])
        self._rows = [EngineRow() for _ in self._rows]
