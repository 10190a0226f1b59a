"""Batches with transformers' names train as transformers trains on them."""

import jax
import numpy as np
import pytest

import panax
from panax.adapters import huggingface
from panax.core.errors import DataError
from panax.mesh import MeshShape
from panax.models import DecoderConfig, DecoderTask
from panax.models.decoder.transformers_batch import to_decoder_batch
from panax.optim import Sgd

ROWS, LENGTH, VOCAB = 4, 12, 64
TASK = DecoderTask(model=DecoderConfig(vocab_size=VOCAB, max_length=16, embed=16, num_layers=1, heads=2, ffn=32))


def batch(**changes):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH))
    there = np.arange(LENGTH) < np.array([12, 9, 5, 1])[:, None]
    prompt = np.arange(LENGTH) < 2
    labels = np.where(there & ~prompt, ids, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": there.astype(np.int64), **changes}


@pytest.mark.full
def test_the_loss_is_that_of_a_transformers_model(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    task = DecoderTask(model=huggingface.config_from(tmp_path))
    for step_batch in (batch(), {k: v for k, v in batch().items() if k != "attention_mask"}):
        wanted = model(**{name: torch.tensor(leaf) for name, leaf in step_batch.items()}).loss.item()
        step = panax.compile_step(task, step_batch, Sgd(), devices=jax.devices()[:1])
        state = step.init()
        params, _ = huggingface.load(tmp_path, task, state.params, state.model_state)
        state = state.with_params(params)
        assert step.evaluate(state, [step_batch])["loss"] == pytest.approx(wanted, rel=1e-5)
        state, scalars = step(state, step_batch)
        assert float(scalars["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_labels_are_shifted_and_minus_100_counts_nothing():
    found = to_decoder_batch(batch())
    assert (
        found["targets"][0, :-1].tolist()
        == np.where(batch()["labels"][0, 1:] == -100, 0, batch()["labels"][0, 1:]).tolist()
    )
    assert found["loss_mask"].sum(axis=1).tolist() == [10, 7, 3, 0]
    assert found["segment"].tolist() == batch()["attention_mask"].tolist()


def test_fit_takes_them(tmp_path):
    mesh, folder = MeshShape(fsdp=4, tensor=2), str(tmp_path)
    experiment = panax.Experiment(name="theirs", task=TASK, data=[batch()], num_steps=2, mesh=mesh, directory=folder)
    result = panax.fit(experiment, quiet=True)
    assert result.step == 2


REFUSED = {
    "labels beside targets": (
        batch(targets=np.zeros((ROWS, LENGTH), np.int32)),
        "as well as targets, and only one can be meant",
    ),
    "labels alone": ({"labels": batch()["labels"]}, "expected input_ids and labels"),
    "no labels": ({"input_ids": batch()["input_ids"]}, '"labels": ids'),
    "filling that counts": (batch(labels=batch()["input_ids"]), "set the labels of padding to -100"),
    "unsigned labels": (batch(labels=batch()["input_ids"].astype(np.uint8)), "expected signed integers"),
    "a shorter label": (batch(labels=batch()["labels"][:, 1:]), "expected one label for each token"),
    "a mask of weights": (batch(attention_mask=np.full((ROWS, LENGTH), 0.5)), "of 0 and 1"),
    "packed positions": (batch(position_ids=np.arange(LENGTH)[None].repeat(ROWS, 0) % 4), "begins again within a row"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_ambiguous_is_refused(case):
    given, words = REFUSED[case]
    with pytest.raises(DataError, match=words):
        panax.compile_step(TASK, given)


NAMES = {
    "no loss_mask": (("tokens", "targets"), "lacks loss_mask; DecoderTask takes loss_mask, targets, tokens and"),
    "x and y": (("x", "y", "loss_mask"), r'"targets": batch\["y"\], "tokens": batch\["x"\]'),
    "a mask beside its own": (
        ("tokens", "targets", "loss_mask", "segment_ids"),
        "has segment_ids, which",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_other_names_get_the_line_to_write(case):
    names, words = NAMES[case]
    with pytest.raises(DataError, match=words):
        panax.compile_step(TASK, dict.fromkeys(names, np.zeros((ROWS, LENGTH), np.int32)))
