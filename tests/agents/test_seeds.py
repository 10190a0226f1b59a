"""`Seeds` passes on its agent's properties, or refuses the agent."""

import dataclasses

import jax
import numpy as np
import pytest
from agent_steps import step_of
from agents.tiny_environments import Endless

from panax.agents import Dqn, PerceptronPolicy, Ppo, Seeds, replay
from panax.agents.seeds import FORWARDED, NOT_FORWARDED
from panax.core import CollectingTask
from panax.core.errors import RecipeError
from panax.mesh import MeshShape

SMALL = PerceptronPolicy(hidden=(4,))
PPO = Ppo(environment=Endless(), policy=SMALL, environments=8, steps=4)
DQN = Dqn(environment=Endless(), policy=SMALL, environments=8, batch_size=8, capacity=8000, warmup=1)


def test_every_setting_of_a_task_is_passed_on_or_named():
    """A new method of tasks fails here until somebody decides what it means for several runs."""
    said = {name for name in dir(CollectingTask) if not name.startswith("_")}
    passed_on = said & vars(Seeds).keys()
    assert said == passed_on | set(FORWARDED) | set(NOT_FORWARDED)
    assert not passed_on & {*FORWARDED, *NOT_FORWARDED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telling(Ppo):
    """Says something else than other tasks wherever `Seeds` passes it on."""

    policy: PerceptronPolicy = SMALL
    matmul_precision = "bfloat16"
    mesh_axes = frozenset({"fsdp"})
    batch_axes = {"row": ("batch", None)}  # noqa: RUF012
    frozen_parameters = ("policy.critic.layers.0.w",)
    notes = ("it is slow",)
    remat_policies = ("none", "full")

    @property
    def leaf_ranges(self):
        return {"row": range(8)}

    def rematerialize(self, policy):
        return dataclasses.replace(self, steps=8)

    def debug_variant(self):
        return dataclasses.replace(self, steps=12)

    def flops_per_example(self):
        return 5.0

    def check_rows(self, batch):
        raise RecipeError("it does not like these rows")


def test_what_is_passed_on_arrives():
    task = Telling(environment=Endless(), environments=8, steps=4)
    seeds = Seeds(task=task, count=2)
    passed_on = "matmul_precision mesh_axes batch_axes frozen_parameters notes remat_policies leaf_ranges"
    for name in passed_on.split():
        assert getattr(seeds, name) == getattr(task, name) != getattr(PPO, name), name
    assert seeds.rematerialize("full") == Seeds(task=dataclasses.replace(task, steps=8), count=2)
    assert seeds.debug_variant() == Seeds(task=dataclasses.replace(task, steps=12), count=2)
    assert seeds.flops_per_example() == 10.0 and Seeds(task=PPO).flops_per_example() is None
    with pytest.raises(RecipeError, match="it does not like these rows"):
        seeds.check_rows({"row": jax.ShapeDtypeStruct((8,), np.int32)})


class OfGivenWeights(Ppo):
    def load_initial(self, shardings):
        return super().load_initial(shardings)


class WithFloat16(Ppo):
    @property
    def scales_loss(self):
        return True


class NamingAxes(Ppo):
    names_axes = True


@pytest.mark.parametrize(
    ("kind", "name"), [(OfGivenWeights, "load_initial"), (WithFloat16, "scales_loss"), (NamingAxes, "names_axes")]
)
def test_an_agent_that_sends_unsupported_settings_is_refused(kind, name):
    """A method, a property and an attribute."""
    with pytest.raises(RecipeError, match=rf"{kind.__name__}.{name} has no effect in Seeds, .*; train it alone"):
        Seeds(task=kind(environment=Endless(), policy=SMALL))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTheHost(Endless):
    lives_on_host = True


def test_environments_of_the_host_are_refused():
    with pytest.raises(RecipeError, match="OfTheHost is stepped on the host, which does it for one run at a time"):
        Seeds(task=dataclasses.replace(PPO, environment=OfTheHost()))


def test_buffers_that_fit_alone_and_not_together_are_refused_before_they_are_made(monkeypatch):
    """One of a transition has 2 * 4 bytes of observations, 4 of an action, 4 of a reward and 1 flag, on each of two devices."""
    monkeypatch.setattr(replay, "_free_bytes", lambda sharding: 2 * 4000 * 17)
    mesh = MeshShape(fsdp=2, replica=1)
    step_of(Seeds(task=DQN, count=2), mesh, clip_norm=None).init(0)
    with pytest.raises(
        RecipeError,
        match=r"task.capacity=8,000, in each of 3 runs side by side: the replay buffer takes 204,000 bytes on each device "
        r"\(408,000 in all, 17 for a transition\), and there are 136,000; .*lower Seeds.count",
    ):
        step_of(Seeds(task=DQN, count=3), mesh, clip_norm=None).init(0)
