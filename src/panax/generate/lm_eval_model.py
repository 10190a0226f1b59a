"""`LmEvalModel`: a model of Panax for EleutherAI's lm-eval, which has hundreds of tasks.

The package is imported with this module alone: `pip install 'panax-jax[eval]'`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..core.errors import DataError, RecipeError
from ..core.install_hints import install_command
from ..data.text.tokenizer import Tokenizer
from .engine import GenerationEngine
from .lm_eval_settings import read_settings
from .prompts import load_template, render_conversation
from .requests import Completion, GenerationRequest

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from tqdm import tqdm
except ImportError as error:
    raise RecipeError(f"lm-eval is not installed; install it with: {install_command('eval')}") from error

Result = TypeVar("Result")

EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""The texts of a request, by which lm-eval stores its result, and the tokens of its context and of its continuation."""


class LmEvalModel(TemplateLM):
    """A model that lm-eval evaluates: `lm_eval.simple_evaluate(model=LmEvalModel(engine, tokenizer), tasks=[...])`.

    Texts are encoded as by lm-eval's model `hf`: with the beginning of a document, and with the ids of special tokens that
    are spelled out. Contexts that are too long are cut from the left, counted, and warned of.

    Attributes:
        num_cut: Number of contexts that were cut so far.
    """

    def __init__(self, engine: GenerationEngine, tokenizer: Tokenizer, *, max_gen_toks: int = 256, seed: int = 0):
        """
        Args:
            tokenizer: The engine's.
            max_gen_toks: Maximum number of tokens of an answer, for tasks that set none.
            seed: Seed of sampled answers; each request has its own, derived from it.
        """
        super().__init__()
        self._engine, self._tokenizer = engine, tokenizer
        self._max_gen_toks, self._seed = max_gen_toks, seed
        self.num_cut = 0

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        end = self._tokenizer.special_ids["eos_token_id"]
        return self._tokenizer.end_of_document if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without a context: the one that begins a text, or the one that ends it."""
        start = self._tokenizer.special_ids["bos_token_id"]
        return self.eot_token_id if start is None else start

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens that are scored together, less one. Two positions of a row are needed beside
        them: for the token before, and for the one that the engine draws."""
        return self._engine.limit - 2

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Return a name of the tokenizer's contents, by which lm-eval stores requests."""
        return f"panax-{self._tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text.

        Args:
            add_special_tokens: Begin with the beginning of a document; None: unless the text does already.
        """
        [encoded] = self._tokenizer.encode_rendered([string])
        start = list(self._tokenizer.start_of_document)
        has_start = encoded.ids[: len(start)] == start
        if add_special_tokens is False or (add_special_tokens is None and has_start):
            return encoded.ids
        return [*start, *encoded.ids]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts; long ones are scored in windows, each token once."""
        windows: list[EncodedRequest] = []
        counts = []
        for request in requests:
            (text,) = _arguments(request)
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [utils.make_disjoint_window(window) for window in cut]
            windows += [(None, context, continuation) for context, continuation in parts]
            counts.append(len(parts))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", _arguments(request), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of its continuation, and True if the continuation is what greedy
        decoding would give."""
        made = []
        num_cut = 0
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"a continuation has {len(continuation)} tokens; expected 1 to {self.max_length}: create the engine with "
                    f"another length"
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            num_cut += len(ids) < len(context) + len(continuation)
            made.append(GenerationRequest.to_score(tuple(ids), len(continuation)))
        self._warn_of_cuts(num_cut, len(requests), self.max_length + 1)

        def read(number: int, completion: Completion) -> tuple[float, bool]:
            texts, _, continuation = requests[number]
            scored = completion.prompt_tokens[len(completion.prompt_tokens) - len(continuation) :]
            is_greedy = all(each.top[0][0] == each.token for each in scored)
            result = math.fsum(each.log_probability for each in scored), is_greedy
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
            return result

        return self._complete(made, read, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each request, up to its first stop text.

        Raises:
            RecipeError: A request has a setting that is not supported, or its answer leaves no room for the context.
        """
        made = []
        num_cut = 0
        for number, request in enumerate(requests):
            context, settings = _arguments(request)
            sampling = read_settings(settings, self.max_gen_toks, self._seed + number)
            room = self.max_length - sampling.tokens
            if room < 1:
                raise RecipeError(
                    f"an answer of {sampling.tokens} tokens leaves no room for its context: this engine scores at most "
                    f"{self.max_length} tokens. Set max_gen_toks, or create the engine with another length"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            num_cut += len(ids) > room
            made.append(GenerationRequest(tuple(ids[-room:]), sampling))
        self._warn_of_cuts(num_cut, len(requests), self.max_length)

        def read(number: int, completion: Completion) -> str:
            self.cache_hook.add_partial("generate_until", _arguments(requests[number]), completion.text)
            return completion.text

        return self._complete(made, read, disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation by the tokenizer's chat template.

        Args:
            add_generation_prompt: End with the beginning of an answer; otherwise with the last message, which the model
                continues.

        Raises:
            RecipeError: The tokenizer has no chat template, or that fails.
        """
        text = render_conversation(self._tokenizer, chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        end = text.rfind(last)
        if end < 0:
            raise RecipeError(
                f"the chat template changes the last message, so that it can't be continued: {last[:60]!r}"
            )
        return text[: end + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the tokenizer's chat template, which lm-eval records.

        Args:
            chat_template: True for the default one, or its name; False returns None.

        Raises:
            RecipeError: The tokenizer has no such template.
        """
        if chat_template is False:
            return None
        if isinstance(chat_template, str) and chat_template != "default":
            raise RecipeError(f"chat_template={chat_template!r}; only the default template is applied: pass True")
        return load_template(self._tokenizer).source

    def _complete(
        self, requests: Sequence[GenerationRequest], read: Callable[[int, Completion], Result], disable_tqdm: bool
    ) -> list[Result]:
        """Return a result for each request, in their order.

        Args:
            read: Called with the index of a request and its completion, as soon as it is complete: completions have a
                record for each token, and are not stored.
        """
        results: dict[int, Result] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Requests") as progress:
            for event in self._engine.stream(requests):
                if event.completion is not None:
                    results[event.number] = read(event.number, event.completion)
                    progress.update()
        return [results[number] for number in range(len(requests))]

    def _warn_of_cuts(self, num_cut: int, count: int, size: int) -> None:
        self.num_cut += num_cut
        if num_cut:
            warnings.warn(
                f"{num_cut} of {count} contexts are longer than a row of the engine and were cut from the left, to {size} tokens "
                f"with the answer; create the engine with a greater length, if the model has more positions",
                stacklevel=3,
            )


def _arguments(request: Instance) -> Any:
    """Return the arguments of a request: their number and types depend on its kind."""
    return request.args
