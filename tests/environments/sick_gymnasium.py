"""gymnasium's environments that raise, die or hang in their third step; a process imports this file by name."""

import os
import time

import gymnasium
import numpy as np


class Sick(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sickness: str = "none", render_mode=None):
        if sickness == "unmade":
            raise RuntimeError("no license")
        self._sickness, self._steps = sickness, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        print("an environment may print")
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 3:
            if self._sickness == "raises":
                raise ValueError("the arm is\nbroken")
            if self._sickness == "dies":
                os._exit(7)
            if self._sickness.startswith("forks") and not os.fork():
                time.sleep(600)  # as a simulator's own process
            if self._sickness == "forks and dies":
                os._exit(7)
            if self._sickness in ("hangs", "forks and hangs"):
                time.sleep(600)
        return np.full(2, 0.1 * self._steps, np.float32), 1.0, False, self._steps >= 5, {}


gymnasium.register("Sick-v0", entry_point=Sick)
