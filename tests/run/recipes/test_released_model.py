"""Released weights by their folder: an experiment that fine-tunes them, its run, and what is exported from it."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import panax
from panax.adapters.huggingface import config_from, save
from panax.cli.main import main
from panax.core import CheckpointError, DataError, RecipeError
from panax.data import BytePairTokenizer, Chats, PretrainedTokenizer, TextFiles
from panax.models import Decoder, DecoderConfig
from panax.optim import AdamW, Schedule

TINY = DecoderConfig(
    vocab_size=300, max_length=64, embed=16, num_layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, attention_bias=True
)
CONSTANT = AdamW(schedule=Schedule(peak=1e-3, decay="constant"))
TEMPLATE = (
    "{% for m in messages %}<{{m['role']}}>{{m['content']}}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as one is released: Qwen 2 with a tokenizer, a template, and keys that change nothing here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the oak, the ash, and the bonny ivy tree " * 30)
    folder = tmp_path / "base"
    model = jax.jit(lambda key: Decoder.build(key, TINY))(jax.random.key(0))
    save(folder, model, model_type="qwen2", token_ids={"eos_token_id": 0})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**raw, "eos_token_id": [0, 5], "initializer_range": 0.017, "use_cache": False})
    )
    BytePairTokenizer(vocab_size=300).train(TextFiles(paths=("a.txt",))).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_an_experiment_of_the_folders_own_parts(base: Path) -> None:
    experiment = panax.released_model("base", data="a.txt", num_steps=7)
    assert experiment.task.model == config_from(base) and experiment.task.compute_dtype == "auto"
    assert experiment.init == "hf:base" and experiment.name == "base" and experiment.num_steps == 7
    assert experiment.data.tokenizer == PretrainedTokenizer(path="base") and experiment.data.sequence_length == 64
    (base.parent / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "the oak?"}, {"role": "assistant", "content": "the ash"}]})
    )
    assert isinstance(panax.released_model("base", data=["chats.jsonl"]).data.corpus, Chats)


def test_without_data_it_is_not_trained(base: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(
        DataError, match=r"hf:base comes without data; pass .*: --data PATH, or panax.released_model\('base', data=PATH"
    ):
        panax.fit(panax.released_model("base"), quiet=True)
    assert main(["train", "hf:base"]) == 3 and "comes without data" in capsys.readouterr().err


def test_what_is_missing_is_reported_before_anything_is_read(base: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        panax.released_model("./nowhere")
    (base / "tokenizer.json").rename(base / "tokenizer.model")
    with pytest.raises(DataError, match=r"has tokenizer.model and no tokenizer.json; convert it once.*AutoTokenizer"):
        panax.released_model(base)
    (base / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer.json; its weights mean nothing"):
        panax.released_model(base)
    (base / "config.json").write_text(json.dumps({"model_type": "strange", "hidden_size": 8, "mixes": 3}))
    with pytest.raises(RecipeError, match=r"By its keys it is nearest to .* does not read mixes=3"):
        panax.released_model(base)


def test_what_was_trained_is_exported_as_what_came_in(base: Path, tmp_path: Path) -> None:
    experiment = panax.released_model("base", data="a.txt", num_steps=2, optimizer=CONSTANT)
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, batch_size=2, held_out=0))
    panax.fit(experiment, quiet=True, devices=jax.devices()[:1])
    # The release may be gone when the run is resumed.
    base.rename(tmp_path / "elsewhere")
    longer = dataclasses.replace(
        experiment,
        num_steps=4,
        data=dataclasses.replace(experiment.data, tokenizer=PretrainedTokenizer(path="elsewhere")),
    )
    panax.fit(longer, quiet=True, devices=jax.devices()[:1], accept_changes=True)
    assert main(["export", "runs/base", "out", "--dtype", "bfloat16"]) == 0
    came, went = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("elsewhere", "out"))
    assert went["model_type"] == "qwen2" and went["initializer_range"] == 0.017 and went["use_cache"] is False
    assert came.pop("torch_dtype") == "float32" and went.pop("torch_dtype") == "bfloat16"
    assert went == came
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    again = panax.adapters.huggingface.load("out", longer.task, *jax.eval_shape(longer.task.init, jax.random.key(0)))[0]
    trained = panax.load("runs/base").params
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs.astype("bfloat16").astype("float32")))
    assert main(["export", "runs/base", "single", "--gguf", "F16"]) == 0
    task = dataclasses.replace(longer.task, model=config_from("single"))
    halves = panax.adapters.huggingface.load("single", task, *jax.eval_shape(task.init, jax.random.key(0)))[0]
    table = np.asarray(trained.embedding.table[:300])
    np.testing.assert_array_equal(np.asarray(halves.embedding.table[:300]), table.astype("float16").astype("float32"))
    assert sorted(path.name for path in (tmp_path / "single").glob("*.[gj]*")) == [
        "chat_template.jinja", "model-F16.gguf", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
