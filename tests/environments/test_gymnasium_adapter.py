"""gymnasium's environments in processes of the host: what they give, that they end, and what becomes of broken ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import panax
from panax.agents import Dqn
from panax.core import DataFacts, RecipeError, TrainingError
from panax.environments import Box, CartPole, Discrete, EnvironmentBatch, Gymnasium
from panax.environments.host_pool import HostPool
from panax.run import Experiment

FOLDER = str(Path(__file__).parent)


def pool(name: str = "CartPole-v1", count: int = 3, processes: int = 2, timeout: float = 60.0, **settings) -> HostPool:
    return HostPool(name, count, processes=processes, settings=settings, timeout_seconds=timeout)


@pytest.fixture
def sick(monkeypatch):
    """Finds `sick_gymnasium.py` in the processes too."""
    monkeypatch.syspath_prepend(FOLDER)
    return "sick_gymnasium:Sick-v0"


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "panax.environments.host_worker" in each.cmdline()]


def test_a_pool_steps_as_gymnasium_does_and_its_processes_end():
    ours, theirs = pool(), [gymnasium.make("CartPole-v1") for _ in range(3)]
    assert len(children()) == 2
    seen = ours.reset([5, 6, 7])
    np.testing.assert_array_equal(seen, np.stack([each.reset(seed=5 + n)[0] for n, each in enumerate(theirs)]))
    ends = 0
    for number in range(25):
        actions, seeds = np.array([0, 1, number % 2], np.int32), [number, 100 + number, 200 + number]
        actual = ours.step(actions, seeds)
        for row, each in enumerate(theirs):
            led_to, reward, terminated, truncated, _ = each.step(int(actions[row]))
            np.testing.assert_array_equal(actual.final_observation[row], led_to)
            assert (actual.reward[row], actual.terminated[row], actual.truncated[row]) == (
                reward,
                terminated,
                truncated,
            )
            observation = each.reset(seed=seeds[row])[0] if terminated else led_to
            np.testing.assert_array_equal(actual.observation[row], observation)
            ends += terminated
    assert ends >= 2
    ours.close()
    assert not children()
    with pytest.raises(TrainingError, match="are closed"):
        ours.reset([1, 2, 3])


@pytest.mark.parametrize(
    ("sickness", "message"),
    [
        ("raises", "an environment of sick_gymnasium:Sick-v0 raised ValueError: the arm is broken"),
        ("dies", r"process \d of the environments of sick_gymnasium:Sick-v0 died \(exit code 7\)"),
        ("hangs", "has not answered for 1 seconds"),
        ("forks and dies", r"process \d of the environments of sick_gymnasium:Sick-v0 died \(exit code 7\)"),
        ("forks and hangs", "has not answered for 1 seconds"),
    ],
)
def test_an_environment_that_breaks_is_one_message_and_ends_the_others(sick, sickness, message):
    ours = pool(sick, sickness=sickness, timeout=60.0)
    pids = {process.pid for process in ours._processes}
    ours.reset([0, 1, 2])
    ours._timeout = 1.0 if "hangs" in sickness else 60.0
    for _ in range(2):
        ours.step(np.zeros(3, np.int32), [0, 1, 2])
    with pytest.raises(TrainingError, match=message) as raised:
        ours.step(np.zeros(3, np.int32), [0, 1, 2])
    assert "\n" not in str(raised.value)
    assert ours.closed and not children()
    nothing_left(pids)


def test_what_an_environment_has_forked_ends_with_it(sick):
    ours = pool(sick, sickness="forks")
    pids = {process.pid for process in ours._processes}
    ours.reset([0, 1, 2])
    for _ in range(3):
        ours.step(np.zeros(3, np.int32), [0, 1, 2])
    assert len(in_groups(pids)) == 5
    ours.close()
    nothing_left(pids)


def test_what_hangs_ends_with_a_program_that_is_killed(sick):
    code = (
        "from panax.environments.host_pool import HostPool\n"
        f"pool = HostPool({sick!r}, 1, processes=1, settings={{'sickness': 'forks and hangs'}}, timeout_seconds=60.0)\n"
        "pool.reset([0])\n"
        "print(pool._processes[0].pid, flush=True)\n"
        "import numpy as np\n"
        "while True: pool.step(np.zeros(1, np.int32), [0])\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, *sys.path])}
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=paths)
    assert program.stdout is not None
    pids = {int(program.stdout.readline())}
    deadline = time.monotonic() + 30
    while len(in_groups(pids)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program.kill()
    program.communicate(timeout=30)
    nothing_left(pids)


def in_groups(pids: set[int]) -> list[int]:
    """Processes of these groups that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in pids and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def nothing_left(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while left := in_groups(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_what_gymnasium_can_not_make_is_refused(sick):
    with pytest.raises(RecipeError, match=r"can't make 'CartPol-v1': .*NameNotFound"):
        Gymnasium(name="CartPol-v1")
    with pytest.raises(RecipeError, match="RuntimeError: no license"):
        Gymnasium(name=sick, settings={"sickness": "unmade"})
    with pytest.raises(RecipeError, match="processes=65; expected 1 to 64"):
        Gymnasium(name="CartPole-v1", processes=65)
    assert not children()


def test_it_runs_in_a_compiled_loop_and_ends_with_a_word():
    environment = Gymnasium(name="CartPole-v1", processes=2)
    assert environment.action_space == Discrete(count=2) and isinstance(environment.observation_space, Box)
    np.testing.assert_allclose(environment.observation_space.upper, CartPole().observation_space.upper, rtol=1e-6)
    batch, index = EnvironmentBatch(environment), jnp.arange(4)

    def step(ongoing, number):
        after = batch.step(ongoing, jnp.ones(4, jnp.int32), jax.random.fold_in(jax.random.key(1), number), index)
        return after.environment_state, (ongoing, after)

    run = jax.jit(lambda ongoing: jax.lax.scan(step, ongoing, jnp.arange(30)))
    begun = jax.jit(batch.reset)(jax.random.key(0), index)
    last, (before, after) = jax.device_get(run(begun))
    # Each step is ours from gymnasium's state: the host's environments followed the actions of the loop.
    ours = jax.vmap(jax.vmap(lambda seen: CartPole().step(_state(seen), jnp.int32(1), jax.random.key(0)).observation))
    np.testing.assert_allclose(after.final_observation, ours(before.observation), atol=1e-5)
    assert after.terminated.any() and not after.truncated.any()
    np.testing.assert_array_equal(before.observation[1:], after.environment_state.observation[:-1])
    # From the same state again: these episodes are past, so they are cut, and others begin.
    _, (_, again) = jax.device_get(run(begun))
    assert again.truncated[0].all() and not again.terminated[0].any() and (again.reward[0] == 0).all()
    np.testing.assert_array_equal(again.final_observation[0], begun.observation)
    assert (again.episode_length[1] == 1).all()
    assert len(children()) == 2
    environment.close()
    assert not children()
    assert last.state.steps.tolist() == [30] * 4


@pytest.mark.slow
def test_a_run_trains_on_it_and_an_environment_that_breaks_ends_it_with_one_message(sick, tmp_path, caplog):
    def experiment(name, environment):
        task = Dqn(
            environment=environment, environments=4, steps=2, rollouts_per_step=4, batch_size=16, capacity=64, warmup=8,
            evaluation_episodes=2, evaluation_steps=600,
        )  # fmt: skip
        return Experiment(task=task, num_steps=2, directory=str(tmp_path / name))

    environment = Gymnasium(name="CartPole-v1", processes=2)
    result = panax.fit(experiment("well", environment), quiet=True, devices=jax.devices()[:1])
    assert result.evaluation["return"] >= 8 and result.evaluation["unfinished"] == 0
    assert len(children()) == 4, "two processes to train in, and two to evaluate in"
    environment.close()
    with pytest.raises(TrainingError, match=r"^an environment of sick_gymnasium:Sick-v0 raised ValueError: the arm is"):
        panax.fit(
            experiment("ill", Gymnasium(name=sick, settings={"sickness": "raises"})),
            quiet=True,
            devices=jax.devices()[:1],
        )
    assert not children() and not [record for record in caplog.records if record.levelname == "ERROR"]


def _state(seen):
    from panax.environments.cart_pole import CartPoleState

    return CartPoleState(seen, jnp.int32(0))


def test_processes_end_with_the_program(tmp_path):
    code = (
        "from panax.environments.host_pool import HostPool\n"
        "pool = HostPool('CartPole-v1', 2, processes=2, settings={}, timeout_seconds=60.0)\n"
        "print(*(process.pid for process in pool._processes), flush=True)\n"
        "import os, sys; os._exit(0) if sys.argv[1] == 'at once' else None\n"
    )
    for how in ("usually", "at once"):
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=paths)
        pids = [int(each) for each in done.stdout.split()]
        assert len(pids) == 2, done.stderr
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_job_of_several_processes_refuses_it(monkeypatch):
    environment = Gymnasium(name="CartPole-v1", processes=1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        RecipeError, match=r"^Gymnasium\(name='CartPole-v1'\) is stepped by one host, and this job has 2"
    ):
        Dqn(environment=environment).adapt_to_data(DataFacts())
