"""DQN and SAC as tasks: their losses in NumPy, on any mesh, resumed with their buffers; a time limit is not a death."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_steps import step_of as step_with
from agent_steps import taken
from agents.tiny_environments import Copy, Endless, Sick

import panax
from panax.agents import DecoderPolicy, Dqn, PerceptronPolicy, RecurrentPolicy, Sac
from panax.checkpoint import CheckpointConfig
from panax.core import named_leaves
from panax.core.errors import DataError, RecipeError
from panax.environments import GridWorld, Pendulum
from panax.mesh import MeshShape
from panax.models import DecoderConfig
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig

SMALL = PerceptronPolicy(hidden=(8,), activation="relu", first_gain=1.0)
COMMON = {
    "environments": 8, "steps": 2, "rollouts_per_step": 4, "updates": 2, "batch_size": 32, "capacity": 128, "warmup": 4,
    "tau": 0.1, "evaluation_episodes": 8, "evaluation_steps": 12, "policy": SMALL,
}  # fmt: skip
DQN = Dqn(environment=GridWorld(maze=("S.X", "..G"), max_steps=6), dueling=True, epsilon_steps=100, **COMMON)
SAC = Sac(environment=Pendulum(max_steps=10), critic_hidden=(8,), **COMMON)

step_of = functools.partial(step_with, clip_norm=None, b2=AdamW().b2)


def layers(network, x: np.ndarray) -> np.ndarray:
    """A perceptron with ReLUs, in NumPy."""
    for number, layer in enumerate(network.layers):
        x = x @ np.asarray(layer.w) + np.asarray(layer.b)
        x = np.maximum(x, 0.0) if number < len(network.layers) - 1 else x
    return x


@functools.cache
def begun(agent: str) -> tuple:
    """The first parameters and state, and parameters of another seed."""
    init = jax.jit({"dqn": DQN, "sac": SAC}[agent].init)
    return *init(jax.random.key(0)), init(jax.random.key(7))[0]


def drawn_batch(task, updates: int = 0) -> tuple:
    """Parameters, state and a minibatch after `init`, with target networks that differ from those that are trained."""
    params, model_state, other = begun(task.name)
    model_state = {**model_state, "target": task.target_network_source(other)}
    experience = {"replay": model_state["replay"], "row": jnp.arange(task.rows)}
    batch = dict(task.minibatch(experience, model_state, jnp.int32(updates), jax.random.key(3)))
    return params, model_state, {**batch, "row": jnp.arange(task.batch_size, dtype=jnp.int32)}


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_of_dqn_in_numpy(double):
    task = dataclasses.replace(DQN, double=double)
    params, state, batch = drawn_batch(task)
    transitions = {name: np.asarray(leaf) for name, leaf in batch.items()}
    assert transitions["terminated"].any() and not transitions["terminated"].all()

    def values(network, seen):
        advantage, value = layers(network.policy.actor, seen), layers(network.policy.critic, seen)
        return value + advantage - advantage.mean(axis=1, keepdims=True)

    total = 0.0
    predicted, following = (
        values(params, transitions["observation"]),
        values(state["target"], transitions["next_observation"]),
    )
    picked_by = values(params, transitions["next_observation"]) if double else following
    for row in range(task.batch_size):
        target = transitions["reward"][row]
        if not transitions["terminated"][row]:
            target += 0.99 * following[row, picked_by[row].argmax()]
        distance = abs(predicted[row, transitions["action"][row]] - target)
        total += 0.5 * distance**2 if distance <= 1 else distance - 0.5
    evaluation = task.loss(params, state, batch, jax.random.key(0), True).losses["value"]
    assert float(evaluation.sum) == pytest.approx(total, rel=1e-5) and float(evaluation.weight) == task.batch_size


def test_the_losses_of_sac_in_numpy():
    params, state, batch = drawn_batch(SAC)
    params = dataclasses.replace(params, log_temperature=jnp.float32(-0.7))
    transitions = {name: np.asarray(leaf) for name, leaf in batch.items()}
    key = jax.random.key(5)

    def drawn(seen, own_key):
        mean, log_deviation = np.split(layers(params.actor.actor, seen), 2, axis=1)
        log_deviation = np.clip(log_deviation, -20, 2)
        keys = jax.vmap(lambda row: jax.random.fold_in(own_key, row))(batch["row"])
        noise = np.asarray(jax.vmap(lambda each: jax.random.normal(each, (1,), jnp.float32))(keys))
        raw = mean + np.exp(log_deviation) * noise
        log_prob = (-0.5 * noise**2 - log_deviation - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(raw) ** 2)).sum(1)
        return np.tanh(raw), log_prob

    def critics(networks, seen, unit):
        return np.stack([layers(each, np.concatenate([seen, unit], 1))[:, 0] for each in networks.each])

    now_key, next_key = jax.random.split(key)
    unit, log_prob = drawn(transitions["next_observation"], next_key)
    following = critics(state["target"], transitions["next_observation"], unit).min(0) - np.exp(-0.7) * log_prob
    target = transitions["reward"] + 0.99 * np.where(transitions["terminated"], 0.0, following)
    valued = critics(params.critics, transitions["observation"], transitions["action"])
    unit, log_prob = drawn(transitions["observation"], now_key)
    expected = {
        "critic": 0.5 * ((valued - target) ** 2).sum(),
        "actor": (np.exp(-0.7) * log_prob - critics(params.critics, transitions["observation"], unit).min(0)).sum(),
        "temperature": (0.7 * (log_prob - 1.0)).sum(),
    }
    actual = SAC.loss(params, state, batch, key, True).losses
    assert {name: float(each.sum) for name, each in actual.items()} == pytest.approx(expected, rel=1e-4)


def test_each_loss_of_sac_moves_what_it_is_of():
    params, state, batch = drawn_batch(SAC)
    moved = {"critic": "critics", "actor": "actor", "temperature": "log_temperature"}

    def of(name):
        return jax.grad(lambda p: SAC.loss(p, state, batch, jax.random.key(5), True).losses[name].sum)(params)

    for name, part in moved.items():
        touched = {
            path.split(".")[0] for path, leaf in named_leaves(of(name)).items() if np.abs(np.asarray(leaf)).max() > 0
        }
        assert touched == {part}, name


@pytest.fixture(scope="module", params=["dqn", "sac"])
def task(request):
    return {"dqn": DQN, "sac": SAC}[request.param]


@pytest.fixture(scope="module")
def on_one_device(task):
    return jax.device_get(taken(step_of(task), 2))


@pytest.mark.parametrize(
    "mesh",
    [MeshShape(replica=2, fsdp=4), pytest.param(MeshShape(fsdp=8), marks=pytest.mark.slow)],
    ids=["replicas", "fsdp"],
)
def test_layouts_equal_one_device(task, mesh, on_one_device):
    """Parameters, target networks and buffers; float32 sums in another order."""
    step = step_of(task, mesh)
    state, scalars = taken(step, 2)
    for (name, a), b in zip(named_leaves(on_one_device[0]).items(), jax.tree.leaves(jax.device_get(state))):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4, err_msg=name)
    assert scalars["transitions_kept"] == on_one_device[1]["transitions_kept"] == 8 * (14 + 16 + 16 + 16) / 4
    held = state.model_state["replay"].experience.observation
    assert held.addressable_shards[0].data.shape[:2] == (1, 16), "an environment's ring on each device"
    text = step.get_compiled({"row": jax.ShapeDtypeStruct((8,), np.int32)}).as_text()
    assert "all-gather(" not in text and "all-to-all(" not in text, "no transition leaves its device"


def experiment(task, folder, **settings) -> Experiment:
    return Experiment(
        task=task,
        optimizer=AdamW(schedule=Schedule(peak=1e-3, decay="constant")),
        directory=str(folder),
        step=StepConfig(clip_norm=None),
        checkpoint=CheckpointConfig(every=1),
        **{"num_steps": 4, "evaluate": EvaluateConfig(every=0), **settings},
    )


def test_a_run_that_was_cut_off_ends_as_one_that_was_not(task, tmp_path):
    """To the last bit, the buffer included."""
    uninterrupted = panax.fit(experiment(task, tmp_path / "whole"))

    class Stop(panax.hooks.Hook):
        def after_step(self, run):
            if run.step == 2:
                run.stop("half of it")

    cut = experiment(task, tmp_path / "cut")
    assert panax.fit(dataclasses.replace(cut, hooks=(Stop(),))).step == 2
    resumed = panax.fit(cut)
    names = named_leaves(uninterrupted.state)
    assert any("replay.experience.observation" in name for name in names)
    for (name, a), b in zip(names.items(), jax.tree.leaves(resumed.state)):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (np.asarray(a) == np.asarray(b)).all(), name
    assert panax.evaluate(tmp_path / "cut") == pytest.approx(dict(resumed.evaluation))


@pytest.mark.slow
def test_a_time_limit_is_not_a_death_to_what_is_learned():
    """All states look alike: each is worth 10 at a time limit, and less at a terminal state."""

    def value_of(environment) -> np.ndarray:
        settings = {
            **COMMON,
            "policy": PerceptronPolicy(hidden=(), first_gain=1.0),
            "updates": 4,
            "rollouts_per_step": 100,
        }
        task = Dqn(environment=environment, discount=0.9, error="squared", **settings)
        state, _ = taken(step_of(task, rate=3e-2), 4)
        return np.asarray(task.values(state.params, jnp.ones((1, 1))))

    assert value_of(Endless()) == pytest.approx(10.0, abs=0.5)
    # The mean of what is left in 1 to 4 steps, each followed by the mean itself: 1 / (1 - 0.9 * 3/4).
    assert value_of(Endless(dies=True)) == pytest.approx(1 / (1 - 0.9 * 0.75), abs=0.5)


@pytest.mark.slow
def test_a_buffer_is_changed_in_place():
    """The memory of a step besides its state does not grow with the buffer."""

    def bytes_of(capacity: int) -> tuple[int, int]:
        memory = step_of(dataclasses.replace(SAC, capacity=capacity)).get_compiled(
            {"row": jax.ShapeDtypeStruct((8,), np.int32)}
        ).memory_analysis()  # fmt: skip
        return memory.temp_size_in_bytes, memory.alias_size_in_bytes

    (small, kept), (large, kept_more) = bytes_of(16_000), bytes_of(1_600_000)
    assert large < small + 4096 and kept_more > kept + 1_500_000 * 30


@pytest.mark.slow
def test_a_decoder_values_actions():
    model = DecoderConfig(vocab_size=4, max_length=2, embed=32, num_layers=1, heads=2, ffn=64)
    settings = {**COMMON, "policy": DecoderPolicy(model=model), "rollouts_per_step": 200, "capacity": 4096}
    task = Dqn(environment=Copy(), epsilon_steps=2000, **{**settings, "evaluation_episodes": 64, "evaluation_steps": 1})
    step = step_of(task, MeshShape(fsdp=4, replica=2), rate=3e-3)
    state, _ = taken(step, 3)
    rows = step.put({"row": np.arange(64, dtype=np.int32)})
    assert float(step.evaluate(state, rows)["metrics"]["return"].value) > 0.9, "chance is 0.2"


def test_a_target_network_follows_its_settings():
    hard = dataclasses.replace(DQN, tau=1.0, target_update_interval=3)
    params, state, _ = begun("dqn")
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    followed = [state]
    for _ in range(3):
        followed.append(jax.jit(hard.update_state)(other, followed[-1]))
    first = [np.asarray(jax.tree.leaves(each["target"])[0]) for each in followed]
    np.testing.assert_array_equal(first[2], first[0])
    np.testing.assert_array_equal(first[3], np.asarray(jax.tree.leaves(other)[0]))
    soft = jax.jit(DQN.update_state)(other, state)
    np.testing.assert_allclose(jax.tree.leaves(soft["target"])[0], first[0] + 0.1, rtol=1e-5)


def test_random_actions_grow_fewer():
    task = dataclasses.replace(DQN, epsilon=(1.0, 0.2), epsilon_steps=400)
    params, state, _ = begun("dqn")
    explore = jax.jit(
        lambda added: task.exploration_policy(params, dataclasses.replace(state["replay"], added=added))(seen, keys)
    )
    seen, keys = jnp.tile(state["acting"].ongoing.observation[:1], (4000, 1)), jax.random.split(jax.random.key(1), 4000)
    best = int(task.greedy_action(params, seen[:1])[0])
    for added, share in ((0, 1.0), (25, 0.6), (50, 0.2), (500, 0.2)):
        # One in four of the random ones is the best one too.
        assert np.mean(np.asarray(explore(jnp.int32(added))) != best) == pytest.approx(share * 0.75, abs=0.03)


def test_an_environment_that_gives_nan_ends_the_run(tmp_path):
    """Also before the first step, in the initial content of the buffer."""
    task = Dqn(environment=Sick(), **COMMON)
    with pytest.raises(DataError, match="step 1: the environment returned a reward that is not finite: nan"):
        panax.fit(experiment(task, tmp_path))


def test_what_was_wrong_once_is_not_forgotten():
    """The buffer still holds it, so that no update is made when the environment has recovered."""
    params, state, _ = begun("dqn")
    assert np.isneginf(state["faults"]).all()
    collect = jax.jit(lambda state: DQN.collect(params, state, {"row": jnp.arange(8)}, jax.random.key(1)))
    ill = collect({**state, "faults": jnp.array([jnp.nan, -jnp.inf], jnp.float32)})
    assert ill.metrics["environment"].has_failed and np.isnan(ill.kept["faults"][0])  # pyright: ignore
    assert not collect(state).metrics["environment"].has_failed  # pyright: ignore


def test_a_buffer_larger_than_memory_is_refused_before_it_is_made(tmp_path):
    task = dataclasses.replace(DQN, capacity=2**33)
    with pytest.raises(RecipeError, match=r"task.capacity=8,589,934,592: the replay buffer takes [\d,]+ bytes on each"):
        panax.fit(experiment(task, tmp_path))


@pytest.mark.parametrize(
    ("base", "changed", "message"),
    [
        (DQN, {"batch_size": 30}, "batch_size=30; expected a multiple of environments = 8"),
        (DQN, {"capacity": 100}, r"capacity=100; expected a multiple of environments \* steps = 16"),
        (DQN, {"warmup": 3}, "warmup=3; expected a multiple of steps = 2"),
        (DQN, {"warmup": 200}, "expected at most 16"),
        (DQN, {"tau": 0.0}, r"tau=0.0; expected a share in \(0, 1\]"),
        (DQN, {"epsilon": (1.5, 0.0)}, "epsilon=.1.5"),
        (DQN, {"environment": Pendulum()}, "use Sac or Ppo"),
        (DQN, {"policy": RecurrentPolicy()}, "RecurrentPolicy has a memory"),
        (SAC, {"environment": GridWorld()}, "use Dqn or Ppo"),
        (SAC, {"first_temperature": 0.0}, "first_temperature=0.0; expected more than 0"),
        (SAC, {"policy": RecurrentPolicy()}, "RecurrentPolicy has a memory"),
    ],
)
def test_settings_that_mean_nothing_are_refused(base, changed, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(base, **changed)
