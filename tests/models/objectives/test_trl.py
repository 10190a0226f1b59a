"""The same tokens, the same weights: losses, gradients and metrics of preference losses against TRL's, in float32."""

import collections
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import torch

from panax.adapters.huggingface import config_from, load
from panax.adapters.huggingface.export import named_tensors
from panax.core.measures import total_loss
from panax.models import DecoderTask, Kto, Preference
from panax.models.objectives.kto import LABEL_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF
from panax.models.objectives.preference_losses import PREFERENCE_LOSSES

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

TOLERANCE = 1e-5
"""Relative, of a loss, and of each gradient's norm."""

VOCABULARY = 96
ANSWERS = pairs.random_answers(seed=3, rows=6)
TEXTS = [text for row in ANSWERS for text in row]
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class Llama(NamedTuple):
    """A tiny Llama, as a task with weights and as TRL's model, and log-probabilities of another one as the reference."""

    model: Any
    reference_model: Any
    task: DecoderTask
    params: Any
    state: Any
    batch: dict[str, jax.Array]
    folder: Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        models.append(transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval())
    models[0].save_pretrained(folder)
    task = DecoderTask(model=config_from(folder))
    params, state = load(folder, task, *jax.eval_shape(task.init, jax.random.key(0)))
    batch = pairs.lay(ANSWERS)
    batch[REFERENCE_LEAF] = lay_log_probabilities(models[1], batch)
    on_device = {name: jnp.asarray(leaf) for name, leaf in batch.items()} | {"row": jnp.arange(len(ANSWERS))}
    return Llama(*models, task, params, state, on_device, folder)


def lay_log_probabilities(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Log-probabilities of each target by a model that sees each text alone."""
    found = np.zeros(batch["tokens"].shape, np.float32)
    for row, texts in enumerate(ANSWERS):
        at = 0
        for prompt, answer in texts:
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                log = torch.log_softmax(model(ids).logits[0], dim=-1)
            found[row, at : at + ids.shape[1] - 1] = log[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
            at += ids.shape[1]
    return found


def ours(llama: Llama, objective: Preference) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    task = DecoderTask(model=llama.task.model, objective=objective)

    def loss(params: Any) -> Any:
        found = task.loss(params, llama.state, llama.batch, jax.random.key(0), True)
        return total_loss(found.losses), found.metrics

    (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(llama.params)
    means = {name: float(metrics[name].value) for name in METRICS}
    return float(value), dict(named_tensors(gradients, "llama")), means


def gradients_of(model: Any, loss: Any) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def assert_equal(found: Any, loss: float, gradients: dict[str, np.ndarray], metrics: dict[str, float]) -> None:
    assert found[0] == pytest.approx(loss, rel=TOLERANCE)
    assert found[1].keys() == gradients.keys()
    for name, theirs in gradients.items():
        assert np.linalg.norm(found[1][name] - theirs) <= TOLERANCE * np.linalg.norm(theirs), name
    assert found[2] == pytest.approx(metrics, rel=TOLERANCE, abs=1e-5)


@pytest.fixture(scope="module")
def trainer(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets
    import tokenizers
    import transformers
    from trl import DPOConfig, DPOTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    data = datasets.Dataset.from_dict({"prompt": ["w3"], "chosen": ["w4"], "rejected": ["w5"]})
    folder = str(tmp_path_factory.mktemp("trl"))
    settings = DPOConfig(folder, use_cpu=True, bf16=False, report_to="none", disable_dropout=True, use_weighting=True)
    made = DPOTrainer(llama.model, llama.reference_model, settings, train_dataset=data, processing_class=tokenizer)
    llama.model.eval()
    return made


def collated() -> dict[str, Any]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    examples = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for (prompt, chosen), (_, rejected) in zip(TEXTS[::2], TEXTS[1::2], strict=True)
    ]
    return DataCollatorForPreference(pad_token_id=0)(examples)


WITH_REFERENCE = [name for name, loss in PREFERENCE_LOSSES.items() if loss.has_reference]
CASES: dict[str, Preference] = {
    **{
        name: Preference(
            loss=name, label_smoothing=0.1 if name in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
        )  # type: ignore[arg-type]
        for name in WITH_REFERENCE
    },
    "sigmoid, sft": Preference(beta=0.3, sft_weight=0.7),
    "three at once": Preference(loss="sigmoid", other_losses={"bco_pair": 0.5, "hinge": 2.0}, sft_weight=0.2),
    "ld": Preference(loss="ipo", ld_alpha=0.3),
    "wpo": Preference(beta=0.3, weight_by_likelihood=True),
    "ld and wpo": Preference(ld_alpha=0.0, weight_by_likelihood=True, other_losses={"bco_pair": 0.5}),
    **{f"hinge, {name}": Preference(loss="hinge", divergence=name) for name in ("forward_kl", "js", "alpha")},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_trl(name: str, llama: Llama, trainer: Any) -> None:
    objective = CASES[name]
    trainer.loss_types, trainer.loss_weights = (
        [objective.loss, *objective.other_losses],
        [1.0, *objective.other_losses.values()],
    )
    if objective.chosen_weight:
        trainer.loss_types, trainer.loss_weights = (
            [*trainer.loss_types, "sft"],
            [*trainer.loss_weights, objective.chosen_weight],
        )
    trainer.beta, trainer.label_smoothing = objective.beta, objective.label_smoothing
    trainer.ld_alpha, trainer.use_weighting = objective.ld_alpha, objective.weight_by_likelihood
    trainer.f_divergence_type = {"js": "js_divergence", "alpha": "alpha_divergence"}.get(
        objective.divergence, objective.divergence
    )
    trainer.f_alpha_divergence_coef = objective.divergence_alpha
    trainer._metrics["eval"].clear()
    trainer.model.eval()
    loss = trainer._compute_loss(trainer.model, collated(), False)
    gradients = gradients_of(trainer.model, loss)
    metrics = {key: trainer._metrics["eval"][key][-1] for key in METRICS}
    assert_equal(ours(llama, objective), float(loss.detach()), gradients, metrics)


def labeled(side: int) -> dict[str, Any]:
    texts = TEXTS[side::2]
    length = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids, labels, mask = (torch.full((len(texts), length), fill) for fill in (0, -100, 0))
    for row, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        ids[row, :end], mask[row, :end] = torch.tensor([*prompt, *answer]), 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    name = ("chosen", "rejected")[side]
    return {f"{name}_input_ids": ids, f"{name}_labels": labels, f"{name}_attention_mask": mask}


def without_reference(
    kind: Any, llama: Llama, **settings: Any
) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """The loss of a trainer that was not set up: it reads these settings, and no more."""
    same = types.SimpleNamespace(gather_for_metrics=lambda value: value, device="cpu")
    common = {
        "is_encoder_decoder": False,
        "aux_loss_enabled": False,
        "pad_token_id": 0,
        "padding_value": 0,
        "accelerator": same,
    }
    trainer = object.__new__(kind)
    trainer.__dict__.update(common, **settings)
    loss, metrics = trainer.get_batch_loss_metrics(llama.model, {**labeled(0), **labeled(1)})
    return float(loss.detach()), gradients_of(llama.model, loss), {name: metrics[name] for name in METRICS}


@pytest.mark.parametrize("alpha", [0.0, 0.8])
@pytest.mark.parametrize("loss", ["simpo", "cpo"])
def test_losses_without_a_reference_equal_trl(loss: str, alpha: float, llama: Llama) -> None:
    from trl.experimental.cpo import CPOTrainer

    objective = Preference(loss=loss, beta=2.0, label_smoothing=0.1, sft_weight=alpha)  # type: ignore[arg-type]
    theirs = without_reference(
        CPOTrainer, llama, beta=2.0, label_smoothing=0.1, simpo_gamma=0.5, alpha=0.0, cpo_alpha=alpha,
        loss_type="simpo" if loss == "simpo" else "sigmoid",
    )  # fmt: skip
    assert_equal(ours(llama, objective), *theirs)


def test_orpo_equals_trl_but_for_the_prompt(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's cross-entropy covers the prompts too, which the paper's does not; both values."""
    from trl.experimental.orpo import ORPOTrainer

    objective = Preference(loss="orpo", beta=0.5)
    loss, _, metrics = without_reference(ORPOTrainer, llama, beta=0.5)
    found = ours(llama, objective)
    pair_loss = ours(llama, Preference(loss="orpo", beta=0.5, sft_weight=0.0))
    assert found[2] == pytest.approx(metrics, rel=TOLERANCE, abs=1e-5)
    with torch.no_grad():
        texts = [(len(prompt), torch.tensor([[*prompt, *answer]])) for prompt, answer in TEXTS[::2]]
        log = [
            torch.log_softmax(llama.model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0] for _, ids in texts
        ]
    whole = -float(torch.cat(log).mean())
    answers = -float(torch.cat([each[start - 1 :] for (start, _), each in zip(texts, log, strict=True)]).mean())
    assert abs(whole - answers) > 0.01
    assert loss == pytest.approx(pair_loss[0] + whole, rel=TOLERANCE)
    assert found[0] == pytest.approx(pair_loss[0] + answers, rel=TOLERANCE)
    # Without prompts beyond the first token, both are the same.
    short = [[([prompt[0]], answer) for prompt, answer in row] for row in ANSWERS]
    monkeypatch.setitem(globals(), "TEXTS", [text for row in short for text in row])
    batch = {name: jnp.asarray(leaf) for name, leaf in pairs.lay(short).items()} | {"row": jnp.arange(len(short))}
    assert_equal(ours(llama._replace(batch=batch), objective), *without_reference(ORPOTrainer, llama, beta=0.5))


def test_kto_equals_trl(llama: Llama, trainer: Any) -> None:
    """The trainer of pairs has changed the models' heads to those that both trainers call."""
    from trl.trainer.kto_trainer import KTOTrainer

    objective = Kto(beta=0.3, desirable_weight=0.7, undesirable_weight=1.2)
    good = [number % 3 != 0 for number in range(len(TEXTS) // 2)]
    labels = np.zeros(llama.batch["segment"].shape, np.int32)
    ends = iter(good)
    for row, segment in enumerate(np.asarray(llama.batch["segment"])):
        for number in range(1, segment.max() + 1, 2):
            labels[row, segment == number] = next(ends)
    task = DecoderTask(model=llama.task.model, objective=objective)
    batch = {**llama.batch, LABEL_LEAF: jnp.asarray(labels)}

    def loss(params: Any) -> Any:
        result = task.loss(params, llama.state, batch, jax.random.key(0), True)
        return total_loss(result.losses), result.metrics

    (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(llama.params)
    both = collated()
    count = len(good)
    inputs = {"label": torch.tensor(good)}
    for prefix, part in (("", slice(0, count)), ("KL_", slice(count, None))):
        inputs |= {f"{prefix}{name}": both[name][part] for name in ("input_ids", "attention_mask", "completion_mask")}
    theirs: Any = object.__new__(KTOTrainer)
    theirs.__dict__.update(
        model=trainer.model, ref_model=trainer.ref_model, accelerator=trainer.accelerator, calculate_KL=True, beta=0.3,
        precompute_ref_logps=False, aux_loss_enabled=False, loss_type="kto", desirable_weight=0.7, undesirable_weight=1.2,
        _metrics={"eval": collections.defaultdict(list)}, _total_train_tokens=0, args=trainer.args,
    )  # fmt: skip
    trainer.model.eval()
    expected = theirs._compute_loss(trainer.model, inputs, False)
    wanted = gradients_of(trainer.model, expected)
    assert float(value) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    for name, gradient in named_tensors(gradients, "llama"):
        assert np.linalg.norm(gradient - wanted[name]) <= TOLERANCE * np.linalg.norm(wanted[name]), name
    assert float(metrics["kl"].value) > 0.1
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"):
        assert float(metrics[name].value) == pytest.approx(
            theirs._metrics["eval"][name][-1], rel=TOLERANCE, abs=1e-5
        ), name
