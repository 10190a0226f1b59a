"""Distillation from stored top-k: the definition over k + 1 events in float64, layouts, micro-batches, and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import torch

from panax.core import DataError, RecipeError
from panax.core.batch_checks import check_ranges
from panax.core.measures import total_loss
from panax.kernels import CrossEntropySettings
from panax.layers import Context
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, Distill, compute_logits
from panax.models.objectives.distill import TEACHER_LEAF, TEACHER_TOKENS_LEAF
from panax.models.objectives.objective import VocabularyHead
from panax.models.objectives.teacher_divergences import teacher_divergence, teacher_events
from panax.optim import Optax
from panax.testing import check_task
from panax.train import CompiledStep, Program, StepConfig

K = 6
OBJECTIVES = {
    "forward_kl": Distill(),
    "reverse_kl": Distill(divergence="reverse_kl", temperature=2.0),
    "js": Distill(divergence="js", beta=0.3, temperature=0.7, label_weight=0.4),
}


def batch(k: int = K, temperature: float = 1.0) -> dict[str, np.ndarray]:
    """Packed rows, one of them empty, with uneven masks and a random teacher's k best tokens, in no order."""
    made = pairs.lay(pairs.random_answers())
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(*made["tokens"].shape, pairs.MODEL.vocab_size)) * 2.0 / temperature
    log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    best = rng.permuted(np.argsort(-log, axis=-1)[..., :k], axis=-1).astype(np.int32)
    made["loss_mask"] *= rng.choice([1.0, 1.0, 0.5], made["loss_mask"].shape).astype(np.float32)
    made[TEACHER_TOKENS_LEAF] = best
    made[TEACHER_LEAF] = np.take_along_axis(log, best, axis=-1).astype(np.float32)
    # What is stored where nothing is learned is of no consequence.
    made[TEACHER_LEAF][made["loss_mask"] == 0.0], made[TEACHER_TOKENS_LEAF][made["loss_mask"] == 0.0] = 3.0, -7
    return made


def on_device(host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(leaf) for name, leaf in host.items()} | {"row": jnp.arange(len(host["tokens"]))}


def defined(logits: np.ndarray, host: dict[str, np.ndarray], objective: Distill) -> tuple[float, np.ndarray]:
    """The loss and its gradient by the logits, in float64 by torch: probabilities first, logarithms last."""
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(host["loss_mask"], dtype=torch.float64)
    counted = mask > 0
    ids = torch.where(counted[..., None], torch.tensor(host[TEACHER_TOKENS_LEAF]).long(), 0)
    p = torch.where(counted[..., None], torch.tensor(host[TEACHER_LEAF], dtype=torch.float64), 0.0).exp()[counted]
    q = torch.softmax(z / objective.temperature, dim=-1).gather(-1, ids)[counted]
    if ids.shape[-1] < z.shape[-1]:
        p, q = (torch.cat([each, 1.0 - each.sum(dim=-1, keepdim=True)], dim=-1) for each in (p, q))
    m = objective.beta * p + (1.0 - objective.beta) * q
    terms = {
        "forward_kl": p * (p / q).log(),
        "reverse_kl": q * (q / p).log(),
        "js": objective.beta * p * (p / m).log() + (1.0 - objective.beta) * q * (q / m).log(),
    }[objective.divergence]
    labels = torch.log_softmax(z, dim=-1).gather(-1, torch.tensor(host["targets"]).long()[..., None])[..., 0]
    loss = (terms.sum(dim=-1) * mask[counted]).sum() - objective.label_weight * (labels * mask).sum()
    (loss / mask.sum()).backward()
    assert z.grad is not None
    return float(loss.detach() / mask.sum()), z.grad.numpy()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_the_definition_over_the_events(name: str) -> None:
    """Values and gradients by all parameters: those of the logits, pulled back through the model."""
    objective = OBJECTIVES[name]
    task = DecoderTask(model=pairs.MODEL, objective=objective)
    params, state = jax.jit(task.init)(jax.random.key(0))
    host = batch(temperature=objective.temperature)
    rows = on_device(host)

    def logits_of(params: Any) -> jax.Array:
        hidden, _ = params(rows["tokens"], Context(rows["position"], rows["segment"]), dtype=jnp.float32)
        return compute_logits(params, hidden)

    def ours(params: Any) -> jax.Array:
        return total_loss(task.loss(params, state, rows, jax.random.key(0), True).losses)

    logits, pull = jax.vjp(logits_of, params)
    expected, d_logits = defined(np.asarray(logits), host, objective)
    (wanted,) = pull(jnp.asarray(d_logits, jnp.float32))
    found, gradients = jax.jit(jax.value_and_grad(ours))(params)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) + 1e-9


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_whole_vocabulary_is_the_divergence_of_trl(beta: float) -> None:
    """With its limits at 0 and 1, at a temperature, by the gradients of the logits."""
    from trl.experimental.gkd import GKDTrainer

    names: dict[float, Any] = {0.0: "forward_kl", 1.0: "reverse_kl"}
    objective = Distill(divergence=names.get(beta, "js"), beta=beta if 0.0 < beta < 1.0 else 0.5, temperature=1.5)
    rng = np.random.default_rng(0)
    vocab = pairs.MODEL.vocab_size
    student, teacher = (rng.normal(size=(2, 7, vocab)).astype(np.float32) * 3.0 for _ in range(2))
    labels = rng.integers(0, vocab, (2, 7))
    labels[0, :3] = -100
    z = torch.tensor(student, requires_grad=True)
    expected: Any = GKDTrainer.generalized_jsd_loss(
        z,
        torch.tensor(teacher),
        torch.tensor(labels),
        beta=beta,
        temperature=1.5,
        num_items_in_batch=int((labels >= 0).sum()),
    )
    expected.backward()
    ids = jnp.asarray(np.argsort(-teacher, axis=-1).astype(np.int32))
    stored = jnp.take_along_axis(jax.nn.log_softmax(jnp.asarray(teacher) / 1.5, axis=-1), ids, axis=-1)
    leaves = {
        "targets": jnp.asarray(np.maximum(labels, 0)), "loss_mask": jnp.asarray(labels >= 0, jnp.float32),
        TEACHER_TOKENS_LEAF: ids, TEACHER_LEAF: jnp.minimum(stored, 0.0),
    }  # fmt: skip

    def ours(logits: jax.Array) -> jax.Array:
        # The logits are the hidden states of a head that is the identity.
        head = VocabularyHead(logits, jnp.eye(vocab), CrossEntropySettings(), vocab)
        return total_loss(objective.compute(head, leaves, True)[0])

    found, gradient = jax.jit(jax.value_and_grad(ours))(jnp.asarray(student))
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert z.grad is not None
    assert np.linalg.norm(gradient - z.grad.numpy()) <= 1e-5 * np.linalg.norm(z.grad.numpy())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_model_like_its_teacher_has_no_divergence(name: str) -> None:
    """And any other has some: more than 0, however sharp either is."""
    rng = np.random.default_rng(0)
    objective = OBJECTIVES[name]
    for scale in (0.1, 1.0, 30.0):
        log = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 3, 11)) * scale, jnp.float32), axis=-1)
        events = teacher_events(log[..., :K], vocab_size=11)
        same, other = (
            teacher_divergence(events, each, objective.divergence, objective.beta)
            for each in (events, teacher_events(log[:, ::-1, :K], vocab_size=11))
        )
        np.testing.assert_allclose(same, 0.0, atol=1e-6)
        assert np.isfinite(other).all() and (np.asarray(other)[:, 0] > 0.0).all()


LAYOUTS = (
    {"fsdp": 2}, {"tensor": 4}, {"context": 4}, {"stage": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "context": 2},
    {"context": 2, "tensor": 2, "fsdp": 2}, {"stage": 2, "tensor": 2, "fsdp": 2}, {"replica": 2, "expert": 2},
)  # fmt: skip


def task_of(name: str) -> DecoderTask:
    return DecoderTask(model=pairs.MODEL, objective=OBJECTIVES[name])


def test_trains_like_one_device_where_rows_and_words_are_split() -> None:
    report = check_task(task_of("js"), batch(), layouts=[{"context": 2, "tensor": 2}])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"stage": 2, "context": 2}, {"replica": 2, "fsdp": 2}, {"stage": 2, "tensor": 2}])
def test_trains_like_one_device(sizes: dict[str, int]) -> None:
    report = check_task(task_of("js"), batch(), layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_trains_like_one_device_on_every_layout(name: str) -> None:
    report = check_task(task_of(name), batch(), layouts=LAYOUTS)
    assert len(report.compared) == len(LAYOUTS), report.left_out


@functools.cache
def gradient(micro_batches: int) -> tuple[list[np.ndarray], dict[str, float]]:
    import optax

    def keep(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"gradient": updates}

    keeping = optax.GradientTransformation(lambda params: {"gradient": jax.tree.map(jnp.zeros_like, params)}, keep)
    config = StepConfig(clip_norm=None, micro_batches=micro_batches)
    task = task_of("js")
    program = Program.create(task, Optax(transformation=keeping), num_steps=1, config=config)
    axes = {name: task.batch_axes[name] for name in batch()}
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), axes)
    state, scalars = step(step.init(0), step.put(batch()))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer_state["gradient"])]
    return leaves, {
        name: float(value) for name, value in scalars.items() if np.ndim(value) == 0 and hasattr(value, "dtype")
    }


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4, 8])
def test_micro_batches_with_uneven_masks_give_the_gradient_of_the_whole_batch(count: int) -> None:
    """One of the rows is empty, so that a micro-batch of one row has no target at all."""
    (whole, all_scalars), (parts, scalars) = gradient(1), gradient(count)
    distance = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(parts, whole, strict=True)))
    assert distance <= 2e-6 * np.sqrt(sum(np.sum(leaf**2) for leaf in whole))
    for name in ("loss", "loss/distillation", "loss/cross_entropy", "teacher/coverage", "teacher/accuracy"):
        assert scalars[name] == pytest.approx(all_scalars[name], rel=1e-5)


def test_an_empty_mask_is_no_loss_and_broken_values_are_errors() -> None:
    task = task_of("js")
    params, state = jax.jit(task.init)(jax.random.key(0))

    @jax.jit
    def both(rows: Any) -> Any:
        def loss(params: Any) -> Any:
            result = task.loss(params, state, rows, jax.random.key(0), True)
            return total_loss(result.losses), result.metrics

        return jax.value_and_grad(loss, has_aux=True)(params)

    right = batch()
    check_ranges(right, task.leaf_ranges)
    (_, metrics), _ = both(on_device(right))
    metrics["teacher_faults"].raise_if_failed("the batch")
    assert 0.2 < float(metrics["teacher/coverage"].value) < 0.9
    (value, metrics), gradients = both(on_device({**right, "loss_mask": np.zeros_like(right["loss_mask"])}))
    assert float(value) == 0.0 and all(np.all(leaf == 0.0) for leaf in jax.tree.leaves(gradients))
    metrics["teacher_faults"].raise_if_failed("the batch")
    doubled = {**right, TEACHER_LEAF: np.minimum(right[TEACHER_LEAF] + 1.0, 0.0)}
    (_, metrics), _ = both(on_device(doubled))
    with pytest.raises(
        DataError, match=r"probabilities of a position's teacher_tokens sum to more than 1.* Their sum: 2."
    ):
        metrics["teacher_faults"].raise_if_failed("the batch")
    place = tuple(np.argwhere(right["loss_mask"] > 0)[0])
    for leaf, value, message in (
        (TEACHER_LEAF, 0.1, r"'teacher_log_probabilities' holds 0.1 at .*takes 0 or less"),
        (TEACHER_LEAF, -np.inf, r"'teacher_log_probabilities' holds -inf"),
        (TEACHER_TOKENS_LEAF, pairs.MODEL.vocab_size, r"'teacher_tokens' holds \d+ at .*raise task.model.vocab_size"),
    ):
        broken = {name: array.copy() for name, array in right.items()}
        broken[leaf][(*place, 0)] = value
        with pytest.raises(DataError, match=message):
            check_ranges(broken, task.leaf_ranges)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distill(temperature=0.0), "objective.temperature=0.0; expected a positive number"),
        (lambda: Distill(divergence="js", beta=1.0), "objective.beta=1.0; expected a number between 0 and 1"),
        (lambda: Distill(beta=0.3), "objective.beta=0.3 has no effect with divergence='forward_kl'"),
        (lambda: Distill(label_weight=-1.0), "objective.label_weight=-1.0; expected 0 or more"),
        (lambda: DecoderTask(model=pairs.MODEL, objective=Distill(), z_loss=0.1), "task.z_loss=0.1 has no effect"),
    ],
)
def test_settings_without_meaning_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()
