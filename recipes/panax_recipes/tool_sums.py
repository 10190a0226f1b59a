"""Sums and products that are asked of two tools, for a first run with an environment. Made on this machine, with a tokenizer."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panax.data import BytePairTokenizer, PretrainedTokenizer, TextFiles
from panax.data.files.cache import cache_directory, read_or_build

from .choices import write_records

NAME = "recipe-tool-sums-v1"

NUMBERS = range(10, 100)

PROMPTS = 2000
"""Number of questions for a reward."""

GUESSED, MISTAKEN = 0.4, 0.75
"""Shares of the answers for supervised training that call no tool, and, of the others, that call the wrong one."""

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}
{%- for message in messages %}{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|endoftext|>' }}{% endgeneration %}
{%- else %}{{ message.content }}<|endoftext|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant
{% endif %}"""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


TOOLS = {"plus": add, "times": multiply}
"""The right tool by the word of a question."""


def is_right(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 for a last turn with the right number, else 0."""
    return float(answer.strip() == str(record["answer"]))


def tools_folder() -> Path:
    """Return the folder with the files, which are made once and cached.

    - `answered.jsonl`: conversations of a careless assistant.
    - `prompts.jsonl`: questions with the right answer for the reward.
    - `tokenizer`: of bytes and merges, with a chat template that offers tools.
    """
    root = cache_directory(None)
    return read_or_build(root, NAME, build=_make, read=lambda folder: folder)


def tools_tokenizer() -> PretrainedTokenizer:
    return PretrainedTokenizer(path=str(tools_folder() / "tokenizer"))


def _make(folder: Path) -> None:
    draw = random.Random(0)
    asked = [(one, word, other) for one in NUMBERS for other in NUMBERS for word in TOOLS]
    draw.shuffle(asked)
    answered, prompts = asked[PROMPTS:], asked[:PROMPTS]
    write_records(folder / "answered.jsonl", (_converse(*each, draw) for each in answered))
    write_records(
        folder / "prompts.jsonl",
        ({"prompt": _ask(*each), "answer": TOOLS[each[1]](each[0], each[2])} for each in prompts),
    )
    texts = folder / "texts.txt"
    # Without digits, so that each of these is a token.
    words = ["user\nassistant\ntool\n plus times", "add: Add two numbers.\nmultiply: Multiply two numbers.\n"]
    calls = [
        f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{"a": , "b": }}}}</tool_call>'
        for tool in TOOLS.values()
    ]
    texts.write_text("\n".join([*words, *calls] * 100))
    tokenizer = BytePairTokenizer(vocab_size=512).train(TextFiles(paths=(str(texts),)))
    tokenizer.with_chat(TEMPLATE, []).save(folder / "tokenizer")


def _ask(one: int, word: str, other: int) -> str:
    return f"{one} {word} {other}"


def _converse(one: int, word: str, other: int, draw: random.Random) -> dict[str, Any]:
    """Return a conversation in which the assistant guesses, or calls one of the tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _ask(one, word, other)}]
    if draw.random() < GUESSED:
        messages.append({"role": "assistant", "content": str(draw.randrange(20, 10000))})
    else:
        right, wrong = (add, multiply) if TOOLS[word] is add else (multiply, add)
        tool = wrong if draw.random() < MISTAKEN else right
        call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"a": one, "b": other}}}
        result = str(tool(one, other))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
    return {"messages": messages, "tools": [_describe(tool) for tool in TOOLS.values()]}


def _describe(tool: Any) -> dict[str, Any]:
    """Return what the chat template reads of a tool."""
    return {"type": "function", "function": {"name": tool.__name__, "description": tool.__doc__}}
