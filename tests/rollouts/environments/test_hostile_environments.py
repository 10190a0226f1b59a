"""Environments that misbehave: each fails for its answer alone, and is named."""

import re

from scripted import save_tokenizer
from sick_environments import misbehave

from panax.rollouts import RewardPool, TextEnvironment
from panax.rollouts.environments.turns import AskedTurn, TurnReply

LIMIT = "gave no result within 1 seconds; its process was killed"
FAILURES = {
    "raises": r"raised ValueError: no turns here \(sick_environments.py, line \d+\)",
    "hangs": LIMIT,
    "dies": "ended its process with exit code 3; another takes its place",
    "number": "returned an int; expected None, a text",
    "tuple": "returned a message that is a str",
    "speaks for the model": "returned a message of the assistant; expected those of other roles",
    "no content": r"returned a message with \['role'\]; expected texts as role and content",
    "no object": "returned a message that is a str; expected None",
    "no message": "returned no message; expected at least one, or None to end the episode",
    "strange state": r"returned a value that is not JSON \(Object of type set",
    "strange end": "returned a list; expected None",
    "size": "returned 1,048,.* bytes of JSON; expected at most 524,288",
    "depth": "returned a value that JSON can't hold: it is nested deeper than 64",
    "prints without end": LIMIT,
    "forks": f"started more than 256 processes; all were killed|{LIMIT}",
}
GOOD = {
    "text": TurnReply(({"role": "user", "content": "again"},), "before"),
    "prints": TurnReply(({"role": "user", "content": "again"},), "before"),
    "state": TurnReply(({"role": "user", "content": "again"},), ["before", 2, {"prompt": "p"}]),
    "nothing": TurnReply((), "before", is_over=True),
}


def ask(place, text):
    messages = ({"role": "user", "content": "p"}, {"role": "assistant", "content": text})
    return AskedTurn(place, "", 1, text, messages, {"prompt": "p"}, "before")


def test_each_fails_for_its_answer_alone(tmp_path):
    environment = TextEnvironment(function=misbehave, tokens=10, seconds=1.0).open(save_tokenizer(tmp_path).load())
    names = [name for pair in zip(FAILURES, [*GOOD] * 4, strict=False) for name in pair]
    assert {*names} == {*FAILURES, *GOOD}
    asked = [ask(place, name) for place, name in enumerate(names)]
    with RewardPool([], 2, others=environment.functions, memory_bytes=1 << 28) as pool:
        replies = environment.reply(pool, asked, stop_at_failure=False, on_wait=lambda: None)
        first, *others = environment.reply(pool, asked * 20, stop_at_failure=True, on_wait=lambda: None)
    for name, reply in zip(names, replies, strict=True):
        if name in GOOD:
            assert reply == GOOD[name], name
        else:
            assert re.match(f"environment misbehave ({FAILURES[name]})", reply.error), (name, reply.error)
            assert reply.messages == () and len(reply.error) < 800
    # No further call begins after a failure, by choice.
    assert "no turns here" in first.error and "was not called" in others[-1].error


def test_settings_are_text():
    environment = TextEnvironment(function=misbehave, tokens=10)
    assert environment.function == "sick_environments:misbehave" and environment.name == "misbehave"
