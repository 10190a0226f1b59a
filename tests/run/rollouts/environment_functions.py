"""Environments, tools and rewards of episodes, which processes import from this file."""

import os

from panax.rollouts import Reply


def _count():
    """Append to the file by which tests count calls."""
    with open(os.environ["LETTERS_MARK"], "a") as file:
        file.write("x")


def asks_again(messages, record, state):
    """Two replies, which have the number of characters so far; the state counts the turns."""
    _count()
    turns = (state or 0) + 1
    if turns == 3:
        return Reply([], turns, is_over=True)
    return Reply([{"role": "user", "content": f"<{sum(len(each['content']) for each in messages)}>"}], turns)


def any_number(messages, record, state):
    """Another reply each time."""
    _count()
    return os.urandom(2).hex()


def fails_on_b(messages, record, state):
    """An error at the second turn of the prompt b."""
    if record["prompt"] == "b" and state is not None:
        raise ValueError("no b here")
    return Reply([{"role": "user", "content": "?"}], True)


def counts_turns(answer, record, episode):
    """A reward of what happened: the letters of all turns."""
    texts = [each["content"] for each in episode["messages"] if each["role"] == "assistant"]
    assert answer == texts[-1] and len(texts) == episode["turns"]
    return float(sum(map(len, texts)))
