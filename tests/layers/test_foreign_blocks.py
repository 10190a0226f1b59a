"""A user's block on meshes that split rows: right, or refused by name before the first step."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from panax.core import named_leaves, normal, parameter
from panax.core.errors import LayoutError, RecipeError
from panax.layers import Attention, Block, Norm, StagedTask
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask
from panax.models.decoder.blocks import build_transformer_block
from panax.optim import Schedule, Sgd
from panax.spmd import gather
from panax.train import CompiledStep, Program, StepConfig


class Pointwise(Block):
    """Each position by itself."""

    norm: Norm
    w: Float[Array, "embed"] = parameter(normal(std=1.0))  # noqa: F821

    def __call__(self, x, context, state=None):
        return x + jnp.tanh(self.norm(x) * gather(self.w, "embed", x.dtype)[None, None]), None


class Filter(Block):
    """A causal filter of three taps: reads the two positions before."""

    norm: Norm
    taps: Float[Array, "tap embed"] = parameter(normal(std=1.0))

    def __call__(self, x, context, state=None):
        y, taps = self.norm(x), gather(self.taps, "tap embed", x.dtype)
        shifted = [jnp.pad(y, ((0, 0), (back, 0), (0, 0)))[:, : y.shape[1]] for back in range(3)]
        return x + sum(taps[back][None, None] * each for back, each in enumerate(shifted)), None


class FilterOfRows(Filter):
    positions: ClassVar[Any] = "row"


class Attending(Block):
    """Written with Panax's own parts, which know shards."""

    norm: Norm
    attention: Attention

    def __call__(self, x, context, state=None):
        y = self.norm(x)
        return x + self.attention(y, context.position, context.segment, context.attention), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    kind: type = Pointwise

    def block(self, key, kind):
        layer = build_transformer_block(key, self, kind)
        if self.kind is Attending:
            return Attending(layer.attention_norm, layer.attention)
        sizes = {"embed": self.embed, "norm": self.embed, "tap": 3}
        return self.kind.create(key, sizes, norm=layer.attention_norm)


def step_of(kind, mesh):
    task = DecoderTask(model=Config(vocab_size=64, max_length=16, embed=16, num_layers=2, heads=2, ffn=16, kind=kind))
    sizes = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1) | mesh
    program = Program.create(
        task, Sgd(schedule=Schedule(peak=0.1, decay="constant")), num_steps=4, config=StepConfig(clip_norm=None)
    )
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    axes = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
    return CompiledStep(program, Placement.create(MeshShape(**sizes), devices=devices), axes)


def trained(kind, mesh):
    step, rng = step_of(kind, mesh), np.random.default_rng(0)
    batch = {name: rng.integers(0, 64, (4, 16)).astype(np.int32) for name in ("tokens", "targets")}
    batch["loss_mask"] = np.ones((4, 16), np.float32)
    state, scalars = step(step.init(0), step.put(batch))
    return float(scalars["loss"]), {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}


MESHES = [{"tensor": 2}, {"context": 2}, {"context": 2, "tensor": 2, "fsdp": 2}]


@pytest.fixture(scope="module")
def alone():
    return {kind: trained(kind, {}) for kind in (Pointwise, FilterOfRows, Attending)}


@pytest.mark.parametrize("mesh", MESHES, ids="x".join)
@pytest.mark.parametrize("kind", [Pointwise, FilterOfRows, Attending])
def test_a_block_trains_as_on_one_device(kind, mesh, alone):
    loss, params = trained(kind, mesh)
    assert loss == pytest.approx(alone[kind][0], rel=1e-5)
    for name, leaf in alone[kind][1].items():
        np.testing.assert_allclose(params[name], leaf, atol=1e-5 * np.abs(leaf).max(), err_msg=name)


@pytest.mark.parametrize("mesh", MESHES, ids="x".join)
def test_a_block_that_reads_its_neighbours_is_refused_by_name(mesh):
    with pytest.raises(LayoutError, match=r'Filter gives different results on the mesh .* Write `positions = "row"`'):
        trained(Filter, mesh)


def test_one_device_and_data_parallel_meshes_compare_nothing(monkeypatch):
    from panax.layers import foreign_blocks

    monkeypatch.setattr(foreign_blocks, "_check", lambda *_: pytest.fail("compared"))
    trained(Filter, {"fsdp": 2})


def test_losses_that_layers_report_need_a_weight():
    class Reporting(DecoderTask):
        def layer_metrics(self, reports, count, train):
            return {}, {}

        count_tokens = StagedTask.count_tokens

    task = Reporting(model=DecoderConfig(vocab_size=64, max_length=16, embed=16, num_layers=1, heads=2, ffn=16))
    with pytest.raises(RecipeError, match="has `layer_metrics` but no `count_tokens`"):
        task.count_tokens({})
