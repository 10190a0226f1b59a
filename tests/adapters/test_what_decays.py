"""Weight decay, trust ratios and the choice of matrices follow what a parameter is, never where it is placed."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import panax
from panax.adapters import flax_linen
from panax.adapters.layouts import infer_meaning_axes
from panax.core import named_leaves
from panax.mesh import MeshShape
from panax.optim import AdamW, Lamb, Muon, Schedule, Sgd
from panax.optim.decay import uses_weight_decay
from panax.train import StepConfig

STEADY = Schedule(peak=0.1, decay="constant", warmup_steps=0)
PLACEMENTS = {
    "kept whole": {"up.kernel": (None, None)},
    "one dimension": {"up.kernel": (None, "features")},
    "the other": {"*.kernel": ("width", None)},
}
OPTIMIZERS = {
    "adamw": AdamW(schedule=STEADY, weight_decay=0.1),
    "lamb": Lamb(schedule=STEADY, weight_decay=0.1),
    "muon": Muon(schedule=STEADY, weight_decay=0.1),
    "clipped": Sgd(schedule=STEADY),
}
BATCH = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.LayerNorm(name="norm")(nn.Dense(16, name="up")(x)))


def moved(sharding, name: str) -> dict[str, np.ndarray]:
    """How far each parameter moves in one step."""
    task = flax_linen.task(
        Net(), lambda model, batch: (model(batch["x"]) ** 2).mean(), example=BATCH, sharding=sharding
    )
    config = StepConfig(clip_ratio=0.01) if name == "clipped" else StepConfig()
    step = panax.compile_step(
        task, BATCH, OPTIMIZERS[name], mesh=MeshShape(replica=1, fsdp=1), devices=jax.devices()[:1], config=config
    )
    state = step.init()
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
    state, _ = step(state, BATCH)
    return {name: np.asarray(leaf) - before[name] for name, leaf in named_leaves(state.params).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_placement_changes_no_update(name):
    wanted = moved({}, name)
    for words, sharding in PLACEMENTS.items():
        found = moved(sharding, name)
        for parameter, change in wanted.items():
            np.testing.assert_allclose(found[parameter], change, rtol=1e-5, atol=1e-7, err_msg=f"{words}: {parameter}")


@pytest.mark.parametrize(
    ("path", "shape", "kind", "named", "expected"),
    [
        ("up.kernel", (64, 256), None, None, True),
        ("up.kernel", (64, 256), None, (None, "features"), True),
        ("up.kernel", (64, 256), "in_out", (None, None), True),
        ("wte.embedding", (96, 64), "embedding", None, True),
        ("conv.kernel", (3, 3, 16, 32), None, None, True),
        ("up.bias", (256,), None, ("features",), False),
        ("layers.mlp.up.bias", (12, 256), None, None, False),
        ("layers.norm.scale", (12, 256), None, ("layer", "norm"), False),
        ("layers.norm1.weight", (12, 256), None, None, False),
        ("layers.ln_1.weight", (12, 256), None, None, False),
        ("block.layer_norm.offset", (12, 256), None, None, False),
        ("batch_normalization.gamma", (12, 256), None, None, False),
        ("query.bias", (8, 4), None, ("heads", "head_dim"), False),
    ],
)
def test_what_decays_is_read_off_what_a_parameter_is(path, shape, kind, named, expected):
    assert uses_weight_decay(infer_meaning_axes(path, shape, kind, named)) is expected
