"""Tokens of replies after published chat templates: with the drawn turn before them, they are those of the template."""

import importlib.util
import re
from pathlib import Path

import pytest
import tokenizers
from scripted import END
from tokenizers import decoders, models, pre_tokenizers

from panax.data.text.tokenizer import Tokenizer
from panax.generate.prompts import render_conversation
from panax.generate.tools import find_call_form
from panax.rollouts.calls.pool import CalledFunction
from panax.rollouts.calls.tool_schema import describe_tool
from panax.rollouts.environments.reply_tokens import ReplyEncoder
from panax.rollouts.environments.text_environment import FunctionReplies
from panax.rollouts.environments.tool_environment import ToolReplies

ENDS = {
    "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>", "phi3": "<|end|>",
    "lfm2": "<|im_end|>", "gptoss": "<|end|>", "glm4moe": "<|user|>", "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
"""Published templates, of TRL's package, which is read and not imported; and the tokens that end a turn."""

NOT_WRITTEN_ALIKE = ("deepseekv3", "gptoss", "glm4moe")
"""Templates that write an earlier answer otherwise than it was drawn: without thoughts, or with a channel."""


def add(a: int) -> int:
    """Add one."""
    return a + 1


def load(name):
    """A tokenizer of bytes with a template, and the special tokens that it spells."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "requirements/published.txt has the package"
    source = (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [END, *sorted(set(re.findall(r"<\|\w+\|>|<\w+_of_turn>|<\uff5c[^\uff5c]+\uff5c>", source)) - {END})]
    )
    end = backend.token_to_id(ENDS[name])
    return Tokenizer(backend, end_of_document=END).with_chat(source, [end]), end


@pytest.mark.parametrize("name", ENDS)
def test_a_drawn_turn_and_its_reply_are_what_the_template_writes(name):
    tokenizer, end = load(name)
    encoder = ReplyEncoder(tokenizer, FunctionReplies("it", CalledFunction("a:b", "environment", 1.0)), ())
    encoder.check_chat()
    reply = [{"role": "user", "content": "Are you sure?"}]
    after = tokenizer.decode(encoder.encode_chat(reply, end))
    ask = [{"role": "user", "content": "2 + 2?"}]
    prompt = render_conversation(tokenizer, ask)
    written = render_conversation(tokenizer, [*ask, {"role": "assistant", "content": "It is 4."}, *reply])
    if name not in NOT_WRITTEN_ALIKE:
        assert f"{prompt}It is 4.{ENDS[name]}{after}" == written
    assert written.endswith(f"It is 4.{ENDS[name]}{after}")
    # A turn that another token ended is not ended twice, and the next message begins as ever.
    other = tokenizer.decode(encoder.encode_chat(reply, tokenizer.end_of_document))
    assert other == (f"<|user|>{after}" if name == "glm4moe" else after)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_results_of_tools_follow_a_turn_as_the_template_writes_them(name):
    tokenizer, end = load(name)
    tools = {"add": (CalledFunction("a:add", "tool", 1.0), describe_tool(add, "a:add"))}
    environment = ToolReplies(find_call_form(tokenizer), tools, 8)
    encoder = ReplyEncoder(tokenizer, environment, ())
    encoder.check_chat()
    turn = environment.read_turn(
        '{"name": "add", "parameters": {"a": 1}}'
        if name == "llama3_1"
        else ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        1,
    )
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    result = [{"role": "tool", "name": "add", "content": "2", "tool_call_id": "call_1_0"}]
    ask = [{"role": "user", "content": "1 + 1?"}]
    written = render_conversation(tokenizer, [*ask, turn, *result], environment.tools)
    prompt = render_conversation(tokenizer, ask, environment.tools)
    after = tokenizer.decode(encoder.encode_chat(result, end))
    assert written.startswith(prompt) and written.endswith(f"{ENDS[name]}{after}")
