"""The same actions, the same logits: losses, gradients and metrics of policy gradients against TRL's, in float32."""

import collections
import contextlib
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import sampled_answers
import torch

from panax.adapters.huggingface import config_from, load
from panax.adapters.huggingface.export import named_tensors
from panax.core.measures import total_loss
from panax.models import DecoderTask, PolicyGradient
from panax.models.objectives.policy_gradient import ADVANTAGE_LEAF, BEHAVIOR_LEAF, OLD_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

TOLERANCE = 1e-5
"""Relative, of a loss, and of each gradient's norm."""

CLIPPED: dict[str, Any] = {"several_updates": True, "clip_low": 0.15, "clip_high": 0.3}
SOFT: dict[str, Any] = {"several_updates": True, "positive_temperature": 2.0, "negative_temperature": 3.0}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"loss": name, **CLIPPED} for name in ("grpo", "bnpo", "dapo")},
    "dr_grpo": {"loss": "dr_grpo", "max_answer": 7, **CLIPPED},
    "cispo": {"loss": "cispo", "several_updates": True, "clip_high": 1.1},
    "sapo": {"loss": "sapo", **SOFT},
    "luspo": {"loss": "luspo", "ratio": "sequence", **CLIPPED},
}
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES: dict[str, dict[str, Any]] = {
    **SETTINGS,
    **{f"{name}, sequence": {**each, "ratio": "sequence"} for name, each in SETTINGS.items() if name != "luspo"},
    **{f"{name}, kl": {**each, "kl_weight": 0.3} for name, each in SETTINGS.items()},
    **{f"{name}, one update": {**each, "several_updates": False, "kl_weight": 0.1} for name, each in SETTINGS.items()},
    **{
        f"dapo, {name}": {**CLIPPED, "correction": name, "correction_cap": 1.1, "kl_weight": 0.1}
        for name in CORRECTIONS
    },
    **{f"luspo, {name}": {**SETTINGS["luspo"], "correction": name, "correction_cap": 1.1} for name in CORRECTIONS},
    **{f"cispo, {name}": {**SETTINGS["cispo"], "correction": name, "correction_cap": 1.1} for name in CORRECTIONS},
    "dapo, one update, token_truncate": {"correction": "token_truncate", "correction_cap": 1.1},
    "gspo, one update, sequence_mask": {
        "loss": "grpo",
        "ratio": "sequence",
        "correction": "sequence_mask",
        "correction_cap": 1.1,
        "temperature": 0.7,
    },
    "dapo, two-sided": {**CLIPPED, "two_sided_clip": 1.4},
    "grpo, sequence, two-sided": {"loss": "grpo", "ratio": "sequence", **CLIPPED, "two_sided_clip": 1.4},
    "grpo, warm": {**SETTINGS["grpo"], "temperature": 0.7},
}


def create_trainer(objective: PolicyGradient) -> Any:
    """A trainer that was not set up: it reads these settings, and no more."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer: Any = object.__new__(GRPOTrainer)
    device = types.SimpleNamespace(
        autocast=contextlib.nullcontext,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        is_main_process=False,
    )
    args = types.SimpleNamespace(
        delta=objective.two_sided_clip, use_bias_correction_kl=False, report_to=[], steps_per_generation=1,
        sapo_temperature_pos=objective.positive_temperature, sapo_temperature_neg=objective.negative_temperature,
    )  # fmt: skip
    trainer.__dict__.update(
        args=args, state=types.SimpleNamespace(global_step=0), accelerator=device,
        model=types.SimpleNamespace(training=True), loss_type=objective.loss,
        importance_sampling_level=objective.ratio, beta=objective.kl_weight, epsilon_low=objective.clip_low,
        epsilon_high=objective.clip_high, max_completion_length=objective.max_answer,
        use_vllm=objective.correction != "none", vllm_importance_sampling_correction=objective.correction != "none",
        current_gradient_accumulation_steps=1, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        aux_loss_enabled=False, _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
    )  # fmt: skip
    return trainer


def weigh_sampling(objective: PolicyGradient, log_weight: torch.Tensor) -> torch.Tensor:
    """The ratios that the trainer's rollouts come with: by its settings `vllm_importance_sampling_mode` and `..._clip_max`."""
    kind, rule = objective.correction.split("_")
    weight = (log_weight.sum(dim=1, keepdim=True) if kind == "sequence" else log_weight).exp()
    return (
        weight.clamp(max=objective.correction_cap)
        if rule == "truncate"
        else weight * (weight <= objective.correction_cap)
    )


def collate(
    objective: PolicyGradient, host: dict[str, np.ndarray], current: np.ndarray
) -> tuple[dict[str, Any], list[tuple[int, np.ndarray]]]:
    """The rollout as the trainer's inputs, one answer a row, and the row and positions of each answer's actions here.

    The trainer counts answers without actions, so that the excluded one is left out.

    Args:
        current: Log-probabilities before the update.
    """
    answers = sampled_answers.find_answers(host)
    prompts = [
        host["tokens"][row, places[0] - host["position"][row, places[0]] : places[0] + 1] for row, places in answers
    ]
    width, length = max(map(len, prompts)), max(len(places) for _, places in answers)

    def lay(name: str) -> torch.Tensor:
        leaf = torch.zeros((len(answers), length))
        for number, (row, places) in enumerate(answers):
            leaf[number, : len(places)] = torch.tensor(host[name][row, places])
        return leaf

    host = {**host, "current": current}
    prompt_ids, prompt_mask = (torch.zeros((len(answers), width), dtype=torch.long) for _ in range(2))
    for number, prompt in enumerate(prompts):
        prompt_ids[number, width - len(prompt) :], prompt_mask[number, width - len(prompt) :] = torch.tensor(prompt), 1
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": lay("targets").long(),
        "completion_mask": lay("loss_mask").long(),
        "advantages": lay(ADVANTAGE_LEAF)[:, 0],
        "num_items_in_batch": lay("loss_mask").sum(),
    }
    old = lay(OLD_LEAF if objective.several_updates else "current")
    if objective.several_updates:
        inputs["old_per_token_logps"] = old
    if objective.kl_weight:
        inputs["ref_per_token_logps"] = lay(REFERENCE_LEAF)
    if objective.correction != "none":
        inputs["importance_sampling_ratio"] = weigh_sampling(objective, old - lay(BEHAVIOR_LEAF))
    return inputs, answers


def assert_metrics(trainer: Any, metrics: dict[str, Any]) -> None:
    """Means over actions, or over answers if ratios are theirs."""
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    names = {
        "kl": "kl", "clip_ratio/low_mean": "clipped/low", "clip_ratio/high_mean": "clipped/high",
        "cispo_clip_ratio": "clipped/high",
    }  # fmt: skip
    for name, ours in names.items():
        if name in theirs:
            assert float(metrics[ours].value) == pytest.approx(theirs[name], rel=TOLERANCE, abs=1e-6), name


@pytest.mark.parametrize("name", CASES)
def test_equals_trl(name: str) -> None:
    """By the logits of each action; the trainer's model is these logits."""
    objective = PolicyGradient(**CASES[name])
    host = sampled_answers.batch_for(objective)
    logits = sampled_answers.draw_logits(host)
    value, gradient, metrics = sampled_answers.evaluate(objective, host, logits)
    current = np.asarray(jax.nn.log_softmax(jnp.asarray(logits) / objective.temperature, axis=-1))
    current = np.take_along_axis(current, host["targets"][..., None], axis=-1)[..., 0]
    inputs, answers = collate(objective, host, current)
    z = torch.zeros((*inputs["completion_ids"].shape, logits.shape[-1]))
    for number, (row, places) in enumerate(answers):
        z[number, : len(places)] = torch.tensor(logits[row, places])
    z.requires_grad_()

    def model(input_ids: Any, attention_mask: Any, labels: Any, fused_lm_head: bool) -> Any:
        log = torch.log_softmax(z / objective.temperature, dim=-1)
        ids = input_ids[:, -z.shape[1] :, None]
        return types.SimpleNamespace(log_probs=log.gather(-1, ids)[..., 0], entropy=-(log.exp() * log).sum(-1))

    trainer = create_trainer(objective)
    expected = trainer._compute_loss(model, inputs)
    expected.backward()
    assert z.grad is not None
    wanted = np.zeros_like(gradient)
    for number, (row, places) in enumerate(answers):
        wanted[row, places] = z.grad[number, : len(places)].numpy()
    assert value == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    assert np.linalg.norm(gradient - wanted) <= TOLERANCE * np.linalg.norm(wanted)
    assert_metrics(trainer, metrics)


@pytest.mark.parametrize("name", ["dapo, kl", "grpo, sequence", "grpo, warm"])
def test_a_model_learns_as_by_trl(name: str, tmp_path: Path) -> None:
    """By all parameters of a tiny Llama, with the answers packed here, and one a row there."""
    import transformers
    from trl.trainer.utils import add_fused_lm_head

    objective = PolicyGradient(**CASES[name])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=pairs.MODEL.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    own: Any = config_from(tmp_path)
    task = DecoderTask(model=own, objective=objective)
    params, state = load(tmp_path, task, *jax.eval_shape(task.init, jax.random.key(0)))
    host = sampled_answers.batch_for(objective)
    batch = {leaf: jnp.asarray(values) for leaf, values in host.items()} | {"row": jnp.arange(pairs.ROWS)}

    def loss(params: Any) -> Any:
        found = task.loss(params, state, batch, jax.random.key(0), True)
        return total_loss(found.losses), found.metrics

    (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    add_fused_lm_head(model, temperature=objective.temperature, outputs=("log_probs", "entropy"))
    trainer = create_trainer(objective)
    inputs, _ = collate(objective, host, np.zeros_like(host["loss_mask"]))
    expected = trainer._compute_loss(model, inputs)
    expected.backward()
    assert float(value) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    weights: dict[str, Any] = dict(model.named_parameters())
    wanted = {name: weight.grad.numpy() for name, weight in weights.items()}
    for leaf, found in named_tensors(gradients, "llama"):
        assert np.linalg.norm(found - wanted[leaf]) <= TOLERANCE * np.linalg.norm(wanted[leaf]), leaf
    assert_metrics(trainer, metrics)
