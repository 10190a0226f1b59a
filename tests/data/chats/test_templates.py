"""Chat templates render as in transformers, and are bounded in time, loops and output."""

import json
import random
import shutil
import time

import pytest
from chats.conftest import CHATML, TOKENS, published_templates, random_messages

from panax.core.errors import DataError, RecipeError
from panax.data import Chats, PretrainedTokenizer
from panax.data.chats.answers import render_answers
from panax.data.chats.conversation import make_conversation
from panax.data.chats.template import MAX_SECONDS, ChatTemplate, RenderError

TEMPLATES = published_templates()
DATE = "2026-11-28"
DOUBLED = "{%% set n = namespace(a='aaaaaaaa') %%}{%% for i in range(40) %%}{%% set n.a = %s %%}{%% endfor %%}"


def make(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="a test", tokens=TOKENS, date=DATE)


def check_equal(name: str, count: int, monkeypatch) -> None:
    """Compare texts and marked answers on random conversations; if one refuses, the other does."""
    import datetime

    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    source = TEMPLATES[name]
    template, rng = make(source), random.Random(name)
    rendered = 0
    for _ in range(count):
        messages, tools = random_messages(rng)
        conversation = make_conversation(messages, where="a test", tools=tools)
        try:
            texts, spans = chat_template_utils.render_jinja_template(
                [list(conversation.messages)],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=template.marks_answers,
                **TOKENS,
            )
        except Exception:
            with pytest.raises(RenderError):
                template.render(conversation.messages, tools=conversation.tools)
            continue
        rendered += 1
        assert template.render(conversation.messages, tools=conversation.tools) == texts[0]
        if template.marks_answers:
            (chat,) = render_answers(conversation, template)
            assert chat.text == texts[0]
            assert chat.spans == [tuple(span) for span in spans[0]]
    # These two read only contents with pictures.
    assert rendered or name.startswith("llava_next")


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_render_as_in_transformers(name, monkeypatch):
    check_equal(name, 8, monkeypatch)


def test_there_are_more_than_forty_templates():
    assert len(TEMPLATES) >= 41


@pytest.mark.parametrize(
    "source, message",
    [
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "loops take more than 1,000,000"),
        ("{{ 'a' * 100000000 }}", "repeats a value 100,000,000 times"),
        ("{{ 100000000 * 'a' }}", "repeats a value"),
        ("{{ 9 ** 99999999 }}", "computes 9"),
        ("{{ 'a'.ljust(100000000) }}", "calls a function with 100,000,000"),
        ("{{ 'a' | center(100000000) }}", "calls a function with 100,000,000"),
        ("{{ '%100000000d' % 1 }}", "formats a number"),
        (DOUBLED % "n.a ~ n.a", "more than 33,554,432"),
        (DOUBLED % "n.a + n.a", "more than 33,554,432"),
        (DOUBLED % "n.a | replace('a', n.a)", "more than"),
        (DOUBLED % "n.a.replace('a', n.a)", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself endlessly"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|not safe|unsafe"),
        ("{% for a in messages %}{% include 'x' %}{% endfor %}", "TypeError|no loader"),
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
    ],
)  # fmt: skip
def test_hostile_and_failing_templates_end_with_one_message(source, message):
    begin = time.monotonic()
    with pytest.raises(RenderError, match=message):
        make(source).render([{"role": "user", "content": "a"}])
    assert time.monotonic() - begin < MAX_SECONDS


def test_a_template_that_is_not_valid():
    with pytest.raises(DataError, match=r"the chat template of a test, line 2 is not valid"):
        make("{% if a %}\n{% endfor %}")


def test_the_date_is_a_setting():
    source = "{{ strftime_now('%d %B %Y') }}"
    assert make(source).render([]) == "28 November 2026"
    with pytest.raises(RecipeError, match=r"prints the date of today.*set data.corpus.date"):
        ChatTemplate(source, name="a test", tokens=TOKENS).render([])


def test_a_template_that_changes_its_marked_answers():
    source = "{% set a %}{% generation %}b{% endgeneration %}{% endset %}{{ a | length }}"
    with pytest.raises(RenderError, match="changes the text inside"):
        make(source).render_marked([])


@pytest.mark.parametrize("files", [False, True], ids=["in the configuration", "in files"])
def test_conversations_with_tools_have_a_template_of_their_own(tokenizer_folder, tmp_path, files):
    """As transformers chooses it, from each place that can hold it; it is saved with the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tool_use = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    shutil.copytree(tokenizer_folder, tmp_path / "here")
    config = json.loads((tmp_path / "here" / "tokenizer_config.json").read_text())
    if files:
        del config["chat_template"]
        (tmp_path / "here" / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "here" / "additional_chat_templates").mkdir()
        (tmp_path / "here" / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    else:
        named = {"default": CHATML, "tool_use": tool_use}
        config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    (tmp_path / "here" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "here")
    corpus, rng, with_tools = Chats(paths=("here",)), random.Random(3), 0
    PretrainedTokenizer(path=str(tmp_path / "here")).load().save(tmp_path / "saved")
    for folder in ("here", "saved"):
        encoder = corpus.encoder(PretrainedTokenizer(path=str(tmp_path / folder)).load())
        for _ in range(20):
            messages, tools = random_messages(rng)
            conversation = make_conversation(messages, where="row 1", tools=tools)
            ((document,),) = encoder.encode([conversation])
            expected = theirs.apply_chat_template(list(conversation.messages), tools=tools, return_dict=True)
            assert document.ids == expected["input_ids"]
            with_tools += tools is not None
    assert 5 < with_tools < 35
