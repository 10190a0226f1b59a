"""gymnasium's environments with spaces and values of forms that are met in the field; a process imports this file by name."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Odd(gymnasium.Env):
    """Its observations count the steps; an episode has 3."""

    observation_space = Box(-100, 100, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.array([self.time, 1], np.float32), 1.0, False, self.time >= 3, {}


class SameBuffer(Odd):
    """One array for all observations."""

    def __init__(self):
        self.buffer = np.zeros(2, np.float32)

    def reset(self, **given):
        super().reset(**given)
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action):
        seen, *rest = super().step(action)
        self.buffer[:] = seen
        return self.buffer, *rest


class ScalarBox(Odd):
    """Its reward is the action."""

    action_space = Box(-1.0, 1.0, ())

    def step(self, action):
        seen, _, *rest = super().step(action)
        assert self.action_space.contains(action), (action, type(action))
        return seen, float(action), *rest


class Bounds(Odd):
    action_space = Box(np.array([[-1, -1], [-9, -9]], np.float32), np.array([[1, 1], [9, 9]], np.float32))


class WholeNumbers(Odd):
    """int64 where its space is float32, a reward of shape (1,), flags as NumPy's."""

    def step(self, action):
        seen, _, *flags, info = super().step(action)
        return seen.astype(np.int64), np.array([2], np.uint8), *map(np.bool_, flags), info


class OldReset(Odd):
    """The form before gymnasium: no `info`."""

    def reset(self, **given):
        return super().reset(**given)[0]


class TwoRewards(Odd):
    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, np.ones(2), *rest


for one in (SameBuffer, ScalarBox, Bounds, WholeNumbers, OldReset, TwoRewards):
    gymnasium.register(f"Odd{one.__name__}-v0", entry_point=one)
