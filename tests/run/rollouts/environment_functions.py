"""Environments, tools and rewards of episodes, which processes import from this file."""

import os
import time
from pathlib import Path

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


def always_asks(messages, record, state):
    return "?"


def any_number(messages, record, state):
    """Another reply each time."""
    _count()
    return os.urandom(2).hex()


def misbehaves_on_b(messages, record, state):
    """As the file says, at the second turn of the prompt b."""
    if record["prompt"] != "b" or state is None:
        return Reply([{"role": "user", "content": "?"}], True)
    match Path(os.environ["LETTERS_MARK"]).read_text():
        case "raises":
            raise ValueError("no b here")
        case "hangs":
            time.sleep(60)
        case "dies":
            os._exit(3)
        case "number":
            return 3
        case "speaks for the model":
            return [{"role": "assistant", "content": "b"}]
        case "no content":
            return [{"role": "user"}]
        case "no message":
            return []
        case "state":
            return Reply([{"role": "user", "content": "?"}], {1, 2})
        case "size":
            return "?" * (1 << 20)
        case "depth":
            deep = []
            for _ in range(500):
                deep = [deep]
            return Reply([{"role": "user", "content": "?"}], deep)
        case "prints":
            while True:
                print("?" * 1000)
        case "forks":
            while True:
                os.fork()


def counts_turns(answer, record, episode):
    """A reward of what happened: the letters of all turns."""
    texts = [each["content"] for each in episode["messages"] if each["role"] == "assistant"]
    assert answer == texts[-1] and len(texts) == episode["turns"]
    return float(sum(map(len, texts)))
