"""The same tokens, the same weights: logits and gradients against `transformers`, in float32."""

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from huggingface_examples import (
    DOCUMENTS,
    LENGTH,
    OTHERS,
    ROWS,
    Example,
    abstract,
    apart,
    make_example,
    our_logits,
    positions,
    their_logits,
    tokens,
    with_joined,
)
from safetensors.numpy import load_file
from torch.overrides import TorchFunctionMode

from panax.adapters.huggingface.export import named_tensors
from panax.core import RecipeError
from panax.layers import Rotary
from panax.models import Decoder, DecoderConfig, DecoderTask

TOLERANCE = 1e-5
"""Largest distance allowed, as a part of the reference's norm, for each tensor. Two programs that round float32 in
another order come out up to 2e-6 apart after a few layers; a part that is left out or misplaced moves the logits by
more than a hundred times the tolerance, which the last test asserts."""


IN_FLOAT64 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Examples of which the gradients of `transformers` are computed in float64: in float32 they are up to 2e-3 from these, as
its summed log decays lose digits where strong and weak ones mix."""


class Widened(TorchFunctionMode):
    """Lifts explicit conversions to float32 to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "float":
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = [wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
        kwargs = {
            name: wide.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def our_gradients(example: Example, batch: dict[str, np.ndarray]) -> tuple[float, Decoder]:
    def mean_loss(params: Decoder) -> jax.Array:
        return example.task.loss(params, example.state, on_device, jax.random.key(0), True).losses["cross_entropy"].mean

    on_device = jax.tree.map(jax.numpy.asarray, batch)

    value, gradients = jax.jit(jax.value_and_grad(mean_loss))(example.params)
    return float(value), gradients


def their_gradients(
    example: Example, batch: dict[str, np.ndarray], folder: Path
) -> tuple[float, dict[str, np.ndarray]]:
    wide = example.name in IN_FLOAT64
    model = copy.deepcopy(example.theirs).double() if wide else example.theirs
    model.zero_grad()
    with Widened() if wide else contextlib.nullcontext():
        logits = model(torch.from_numpy(batch["tokens"]).long()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["targets"]).long().flatten())
    loss.backward()
    return float(loss.detach()), in_files(model, folder)


def in_files(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """The gradients, named and split as `transformers` saves the weights: each expert's alone."""
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for value, weight in zip(gradients.parameters(), model.parameters(), strict=True):
            value.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    gradients.save_pretrained(folder)
    return {
        name: value
        for name, value in load_file(folder / "model.safetensors").items()
        if not name.endswith(("e_score_correction_bias", "expert_bias"))
    }


def test_logits(any_example: Example) -> None:
    example = any_example
    theirs = their_logits(example.theirs, tokens())
    distance = apart(our_logits(example.params, example.state, tokens(), positions(), None), theirs)
    print(f"{example.name} logits: {distance:.1e} apart")
    assert distance < TOLERANCE


def test_gradients(any_example: Example, tmp_path: Path) -> None:
    example = any_example
    batch = {
        "tokens": tokens(),
        "targets": tokens(1),
        "loss_mask": np.ones((ROWS, LENGTH), np.float32),
        "row": np.arange(ROWS, dtype=np.int32),
    }
    loss, gradients = our_gradients(example, batch)
    their_loss, theirs = their_gradients(example, batch, tmp_path)
    ours = dict(named_tensors(gradients, example.family))
    assert loss == pytest.approx(their_loss, rel=TOLERANCE)
    assert ours.keys() == theirs.keys()
    ours, theirs = with_joined(example.name, ours), with_joined(example.name, theirs)
    # An expert that no token is sent to.
    idle = {name for name in theirs if ".experts." in name and not theirs[name].any()}
    assert not any(ours[name].any() for name in idle)
    distances = {name: apart(ours[name], theirs[name]) for name in ours.keys() - idle}
    print(f"{example.name} gradients: at most {max(distances.values()):.1e} apart")
    assert {name: d for name, d in distances.items() if d > TOLERANCE} == {}


def test_logits_without_a_latent_of_queries(folder_of_examples: Path) -> None:
    example = make_example("deepseek_v3_direct", folder_of_examples)
    assert example.task.model.latent.q_rank == 0 and not example.task.model.rotary.interleaved
    ours = our_logits(example.params, example.state, tokens(), positions(), None)
    assert apart(ours, their_logits(example.theirs, tokens())) < TOLERANCE


def test_packed_documents_see_nothing_of_each_other(any_example: Example) -> None:
    example = any_example
    packed = tokens(2)
    first, second = DOCUMENTS
    segment = np.tile(np.repeat(np.array([1, 2], np.int32), DOCUMENTS), (ROWS, 1))
    position = np.tile(np.concatenate([np.arange(n, dtype=np.int32) for n in DOCUMENTS]), (ROWS, 1))
    ours = np.asarray(our_logits(example.params, example.state, packed, position, segment))
    assert apart(ours[:, :first], their_logits(example.theirs, packed[:, :first])) < TOLERANCE
    assert apart(ours[:, first:], their_logits(example.theirs, packed[:, first:])) < TOLERANCE
    assert first + second == LENGTH


def variants(config: DecoderConfig) -> dict[str, DecoderConfig]:
    """The configuration with one thing that its family is particular about left out or changed."""
    changes: dict[str, dict] = {
        "epsilon": {"norm_epsilon": 0.1 + config.norm_epsilon},
        "activation": {"activation": "relu"},
        "attention clip": {"attention_clip": None},
        "soft cap on scores": {"attention_soft_cap": None},
        "soft cap on logits": {"logit_soft_cap": None},
        "query scale": {"query_scale": 0.0},
        "embedding scale": {"embed_scale": False},
        "unit offset": {"norm_unit_offset": False},
        "windows": {"windows": tuple(1000 if window else 0 for window in config.windows)},
        "multiplier of embeddings": {"embed_multiplier": 1.0},
        "multiplier of branches": {"residual_multiplier": 1.0},
        "multiplier of logits": {"logit_multiplier": 1.0},
        "parallel branches": {"parallel_residual": False},
        "norms after the rotation": {"qk_norm_after_rotary": False},
        "positions of each layer": {"rotaries": tuple(Rotary() if x is None else None for x in config.rotaries)},
        "bases of each layer": {"rotaries": tuple(x and dataclasses.replace(x, theta=7.0) for x in config.rotaries)},
        "scaling of each layer": {
            "rotaries": tuple(x and dataclasses.replace(x, scaling=None) for x in config.rotaries)
        },
    }
    if config.rotary is not None and not config.rotaries:
        changes["theta"] = {"rotary": dataclasses.replace(config.rotary, theta=2.0 * config.rotary.theta)}
        changes["scaling"] = {"rotary": dataclasses.replace(config.rotary, scaling=None)}
        changes["interleaving"] = {"rotary": dataclasses.replace(config.rotary, interleaved=False)}
        growth = {"query_growth": 0.0, "query_length": 0}
        changes["growth of queries"] = {"rotary": dataclasses.replace(config.rotary, **growth)}
        changes["fraction"] = {"rotary": dataclasses.replace(config.rotary, fraction=1.0)}
    moe = config.feed_forward
    if moe is not None:
        mixtures = {
            "normalized weights": {"normalize_topk": not moe.normalize_topk},
            "scale of weights": {"scale": 1.0},
            "scores": {"scores": "softmax"},
            "groups": {"groups": 1, "active_groups": 1},
            "active experts": {"active": 1},
        }
        changes |= {name: {"feed_forward": dataclasses.replace(moe, **change)} for name, change in mixtures.items()}
    differences = {}
    for name, change in changes.items():
        # A model without attention, say, refuses what would have no effect.
        with contextlib.suppress(RecipeError):
            differences[name] = dataclasses.replace(config, **change)
    return {name: variant for name, variant in differences.items() if variant != config}


def test_the_examples_put_every_part_to_work(example: Example) -> None:
    """Parity proves nothing about tensors that an example does not depend on."""
    check_every_part(example)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_examples_put_every_part_to_work(name: str, folder_of_examples: Path) -> None:
    check_every_part(make_example(name, folder_of_examples))


def check_every_part(example: Example) -> None:
    leaves = jax.tree.leaves(example.params)
    unchanged = our_logits(example.params, example.state, tokens(), positions(), None)
    for name, config in variants(example.task.model).items():
        structure = jax.tree.structure(abstract(DecoderTask(model=config))[0])
        logits = our_logits(structure.unflatten(leaves), example.state, tokens(), positions(), None)
        assert apart(logits, np.asarray(unchanged)) > 100 * TOLERANCE, name
