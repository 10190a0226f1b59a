"""A tokenizer of bytes with a chat template, and an engine that draws written turns, for tests of episodes."""

import json

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from panax.data import PretrainedTokenizer
from panax.data.text.tokenizer import Tokenizer
from panax.generate.requests import Completion, GeneratedToken, StreamEvent
from panax.rollouts import PromptFiles, Reward, RolloutData

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT = """\
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}; {% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template of separate turns, which offers tools and shows calls as Qwen's does."""


def save_tokenizer(folder, template=CHAT, end=END_TURN):
    """Save a tokenizer of 256 bytes and three special tokens; return its settings."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, BEGIN_TURN, END_TURN])
    made = Tokenizer(backend, end_of_document=END)
    made.with_chat(template, [backend.token_to_id(end)]).save(folder)
    return PretrainedTokenizer(path=str(folder))


def open_rollouts(folder, environment, *, prompts=("ask",), template=CHAT, end=END_TURN, **settings):
    """Open rollouts of these prompts."""
    lines = [json.dumps({"prompt": prompt, "number": number}) for number, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return RolloutData(
        prompts=PromptFiles(paths=(str(folder / "prompts.jsonl"),)),
        rewards=(Reward(function="math:fsum"),),
        tokenizer=save_tokenizer(folder / "tokenizer", template, end),
        environment=environment,
        **{"batch_size": len(prompts), "samples": 2, "tokens": 100, "prompt_tokens": 300, "held_out": 0.0, "chat": True}
        | settings,
    ).open()


class Scripted:
    """An engine that draws the turns of a script: for each answer to the first requests, in their order, its texts.

    Attributes:
        requests: All requests, by turns.
    """

    def __init__(self, tokenizer, *scripts, end=END_TURN):
        self.requests = []
        self._tokenizer, self._scripts, self._end = tokenizer, scripts, tokenizer.encode_rendered([end])[0].ids[0]
        self._turns = {}

    def stream(self, requests):
        self.requests.append(list(requests))
        known = dict(self._turns)
        asked = [
            (number, sample, request)
            for number, request in enumerate(self.requests[-1])
            for sample in range(request.sampling.n)
        ]
        for place, (number, sample, request) in enumerate(asked):
            # The answer with the longest beginning of the prompt.
            before = max((ids for ids in known if ids == request.prompt[: len(ids)]), key=len, default=None)
            script = list(self._scripts[place]) if len(self.requests) == 1 else known[before].pop(0)
            text = script.pop(0)
            ids = self._tokenizer.encode(text)[: request.sampling.tokens]
            is_cut = len(ids) == request.sampling.tokens
            actions = tuple(GeneratedToken(token, -1.0, -float(drawn + 1)) for drawn, token in enumerate(ids))
            end = None if is_cut else GeneratedToken(self._end, -1.0, -100.0)
            experts = np.full((len(request.prompt) + len(ids) - is_cut, 1, 1), len(self.requests), np.int32)
            drawn = (*request.prompt, *ids, *([] if is_cut else [self._end]))
            self._turns.setdefault(drawn, []).append(script)
            finish = "length" if is_cut else "end"
            completion = Completion(
                number, sample, actions, self._tokenizer.decode(ids), finish, end=end, experts=experts
            )
            yield StreamEvent(number, sample, None, "", completion)
