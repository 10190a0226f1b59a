"""`preset:NAME` and `--data PATH...`."""

import json
from pathlib import Path

import pytest
import tiny_recipe

from panax.cli.main import main
from panax.cli.overrides import experiment_from
from panax.core import RecipeError
from panax.data import Jsonl, TextFiles
from panax.models import PRESETS, VIT_PRESETS, VitConfig

RECIPE = str(Path(tiny_recipe.__file__))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the oak")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "and?", "answer": "the ash"}))
    return tmp_path


def test_paths_reach_the_recipe_and_its_corpus_can_be_set(here):
    found = experiment_from([RECIPE, "--data", "a.txt", "--num-steps", "9", "--data.batch-size", "4"], "train")
    assert found.data.corpus == TextFiles(paths=("a.txt",)) and (found.num_steps, found.data.batch_size) == (9, 4)
    found = experiment_from([RECIPE, "--data=b.jsonl", "--data.corpus.text", "answer"], "train")
    assert found.data.corpus == Jsonl(paths=("b.jsonl",), text="answer")
    found = experiment_from([RECIPE, "--data", "a.txt", "b.jsonl", "--data.corpus.corpora.1.text", "answer"], "train")
    assert found.data.corpus.corpora[1] == Jsonl(paths=("b.jsonl",), text="answer")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((RECIPE, "--data"), 2, "expected paths after --data"),
        ((RECIPE, "--data", "--seed", "1"), 2, "expected paths after --data"),
        ((RECIPE, "--data="), 2, "expected paths after --data"),
        ((RECIPE, "--data", "nowhere"), 3, "nowhere does not exist"),
        (("vit_digits", "--data", "a.txt"), 2, "vit_digits trains on ExampleData, and --data gives texts"),
        (("preset:gpt2",), 3, "the preset gpt2 comes without data; pass texts: --data PATH"),
        (("preset:vit_b16",), 3, "the preset vit_b16 comes without data; pass a folder of images"),
        (("preset:gpt3", "--data", "a.txt"), 2, "unknown preset 'gpt3'; did you mean 'gpt2'?"),
        (("preset:gpt2", "--data", "nowhere"), 3, "nowhere does not exist"),
        (("preset:gpt2", "--data", "a.txt", "--init", "weights"), 2, "expected hf:DIR"),
    ],
)
def test_what_can_not_be_used_is_one_message(here, capsys, arguments, code, said):
    assert main(["train", *arguments]) == code
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("panax: error: ") and said in err


def test_a_preset_is_inspected_without_data(here, capsys, monkeypatch):
    small = {"embed": 16, "num_layers": 1, "heads": 2, "ffn": 16}
    monkeypatch.setitem(VIT_PRESETS, "vit_ti16", VitConfig(num_classes=10, image_size=8, patch=4, **small))
    assert main(["inspect", "preset:vit_ti16", "--no-compile", "--data.batch-size", "8"]) == 0
    assert "patches.w" in capsys.readouterr().out


@pytest.mark.slow
def test_published_sizes_are_inspected_without_data(here, capsys):
    assert main(["inspect", "preset:vit_ti16", "--no-compile", "--data.batch-size", "8"]) == 0
    assert "5,717,416 parameters" in capsys.readouterr().out
    assert main(["inspect", "preset:gpt2", "--no-compile", "--mesh.fsdp", "8"]) == 0
    assert "124,475,904 parameters" in capsys.readouterr().out


def test_flags_of_a_preset(here, capsys):
    found = experiment_from(["preset:qwen3_0.6b", "--data", "a.txt", "--task.remat", "full"], "train")
    assert found.task.model == PRESETS["qwen3_0.6b"] and found.task.remat == "full"
    assert "tokenizer of 32,768 tokens is trained on the data" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="unknown preset"):
        experiment_from(["preset:", "--help"], "train")


def test_recipes_and_presets_are_listed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["quickstart", *line.split()[1:]] for line in lines)
    words = " ".join(lines).split()
    assert set(PRESETS) <= set(words) and "preset:NAME" in words
    assert words[words.index("gpt2") + 1] == "124"


def test_data_is_shown(here, capsys, monkeypatch):
    monkeypatch.setenv("PANAX_CACHE", str(here / "cache"))
    (here / "b.jsonl").write_text("\n".join(json.dumps({"q": f"{n}? ", "a": f"it is {n}"}) for n in range(9)))
    fields = ("--data.corpus.prompt", "q", "--data.corpus.answer", "a")
    assert main(["data", "show", RECIPE, "--data", "b.jsonl", *fields, "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("--- row") == 1 and "? >>it is " in out and "an epoch" in out
    assert "8 documents of 7 tokens on average, 7 at most; 1 rows of" in " ".join(out.split())
    assert main(["data", "show", "vit_digits"]) == 0
    out = capsys.readouterr().out
    assert "128 x 8 x 8 x 1" in out and "labels: 0:" in out
    assert main(["data", "show", RECIPE, "-n", "-1"]) == 2 and "-n -1; expected" in capsys.readouterr().err
    assert main(["data", "show", "preset:gpt2"]) == 3 and "comes without data" in capsys.readouterr().err
