"""Episodes: the tokens, masks and limits of answers of several turns."""

import dataclasses

import numpy as np
import pytest
from scripted import CHAT, END, END_TURN, Scripted, open_rollouts
from tool_functions import replies, strange_role

from panax.core.errors import RecipeError
from panax.generate import Sampling
from panax.rollouts import RewardPool, TextEnvironment
from panax.rollouts.episodes import EpisodeSampler, derive_seed
from panax.rollouts.rows import make_rows


def draw(rollouts, engine, samples=2):
    """Draw episodes of all prompts."""
    environment = rollouts.environment
    sampler = EpisodeSampler(rollouts, lambda: None)
    with RewardPool([], 1, others=environment.functions) as pool:

        def ask(asked):
            return environment.reply(pool, asked, stop_at_failure=False, on_wait=lambda: None)

        prompts = list(range(len(rollouts.records)))
        seeds = [[10 * p + s for s in range(samples)] for p in prompts]
        return sampler.sample(engine, prompts, rollouts.settings.sampling(), seeds, ask)


def opened(folder, prompts=("ask", "two"), limits=None, **settings):
    environment = TextEnvironment(function=replies, **{"tokens": 400, "turns": 4} | (limits or {}))
    return open_rollouts(folder, environment, prompts=prompts, **settings)


def test_turns_and_replies_are_the_tokens_that_the_template_writes(tmp_path):
    rollouts = opened(tmp_path)
    tokenizer = rollouts.tokenizer
    engine = Scripted(tokenizer, ["abc", "done"], ["done"], ["last"], ["12345", "1", "done"])
    first, second, third, fourth = draw(rollouts, engine)
    texts = [
        "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n<|im_start|>user\n0:3<|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>",
        "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>",
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nlast<|im_end|>",
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n12345<|im_end|>\n<|im_start|>user\n1:5<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n1:1<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>",
    ]
    answers = [first, second, third, fourth]
    for answer, text in zip(answers, texts, strict=True):
        assert [*answer.prompt, *answer.tokens] == tokenizer.encode_rendered([text])[0].ids
        assert not answer.is_truncated and not answer.episode.at_limit
    assert [answer.group for answer in answers] == [0, 0, 1, 1]
    assert [answer.episode.turns for answer in answers] == [2, 1, 1, 3]
    assert [answer.text for answer in answers] == ["done", "done", "last", "done"]
    # The actions are what was drawn, the ends of turns among them.
    assert tokenizer.decode(first.actions) == "abc<|im_end|>done<|im_end|>"
    assert first.log_probabilities == (-1.0, -2.0, -3.0, -100.0, -1.0, -2.0, -3.0, -4.0, -100.0)
    drawn = tokenizer.decode(np.array(first.tokens)[~first.is_action])
    assert drawn == "\n<|im_start|>user\n0:3<|im_end|>\n<|im_start|>assistant\n"
    # A message that the model does not see belongs to the conversation that rewards do.
    assert third.episode.messages[-1] == {"role": "user", "content": "it was the last"}
    assert (third.episode.state, fourth.episode.state) == ("ended", 2)
    assert third.describe_episode()["messages"][0] == {"role": "user", "content": "two"}
    # Each turn has its own seed.
    seeds = [[request.seeds for request in turn] for turn in engine.requests]
    assert seeds == [[(0, 1), (10, 11)], [(derive_seed(0, 2),), (derive_seed(11, 2),)], [(derive_seed(11, 3),)]]
    assert fourth.digest != dataclasses.replace(fourth, replies=()).digest


def test_rows_have_loss_at_the_actions_alone_and_experts_of_their_own_draws(tmp_path):
    rollouts = opened(tmp_path, ("ask",))
    engine = Scripted(rollouts.tokenizer, ["ab", "done"], ["done"])
    answers = draw(rollouts, engine)
    rows = make_rows(answers, np.array([2.0, -1.0], np.float32), np.array([True, True]), rollouts.settings.length)
    answer = answers[0]
    ids, prompt = np.array([*answer.prompt, *answer.tokens]), len(answer.prompt)
    size = len(ids) - 1
    assert (rows["tokens"][0, :size] == ids[:-1]).all() and (rows["targets"][0, :size] == ids[1:]).all()
    assert (rows["segment"][0] == ([1] * size + [0] * (rollouts.settings.length - size))).all()
    assert (rows["position"][0, :size] == np.arange(size)).all()
    # A row made by hand: two letters and the end, then the reply, then four letters and the end.
    reply = len(answer.replies[0].tokens)
    by_hand = [0] * (prompt - 1) + [1] * 3 + [0] * reply + [1] * 5
    assert rows["loss_mask"][0, :size].tolist() == by_hand and not rows["loss_mask"][0, size:].any()
    assert rows["advantage"][0, :size].tolist() == [2.0 * flag for flag in by_hand]
    logs = iter([-1, -2, -100, -1, -2, -3, -4, -100])
    assert rows["behavior_log_probability"][0, :size].tolist() == [next(logs) if flag else 0 for flag in by_hand]
    # The end of the first turn was drawn in the first draw, and run in the second.
    first = prompt + 2
    assert rows["experts"][0, :size, 0, 0].tolist() == [1] * first + [2] * (size - first)
    excluded = make_rows(answers, np.ones(2, np.float32), np.array([False, True]), rollouts.settings.length)
    assert not excluded["loss_mask"][0].any() and excluded["loss_mask"][1].sum() == 5


def test_plain_replies_are_encoded_as_they_are(tmp_path):
    rollouts = opened(tmp_path, ("ask",), chat=False, end=END)
    engine = Scripted(rollouts.tokenizer, ["ab", "done"], ["done"], end=END)
    answer = draw(rollouts, engine)[0]
    assert rollouts.tokenizer.decode([*answer.prompt, *answer.tokens]) == f"askab{END}0:2done{END}"
    assert answer.is_action.tolist() == [True] * 3 + [False] * 3 + [True] * 5
    assert answer.episode.messages[0] == {"role": "user", "content": "ask"}


def test_limits_end_an_episode(tmp_path):
    rollouts = opened(tmp_path, ("ask",), {"turns": 2}, tokens=10)
    at_limit, cut = draw(rollouts, Scripted(rollouts.tokenizer, ["a", "b"], ["a" * 10]))
    assert at_limit.episode.at_limit and not at_limit.is_truncated and at_limit.episode.turns == 2
    # It was replied to, for the rewards, and the model draws no further turn.
    assert at_limit.episode.state == 2 and at_limit.episode.messages[-1]["content"] == "0:1"
    assert rollouts.tokenizer.decode(at_limit.actions) == f"a{END_TURN}b{END_TURN}"
    assert cut.is_truncated and cut.episode.turns == 1 and len(cut.actions) == 10
    reply = len(at_limit.replies[0].tokens)
    # A turn without room for a token is not begun, and one that has some is as short as the room.
    for room, turns, actions in ((reply + 2, 1, 2), (reply + 4, 2, 4)):
        rollouts = opened(tmp_path, ("ask",), {"tokens": room}, tokens=10)
        answer = draw(rollouts, Scripted(rollouts.tokenizer, ["a", "bcd"], ["done"]))[0]
        assert answer.episode.turns == turns and len(answer.actions) == actions
        assert answer.is_truncated and not answer.episode.at_limit and len(answer.tokens) <= room
    assert rollouts.settings.length == 300 + room + -(300 + room) % 8


def test_a_message_that_the_template_refuses_fails_alone(tmp_path):
    refusing = CHAT.replace(
        "{{- '<|im_start|>'",
        "{% if message.role == 'oracle' %}{{ raise_exception('no oracles') }}{% endif %}{{- '<|im_start|>'",
    )
    rollouts = open_rollouts(tmp_path, TextEnvironment(function=strange_role, tokens=200), template=refusing)
    answers = draw(rollouts, Scripted(rollouts.tokenizer, ["a"], ["b"]))
    assert all(
        "can't be rendered: the chat template fails on the prompt: no oracles" in a.episode.error for a in answers
    )


@pytest.mark.parametrize(
    ("template", "end", "message"),
    [
        (CHAT, END, r"ends a turn of the assistant with '<\|im_end\|>', at which no answer ends; add its id \(258\)"),
        (
            CHAT.replace("{%- for message in messages %}", "{%- for message in messages %}{{ loop.index }}"),
            END_TURN,
            "after two",
        ),
        (
            CHAT.replace("message.content", "message.content + message.content"),
            END_TURN,
            "an assistant's message 2 times",
        ),
        (
            CHAT.replace("message.role +", "message.role[:1] +").replace("message.content", "''"),
            END_TURN,
            "message 0 times",
        ),
        ("{{ raise_exception('not two turns') }}", END_TURN, "not two turns"),
    ],
)
def test_templates_that_do_not_leave_turns_as_they_are_are_refused(tmp_path, template, end, message):
    with pytest.raises(RecipeError, match=message):
        opened(tmp_path, template=template, end=end)


@pytest.mark.parametrize(
    ("limits", "settings", "message"),
    [
        ({"tokens": 0}, {}, "TextEnvironment.tokens=0: expected 1 or more"),
        ({"turns": 0}, {}, "TextEnvironment.turns=0: expected 1 or more"),
        ({"seconds": 0.0}, {}, "TextEnvironment.seconds=0: expected a positive number"),
        ({"name": "a b"}, {}, "TextEnvironment.name='a b': expected letters"),
        ({"tokens": 10}, {"tokens": 11}, "data.environment.tokens=10 are those of all turns"),
        ({}, {"overlong": 400}, "data.overlong=400; expected less than data.environment.tokens=400"),
        ({"function": lambda messages: None}, {}, "TextEnvironment.function=.*lambda.*another process can't import it"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, limits, settings, message):
    with pytest.raises(RecipeError, match=message):
        opened(tmp_path, limits=limits, **settings) if "function" not in limits else TextEnvironment(tokens=1, **limits)


def test_seeds_of_turns_are_functions_of_the_answer_and_the_turn():
    assert derive_seed(5, 1) == 5 and derive_seed(5, 2) == derive_seed(5, 2) != derive_seed(6, 2)
    assert Sampling(seed=derive_seed(2**32 - 1, 9)).seed >= 0
