"""Chat templates: Jinja as `transformers` runs it, in a sandbox that is bounded in time, loops and output."""

import datetime
import functools
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from panax.core.errors import DataError, RecipeError

from .conversation import SPAN_BEGIN, SPAN_END

MAX_CHARACTERS = 32 << 20
"""Characters that a rendering may have."""

MAX_ITERATIONS = 1_000_000
"""Turns of all loops of one rendering together."""

MAX_SECONDS = 10.0
"""Time of one rendering."""

_MAX_REPEAT = 1_000_000
"""Length that an operation such as `"-" * n` or `text.ljust(n)` may ask for."""

_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*\d{6}")


class RenderError(Exception):
    """A template does not render a conversation; the message is for the user."""


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: Its text.
        key: Text and settings, as one hashable value that determines each rendering.
        marks_answers: True if it marks the model's own text by `{% generation %}`.
    """

    def __init__(self, source: str, *, name: str, tokens: Mapping[str, str], date: str | None = None) -> None:
        """Compile a template.

        Args:
            name: Its file or source, for messages.
            tokens: The tokenizer's special tokens by role: `bos_token`, `eos_token`, ...
            date: The day that `strftime_now` prints, YYYY-MM-DD; None makes a template that prints it an error.

        Raises:
            DataError: The template has a syntax error.
        """
        self.source = source
        self.key = (source, date or "", *sorted(tokens.items()))
        self._tokens = dict(tokens)
        self._environment = _Environment(date)
        try:
            self._plain = self._environment.compile_bounded(source)
            self.marks_answers = self._environment.num_marked > 0
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"the chat template of {name}{line} is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, equal to `apply_chat_template(..., tokenize=False)` of transformers.

        Args:
            options: Further variables.
            add_generation_prompt: True to end with the beginning of an answer.

        Raises:
            RenderError: The template rejects the conversation, fails on it, or exceeds a bound.
        """
        return self._render(messages, tools, options, add_generation_prompt, marked=False)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the beginning and end of each answer that the template marks.

        Raises:
            RenderError: As `render` does, or the template changes a marked answer afterwards.
        """
        marked = self._render(messages, tools, options, False, marked=True)
        text, spans = _split_marks(marked)
        if text != self.render(messages, tools=tools, options=options):
            raise RenderError("it changes the text inside {% generation %} afterwards, so that answers can't be found")
        return text, spans

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        options: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        *,
        marked: bool,
    ) -> str:
        self._environment.begin(marked)
        variables = {**self._tokens, **(options or {})}
        size, parts = 0, []
        try:
            chunks = self._plain.generate(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            for chunk in chunks:
                size += len(chunk)
                self._environment.check(size)
                parts.append(chunk)
        except (RenderError, RecipeError):
            raise
        except RecursionError:
            raise RenderError("it calls itself endlessly") from None
        except MemoryError:
            raise RenderError("it needs more memory than available") from None
        except Exception as error:  # a template can raise whatever Python raises
            raise RenderError(
                f"{type(error).__name__}: {error}" if not str(error) or not _is_own(error) else str(error)
            ) from error
        return "".join(parts)


def _is_own(error: Exception) -> bool:
    """Return True for an error that a template raised with `raise_exception`."""
    return type(error) is jinja2.TemplateError


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks; return the text and the spans between them.

    >>> _split_marks(f"a{SPAN_BEGIN}bc{SPAN_END}d")
    ('abcd', [(1, 3)])
    """
    parts, spans, length, begin = [], [], 0, None
    for part in re.split(f"([{SPAN_BEGIN}{SPAN_END}])", marked):
        if part == SPAN_BEGIN:
            begin = length
        elif part == SPAN_END and begin is not None:
            spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: marks around its text if the environment asks for them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.num_marked += 1  # pyright: ignore[reportAttributeAccessIssue]
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        text = caller()
        return f"{SPAN_BEGIN}{text}{SPAN_END}" if self.environment.marking else text  # pyright: ignore[reportAttributeAccessIssue]


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers' templates, with bounds.

    Attributes:
        marking: True if the present rendering marks answers.
        num_marked: Number of `{% generation %}` blocks that were compiled.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.marking, self.num_marked = False, 0
        self._iterations, self._deadline = 0, 0.0
        self.filters["tojson"] = _to_json
        self.filters["panax bounded"] = self._bounded
        self.filters["panax joined"] = self._joined
        for name in ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round", "replace"):
            self.filters[name] = self._with_small_arguments(self.filters[name])
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = functools.partial(_print_date, date)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template with each loop and each joining of texts bounded."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = self._filtered(loop.iter, "panax bounded")
        _replace(tree, self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None), None)

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Node:
        # No template can name these filters, since their names have a space.
        made = nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)
        made.set_environment(self)
        return made

    def begin(self, marking: bool) -> None:
        """Reset the bounds for a rendering."""
        self.marking = marking
        self._iterations, self._deadline = 0, time.monotonic() + MAX_SECONDS

    def check(self, size: int) -> None:
        """Raise a RenderError if the output or the time exceeds its bound."""
        if size > MAX_CHARACTERS:
            raise RenderError(f"it prints more than {MAX_CHARACTERS:,} characters")
        if time.monotonic() > self._deadline:
            raise RenderError(f"it takes more than {MAX_SECONDS:.0f} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > _MAX_REPEAT:
                    raise RenderError(f"it repeats a value {other:,} times")
        elif operator == "**" and not (abs(left) < 2**32 and abs(right) < 64):
            raise RenderError(f"it computes {left} ** {right}")
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise RenderError("it formats a number to more than 99,999 characters")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str):
            _check_small((*args, *kwargs.values()))
            self.check(_replaced_size(obj, args))
        return super().call(context, obj, *args, **kwargs)

    def _bounded(self, values: Any) -> Any:
        """Count the iterations of a loop before it begins."""
        try:
            count = len(values)
        except TypeError:
            values = list(itertools.islice(values, MAX_ITERATIONS + 1))
            count = len(values)
        self._iterations += count
        if self._iterations > MAX_ITERATIONS:
            raise RenderError(f"its loops take more than {MAX_ITERATIONS:,} turns")
        self.check(0)
        return values

    def _joined(self, values: Sequence[Any]) -> str:
        texts = [str(value) for value in values]
        self.check(sum(map(len, texts)))
        return "".join(texts)

    def _with_small_arguments(self, function: Any) -> Any:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _check_small((*args, *kwargs.values()))
            texts = [arg for arg in args if isinstance(arg, str)]
            if function.__name__ == "do_replace" and len(texts) == 3:
                self.check(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
            return function(*args, **kwargs)

        return checked


def _replace(node: nodes.Node, environment: _Environment) -> None:
    """Replace each `a ~ b` below a node by a filter that checks the size first."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_bounded_concat(each, environment) for each in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _bounded_concat(value, environment))


def _bounded_concat(value: Any, environment: _Environment) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace(value, environment)
    if isinstance(value, nodes.Concat):
        items = nodes.List(value.nodes).set_lineno(value.lineno)
        items.set_environment(environment)
        return environment._filtered(items, "panax joined")
    return value


def _check_small(arguments: Sequence[Any]) -> None:
    large = next((each for each in arguments if isinstance(each, int) and each > _MAX_REPEAT), None)
    if large is not None:
        raise RenderError(f"it calls a function with {large:,}")


def _replaced_size(method: Any, arguments: Sequence[Any]) -> int:
    """Return the size of the result of `text.replace(old, new)` or `text.join(texts)`; 0 for other methods."""
    text = method.__self__
    if method.__name__ == "replace" and len(arguments) >= 2 and all(isinstance(each, str) for each in arguments[:2]):
        return len(text) + text.count(arguments[0]) * len(arguments[1])
    if method.__name__ == "join" and arguments and isinstance(arguments[0], list | tuple):
        return sum(len(str(each)) + len(text) for each in arguments[0])
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does: no escapes for HTML, and other scripts as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> Iterator[None]:
    raise jinja2.TemplateError(message)


def _print_date(date: str | None, form: str) -> str:
    if date is None:
        raise RecipeError(
            "the chat template prints the date of today (strftime_now), so that the same data would give other tokens tomorrow; "
            "set data.corpus.date to the day that all conversations show, for example 2026-11-28"
        )
    return datetime.datetime.fromisoformat(date).strftime(form)
