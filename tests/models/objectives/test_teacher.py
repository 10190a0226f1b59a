"""A teacher's stored tokens, from text to a student that learns them, by the library's own functions."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.core import DataError, RecipeError
from panax.data import (
    BytePairTokenizer,
    Mixture,
    MixtureComponent,
    PackedSource,
    Preferences,
    PretrainedTokenizer,
    TextData,
    TextFiles,
)
from panax.data.teacher.stored_teacher import load_teacher
from panax.layers import Context
from panax.models import DecoderConfig, DecoderTask, Distill, compute_logits
from panax.models.objectives.distill import TEACHER_LEAF, TEACHER_TOKENS_LEAF
from panax.optim import AdamW, Schedule

LENGTH, TOP_K = 32, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    rng = np.random.default_rng(0)
    words = ["oak", "ash", "elm", "fir", "yew", "box"]
    # Some documents are longer than a row.
    texts = [" ".join(rng.choice(words, rng.integers(3, 40))) for _ in range(60)]
    (folder / "words.txt").write_text("\n\n".join(texts))
    BytePairTokenizer(vocab_size=270).train(TextFiles(paths=(str(folder / "words.txt"),))).save(folder / "tokenizer")
    return folder


def experiment(
    folder: Path, name: str, *, objective: object = None, vocab_size: int = 0, **data: object
) -> panax.Experiment:
    text = TextData(
        corpus=TextFiles(paths=(str(folder / "words.txt"),), separator="\n\n"),
        tokenizer=PretrainedTokenizer(path=str(folder / "tokenizer")), cache_dir=str(folder / "cache"),
        **{"sequence_length": LENGTH, "batch_size": 8, "held_out": 8, **data},  # type: ignore[arg-type]
    )  # fmt: skip
    model = DecoderConfig(vocab_size=vocab_size, max_length=64, embed=32, num_layers=1, heads=2, ffn=64)
    settings = {} if objective is None else {"objective": objective}
    return panax.Experiment(
        name=name, task=DecoderTask(model=model, **settings), data=text, num_steps=40, directory=str(folder / name),  # type: ignore[arg-type]
        optimizer=AdamW(schedule=Schedule(peak=1e-2)), log_every=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def teacher(folder: Path) -> panax.Result:
    return panax.fit(experiment(folder, "trained"), quiet=True)


@pytest.mark.full
def test_a_student_learns_from_a_checkpoint(folder: Path, teacher: panax.Result) -> None:
    where = f"checkpoint:{folder / 'trained'}"
    recipe = experiment(folder, "student", objective=Distill(label_weight=0.1))
    with pytest.raises(DataError, match=r"lacks teacher_log_probabilities, teacher_tokens.* call panax.add_teacher"):
        panax.fit(recipe, quiet=True)
    lines: list[str] = []
    joined = panax.add_teacher(recipe, teacher=where, top_k=TOP_K, say=lines.append)
    assert any(f"a teacher's {TOP_K} most likely tokens of" in line for line in lines)
    result = panax.fit(joined, quiet=True)
    rows = [json.loads(line) for line in (folder / "student" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss/distillation"] for row in rows if "train/loss/distillation" in row]
    assert losses[-1] < 0.3 * losses[0]
    assert result.evaluation["loss/distillation"] < 0.3 * losses[0]
    assert 0.5 < result.evaluation["teacher/coverage"] <= 1.0
    # The same data and weights are found again; other weights, or another temperature, are evaluated again.
    lines.clear()
    assert panax.add_teacher(recipe, teacher=where, top_k=TOP_K, say=lines.append).data == joined.data
    assert not any("computed" in line for line in lines)
    warm = dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, objective=Distill(temperature=2.0)))  # type: ignore[type-var]
    assert panax.add_teacher(warm, teacher=where, top_k=TOP_K, say=lines.append).data != joined.data
    assert any("computed" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("packing", [False, True])
def test_stored_values_are_those_of_the_teacher(folder: Path, packing: bool) -> None:
    """On meshes that split words, rows or layers: all targets of unpacked rows, and of whole documents in packed ones."""
    recipe = experiment(folder, f"values-{packing}", objective=Distill(temperature=2.0), packing=packing, held_out=0)
    size = recipe.data.open().vocab_size  # type: ignore[union-attr]
    task = DecoderTask(model=DecoderConfig(vocab_size=size, max_length=64, embed=32, num_layers=2, heads=4, ffn=48))
    params, _ = jax.jit(task.init)(jax.random.key(7))
    sizes = {"stage": 2, "tensor": 2, "fsdp": 2} if packing else {"tensor": 2, "context": 2, "fsdp": 2}
    meshed = dataclasses.replace(recipe, mesh=panax.mesh.MeshShape(**sizes))  # type: ignore[attr-defined]
    joined = panax.add_teacher(meshed, teacher=(task, params), top_k=TOP_K)
    assert isinstance(joined.data, TextData)
    rows = joined.data.open().train.rows  # type: ignore[union-attr]
    compared = 0
    for batch, _ in PackedSource(rows, batch_size=8, epochs=1).batches():
        hidden, _ = params(
            jnp.asarray(batch["tokens"]),
            Context(jnp.asarray(batch["position"]), jnp.asarray(batch["segment"])),
            dtype=jnp.float32,
        )
        log = np.asarray(jax.nn.log_softmax(compute_logits(params, hidden) / 2.0, axis=-1))
        counted = batch["loss_mask"] > 0
        assert (batch[TEACHER_TOKENS_LEAF][~counted] == 0).all()
        if packing:
            counted &= begins_with_its_document(batch, joined.data)
        found = np.take_along_axis(log, batch[TEACHER_TOKENS_LEAF], axis=-1)
        np.testing.assert_allclose(batch[TEACHER_LEAF][counted], found[counted], atol=2e-5)
        best = -np.sort(-log, axis=-1)[..., :TOP_K]
        np.testing.assert_allclose(batch[TEACHER_LEAF][counted], best[counted], atol=2e-5)
        compared += int(counted.sum())
    assert compared > (300 if packing else 900)


def begins_with_its_document(batch: dict[str, np.ndarray], data: TextData) -> np.ndarray:
    """True for segments that begin as a document does: the rest are continued from an earlier row."""
    opened = data.open()
    documents = opened.training_documents
    firsts = {tuple(documents.store.tokens[start : start + 3].tolist()) for start in documents.starts.tolist()}
    begins = np.zeros(batch["tokens"].shape, np.bool_)
    for row, segment in enumerate(batch["segment"]):
        for number in range(1, segment.max() + 1):
            inside = segment == number
            begins[row, inside] = tuple(batch["tokens"][row, inside][:3].tolist()) in firsts and inside.sum() > 2
    # A continuation may begin as a document does, by chance; those at the beginning of a row are not taken.
    return begins & (batch["segment"] > 1)


def test_another_vocabulary_is_an_error(folder: Path, teacher: panax.Result, tmp_path: Path) -> None:
    recipe = experiment(folder, "other", objective=Distill())
    where = f"checkpoint:{folder / 'trained'}"
    with pytest.raises(
        RecipeError, match=r"the teacher has a vocabulary of \d+ tokens, and the experiment's model one of 300"
    ):
        panax.add_teacher(experiment(folder, "large", objective=Distill(), vocab_size=300), teacher=where)
    # The same tokens, two of them with each other's id.
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    described = json.loads(path.read_text())
    ids = described["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(described))
    strange = dataclasses.replace(recipe.data, tokenizer=PretrainedTokenizer(path=str(tmp_path / "tokenizer")))  # type: ignore[type-var]
    with pytest.raises(
        RecipeError, match=r"the teacher's tokenizer is not data.tokenizer: 'a' has the id \d+ in one, and"
    ):
        panax.add_teacher(dataclasses.replace(recipe, data=strange), teacher=where)
    with pytest.raises(RecipeError, match=r"top_k=9999; expected 1 to the vocabulary's"):
        panax.add_teacher(recipe, teacher=where, top_k=9999)


@pytest.mark.full
def test_a_released_model_teaches(folder: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    recipe = experiment(folder, "released", objective=Distill(divergence="js"), packing=False)
    assert isinstance(recipe.data, TextData)
    shutil.copytree(folder / "tokenizer", tmp_path / "model")
    config = transformers.LlamaConfig(
        vocab_size=recipe.data.open().vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "model")
    joined = panax.add_teacher(recipe, teacher=f"hf:{tmp_path / 'model'}", top_k=TOP_K)
    batch = next(iter(joined.data.open().train.batches())).batch  # type: ignore[union-attr]
    with torch.no_grad():
        log = torch.log_softmax(model(torch.tensor(batch["tokens"]).long()).logits, dim=-1).numpy()
    counted = batch["loss_mask"] > 0
    np.testing.assert_allclose(batch[TEACHER_LEAF][counted], -np.sort(-log, axis=-1)[..., :TOP_K][counted], atol=1e-4)
    assert panax.fit(dataclasses.replace(joined, num_steps=2), quiet=True).step == 2


def test_whatever_has_no_teacher_is_an_error(folder: Path) -> None:
    recipe = experiment(folder, "refused", objective=Distill())
    for broken, teacher, message in (
        (experiment(folder, "plain"), "hf:x", "reads no teacher; set task.objective=Distill"),
        (recipe, "runs/x", r"teacher='runs/x'; expected hf:DIR, checkpoint:DIR"),
        (dataclasses.replace(recipe, data=[]), "hf:x", "takes data=TextData"),
        (dataclasses.replace(recipe, held_out=recipe.data), "hf:x", "held_out has no teacher; hold out a part of data"),
    ):
        with pytest.raises(RecipeError, match=message):
            panax.add_teacher(broken, teacher=teacher)
    assert isinstance(recipe.data, TextData)
    texts = TextFiles(paths=("x",))
    parts = (MixtureComponent(name="a", corpus=texts), MixtureComponent(name="b", corpus=texts))
    for corpus in (Mixture(parts=parts), Preferences(paths=("x",))):
        with pytest.raises(RecipeError, match=r"data.teacher is of the documents of one corpus"):
            dataclasses.replace(recipe.data, corpus=corpus, teacher="x")


def test_a_stored_teacher_of_other_tokens_is_an_error(folder: Path, tmp_path: Path) -> None:
    recipe = experiment(folder, "stale", objective=Distill(), packing=False)
    assert isinstance(recipe.data, TextData)
    opened = recipe.data.open()
    task = dataclasses.replace(recipe.task, model=dataclasses.replace(recipe.task.model, vocab_size=opened.vocab_size))  # type: ignore[attr-defined, type-var]
    joined = panax.add_teacher(recipe, teacher=(task, jax.jit(task.init)(jax.random.key(1))[0]), top_k=2)  # type: ignore[attr-defined]
    assert isinstance(joined.data, TextData) and joined.data.teacher is not None
    store = dataclasses.replace(opened.training_documents.store, content="other")
    with pytest.raises(DataError, match=r"of other tokens: .* again with panax.add_teacher"):
        load_teacher(joined.data.teacher, store)
    with pytest.raises(DataError, match=r"does not hold a teacher's log-probabilities .* again with panax.add_teacher"):
        load_teacher(tmp_path, opened.training_documents.store)
    # A file that is cut short, while it is in use and after.
    copy, store = tmp_path / "copy", opened.training_documents.store
    shutil.copytree(joined.data.teacher, copy)
    stored = load_teacher(copy, store)
    os.truncate(copy / "tokens.npy", 140)
    with pytest.raises(DataError, match=r"tokens.npy was cut short to 140 bytes while it was in use"):
        stored.read(np.array([1]))
    with pytest.raises(DataError, match=r"does not hold a teacher's log-probabilities \(tokens.npy takes"):
        load_teacher(copy, store)
