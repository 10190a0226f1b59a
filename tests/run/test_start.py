"""Other ways to begin: from Hugging Face weights, with padded lengths, and out again."""

import dataclasses
import json
from pathlib import Path

import drawing
import numpy as np
import pytest
import tiny_recipe
import tokenizers

from panax import fit
from panax.adapters import huggingface
from panax.cli.main import main
from panax.core import CheckpointError, named_leaves
from panax.data import PretrainedTokenizer
from panax.models import DecoderTask
from panax.optim import Schedule, ScheduleFreeAdamW, Sgd


def quiet(line):
    pass


@pytest.fixture
def plain(experiment):
    """The tiny recipe as a model that a family of Hugging Face's expresses, trained by steps that change nothing."""
    model = dataclasses.replace(experiment.task.model, windows=(0,), dropout=0.0)
    still = Sgd(schedule=Schedule(peak=1e-30, decay="constant"))
    return dataclasses.replace(experiment, task=DecoderTask(model=model), optimizer=still, num_steps=1)


def drawn(experiment, vocab_size=300):
    model = dataclasses.replace(experiment.task.model, vocab_size=vocab_size)
    return drawing.drawn(DecoderTask(model=model).init, seed=77)[0]


def test_training_starts_from_hugging_face_weights(plain, tmp_path):
    weights = drawn(plain)
    huggingface.save(str(tmp_path / "hf"), weights)
    result = fit(dataclasses.replace(plain, init=f"hf:{tmp_path / 'hf'}"), say=quiet)
    trained = named_leaves(result.state.params)
    for name, leaf in named_leaves(weights).items():
        # The step of 1e-30 is below the rounding of every number but an exact zero.
        np.testing.assert_allclose(np.asarray(trained[name]), np.asarray(leaf), rtol=0, atol=1e-29, err_msg=name)


def test_the_optimizers_own_weights_begin_with_the_loaded_ones(plain, tmp_path):
    weights = drawn(plain)
    huggingface.save(str(tmp_path / "hf"), weights)
    still = ScheduleFreeAdamW(schedule=Schedule(peak=1e-30, decay="constant"), weight_decay=0.0)
    result = fit(dataclasses.replace(plain, optimizer=still, init=f"hf:{tmp_path / 'hf'}"), say=quiet)
    evaluated = named_leaves(result.state.eval_params)
    for name, leaf in named_leaves(weights).items():
        np.testing.assert_allclose(np.asarray(evaluated[name]), np.asarray(leaf), rtol=0, atol=1e-7, err_msg=name)


def test_weights_of_another_model_are_refused(plain, tmp_path):
    huggingface.save(str(tmp_path / "hf"), drawn(plain, vocab_size=400))
    with pytest.raises(Exception, match="vocab") as caught:
        fit(dataclasses.replace(plain, init=f"hf:{tmp_path / 'hf'}"), say=quiet)
    assert getattr(caught.value, "exit_code", 0) > 0


def test_no_weights_there(plain, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        fit(dataclasses.replace(plain, init=f"hf:{tmp_path / 'nowhere'}"), say=quiet)


def test_a_trained_model_is_exported_with_its_tokenizer_and_what_lies_beside_it(plain, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>"]
    made.train_from_iterator(
        ["a"], tokenizers.trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    source, out, template = tmp_path / "source", tmp_path / "out", "{{ bos_token }}{{ messages[0]['content'] }}"
    source.mkdir()
    made.save(str(source / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text(json.dumps({"top_k": 7, "eos_token_id": 99}))
    data = dataclasses.replace(plain.data, tokenizer=PretrainedTokenizer(path=str(source)))
    lines = []
    fit(dataclasses.replace(plain, data=data), say=lines.append)
    assert [line for line in lines if "each document begins with '<s>'" in line]
    assert main(["export", plain.folder, str(out)]) == 0
    theirs, again = AutoTokenizer.from_pretrained(str(source)), AutoTokenizer.from_pretrained(str(out))
    assert again("a cat").input_ids == theirs("a cat").input_ids and again("a cat").input_ids[0] == 1
    assert again.chat_template == template
    generation = GenerationConfig.from_pretrained(str(out))
    assert generation.top_k == 7
    model = AutoModelForCausalLM.from_pretrained(str(out))
    assert model.config.vocab_size == len(again) == 259
    for each in (again, model.config, generation):
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (1, 2, 0)


def test_lengths_are_padded_to_the_buckets_and_each_compiles_once(experiment):
    data = dataclasses.replace(experiment.data, packing=False, buckets=(16, 32), sequence_length=64, batch_size=8)
    lines = []
    result = fit(dataclasses.replace(experiment, data=data, num_steps=12), say=lines.append)
    assert result.step == 12
    assert 1 <= len(result.prepared.step._train) <= 3


def test_the_flag_for_buckets_turns_packing_off(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path))
    assert (
        main(["inspect", str(Path(tiny_recipe.__file__)), "--buckets", "16", "32", "--settings", "--no-compile"]) == 0
    )
    out = capsys.readouterr().out
    settings = json.loads(out[out.index("\n{") :])
    assert settings["data"]["buckets"] == [16, 32] and settings["data"]["packing"] is False
