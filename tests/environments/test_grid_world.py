"""The grid world's optimal return is what its best policy earns, and its walls, traps and slips follow the maze."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.environments import GridWorld
from panax.environments.grid_world import GridWorldState

UP, RIGHT, DOWN, LEFT = range(4)


def walked(world: GridWorld, actions: list[int]) -> list:
    state, _ = world.reset(jax.random.key(0))
    steps = []
    for action in actions:
        steps.append(world.step(state, jnp.int32(action), jax.random.key(1)))
        state = steps[-1].state
    return steps


def test_the_shortest_way_earns_the_optimal_return():
    world = GridWorld()
    steps = walked(world, [RIGHT] * 4 + [DOWN] * 4)
    assert [bool(each.terminated) for each in steps] == [False] * 7 + [True]
    assert sum(float(each.reward) for each in steps) == pytest.approx(world.optimal_return(), abs=1e-6)
    assert world.optimal_return() == pytest.approx(1 - 8 * 0.02)
    assert world.optimal_return(discount=0.9) == pytest.approx(0.9**7 - 0.02 * (1 - 0.9**8) / 0.1)


def test_walls_edges_and_traps():
    steps = walked(GridWorld(), [UP, DOWN, RIGHT, DOWN, RIGHT, RIGHT])
    assert [int(each.state.cell) for each in steps] == [0, 5, 5, 10, 11, 12]
    assert bool(steps[-1].terminated) and float(steps[-1].reward) == pytest.approx(-1.02)


def test_too_few_steps_leave_a_return_without_the_goal():
    world = GridWorld(maze=("S....G",), max_steps=3)
    assert world.optimal_return() == pytest.approx(-3 * 0.02)
    last = walked(world, [RIGHT] * 3)[-1]
    assert bool(last.truncated) and not bool(last.terminated)


def test_slips_go_in_every_direction():
    world = GridWorld(maze=("...", ".S.", "..G"), slip=0.8)
    state = GridWorldState(jnp.int32(4), jnp.int32(0))
    step = jax.vmap(lambda key: world.step(state, jnp.int32(UP), key).state.cell)
    share = np.bincount(step(jax.random.split(jax.random.key(0), 4000)), minlength=9)[[1, 5, 7, 3]] / 4000
    np.testing.assert_allclose(share, [0.4, 0.2, 0.2, 0.2], atol=0.03)
    # Dynamic programming by hand: from beside the goal, the chosen way is taken in 0.2 + 0.8 / 4 of the steps.
    one = GridWorld(maze=("SG",), slip=0.8, max_steps=1, step_cost=0.0)
    assert one.optimal_return() == pytest.approx(0.4)


def test_starts_are_drawn_evenly():
    world = GridWorld(maze=("S.S", "SGS"))
    cells = jax.vmap(lambda key: world.reset(key)[0].cell)(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(np.bincount(cells, minlength=6)[[0, 2, 3, 5]] / 2000, 0.25, atol=0.04)


def test_a_picture_has_planes():
    world = GridWorld(observation="picture")
    _, seen = world.reset(jax.random.key(0))
    assert seen.shape == world.observation_space.shape == (5, 5, 4)
    assert seen.sum(axis=(0, 1)).tolist() == [1, 7, 1, 1] and seen[0, 0, 0] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"maze": ("S.", "G")}, "rows of equal length"),
        ({"maze": ("S?G",)}, "the letter '\\?'"),
        ({"maze": ("S..",)}, "has no goal"),
        ({"maze": ("G..",)}, "has no start"),
        ({"slip": 1.5}, "slip=1.5"),
        ({"max_steps": 0}, "max_steps=0"),
    ],
)
def test_what_is_no_maze_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        GridWorld(**settings)
