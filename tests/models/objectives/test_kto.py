"""KTO: the definition from whole logits, TRL's trainer, layouts, and refusals of whatever splits the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest

from panax.core import LayoutError, RecipeError
from panax.layers import Context
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, Kto, compute_logits
from panax.models.objectives.kto import LABEL_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF
from panax.testing import check_task
from panax.train import CompiledStep, Program, StepConfig
from panax.train.assembly.setting_checks import check_rows_together

TASK = DecoderTask(model=pairs.MODEL, objective=Kto(beta=0.3, desirable_weight=0.7, undesirable_weight=1.2))


def labeled() -> dict[str, np.ndarray]:
    """Pairs, of which the first segment is the answer to judge, good in every other."""
    batch = pairs.batch()
    number = (batch["segment"] + 1) // 2 + np.arange(len(batch["tokens"]))[:, None]
    # With a reference of less probability, the divergence is above 0.
    batch[REFERENCE_LEAF] -= 2.0
    return {**batch, LABEL_LEAF: np.where(batch["segment"] > 0, number % 2, 0).astype(np.int32)}


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()} | {"row": jnp.arange(len(batch["tokens"]))}


@pytest.mark.full
def test_equals_the_definition() -> None:
    host = labeled()
    batch = on_device(host)
    params, state = jax.jit(TASK.init)(jax.random.key(0))
    places = [(row, number) for row, each in enumerate(host["segment"]) for number in range(1, each.max() + 1)]
    good = np.array([host[LABEL_LEAF][row][host["segment"][row] == number][0] for row, number in places[::2]])
    assert 0 < good.sum() < len(good) == 10

    def ours(params: Any) -> Any:
        result = TASK.loss(params, state, batch, jax.random.key(0), True)
        return result.losses["kto"].mean, result.metrics

    def defined(params: Any) -> Any:
        hidden, _ = params(batch["tokens"], Context(batch["position"], batch["segment"]), dtype=jnp.float32)
        log = jax.nn.log_softmax(compute_logits(params, hidden), axis=-1)
        log = jnp.take_along_axis(log, batch["targets"][..., None], axis=-1)[..., 0] - batch[REFERENCE_LEAF]
        ratios = jnp.stack(
            [
                jnp.where(host["segment"][row] == number, log[row] * host["loss_mask"][row], 0.0).sum()
                for row, number in places
            ]
        )
        divergence = jnp.maximum(jax.lax.stop_gradient(ratios[1::2].mean()), 0.0)
        gain = 0.3 * (ratios[::2] - divergence)
        losses = jnp.where(good > 0, 0.7 * (1 - jax.nn.sigmoid(gain)), 1.2 * (1 - jax.nn.sigmoid(-gain)))
        return losses.mean(), divergence

    (found, metrics), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, divergence), wanted = jax.jit(jax.value_and_grad(defined, has_aux=True))(params)
    assert float(divergence) > 0.0 and float(metrics["kl"].value) == pytest.approx(float(divergence), rel=1e-5)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= 2e-5 * np.linalg.norm(other) + 1e-9


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"context": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"replica": 2, "fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
)
def test_trains_like_one_device(sizes: dict[str, int]) -> None:
    report = check_task(TASK, labeled(), layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


def test_whatever_splits_the_batch_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"step.micro_batches=2: the loss of DecoderTask compares each row with all others"
    ):
        check_rows_together(TASK, StepConfig(micro_batches=2), None)
    program = Program.create(TASK, pairs.ADAMW, num_steps=1)
    axes = dict.fromkeys(labeled(), ("batch", "seq"))
    with pytest.raises(LayoutError, match="stage"):
        CompiledStep(program, Placement.create(MeshShape(stage=2), devices=jax.devices()[:2]), axes)
    with pytest.raises(RecipeError, match=r"objective.undesirable_weight=0.0; expected a positive number"):
        Kto(undesirable_weight=0.0)
