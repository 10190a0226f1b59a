"""A stand-in for verifiers 0.1: a game of guesses, by the protocol of its MultiTurnEnv."""

from . import types


class Rubric:
    async def score_rollout(self, state):
        guesses = [step["completion"][0]["content"] for step in state["trajectory"]]
        state["reward"] = state["found"] - 0.1 * len(guesses)
        state["metrics"] = {}


class Game:
    rubric = Rubric()

    def __init__(self, low, keeps_object=False):
        self.low, self.keeps_object = low, keeps_object

    def get_dataset(self, n=-1, seed=None):
        return [
            {
                "prompt": [{"role": "user", "content": f"Guess {n}."}],
                "answer": str(self.low + n),
                "example_id": n,
                "info": {},
            }
            for n in range(3)
        ]

    async def setup_state(self, state):
        state["found"], state["secret"] = 0, int(state["answer"])
        if self.keeps_object:
            state["game"] = object()

    async def is_completed(self, state):
        return len(state["trajectory"]) >= 4

    async def env_response(self, messages, state):
        guess = int(messages[-1]["content"])
        if guess == state["secret"]:
            state["found"], state["final_env_response"] = 1, [{"role": "user", "content": "found"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < state["secret"] else "lower"}]


def load_environment(name, **settings):
    assert name == "game" and issubclass(types.State, dict)
    return Game(**settings)
