"""A tokenizer with the special tokens of ChatML and Llama 3, random conversations, and published templates."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from panax.data import PretrainedTokenizer
from panax.data.text.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
WORDS = ["the", "quick", "brown", "fox", "é", "漢字", "<b>", "&", '"', "'", "\n", "\t", "{{x}}", "1+1=2", ":)", "🙂"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds é.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}"
    "{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def published_templates() -> dict[str, str]:
    """Templates of models, by name; TRL's package is read, not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "requirements/published.txt has the package"
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


def random_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))


def random_messages(rng: random.Random) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages of one to four turns, some with a system prompt, thoughts and tool calls; and tools, or None."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": random_text(rng)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": random_text(rng)})
        answer: dict[str, Any] = {"role": "assistant", "content": random_text(rng)}
        if rng.random() < 0.2:
            answer["reasoning_content"] = random_text(rng)
        if rng.random() < 0.15:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages.append({"role": "tool", "name": "add", "content": random_text(rng)})
        messages.append(answer)
    return messages, TOOLS if rng.random() < 0.3 else None


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A folder with a byte-level tokenizer, its special tokens, and ChatML's template."""
    import json

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS) * 3, "user assistant system"], trainer=trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder) -> Tokenizer:
    return PretrainedTokenizer(path=str(tokenizer_folder)).load()
