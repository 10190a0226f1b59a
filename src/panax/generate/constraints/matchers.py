"""Constraints of an engine's requests, compiled for its tokenizer, and the state of each answer under its constraint."""

import collections
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...core.errors import DataError, RecipeError
from ...data.text.tokenizer import Tokenizer
from ..draw import WORD_BITS, AllowedTokens
from .settings import WHITESPACE, Constraint, Grammar, JsonSchema
from .vocabulary import create_vocabulary

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 16
"""Constraints that are compiled for the next request with the same one."""

STACK_BYTES = 256 << 20
"""Stack of the thread that compiles: llguidance recurses along references. 128 KiB of schemas and 16 KiB of rules, the
longest that are accepted, take less than 60 MiB (llguidance 1.9)."""

LIMITS = {
    "initial_lexer_fuel": 300_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_lexer_states": 50_000,
    "max_items_in_row": 2_000, "max_grammar_size": 500_000, "verbose_errors": False,
}  # fmt: skip
"""Limits of llguidance: a step takes at most some 10 ms, and an automaton some 100 MB."""

_stack_size_lock = threading.Lock()

_MAX_MESSAGE = 300

_DEAD_END = "no token of the model's vocabulary can continue the answer, and it is not complete"


class AnswerConstraint:
    """The state of one answer under its constraint.

    Attributes:
        allowed: Bits of the tokens that may follow, in words of 32.
        error: The reason why no token may follow, though the answer is not complete.
    """

    def __init__(self, start: "llguidance.LLMatcher", allowed: np.ndarray, size: int):
        self._start, self._matcher, self._size = start, None, size
        self.allowed, self.error = allowed, ""

    def accept(self, token: int) -> Literal["stop", "error"] | None:
        """Move on by a token. Returns "stop" if the answer is complete and nothing may follow but its end, and "error"
        if neither a token nor the end may follow."""
        if self._matcher is None:
            # Only for an answer that has begun: many may wait.
            self._matcher = self._start.deep_copy()
        self._matcher.consume_token(token)
        # A matcher that has failed is stopped too.
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return "stop"
        self.allowed, self.error = _next_tokens(self._matcher, self._size)
        return "error" if self.error else None


class ConstraintCompiler:
    """Compiles constraints for a tokenizer, in any thread.

    Args:
        tokenizer: None refuses all constraints.
        size: Size of the model's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer | None, size: int):
        self._tokenizer, self._size = tokenizer, size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._compiled: collections.OrderedDict[Constraint, tuple[llguidance.LLMatcher, np.ndarray]]
        self._compiled = collections.OrderedDict()
        self._free: dict[int, AllowedTokens] = {}

    def begin(self, constraint: Constraint | None) -> AnswerConstraint | None:
        """Return the state of an empty answer; None without a constraint.

        Raises:
            RecipeError: The constraint is invalid or too complex, or there is no tokenizer for it.
            DataError: No token can begin the answer.
        """
        if constraint is None:
            return None
        with self._lock:
            compiled = self._compiled.get(constraint)
        if compiled is None:
            # Outside of the lock: other threads must not wait for it.
            compiled = _run_with_stack(lambda: self._compile(constraint))
        with self._lock:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        start, allowed = compiled
        return AnswerConstraint(start, allowed, self._size)

    def stack(self, answers: Sequence[AnswerConstraint | None]) -> AllowedTokens:
        """Return the allowed tokens of rows; None allows all."""
        count, words = len(answers), -(-self._size // WORD_BITS)
        if not any(answers):
            if count not in self._free:
                self._free[count] = AllowedTokens(
                    _host([False] * count, bool), _host(np.zeros((count, words)), np.uint32)
                )
            return self._free[count]
        bits = np.zeros((count, words), np.uint32)
        for row, answer in enumerate(answers):
            if answer is not None:
                bits[row] = answer.allowed[:words]
        return AllowedTokens(_host([each is not None for each in answers], bool), _host(bits, np.uint32))

    def _compile(self, constraint: Constraint) -> tuple["llguidance.LLMatcher", np.ndarray]:
        if self._tokenizer is None:
            raise RecipeError("a constraint needs a tokenizer; pass one to the engine")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = create_vocabulary(self._tokenizer, self._size)
        import llguidance

        name, source = _source(constraint)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise RecipeError(f"{name} can't be used: llguidance states: {_shorten(matcher.get_error())}")
        allowed, error = _next_tokens(matcher, self._size)
        if error:
            raise DataError(f"{name} can't be used: {error}")
        return matcher, allowed


def _host(values: Any, dtype: Any) -> Any:
    """Return an array on the host, which a program takes with its other arguments in one transfer."""
    return np.array(values, dtype)


def _source(constraint: Constraint) -> tuple[str, str]:
    """Return a constraint's name, and its text in llguidance's form."""
    import llguidance

    matcher = llguidance.LLMatcher
    if isinstance(constraint, JsonSchema):
        options: Any = {"whitespace_pattern": WHITESPACE}
        try:
            return "the schema", matcher.grammar_from_json_schema(str(constraint.schema), overrides=options)
        except ValueError as error:
            raise RecipeError(f"the schema can't be used: llguidance states: {_shorten(str(error))}") from error
    if isinstance(constraint, Grammar):
        return "the grammar", matcher.grammar_from_lark(constraint.rules)
    return "the regular expression", matcher.grammar_from_regex(constraint.pattern)


def _next_tokens(matcher: "llguidance.LLMatcher", size: int) -> tuple[np.ndarray, str]:
    """Return the bits of the tokens that may follow, and the reason if none may."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint32).copy()
    words, rest = divmod(size, WORD_BITS)
    bits = np.pad(bits[: words + 1], (0, max(0, words + 1 - len(bits))))
    # Of a tokenizer that is larger than the model's vocabulary.
    bits[words] &= np.uint32((1 << rest) - 1)
    if matcher.is_error():
        message = _shorten(matcher.get_error())
        return bits, _DEAD_END if message.startswith("NoExtension") else f"llguidance states: {message}"
    return bits, "" if bits.any() else _DEAD_END


def _shorten(message: str) -> str:
    """Return a message of llguidance as one line, without the source and the parser's state that it shows."""
    line = " ".join(re.split(r"<state>|<non-verbose/>|\n *[0-9]+ \| ", message)[0].split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."


def _run_with_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread with a large stack, and return its result."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="panax-constraint")
    # The size is that of all new threads: two callers must not restore each other's.
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
