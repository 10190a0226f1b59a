"""Preference pairs: the definitions in NumPy, whole logits, every layout, and errors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest

from panax.core import DataError, LayoutError, RecipeError
from panax.core.measures import total_loss
from panax.layers import Context
from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, LoRA, Preference, compute_logits
from panax.models.objectives.answer_order import number_targets, weight_longer_parts
from panax.models.objectives.preference import REFERENCE_LEAF
from panax.models.objectives.preference_losses import PREFERENCE_LOSSES, Answers, Pairs
from panax.models.objectives.segment_totals import find_slots
from panax.optim import Optax
from panax.parallel import Pipeline
from panax.testing import check_task
from panax.train import CompiledStep, Program, StepConfig
from panax.train.assembly.setting_checks import check_rows_together

BETA = 0.3


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.log(sigmoid(x))


@dataclasses.dataclass(frozen=True)
class Defined:
    """Sums of a pair: w of the winner, l of the loser; r are logarithms of ratios, a averages, n numbers of tokens."""

    w: np.ndarray
    l: np.ndarray  # noqa: E741
    ref_w: np.ndarray
    ref_l: np.ndarray
    n_w: np.ndarray
    n_l: np.ndarray

    @property
    def r_w(self) -> np.ndarray:
        return self.w - self.ref_w

    @property
    def r_l(self) -> np.ndarray:
        return self.l - self.ref_l

    @property
    def d(self) -> np.ndarray:
        return BETA * (self.r_w - self.r_l)

    @property
    def per_token(self) -> np.ndarray:
        return self.r_w / self.n_w - self.r_l / self.n_l


def log_odds(p: Defined) -> np.ndarray:
    chosen, rejected = np.exp(p.w / p.n_w), np.exp(p.l / p.n_l)
    return np.log(chosen / (1.0 - chosen)) - np.log(rejected / (1.0 - rejected))


def sorted_loss(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """In the order of `one`."""
    d = BETA * (one - np.sort(other)[np.argsort(np.argsort(one))])
    return -(1 - SMOOTHING) * log_sigmoid(d) - SMOOTHING * log_sigmoid(-d)


SMOOTHING = 0.1
DEFINITIONS: dict[str, Callable[[Defined], np.ndarray]] = {
    "sigmoid": lambda p: -(1 - SMOOTHING) * log_sigmoid(p.d) - SMOOTHING * log_sigmoid(-p.d),
    "hinge": lambda p: np.maximum(0.0, 1.0 - p.d),
    "ipo": lambda p: (p.per_token - 1 / (2 * BETA)) ** 2,
    "robust": lambda p: (-(1 - SMOOTHING) * log_sigmoid(p.d) + SMOOTHING * log_sigmoid(-p.d)) / (1 - 2 * SMOOTHING),
    # The divergence of the model's choice from the labels' distribution.
    "exo_pair": lambda p: (
        sigmoid(p.d) * np.log(sigmoid(p.d) / (1 - SMOOTHING)) + sigmoid(-p.d) * np.log(sigmoid(-p.d) / SMOOTHING)
    ),
    "nca_pair": lambda p: (
        -log_sigmoid(BETA * p.r_w) - 0.5 * log_sigmoid(-BETA * p.r_w) - 0.5 * log_sigmoid(-BETA * p.r_l)
    ),
    "bco_pair": lambda p: -log_sigmoid(BETA * p.r_w) - log_sigmoid(-BETA * p.r_l),
    "sppo_hard": lambda p: (p.r_w - 1 / (2 * BETA)) ** 2 + (p.r_l + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda p: 1 - sigmoid(BETA * p.r_w) + sigmoid(BETA * p.r_l),
    "apo_down": lambda p: sigmoid(BETA * p.r_w) + 1 - sigmoid(BETA * (p.r_w - p.r_l)),
    "discopop": lambda p: (1 - sigmoid(p.d / 0.05)) * -log_sigmoid(p.d) + sigmoid(p.d / 0.05) * np.exp(-p.d),
    "sigmoid_norm": lambda p: -log_sigmoid(BETA * p.per_token),
    "aot": lambda p: sorted_loss(p.w - p.l, p.ref_w - p.ref_l),
    "aot_unpaired": lambda p: sorted_loss(p.r_w, p.r_l),
    "orpo": lambda p: -BETA * log_sigmoid(log_odds(p)),
    "simpo": lambda p: (
        -(1 - SMOOTHING) * log_sigmoid(BETA * (p.w / p.n_w - p.l / p.n_l) - 0.5)
        - SMOOTHING * log_sigmoid(0.5 - BETA * (p.w / p.n_w - p.l / p.n_l))
    ),
    "cpo": lambda p: -(1 - SMOOTHING) * log_sigmoid(BETA * (p.w - p.l)) - SMOOTHING * log_sigmoid(-BETA * (p.w - p.l)),
}


def settings_of(loss: str, **changes: Any) -> Preference:
    smoothing = {"label_smoothing": SMOOTHING} if "label_smoothing" in PREFERENCE_LOSSES[loss].settings else {}
    return Preference(loss=loss, beta=BETA, **smoothing, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_each_loss_is_its_definition(loss: str) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, (2, 64)).astype(np.float64)
    policy, reference = (-rng.uniform(0.05, 3.0, (2, 64)) * counts for _ in range(2))
    expected = DEFINITIONS[loss](Defined(*policy, *reference, *counts))
    sides = [
        Answers(*(jnp.asarray(each[side], jnp.float32) for each in (policy, reference, counts))) for side in (0, 1)
    ]
    found = PREFERENCE_LOSSES[loss].compute(Pairs(*sides), settings_of(loss))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_divergences_replace_the_ratio_by_a_derivative(divergence: str) -> None:
    """Of f, at the ratio of probabilities t, by differences: up to a constant, which the margin is without."""
    functions: dict[str, Callable[[Any], Any]] = {
        "forward_kl": lambda t: -np.log(t),
        "js": lambda t: t * np.log(t) - (t + 1) * np.log((t + 1) / 2),
        "alpha": lambda t: (t**0.5 - 0.5 * t - 0.5) / (0.5 * -0.5),
    }
    ratios = np.array([[0.5, -1.0, 2.0], [-0.3, 0.4, 1.0]])
    t, step = np.exp(ratios), 1e-6
    f = functions[divergence]
    derivative = (f(t + step) - f(t - step)) / (2 * step)
    expected = np.log(1 + np.exp(-BETA * (derivative[0] - derivative[1])))
    zero, one = jnp.zeros(3), jnp.ones(3)
    sides = Pairs(*(Answers(jnp.asarray(ratio, jnp.float32), zero, one) for ratio in ratios))
    found = PREFERENCE_LOSSES["sigmoid"].compute(sides, Preference(beta=BETA, divergence=divergence))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()} | {"row": jnp.arange(len(batch["tokens"]))}


def test_pairs_in_rows_are_those_of_whole_logits() -> None:
    """Loss, with the cross-entropy of chosen answers, and gradients; rows with two pairs, one, and none."""
    objective = Preference(beta=BETA, sft_weight=0.5)
    task = DecoderTask(model=pairs.MODEL, objective=objective)
    params, state = jax.jit(task.init)(jax.random.key(0))
    batch = on_device(pairs.batch())
    beginnings = np.argwhere((pairs.batch()["position"] == 0) & (pairs.batch()["segment"] % 2 == 1))
    chosen = [(row, int(pairs.batch()["segment"][row, at])) for row, at in beginnings.tolist()]

    def ours(params: Any) -> jax.Array:
        return total_loss(task.loss(params, state, batch, jax.random.key(0), True).losses)

    def defined(params: Any) -> jax.Array:
        context = Context(batch["position"], batch["segment"])
        hidden, _ = params(batch["tokens"], context, dtype=jnp.float32)
        log = jax.nn.log_softmax(compute_logits(params, hidden), axis=-1)
        log = jnp.take_along_axis(log, batch["targets"][..., None], axis=-1)[..., 0]
        terms, nll, tokens = [], 0.0, 0.0
        for row, number in chosen:
            inside = [
                jnp.where(batch["segment"][row] == each, batch["loss_mask"][row], 0.0) for each in (number, number + 1)
            ]
            won, lost = (((log[row] - batch[REFERENCE_LEAF][row]) * each).sum() for each in inside)
            terms.append(-jax.nn.log_sigmoid(BETA * (won - lost)))
            nll, tokens = nll - (log[row] * inside[0]).sum(), tokens + inside[0].sum()
        assert len(terms) == 10
        return sum(terms) / len(terms) + 0.5 * nll / tokens

    found, gradients = jax.jit(jax.value_and_grad(ours))(params)
    expected, wanted = jax.jit(jax.value_and_grad(defined))(params)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= 2e-5 * np.linalg.norm(other) + 1e-9


def needed(objective: Preference, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return (
        batch if objective.needs_reference else {name: leaf for name, leaf in batch.items() if name != REFERENCE_LEAF}
    )


EXPERTS = dataclasses.replace(pairs.MODEL, feed_forward=MoE(experts=4, active=2, ffn=16, balance=0.1))
FOUR = dataclasses.replace(pairs.MODEL, num_layers=4)
TASKS = {
    "sigmoid": DecoderTask(model=pairs.MODEL, objective=Preference(beta=BETA, sft_weight=0.3)),
    "orpo": DecoderTask(model=pairs.MODEL, objective=Preference(loss="orpo")),
    "short": DecoderTask(model=pairs.MODEL, objective=Preference(beta=BETA, ld_alpha=0.4, weight_by_likelihood=True)),
    "aot": DecoderTask(
        model=pairs.MODEL, objective=Preference(loss="aot", beta=BETA, other_losses={"aot_unpaired": 0.5})
    ),
    "experts": DecoderTask(model=EXPERTS, objective=Preference(loss="ipo")),
    "adapters": DecoderTask(model=pairs.MODEL, objective=Preference(), adapter=LoRA(rank=2)),
    "interleaved": DecoderTask(model=FOUR, objective=Preference(), pipeline=Pipeline(schedule="interleaved", chunks=2)),
}
LAYOUTS = (
    {"fsdp": 2}, {"tensor": 4}, {"context": 4}, {"stage": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "context": 2},
    {"context": 2, "tensor": 2, "fsdp": 2}, {"stage": 2, "tensor": 2, "fsdp": 2}, {"replica": 2, "expert": 2},
)  # fmt: skip
DEFAULT: dict[str, Any] = {"context": 2, "tensor": 2}


def test_trains_like_one_device_where_rows_and_words_are_split() -> None:
    task = TASKS["sigmoid"]
    report = check_task(task, pairs.batch(), layouts=[DEFAULT])
    assert len(report.compared) == 1, report.left_out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "orpo", "experts", "adapters"])
def test_trains_like_one_device_on_every_layout(name: str) -> None:
    task = TASKS[name]
    report = check_task(task, needed(task.objective, pairs.batch()), layouts=LAYOUTS)  # type: ignore[arg-type]
    assert len(report.compared) == len(LAYOUTS), report.left_out


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("sigmoid", {"stage": 2, "context": 2}, marks=pytest.mark.full),
        pytest.param("interleaved", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("experts", {"expert": 2, "context": 2}, marks=pytest.mark.full),
        pytest.param("adapters", {"replica": 2, "fsdp": 2}, marks=pytest.mark.full),
        pytest.param("short", {"stage": 2, "context": 2}, marks=pytest.mark.full),
        pytest.param("short", {"replica": 2, "context": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param("aot", {"context": 2, "tensor": 2, "fsdp": 2}, marks=pytest.mark.full),
        pytest.param("aot", {"replica": 2, "fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
)
def test_trains_like_one_device(name: str, sizes: dict[str, int]) -> None:
    report = check_task(TASKS[name], pairs.batch(), layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


@functools.cache
def gradient(micro_batches: int, sizes: tuple[tuple[str, int], ...] = ()) -> tuple[list[np.ndarray], dict[str, float]]:
    import optax

    def keep(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"gradient": updates}

    keeping = optax.GradientTransformation(lambda params: {"gradient": jax.tree.map(jnp.zeros_like, params)}, keep)
    config = StepConfig(clip_norm=None, micro_batches=micro_batches)
    program = Program.create(TASKS["sigmoid"], Optax(transformation=keeping), num_steps=1, config=config)
    count = int(np.prod([size for _, size in sizes]))
    axes = dict.fromkeys(pairs.batch(), ("batch", "seq"))
    step = CompiledStep(program, Placement.create(MeshShape(**dict(sizes)), devices=jax.devices()[:count]), axes)
    state, scalars = step(step.init(0), step.put(pairs.batch()))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer_state["gradient"])]
    return leaves, {
        name: float(value) for name, value in scalars.items() if np.ndim(value) == 0 and hasattr(value, "dtype")
    }


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4, 8])
def test_micro_batches_with_uneven_pairs_give_the_gradient_of_the_whole_batch(count: int) -> None:
    """One of the rows is empty, so that a micro-batch of one row has no pair at all."""
    (whole, all_scalars), (parts, scalars) = gradient(1), gradient(count)
    distance = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(parts, whole, strict=True)))
    assert distance <= 2e-6 * np.sqrt(sum(np.sum(leaf**2) for leaf in whole))
    assert scalars["pairs"] == 10.0 and scalars["rewards/accuracies"] == all_scalars["rewards/accuracies"]
    for name in ("loss", "rewards/margins", "logps/chosen"):
        assert scalars[name] == pytest.approx(all_scalars[name], rel=1e-5)


def test_broken_pairs_are_errors_and_padding_is_none() -> None:
    task = DecoderTask(model=pairs.MODEL, objective=Preference())
    params, state = jax.jit(task.init)(jax.random.key(0))

    @jax.jit
    def metrics_of(batch: Any) -> Any:
        return task.loss(params, state, batch, jax.random.key(0), False).metrics

    right = pairs.batch()
    metrics_of(on_device(right))["pair_faults"].raise_if_failed("the batch")
    empty = {name: np.zeros_like(leaf) for name, leaf in right.items()}
    none = metrics_of(on_device(empty))
    none["pair_faults"].raise_if_failed("the batch")
    assert float(none["pairs"].value) == 0.0 and float(none["rewards/margins"].value) == 0.0
    segment = right["segment"]
    broken = {
        "an empty mask of the rejected answer": {"loss_mask": np.where(segment == 2, 0.0, right["loss_mask"])},
        "an empty mask of both": {"loss_mask": np.where((np.arange(8) == 0)[:, None], 0.0, right["loss_mask"])},
        "a chosen answer alone": {"segment": np.where(segment == 2, 0, segment)},
        "a rejected answer alone": {"segment": np.where(segment == 1, 0, segment)},
        "positions that do not restart": {"position": np.where(segment == 2, right["position"] + 1, right["position"])},
        "numbers beyond the row": {"segment": np.where(segment == 2, 40, segment)},
    }
    for change in broken.values():
        batch = {**right, **{name: leaf.astype(right[name].dtype) for name, leaf in change.items()}}
        with pytest.raises(DataError, match=r"the batch: (a preference pair lacks an answer|a row has more segments)"):
            metrics_of(on_device(batch))["pair_faults"].raise_if_failed("the batch")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Preference(beta=0.0), "objective.beta=0.0; expected a positive number"),
        (lambda: Preference(loss="exo_pair"), "label_smoothing=0 makes the loss exo_pair infinite"),
        (lambda: Preference(loss="hinge", label_smoothing=0.1), "label_smoothing=0.1 has no effect on the loss hinge"),
        (lambda: Preference(label_smoothing=0.5), r"label_smoothing=0.5; expected a share in \[0, 0.5\)"),
        (lambda: Preference(divergence_alpha=0.3), "divergence_alpha=0.3 has no effect with divergence='reverse_kl'"),
        (lambda: Preference(loss="orpo", divergence="js"), "divergence='js' has no effect on the loss orpo"),
        (lambda: Preference(loss="simpo", reference_free=True), "reference_free has no effect: simpo has no reference"),
        (lambda: Preference(other_losses={"sigmoid": 1.0}), "other_losses has 'sigmoid'; expected losses other than"),
        (lambda: Preference(ld_alpha=1.5), r"objective.ld_alpha=1.5; expected a weight in \[0, 1\]"),
        (
            lambda: Preference(loss="aot", weight_by_likelihood=True),
            "weight_by_likelihood weights pairs, and the loss aot has parts that sort them",
        ),
        (lambda: Preference(sft_weight=-1.0), "sft_weight=-1.0; expected 0 or more"),
        (
            lambda: DecoderTask(model=pairs.MODEL, objective=Preference(), z_loss=1e-4),
            "task.z_loss=0.0001 has no effect with task.objective=Preference",
        ),
    ],
)
def test_settings_without_meaning_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_losses_that_sort_the_batch_are_refused_where_it_is_split() -> None:
    task = TASKS["aot"]
    with pytest.raises(
        RecipeError, match=r"step.micro_batches=2: the loss of DecoderTask compares each row with all others"
    ):
        check_rows_together(task, StepConfig(micro_batches=2), None)
    program = Program.create(task, pairs.ADAMW, num_steps=1)
    axes = dict.fromkeys(pairs.batch(), ("batch", "seq"))
    with pytest.raises(LayoutError, match="stage"):
        CompiledStep(program, Placement.create(MeshShape(stage=2), devices=jax.devices()[:2]), axes)
    assert TASKS["sigmoid"].sums_over_rows and not Preference(other_losses={"aot": 0.1}).sums_over_rows


def test_the_shorter_answer_has_all_of_its_weight() -> None:
    """Masks with gaps too: targets count by their number, not by their position."""
    batch = on_device(pairs.batch())
    batch["loss_mask"] = batch["loss_mask"].at[:, ::3].set(0.0)
    number = number_targets(batch)
    weight = weight_longer_parts(number, find_slots(batch).slot, 0.25)
    mask, segment = np.asarray(batch["loss_mask"]), np.asarray(batch["segment"])
    for row in range(len(mask)):
        for chosen in range(1, segment[row].max() + 1, 2):
            sides = [np.flatnonzero((segment[row] == each) & (mask[row] > 0)) for each in (chosen, chosen + 1)]
            shorter = min(map(len, sides))
            for places in sides:
                assert np.asarray(number)[row, places].tolist() == list(range(1, len(places) + 1))
                expected = [1.0] * shorter + [0.25] * (len(places) - shorter)
                assert np.asarray(weight)[row, places].tolist() == expected


def test_a_batch_without_a_reference_is_refused() -> None:
    task = DecoderTask(model=pairs.MODEL, objective=Preference())
    assert REFERENCE_LEAF in task.required_leaves
    assert (
        REFERENCE_LEAF not in DecoderTask(model=pairs.MODEL, objective=Preference(reference_free=True)).required_leaves
    )
    assert REFERENCE_LEAF not in DecoderTask(model=pairs.MODEL).required_leaves
