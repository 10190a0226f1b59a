"""Typical mistakes of the first hour: each ends in one message with the cause and the fix, and in an exit code.

What is typed is run by `main`, what is written in Python as it stands. Only those of the loss train.
"""

import contextlib
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import tiny_recipe

import panax
from panax import Experiment, fit
from panax.checkpoint import open_checkpoint
from panax.cli.main import main
from panax.core.errors import PanaxError
from panax.data import TextData
from panax.hooks import EarlyStopping
from panax.metrics import CsvTracker
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask
from panax.optim import AdamW
from panax.system.lock import open_locked
from panax.train import StepConfig

LEAST = 46
"""So many mistakes were counted as typical."""

HEAD = "import dataclasses\nimport tiny_recipe\nfrom panax import Experiment\nfrom panax.data import PretrainedTokenizer\n\n"
RECIPES = {
    "syntax": "def mine(:\n",
    "nothing": "x = 1\n",
    "unannotated": f"{HEAD}def mine():\n    return tiny_recipe.tiny()\n",
    "forgot": f"{HEAD}def mine() -> Experiment:\n    tiny_recipe.tiny()\n",
    "raises": f"{HEAD}def mine() -> Experiment:\n    return {{}}['lr']\n",
    "unknown": f"{HEAD}def mine() -> Experiment:\n    return Experiment(task=tiny_recipe.tiny().task, lr=1e-3)\n",
    "uninstalled": "import not_a_module_here\n",
    "two": f"{HEAD}def one() -> Experiment: ...\n\n\ndef two() -> Experiment: ...\n",
    "tokens": f"""{HEAD}def mine() -> Experiment:
    tiny = tiny_recipe.tiny()
    return dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, tokenizer=PretrainedTokenizer(path="empty")))
""",
}
"""Recipe files that don't work, by name."""


@pytest.fixture(scope="module")
def folder(run_of) -> Path:
    """A run of six steps, `runs/tiny`, one with a damaged checkpoint, and files that somebody might name."""
    folder = run_of(6)
    for name, text in RECIPES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "a.txt").write_text("the oak and the ash")
    (folder / "a.parquet").write_bytes(b"PAR1")
    (folder / "noise.txt").write_bytes(b"hello \xff\xfe")
    (folder / "chat.jsonl").write_text(
        "\n".join(json.dumps({"question": "and?", "answer": "the ash"}) for _ in range(9))
    )
    (folder / "broken.jsonl").write_text('{"text": "and?"}\n{"text": \n')
    checkpoint = folder / "runs/tiny/checkpoints/step_00000006"
    chunk = open_checkpoint(str(checkpoint)).manifest.arrays["params.embedding.table"].chunks[0]
    for file in checkpoint.rglob("*"):
        if file.is_file():
            copy = folder / "damaged" / file.relative_to(checkpoint)
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = bytearray(file.read_bytes())
            if file.relative_to(checkpoint).as_posix() == chunk.file:
                data[chunk.offset + 100] ^= 4
            copy.write_bytes(data)
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PANAX_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    # The tests' own checks of types, which users don't have, look at arguments before the settings do.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    return folder


TYPED = [
    # Commands and recipes.
    ("trian R", 2, "unknown command 'trian'; did you mean 'train'"),
    ("train", 2, "expected `panax train RECIPE`; the recipes are .*quickstart"),
    ("train quikstart", 2, "unknown recipe 'quikstart'; did you mean 'quickstart'"),
    ("train nowhere.py", 2, "no recipe file nowhere.py in .*`panax recipes` lists"),
    ("train nopackage.recipes:mine", 2, "module nopackage.recipes can't be imported: No module named 'nopackage'"),
    ("train syntax.py", 2, r"SyntaxError: .*syntax.py, line 1\)$"),
    ("train uninstalled.py", 2, "No module named 'not_a_module_here' .*uninstalled.py, line 1.; install it for .*python"),
    ("train nothing.py", 2, "defines no recipe: a function with the annotation `-> Experiment`"),
    ("train unannotated.py", 2, "defines no recipe: a function with the annotation `-> Experiment`"),
    ("train forgot.py", 2, r"returned a NoneType; expected `return Experiment\(...\)`"),
    ("train raises.py", 2, "'raises.py' could not be built: KeyError: 'lr' .*raises.py, line 7"),
    ("train unknown.py", 2, "unexpected keyword argument 'lr' .*unknown.py, line 7"),
    ("train two.py", 2, "defines one, two; choose one as two.py:one"),
    ("train two.py:three", 2, "has no recipe 'three'; known: one, two"),
    ("train preset:llama3 --data a.txt", 2, "unknown preset 'llama3'; did you mean 'llama3_8b'"),
    ("train preset:gpt2", 3, "preset gpt2 comes without data; pass texts: --data PATH"),
    ("data show", 2, "arguments are required: recipe"),
    ("data show quikstart", 2, "did you mean 'quickstart'"),
    ("report runs", 3, "runs is not a run's folder: .*; there are runs/tiny"),
    ("report runs/tyni", 3, "no such folder; there are runs/tiny"),
    ("report runs/tiny --rate -1", 2, "rate=-1.0; expected the price of a device-hour"),
    ("report runs/tiny runs/tiny", 2, "runs/tiny is given twice"),
    ("compare resnet", 2, "'resnet' can't be compared; known: decoder, dlrm, moe"),
    ("inspect R --target h1000x8", 2, r"unknown target 'h1000x8'; did you mean 'h100'\? \(a target is h100x64"),
    # Flags.
    ("train R --task.model.embde 48", 2, "unknown setting --task.model.embde; did you mean '--task.model.embed'"),
    ("train R --mesh.tensors 2", 2, "unknown setting --mesh.tensors; did you mean '--mesh.tensor'"),
    ("train R --lr 3e-4", 2, "unknown flag --lr; use --optimizer.schedule.peak"),
    ("train R --tp=2", 2, "unknown flag --tp; use --mesh.tensor"),
    ("train R --epochs 3", 2, "a run is measured in steps: --num-steps"),
    ("train R --num-steps many", 2, "Error parsing --num-steps: .*'many'; .*--help` lists"),
    ("train R --num-steps 0", 2, "num_steps=0; expected 1 or more"),
    ("train R --data.batch-size 0", 2, "batch_size=0; expected at least 1"),
    ("train R --checkpoint.every -1", 2, "checkpoint.every=-1; expected 0 or more"),
    ("train R --task.compute-dtype float8", 2, "'float8'.*one of.*'bfloat16'"),
    ("train R --task.model.heads 3", 2, "embed=32 is not divisible by heads=3; change one, or set model.head_dim"),
    ("train R --task.model.dropout 2", 2, "dropout=2.0; expected a rate in"),
    ("train R --optimizer.schedule.peak nan", 2, "peak=nan: expected a number, not NaN"),
    ("train R --optimizer.schedule.warmup-steps -1", 2, "warmup_steps=-1; expected 0 or more"),
    ("train R --kernels.attention flash", 2, "unknown kernel 'flash' for attention; known: auto, blockwise"),
    ("train R --fresh --accept-changes", 2, "fresh starts from step 0, accept_changes resumes: pass one of them"),
    ("train R --init weights", 2, "init='weights'; expected hf:DIR"),
    ("train R --frozen embeddings --name a", 2, "'embeddings' matches no parameter; the first ones are embedding.table"),
    ("train R --frozen embedding stacks final_norm --name a", 2, "every parameter is frozen.*; unfreeze some"),
    # The mesh.
    ("train R --mesh.fsdp 3", 2, "embed=32 is not divisible by fsdp=3; use fsdp in {1, 2, 4, 8"),
    ("train R --mesh.fsdp 16", 2, "has 16 devices, there are 8; shrink an axis.*Nearest layouts of 8 devices"),
    ("train R --mesh.fsdp 2 --mesh.tensor 4", 2, "heads=2 is not divisible by tensor=4; use tensor in {1, 2}"),
    ("train R --name a --data.batch-size 6", 2, "6 rows is not divisible by 8 data-parallel devices.*use a multiple of 8"),
    ("train R --name a --step.micro-batches 3", 2, "8 rows is not divisible by 8 .* x 3 micro-batches; use a multiple of 24"),
    # Data.
    ("train R --data", 2, "expected paths after --data: files, folders or globs"),
    ("train R --data nowhere", 3, "nowhere does not exist; expected a file, a directory, or a glob"),
    ("train R --data empty", 3, "the folder empty is empty; expected texts"),
    ("train R --data noise.txt", 3, "noise.txt.* UTF-8"),
    ("train R --data chat.jsonl", 3, "no field 'text'; it has 'question', 'answer': name the field with text="),
    ("train R --data a.parquet", 3, r"needs pyarrow.*run: .*parquet"),
    ("train R --data broken.jsonl", 3, "broken.jsonl, line 2: broken JSON .*: repair it"),
    ("train R --data.held-out 1000", 3, "keeps 1000 of 5 documents from training; expected fewer: lower it"),
    ("train R --data.sequence-length 100", 2, "100 tokens long, the model is for at most 64; shorten .* or raise"),
    ("train R --data.tokenizer.vocab-size 10", 2, "vocab_size=10; expected at least 257"),
    ("train R --task.model.vocab-size 100 --name a", 2, "vocab_size=100 is less than the tokenizer's 300; raise it"),
    ("train tokens.py", 3, "empty/tokenizer.json can't be read: .*; check that it exists"),
    # Folders, and what is in them.
    ("train R --directory file/run", 4, "can't write to the run's folder file/run: .*; choose another with --directory"),
    ("train R --directory s3://bucket/run", 2, "expected a folder of this machine.*checkpoint.directory"),
    ("train R --name a --checkpoint.directory nosuch://b", 4, "not a known kind of store; expected a path or s3://"),
    ("train R --num-steps 8 --seed 1", 4, "other settings .*seed: 0 -> 1.*pass --fresh .*--accept-changes"),
    ("train R --num-steps 3", 4, "is of step 6, beyond num_steps=3: nothing would be trained.*--fresh"),
    ("train R --name a --init hf:nowhere", 4, "nowhere is not a folder; expected one with config.json"),
    ("train R --name a --init hf:empty", 4, "config.json can't be read: it is missing; expected a folder with config.json"),
    ("train R --name a --init checkpoint:nowhere", 4, "nowhere holds no checkpoint; name a folder like"),
    (
        "train R --name a --init checkpoint:runs/tiny --task.model.ffn 128", 4,
        "checkpoint of another model.*w_up is float32.2, 32, 64. there and float32.2, 32, 128. here.*Use the recipe",
    ),
    # Trained models.
    ("generate empty --prompt x", 4, "empty holds no checkpoint; name a folder like runs/quickstart"),
    ("generate damaged --prompt x", 4, "is damaged: bytes .*params.embedding.table"),
    ("generate runs/tiny", 2, "there is nothing to continue; pass --prompt TEXT"),
    ("generate runs/tiny --prompt ''", 2, "prompt is empty; pass at least one character"),
    ("generate runs/tiny --prompt x --tokens 500", 2, r"501; this engine has 64 .*at most 64\): shorten the prompt, or ask"),
    ("generate runs/tiny --prompt x --temperature -1", 2, "temperature=-1.0; expected 0 or more"),
    ("evaluate empty", 4, "empty holds no checkpoint; name a folder like runs/quickstart"),
    ("evaluate runs/tiny --data nowhere", 3, "nowhere does not exist; expected a file"),
    ("evaluate runs/tiny --batches -1", 2, "batches=-1; expected 1 or more, or 0 for all"),
    ("export empty out", 4, "empty holds no checkpoint; name a folder like runs/quickstart"),
    ("export runs/tiny", 2, "arguments are required: directory"),
    ("export runs/tiny exported --gguf F16 --dtype float16", 2, "--dtype has no effect with --gguf"),
    ("export runs/tiny exported --gguf F16", 2, r"can't express this .* model: .*windows=.*; export without --gguf"),
    ("export runs/tiny runs/tiny/metrics.jsonl", 4, "can't write to runs/tiny/metrics.jsonl"),
    ("checkpoint verify nowhere", 4, "nowhere holds no checkpoint; name a run's folder"),
]  # fmt: skip


def one_message(capsys, arguments: list[str]) -> tuple[Any, str]:
    """The exit code of a command, and its message in one line, without the frame that some are drawn in."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, " ".join(re.sub(r"[│╭╮╰╯─]|-{5,}", " ", err).split())


@pytest.mark.filterwarnings("ignore:optimizer.schedule.warmup_steps")
@pytest.mark.parametrize(("typed", "code", "said"), TYPED, ids=[typed for typed, _, _ in TYPED])
def test_what_is_typed(typed, code, said, here, capsys):
    arguments = [str(tiny_recipe.__file__) if each == "R" else each for each in shlex.split(typed)]
    found, message = one_message(capsys, arguments)
    assert re.search(said, message), message
    assert found == code, message


def test_a_folder_in_use(here, capsys):
    Path("runs/busy").mkdir()
    with contextlib.closing(open_locked("runs/busy/.lock")):
        code, message = one_message(capsys, ["train", str(tiny_recipe.__file__), "--name", "busy"])
    assert code == 4 and "another process is training in runs/busy; wait for it, stop it, or choose another" in message


def tiny(**changes: Any) -> Experiment:
    return dataclasses.replace(tiny_recipe.tiny(), **{"name": "python", **changes})


def batches():
    yield {"tokens": np.zeros((8, 64), np.int32)}


VIT = VitTask(
    model=VitConfig(image_size=8, patch=4, channels=1, embed=16, num_layers=1, heads=2, ffn=32, num_classes=10)
)


def images(label: int, value: float = 0.0) -> list[dict[str, np.ndarray]]:
    return [{"image": np.full((8, 8, 8, 1), value, np.float32), "label": np.full(8, label, np.int32)}] * 20


WRITTEN: dict[str, tuple[Callable[[], Any], int, str]] = {
    "a recipe that is not called": (lambda: fit(tiny_recipe.tiny), 2, r"call it, fit\(tiny\(\)\)"),
    "a dict for an experiment": (lambda: fit({"lr": 1e-3}), 2, "takes an Experiment, and this is a dict"),
    "a hook's class": (lambda: tiny(hooks=(EarlyStopping,)), 2, r"this is a class: write EarlyStopping\(...\)"),
    "a hook that is no tuple": (lambda: tiny(hooks=EarlyStopping()), 2, r"one of its items: write \(item,\)"),
    "a tracker that is no tuple": (lambda: fit(tiny(), trackers=CsvTracker()), 2, r"trackers=\(tracker,\)"),
    "a task's class": (lambda: tiny(task=DecoderTask), 2, r"this is a class: write DecoderTask\(...\)"),
    "a model for a task": (lambda: Experiment(task=DecoderConfig()), 2, "expected a Task, got a DecoderConfig"),
    "a function for data": (lambda: tiny(data=batches), 2, r"data is the function batches; .* write batches\(...\)"),
    "a class for data": (lambda: tiny(data=TextData), 2, r"data is the class TextData; .* write TextData\(...\)"),
    "a path for data": (lambda: tiny(data="a.txt"), 2, r"TextData\(corpus=panax.data.make_corpus\('a.txt'\)\)"),
    "a number for data": (lambda: fit(tiny(data=5)), 2, "data is an int; expected TextData, .*another iterable"),
    "no batches": (lambda: fit(Experiment(task=VIT, data=[], num_steps=2)), 3, "no batch|nothing|empty"),
    "a name for an optimizer": (lambda: tiny(optimizer="adamw"), 2, r"got a str: write AdamW\(...\)"),
    "a rate for a schedule": (lambda: AdamW(schedule=1e-3), 2, r"got a float: write Schedule\(peak=0.001\)"),
    "a dict for a mesh": (lambda: tiny(mesh={"fsdp": 8}), 2, r"got a dict: write MeshShape\(fsdp=8\)"),
    "text for a tuple": (lambda: tiny(frozen="embedding"), 2, r"this is text: write \('embedding',\)"),
    "two ways to show": (lambda: fit(tiny(), quiet=True, say=print), 2, "pass one of them"),
    "an unknown preset": (lambda: panax.preset("gpt3"), 2, "did you mean 'gpt2'"),
    "no run to load": (lambda: panax.load("nowhere"), 4, "holds no checkpoint; name a folder like"),
    "an experiment to evaluate": (lambda: panax.evaluate(tiny()), 2, "expected a run's folder, or what fit or load"),
    "labels out of range": (
        lambda: fit(Experiment(task=VIT, data=images(12), num_steps=2)), 3,
        "'label' holds 12 at .0.; this task takes 0 to 9 .*; correct the data",
    ),
    "a loss that is not a number": (
        lambda: fit(Experiment(name="nan", task=VIT, data=images(1, np.nan), num_steps=9, step=StepConfig(max_skipped=2))),
        5, "2 updates in a row were not finite .*lower optimizer.schedule.peak, or look for the cause with --debug",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRITTEN)
def test_what_is_written_in_python(mistake, here):
    write, code, said = WRITTEN[mistake]
    with pytest.raises(PanaxError) as raised:
        write()
    message = " ".join(str(raised.value).split())
    assert re.search(said, message), message
    assert raised.value.exit_code == code


def test_the_list_is_long_enough_and_names_each_once():
    assert len({typed for typed, _, _ in TYPED} | WRITTEN.keys()) == len(TYPED) + len(WRITTEN) >= LEAST
