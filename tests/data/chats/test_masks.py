"""Loss on answers and on the token that ends each, compared with transformers and with references by rendering."""

import json
import random

import numpy as np
import pytest
from chats.conftest import CHATML, MARKED, TOKENS, random_messages

from panax.core.errors import DataError
from panax.data import BadRecord
from panax.data.chats.conversation import make_conversation
from panax.data.chats.encoder import ChatEncoder
from panax.data.chats.template import ChatTemplate

TURNS = [
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "quick"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2 é"},
]
REMOVES_EARLIER = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '(' + (message.reasoning_content or '') + ')' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_END = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
BREAKS = "{% for message in messages %}{{ message.role + messages | length | string }}{% endfor %}"


def encoder(tokenizer, source: str) -> ChatEncoder:
    return ChatEncoder(tokenizer, ChatTemplate(source, name="a test", tokens=TOKENS))


def encode(tokenizer, source: str, messages, **settings):
    (made,) = encoder(tokenizer, source).encode([make_conversation(messages, where="row 1", **settings)])
    return made


def trained(tokenizer, document) -> str:
    """The tokens with loss, as text."""
    return tokenizer.decode([i for i, loss in zip(document.ids, document.loss, strict=True) if loss])


def test_answers_and_their_ends_carry_loss(tokenizer):
    (document,) = encode(tokenizer, CHATML, TURNS)
    assert tokenizer.decode(document.ids) == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TURNS
    )
    assert trained(tokenizer, document) == "quick<|im_end|>2 é<|im_end|>"


def test_the_end_after_a_marked_answer_carries_loss(tokenizer):
    (document,) = encode(tokenizer, MARKED, TURNS)
    assert trained(tokenizer, document) == "quick<|im_end|>2 é<|im_end|>"
    assert document.ids[0] == tokenizer.special_ids["bos_token_id"] != document.ids[1]


def test_earlier_turns_that_change_become_rows_of_their_own(tokenizer):
    turns = [dict(turn, reasoning_content="fox") if turn["role"] == "assistant" else turn for turn in TURNS]
    first, second = encode(tokenizer, REMOVES_EARLIER, turns)
    assert trained(tokenizer, first) == "(fox)quick<|im_end|>"
    assert trained(tokenizer, second) == "(fox)2 é<|im_end|>"
    assert "assistant\nquick<|im_end|>" in tokenizer.decode(second.ids)


def test_a_template_without_ends_gets_the_end_of_the_document(tokenizer):
    (document,) = encode(tokenizer, WITHOUT_END, TURNS)
    assert trained(tokenizer, document) == " quick\n2 é\n</s>"  # its first token holds the space before it
    assert encoder(tokenizer, WITHOUT_END).answer_ends == ()


def test_the_error_shows_where_a_template_breaks(tokenizer):
    made = encode(tokenizer, BREAKS, TURNS)
    assert isinstance(made, BadRecord)
    assert "before answer 1 as ...'user1' with add_generation_prompt, but as ...'user2assistant2'" in made.reason
    assert "{% generation %}" in made.reason


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"first_trained": 2}, "2 é<|im_end|>"),
        ({"first_trained": 4}, ""),
    ],
)
def test_a_prompt_carries_no_loss(tokenizer, settings, expected):
    for source in (CHATML, MARKED):
        (document,) = encode(tokenizer, source, TURNS, **settings)
        assert trained(tokenizer, document) == expected


def test_weights_of_messages(tokenizer):
    turns = [dict(TURNS[0]), {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 1}]
    for source in (CHATML, MARKED):
        (document,) = encode(tokenizer, source, turns)
        assert trained(tokenizer, document) == "2 é<|im_end|>"


def test_two_beginnings_are_an_error(tokenizer):
    source = "{{ bos_token }}" + CHATML.replace("'<|im_start|>' +", "message.get('bos', '') + '<|im_start|>' +")
    turns = [{**TURNS[0], "bos": "<s>"}, *TURNS[1:]]
    with pytest.raises(DataError, match="row 1: the rendered conversation begins with two BOS tokens"):
        encode(tokenizer, source, turns)


def test_ids_and_masks_are_those_of_transformers(tokenizer, tokenizer_folder):
    """On its own answers; the ends that follow them carry loss here in addition."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    end = tokenizer.encode_rendered(["<|im_end|>"])[0].ids[0]
    rng = random.Random(0)
    for _ in range(50):
        messages, _ = random_messages(rng)
        conversation = make_conversation(messages, where="row 1")
        (document,) = encode(tokenizer, MARKED, messages)
        result = theirs.apply_chat_template(
            list(conversation.messages), chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        assert document.ids == result["input_ids"]
        mask = np.array(result["assistant_masks"], np.uint8)
        added = np.flatnonzero(document.loss != mask)
        assert (mask[added] == 0).all()
        answers = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
        assert sum(document.ids[place] == end for place in added) == len(answers)
        # Their mask also lacks the last bytes of an answer that ends with a character of several tokens.
        assert trained(tokenizer, document) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_a_reference_by_rendering(tokenizer):
    """Each answer's tokens are those between the text before it and the text up to it, for templates without marks."""
    rng = random.Random(1)
    template = ChatTemplate(CHATML, name="a test", tokens=TOKENS)
    for _ in range(50):
        messages, _ = random_messages(rng)
        conversation = make_conversation(messages, where="row 1")
        (document,) = encode(tokenizer, CHATML, messages)
        expected = np.zeros(len(document.ids), np.uint8)
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                before = template.render(conversation.messages[:number], add_generation_prompt=True)
                upto = template.render(conversation.messages[: number + 1])
                first, last = (len(tokenizer.encode_rendered([text])[0].ids) for text in (before, upto))
                expected[first : last - 1] = 1  # the line break after the end is not learnt
        assert (document.loss == expected).all()


def test_ends_of_answers_are_saved_with_the_tokenizer(tokenizer, tmp_path):
    from panax.data import PretrainedTokenizer

    chat = encoder(tokenizer, MARKED)
    end = tokenizer.encode_rendered(["<|im_end|>"])[0].ids[0]
    assert chat.answer_ends == (end,)
    assert chat.tokenizer.end_ids == (tokenizer.end_of_document, end)
    chat.tokenizer.save(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.end_of_document, end]
    assert (tmp_path / "chat_template.jinja").read_text() == MARKED
    again = PretrainedTokenizer(path=str(tmp_path)).load()
    assert again.end_ids == chat.tokenizer.end_ids
    assert again.chat_templates["default"] == MARKED
    assert tokenizer.end_ids == (tokenizer.end_of_document,)


def test_conversations_without_answers(tokenizer):
    chat = encoder(tokenizer, CHATML)
    good = make_conversation(TURNS, where="row 1")
    bad = make_conversation(TURNS[:1], where="row 2")
    list(chat.encode([good] * 199 + [bad] * 2))
    chat.finish(201)
    list(chat.encode([bad]))
    with pytest.raises(DataError, match="3 of 202 conversations have no token with loss, for example row 2"):
        chat.finish(202)
