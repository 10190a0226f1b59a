"""Environments of every kind of misbehavior, which processes import from this file."""

import os
import time

from panax.rollouts import Reply


def misbehave(messages, record, state):
    match messages[-1]["content"]:
        case "text":
            return "again"
        case "state":
            return Reply([{"role": "user", "content": "again"}], [state, len(messages), record])
        case "prints":
            print("?" * 100)
            return "again"
        case "raises":
            raise ValueError("no turns here")
        case "hangs":
            time.sleep(60)
        case "dies":
            os._exit(3)
        case "number":
            return 3
        case "tuple":
            return "again", 1
        case "speaks for the model":
            return [{"role": "assistant", "content": "b"}]
        case "no content":
            return [{"role": "user"}]
        case "no object":
            return ["again"]
        case "no message":
            return []
        case "strange state":
            return Reply([{"role": "user", "content": "again"}], {1, 2})
        case "strange end":
            return Reply([], None, 1)
        case "size":
            return "?" * (1 << 20)
        case "depth":
            deep = []
            for _ in range(500):
                deep = [deep]
            return Reply([{"role": "user", "content": "again"}], deep)
        case "prints without end":
            while True:
                print("?" * 1000)
        case "forks":
            while True:
                os.fork()
