"""`GridWorld`: a walk through a maze given as text, with the best return of any policy."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ..core.errors import RecipeError, suggest_name
from .canvas import BLUE, DARK, GREEN, PALE, RED, blank_frame, fill_circle, fill_rectangle
from .environment import Action, Environment, EnvironmentStep, Frame, Observation
from .spaces import Box, Discrete

_MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
"""Up, right, down, left: the change of (row, column) by each action."""

_FREE, _START, _GOAL, _TRAP, _WALL = ".SGX#"
_CELL = 16

ObservationKind = Literal["cell", "picture"]


class GridWorldState(eqx.Module):
    """A walker in a maze.

    Attributes:
        cell: Index of the cell: row times the maze's width, plus column.
        time: Steps taken.
    """

    cell: Int[Array, ""]
    time: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridWorld(Environment):
    """A walk from a start to the goal: each step costs `step_cost`, the goal gives 1 and a trap takes 1; both
    end the episode.

    `optimal_return` computes the return of the best policy.

    Attributes:
        maze: Rows of equal length: `S` a start (drawn uniformly if there are several), `G` a goal, `X` a
            trap, `#` a wall, `.` free.
        slip: Probability that a step goes in a uniformly drawn direction, instead of the chosen one.
        step_cost: Cost of each step.
        max_steps: Number of steps after which an episode is truncated.
        observation: "cell", one-hot of the walker's cell; "picture", (row, column, plane) with planes for the
            walker, walls, goals and traps.
    """

    maze: tuple[str, ...] = ("S....", ".###.", "..X#.", "#..#.", "...#G")
    slip: float = 0.0
    step_cost: float = 0.02
    max_steps: int = 50
    observation: ObservationKind = "cell"

    def __post_init__(self) -> None:
        if not self.maze or len({len(row) for row in self.maze}) != 1 or not self.maze[0]:
            raise RecipeError(f"GridWorld.maze={self.maze}; expected rows of equal length")
        letters = set("".join(self.maze))
        for letter in sorted(letters - set(_FREE + _START + _GOAL + _TRAP + _WALL)):
            raise RecipeError(f"GridWorld.maze has the letter {letter!r}; {suggest_name(letter, '.SGX#')}")
        for letter, name in ((_START, "start"), (_GOAL, "goal")):
            if letter not in letters:
                raise RecipeError(f"GridWorld.maze={self.maze} has no {name}; mark its position with {letter!r}")
        if not 0.0 <= self.slip <= 1.0:
            raise RecipeError(f"GridWorld.slip={self.slip}; expected a share of the steps, in [0, 1]")
        if self.max_steps < 1:
            raise RecipeError(f"GridWorld.max_steps={self.max_steps}; expected 1 or more")

    @property
    def observation_space(self) -> Box:
        rows, columns = len(self.maze), len(self.maze[0])
        return Box(low=0.0, high=1.0, shape=(rows * columns,) if self.observation == "cell" else (rows, columns, 4))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=4)

    @property
    def seconds_per_frame(self) -> float:
        return 0.2

    def reset(self, key: Key[Array, ""]) -> tuple[GridWorldState, Observation]:
        starts = np.flatnonzero(self._is(_START))
        cell = jnp.asarray(starts, jnp.int32)[jax.random.randint(key, (), 0, len(starts))]
        return GridWorldState(cell, jnp.int32(0)), self._observe(cell)

    def step(self, state: GridWorldState, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        if self.slip:
            slips, direction = jax.random.split(key)
            drawn = jax.random.randint(direction, (), 0, 4, jnp.int32)
            action = jnp.where(jax.random.bernoulli(slips, self.slip), drawn, action)
        cell = jnp.asarray(self._next(), jnp.int32)[state.cell, action]
        after = GridWorldState(cell, state.time + 1)
        reward = jnp.asarray(self._rewards(), jnp.float32)[cell]
        ends = jnp.asarray(self._is(_GOAL) | self._is(_TRAP))[cell]
        return EnvironmentStep(after, self._observe(cell), reward, ends, after.time >= self.max_steps)

    def optimal_return(self, discount: float = 1.0) -> float:
        """Compute the expected return of the best policy, over starts and slips, within `max_steps`: by
        dynamic programming, in float64.

        >>> round(GridWorld(maze=("S.G",), step_cost=0.02).optimal_return(), 2)
        0.96
        """
        after, ends = self._next(), self._is(_GOAL) | self._is(_TRAP)
        value = np.zeros(len(ends))
        for _ in range(self.max_steps):
            of_action = self._rewards()[after] + discount * np.where(ends, 0.0, value)[after]
            slipped = (1 - self.slip) * of_action + self.slip * of_action.mean(axis=1, keepdims=True)
            value = slipped.max(axis=1)
        return float(value[self._is(_START)].mean())

    def render(self, state: GridWorldState) -> Frame:
        rows, columns = len(self.maze), len(self.maze[0])
        frame = blank_frame(rows * _CELL, columns * _CELL)
        colors = {_WALL: DARK, _GOAL: GREEN, _TRAP: RED, _START: PALE}
        for row, letters in enumerate(self.maze):
            for column, letter in enumerate(letters):
                if letter in colors:
                    place = (row * _CELL, column * _CELL)
                    fill_rectangle(frame, place, (place[0] + _CELL, place[1] + _CELL), colors[letter])
        row, column = divmod(int(state.cell), columns)
        fill_circle(frame, ((row + 0.5) * _CELL, (column + 0.5) * _CELL), _CELL / 3, BLUE)
        return frame

    def _is(self, letter: str) -> np.ndarray:
        """Return True for each cell in which the maze has this letter."""
        return np.array([each == letter for each in "".join(self.maze)])

    def _rewards(self) -> Float[np.ndarray, " cell"]:
        """Return the reward of a step into each cell."""
        return self._is(_GOAL) * 1.0 - self._is(_TRAP) * 1.0 - self.step_cost

    def _next(self) -> Int[np.ndarray, "cell 4"]:
        """Return the cell to which each action leads from each cell; at a wall or the edge the walker stays."""
        rows, columns = len(self.maze), len(self.maze[0])
        cells = np.arange(rows * columns)
        row, column = (each[:, None] + moves for each, moves in zip(divmod(cells, columns), _MOVES.T))
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        ahead = np.where(inside, row * columns + column, cells[:, None])
        return np.where(self._is(_WALL)[ahead], cells[:, None], ahead)

    def _observe(self, cell: Int[Array, ""]) -> Observation:
        rows, columns = len(self.maze), len(self.maze[0])
        here = (jnp.arange(rows * columns) == cell).astype(jnp.float32)
        if self.observation == "cell":
            return here
        planes = [jnp.asarray(self._is(letter), jnp.float32) for letter in (_WALL, _GOAL, _TRAP)]
        return jnp.stack([here, *planes], axis=-1).reshape(rows, columns, 4)
