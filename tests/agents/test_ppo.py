"""PPO as a task: on any mesh, resumed, with any policy, and never taught that a time limit is a death."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_steps import step_of, taken
from agents.tiny_environments import Copy, Endless, Growing, Recall, Sick

import panax
from panax.agents import DecoderPolicy, PerceptronPolicy, Ppo, RecurrentPolicy, Seeds
from panax.agents.episodes import Episodes, evaluation_result
from panax.agents.rollouts import collect_rollout, next_values
from panax.checkpoint import CheckpointConfig
from panax.core import named_leaves
from panax.core.errors import DataError, RecipeError
from panax.environments import Box, CartPole, Pendulum
from panax.mesh import MeshShape
from panax.models import DecoderConfig
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import CompiledStep, Program, StepConfig

SMALL = PerceptronPolicy(hidden=(16,))
TASK = Ppo(
    environment=CartPole(max_steps=20),
    policy=SMALL,
    environments=8,
    steps=16,
    rollouts_per_step=2,
    epochs=2,
    minibatches=2,
    ent_coef=0.01,
    normalize_observations=True,
    normalize_rewards=True,
    evaluation_episodes=8,
    evaluation_steps=30,
)


def judged(step: CompiledStep, state) -> dict[str, Any]:
    rows = step.program.task.evaluation_rows  # pyright: ignore
    return step.evaluate(state, step.put({"row": np.arange(rows, dtype=np.int32)}))["metrics"]


@pytest.fixture(scope="module")
def on_one_device():
    state, scalars = taken(step_of(TASK), 2)
    return jax.device_get(state), scalars


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(MeshShape(fsdp=8), marks=pytest.mark.slow), MeshShape(replica=2, fsdp=4)],
    ids=["fsdp", "replicas"],
)
def test_layouts_equal_one_device(mesh, on_one_device):
    """Parameters, environments and statistics; float32 sums in another order."""
    step = step_of(TASK, mesh)
    state, scalars = taken(step, 2)
    for (name, a), b in zip(named_leaves(on_one_device[0]).items(), jax.tree.leaves(jax.device_get(state))):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4, err_msg=name)
    assert scalars["episodes"] == on_one_device[1]["episodes"] > 0
    held = state.model_state["acting"].ongoing.observation
    assert held.addressable_shards[0].data.shape == (1, 4), "an environment on each device"
    text = step.get_compiled({"row": jax.ShapeDtypeStruct((8,), np.int32)}).as_text()
    assert "all-gather(" not in text and "all-to-all(" not in text, "no step of a rollout leaves its device"


def test_a_minibatch_has_as_many_steps_of_each_environment_and_a_pass_has_all():
    state = step_of(TASK).init(0)
    row = jnp.arange(8, dtype=jnp.int32)
    collected = jax.jit(TASK.collect)(state.params, state.model_state, {"row": row}, jax.random.key(5))
    experience = dict(collected.experience)
    # Each step says whose it is, and which.
    numbers = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16, 1)
    experience["transitions"] = {**experience["transitions"], "value": numbers}
    batches = [TASK.minibatch(experience, {}, jnp.int32(i), jax.random.key(0)) for i in range(TASK.updates)]
    for first in (0, 2):
        seen = [np.asarray(batches[first + i]["value"]).ravel() for i in range(2)]
        assert sorted(np.concatenate(seen)) == list(range(8 * 16))
        assert all((np.bincount(each.astype(int) // 16) == 8).all() for each in seen)
    assert (batches[0]["value"] != batches[2]["value"]).any(), "each pass has another order"
    assert float(batches[0]["advantage"].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(batches[0]["advantage"].std()) == pytest.approx(1.0, abs=1e-3)


def experiment(task, folder, **settings) -> Experiment:
    return Experiment(
        task=task,
        optimizer=AdamW(schedule=Schedule(peak=1e-3, decay="constant")),
        directory=str(folder),
        step=StepConfig(clip_norm=None if isinstance(task, Seeds) else 0.5),
        checkpoint=CheckpointConfig(every=1),
        **{"num_steps": 4, "evaluate": EvaluateConfig(every=0), **settings},
    )


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path):
    """To the last bit, environments, their statistics and unfinished episodes included."""
    uninterrupted = panax.fit(experiment(TASK, tmp_path / "whole"))

    class Stop(panax.hooks.Hook):
        def after_step(self, run):
            if run.step == 2:
                run.stop("half of it")

    cut = experiment(TASK, tmp_path / "cut")
    first = panax.fit(dataclasses.replace(cut, hooks=(Stop(),)))
    assert first.step == 2
    resumed = panax.fit(cut)
    for (name, a), b in zip(named_leaves(uninterrupted.state).items(), jax.tree.leaves(resumed.state)):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (np.asarray(a) == np.asarray(b)).all(), name
    assert panax.evaluate(tmp_path / "cut") == pytest.approx(dict(resumed.evaluation))


@pytest.mark.parametrize(
    "policy",
    [PerceptronPolicy(hidden=()), pytest.param(RecurrentPolicy(memory=4, hidden=4), marks=pytest.mark.slow)],
    ids=["plain", "gru"],
)
def test_a_time_limit_is_not_a_death(policy):
    """All states look alike and are worth 10: those before the limit as well. Were it a death, they would be worth less than 3.

    Bootstrapping from the observation after the reset would be seen too: the recurrent policy's memory is empty there.
    """

    def value_of(environment) -> np.ndarray:
        task = Ppo(
            environment=environment, policy=policy, environments=4, steps=16, rollouts_per_step=20, discount=0.9, gae_lambda=0.9,
            minibatches=1, epochs=4, normalize_advantages=False,
        )  # fmt: skip
        step = step_of(task, rate=3e-2)
        state, _ = taken(step, 8)
        actor = task.actor(state.params, state.model_state)
        memory = policy.initial_carry(4)
        return np.asarray(task.policy.act(actor.params, memory, jnp.ones((4, 1)))[1].value)

    assert value_of(Endless()) == pytest.approx(10.0, abs=0.7)
    # The mean over the four steps before the death, if the policy can't count them.
    assert (value_of(Endless(dies=True)) < 3.5).all()


@pytest.mark.parametrize("policy", [SMALL, RecurrentPolicy(memory=8, hidden=8)], ids=["plain", "gru"])
def test_values_of_final_observations_are_those_before_the_reset(policy):
    """Of a plain policy they are found in one pass, of a recurrent one step by step: both as the policy itself says them."""
    environment, row = CartPole(max_steps=3), jnp.arange(8, dtype=jnp.int32)
    task = dataclasses.replace(TASK, environment=environment, policy=policy, normalize_observations=False)
    params, state = jax.jit(task.init)(jax.random.key(1))
    actor = task.actor(params, state)
    _, rollout = jax.jit(lambda acting: collect_rollout(environment, actor, acting, row, jax.random.key(2), 16))(
        state["acting"]
    )
    values = next_values(actor, rollout)
    assert rollout.truncated.sum() == 5 * 8 and not rollout.terminated.any()
    at, who = map(int, np.argwhere(np.asarray(rollout.truncated))[3])
    memory = jax.tree.map(lambda leaf: leaf[at], rollout.memory)
    remembered, _ = policy.act(params.policy, memory, rollout.observation[at])
    bootstrap = policy.act(params.policy, remembered, rollout.final_observation[at])[1].value[who]
    assert values[at, who] == pytest.approx(float(bootstrap), abs=1e-6)
    assert values[at, who] != pytest.approx(float(rollout.value[at + 1, who]), abs=1e-6), "after the reset"


def test_a_recurrent_policy_is_trained_as_it_acted():
    """Its log-probabilities over pieces equal those of the rollout, episodes' ends within a piece included."""
    task = dataclasses.replace(
        TASK, environment=Recall(steps=3), policy=RecurrentPolicy(memory=8, hidden=8, first_gain=1.0), bptt_length=8,
        normalize_observations=False,
    )  # fmt: skip
    params, state = jax.jit(task.init)(jax.random.key(1))
    collect = jax.jit(task.collect)
    collected = collect(params, state, {"row": jnp.arange(8, dtype=jnp.int32)}, jax.random.key(2))
    again = {**state, **collected.kept}
    collected = collect(params, again, {"row": jnp.arange(8, dtype=jnp.int32)}, jax.random.key(3))
    batch = task.minibatch(collected.experience, {}, jnp.int32(1), jax.random.key(0))
    assert batch["begins"].any() and batch["begins"].shape == (8, 8)
    result = task.loss(params, {}, batch, jax.random.key(0), True)
    assert float(result.metrics["divergence"].value) == pytest.approx(0.0, abs=1e-9)  # pyright: ignore
    forgotten = {**batch, "begins": jnp.ones_like(batch["begins"])}
    other = task.loss(params, {}, forgotten, jax.random.key(0), True)
    assert float(other.metrics["divergence"].value) > 1e-7  # pyright: ignore


def trained_return(task, steps, rate=1e-2) -> float:
    step = step_of(task, rate=rate)
    state, _ = taken(step, steps)
    return float(judged(step, state)["return"].value)


@pytest.mark.slow
def test_a_memory_learns_what_no_plain_policy_can():
    settings = {"environment": Recall(), "environments": 16, "steps": 32, "rollouts_per_step": 10, "ent_coef": 0.01}
    settings |= {"evaluation_episodes": 64, "evaluation_steps": 10, "discount": 0.95}
    policy = RecurrentPolicy(memory=16, hidden=16)
    assert trained_return(Ppo(policy=policy, bptt_length=8, **settings), 6) > 0.95
    assert trained_return(Ppo(policy=SMALL, **settings), 6) < 0.75


@pytest.mark.slow
def test_a_decoder_is_a_policy():
    """The module that language models are; its weights rest split as they do there."""
    model = DecoderConfig(vocab_size=4, max_length=2, embed=32, num_layers=1, heads=2, ffn=64)
    task = Ppo(
        environment=Copy(), policy=DecoderPolicy(model=model), environments=64, steps=8, rollouts_per_step=6, minibatches=2,
        evaluation_episodes=64, evaluation_steps=1, normalize_observations=False,
    )  # fmt: skip
    step = step_of(task, MeshShape(fsdp=4, replica=2), rate=3e-3)
    state, _ = taken(step, 5)
    assert "fsdp" in str(state.params.policy.decoder.embedding.table.sharding.spec)
    assert float(judged(step, state)["return"].value) > 0.9, "chance is 0.2"
    with pytest.raises(RecipeError, match="observation is 2 numbers up to 8; the decoder takes 2 up to 3"):
        Program.create(dataclasses.replace(task, environment=Copy(digits=9)), AdamW(), num_steps=1)


@pytest.mark.slow
def test_seeds_side_by_side_train_as_each_alone():
    task = dataclasses.replace(TASK, rollouts_per_step=1)
    state, scalars = taken(step_of(Seeds(task=task, count=3, clip_norm=0.5), clip_norm=None), 2)

    class OfOneSeed(Ppo):
        """The agent, with the keys that it has as the second of three."""

        def init(self, key):
            return super().init(jax.random.fold_in(key, 1))

        def collect(self, params, state, batch, key):
            return super().collect(params, state, batch, jax.random.fold_in(key, 1))

    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    alone, bootstrap = taken(step_of(OfOneSeed(**fields)), 2)
    assert any((leaf[0] != leaf[1]).any() for leaf in jax.tree.leaves(state.params))
    for (name, a), b in zip(named_leaves(state.params).items(), jax.tree.leaves(alone.params)):
        np.testing.assert_allclose(a[1], b, atol=1e-5, err_msg=name)
    assert scalars["episode_return/seed1"] == pytest.approx(float(bootstrap["episode_return"]))
    with pytest.raises(RecipeError, match=r"step.clip_norm=0.5.*of all runs of Seeds as one"):
        step_of(Seeds(task=task))


def test_updates_end_at_the_target_divergence():
    task = dataclasses.replace(TASK, rollouts_per_step=1, epochs=10, target_kl=1e-3)
    _, scalars = taken(step_of(task, rate=3e-2), 1)
    assert 1 <= scalars["updates"] < 20 and scalars["divergence"] <= 1.5e-3


@pytest.mark.slow
def test_continuous_actions_are_trained():
    """Two collections of a pendulum; that it is learned is the recipe's to show."""
    task = Ppo(environment=Pendulum(), policy=SMALL, environments=4, steps=16, continuous="squashed", minibatches=2)
    state, scalars = taken(step_of(task), 1)
    assert state.params.log_deviation.shape == (1,) and float(state.params.log_deviation[0]) != 0.0
    assert np.isfinite(scalars["loss"]) and scalars["skipped"] == 0


def test_an_evaluation_is_of_whole_episodes_with_an_interval():
    step = step_of(TASK)
    evaluation = judged(step, step.init(0))
    assert evaluation["episodes"].value == 8 and evaluation["unfinished"].value == 0
    assert 5 < float(evaluation["return"].value) <= 20 and float(evaluation["return"].value) == float(
        evaluation["length"].value
    )
    totals = jnp.array([1.0, 2.0, 4.0, 9.0])
    sample = evaluation_result(Episodes(totals, jnp.ones(4, jnp.int32), jnp.array([True] * 3 + [False])), {}).metrics
    assert sample["unfinished"].value == 1
    figures = sample["return"].statistics()  # pyright: ignore
    # scipy.stats.t.interval(0.95, 3) is 3.1824 standard errors wide on each side.
    assert figures["_std"] == pytest.approx(np.std(np.asarray(totals), ddof=1))
    assert figures["_ci95"] == pytest.approx(3.1824 * np.std(np.asarray(totals), ddof=1) / 2, rel=0.01)


def test_an_environment_that_returns_nan_or_changes_shapes_is_one_clear_message(tmp_path):
    with pytest.raises(DataError, match="step 1: the environment returned a reward that is not finite: nan"):
        panax.fit(experiment(dataclasses.replace(TASK, environment=Sick()), tmp_path / "sick"))
    with pytest.raises(RecipeError, match=r"Growing.step changes the state's leaf state from .* same shape"):
        panax.fit(experiment(dataclasses.replace(TASK, environment=Growing()), tmp_path / "growing"))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"steps": 10, "minibatches": 4}, "task.steps=10 does not divide into minibatches=4 .* multiple of 4"),
        ({"bptt_length": 4}, "bptt_length=4 has no effect: PerceptronPolicy has no memory"),
        ({"gae_lambda": 1.5}, r"task.gae_lambda=1.5; expected a number in \[0, 1\]"),
        ({"dual_clip": 0.5}, "task.dual_clip=0.5; expected more than 1"),
        ({"environments": 0}, "task.environments=0; expected 1 or more"),
        ({"environment": Copy()}, "normalize_observations is for a Box of float32, and observations are Box"),
        ({"clip": -1.0}, "task.clip=-1.0; expected more than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changed, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(TASK, **changed)


def test_environments_that_devices_do_not_divide_are_refused():
    with pytest.raises(panax.core.LayoutError, match="environment=4 is not divisible by fsdp=8"):
        step_of(dataclasses.replace(TASK, environments=4), MeshShape(fsdp=8))
    assert isinstance(TASK.environment.observation_space, Box)
