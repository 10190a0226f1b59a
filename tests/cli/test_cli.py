"""The command line as a user meets it: messages, exit codes, never a traceback for what they can cause."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_recipe

from panax.checkpoint import open_checkpoint
from panax.cli.main import main
from panax.cli.overrides import experiment_from

RECIPE = str(Path(tiny_recipe.__file__))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def six_steps(run_of) -> Path:
    return run_of(6)


@pytest.fixture
def trained(six_steps, here) -> Path:
    shutil.copytree(six_steps, here, dirs_exist_ok=True)
    return here


def panax(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return code, out.out, out.err


def fails(capsys, code, *arguments):
    """The one message of a command that must fail with `code`."""
    found, _, err = panax(capsys, *arguments)
    assert found == code, err
    message = err.strip()
    assert message.startswith("panax: error: ") and message.count("panax: error") == 1
    return message


def test_trains_and_ends_with_all_that_is_promised(here, capsys):
    code, out, _ = panax(capsys, "train", RECIPE, "--num-steps", "10")
    assert code == 0
    assert "held-out loss" in out and "token frequencies alone give" in out
    assert "bits/byte" in out and "\nbits per byte " in out
    assert "a sample of the model's text, after a prompt" in out
    assert "runs/tiny/checkpoints/step_00000010" in out
    assert "tensorboard --logdir runs/tiny/tensorboard" in out
    assert "panax generate runs/tiny --prompt" in out
    assert "MFU divides by" in out and "tok/s" in out and "ETA" in out and "acc " in out

    code, out, _ = panax(capsys, "generate", "runs/tiny", "--prompt", "def ", "--tokens", "8", "--seed", "1")
    assert code == 0 and out.startswith("def ")
    assert all(each.isprintable() or each in "\t\n" for each in out)
    again = panax(
        capsys, "generate", "runs/tiny/checkpoints/step_00000010", "--prompt", "def ", "--tokens", "8", "--seed", "1"
    )
    assert again[1] == out


def test_a_fast_dev_run_states_that_it_runs(here, capsys):
    code, out, _ = panax(capsys, "train", RECIPE, "--fast-dev-run")
    assert code == 0 and "two steps of everything" in out and "it runs: data, steps, evaluation, saving" in out
    assert "a sample of the model's text" in out and "panax generate" not in out and not (here / "runs").exists()


def test_a_checkpoint_can_be_used_alone(trained, capsys):
    (trained / "runs/tiny/checkpoints/step_00000006").rename(trained / "moved")
    assert panax(capsys, "generate", "moved", "--prompt", "import", "--tokens", "4")[0] == 0


def test_overrides_reach_the_experiment(here, capsys):
    code, out, _ = panax(
        capsys,
        "inspect",
        RECIPE,
        "--task.model.embed",
        "48",
        "--optimizer.schedule.peak",
        "0.5",
        "--task.remat",
        "full",
        "--settings",
        "--no-compile",
    )
    assert code == 0
    settings = json.loads(out[out.index("\n{") :])
    assert settings["task"]["model"]["embed"] == 48
    assert settings["task"]["model"]["vocab_size"] == 300
    assert settings["optimizer"]["schedule"]["peak"] == 0.5
    assert settings["task"]["remat"] == "full"


def test_inspect_shows_every_parameter_with_layout_and_bytes(here, capsys):
    code, out, _ = panax(capsys, "inspect", RECIPE, "--mesh.fsdp", "8")
    assert code == 0
    lines = out.splitlines()
    number = next(number for number, line in enumerate(lines) if "feed_forward.w_up" in line)
    assert lines[number].split() == ["stacks.0.blocks.0.feed_forward.w_up", "16.0", "KiB", "2.0", "KiB"]
    assert lines[number + 1] == "  layer 2 x embed 32 (fsdp) x ffn 64"
    assert max(map(len, lines)) <= 80 and "settings" not in out
    assert "fsdp=8" in out and "FLOPs for a token" in out


def test_help_shows_fields_with_defaults(here, capsys):
    code, out, _ = panax(capsys, "train", RECIPE, "--help")
    assert code == 0
    assert "--task.model.embed INT" in out and "(default: 32)" in out
    assert "Width of the residual stream" in out


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_usage(capsys, arguments):
    code, out, err = panax(capsys, *arguments)
    assert code == (0 if arguments else 2)
    assert "train RECIPE" in out + err


def test_a_misspelt_field_names_the_nearest(here, capsys):
    code, out, err = panax(capsys, "train", RECIPE, "--task.model.embde", "48")
    assert code == 2
    assert "--task.model.embed" in out + err


def test_a_value_of_the_wrong_type(here, capsys):
    code, out, err = panax(capsys, "train", RECIPE, "--num-steps", "many")
    assert code == 2
    assert "--num-steps" in out + err


def test_a_recipe_that_does_not_exist(capsys):
    assert "unknown recipe 'quikstart'; did you mean 'quickstart'?" in fails(capsys, 2, "train", "quikstart")
    assert "no recipe file none.py" in fails(capsys, 2, "train", "none.py")


def test_a_command_that_does_not_exist(capsys):
    assert "did you mean 'train'?" in fails(capsys, 2, "trian")


def test_a_recipe_file_without_a_recipe(here, capsys):
    (here / "empty.py").write_text("x = 1\n")
    assert "defines no recipe" in fails(capsys, 2, "train", "empty.py")


def test_a_setting_without_effect(here, capsys):
    code, out, err = panax(capsys, "inspect", RECIPE, "--data.buckets", "32", "--data.packing")
    assert code == 2
    assert "buckets=(32,) has no effect with packing" in " ".join((out + err).split())


def test_an_unreadable_file(here, capsys):
    message = fails(capsys, 3, "train", RECIPE, "--data.corpus.paths", "nowhere")
    assert "nowhere" in message


def test_an_empty_corpus(here, capsys):
    (here / "texts").mkdir()
    assert "texts" in fails(capsys, 3, "train", RECIPE, "--data.corpus.paths", "texts")
    (here / "texts" / "blank.py").write_text("")
    assert "texts" in fails(capsys, 3, "train", RECIPE, "--data.corpus.paths", "texts")


def test_a_file_that_is_no_text(here, capsys):
    (here / "noise.py").write_bytes(b"hello \xff\xfe")
    assert "noise.py" in fails(capsys, 3, "train", RECIPE, "--data.corpus.paths", "noise.py")


def test_a_sequence_longer_than_the_models(here, capsys):
    message = fails(capsys, 2, "train", RECIPE, "--data.sequence-length", "100")
    assert "100 tokens long, the model is for at most 64" in message


def test_heads_that_do_not_divide(here, capsys):
    message = fails(capsys, 2, "train", RECIPE, "--mesh.fsdp", "2", "--mesh.tensor", "4")
    assert "heads=2 is not divisible by tensor=4; use tensor in {1, 2}" in message


def test_a_mesh_larger_than_the_devices(here, capsys):
    assert "16 devices, there are 8" in fails(capsys, 2, "train", RECIPE, "--mesh.fsdp", "16")


def test_a_checkpoint_of_another_model(trained, capsys):
    other = ("train", RECIPE, "--num-steps", "8", "--task.model.ffn", "128")
    message = fails(capsys, 4, *other)
    assert "task.model.ffn: 64 -> 128" in message and "--fresh" in message and "--accept-changes" in message
    assert "checkpoint of another model" in fails(capsys, 4, *other, "--accept-changes")
    assert (trained / "runs/tiny/checkpoints/step_00000006/manifest.json").is_file()


def test_no_checkpoint_to_generate_from(here, capsys):
    assert "holds no checkpoint" in fails(capsys, 4, "generate", "nothing", "--prompt", "x")


def test_a_damaged_checkpoint(trained, capsys):
    checkpoint = open_checkpoint("runs/tiny/checkpoints/step_00000006")
    chunk = checkpoint.manifest.arrays["params.embedding.table"].chunks[0]
    file = trained / checkpoint.url / chunk.file
    data = bytearray(file.read_bytes())
    data[chunk.offset + 100] ^= 4
    file.write_bytes(data)
    # The best one that is whole is used instead, saying so.
    code, _, err = panax(capsys, "generate", "runs/tiny", "--prompt", "x", "--tokens", "4")
    assert code == 0
    assert f"{chunk.file} is damaged: bytes {chunk.offset} to " in err and "params.embedding.table" in err
    shutil.rmtree(trained / "runs/tiny/checkpoints/step_00000005")
    code, _, err = panax(capsys, "generate", "runs/tiny", "--prompt", "x")
    assert code == 4 and f"{chunk.file} is damaged" in err.splitlines()[-1]
    # Nothing else is there to go on from, and to begin anew without being told would throw the run away.
    code, _, err = panax(capsys, "train", RECIPE, "--num-steps", "8")
    assert code == 4 and "no checkpoint in runs/tiny/checkpoints is undamaged" in err


def test_an_empty_or_too_long_prompt(trained, capsys):
    assert "prompt is empty" in fails(capsys, 2, "generate", "runs/tiny", "--prompt", "")
    assert "at most 64" in fails(capsys, 2, "generate", "runs/tiny", "--prompt", "x", "--tokens", "500")


def test_a_folder_that_cannot_be_written(here, capsys):
    (here / "file").write_text("")
    assert "can't write to the run's folder" in fails(capsys, 4, "train", RECIPE, "--directory", "file/run")


FULL = """
import resource, signal, sys
from panax.cli.main import main
from panax.cli.overrides import experiment_from
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
code = main(["train", sys.argv[1], "--num-steps", "6", "--checkpoint.every", "0"])
assert code == 0, code
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
sys.exit(main(["train", sys.argv[1], "--num-steps", "12", "--checkpoint.every", "2",
               "--checkpoint.retry-seconds", "0.01"]))
"""


def test_a_full_disk_while_saving(here):
    """The run continues to its end, with warnings; then one message, an exit code, and the old checkpoint intact."""
    environment = dict(os.environ, PANAX_CACHE=str(here / "cache"))
    run = subprocess.run(
        [sys.executable, "-c", FULL, RECIPE, "8000"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=here,
    )
    assert run.returncode == 4, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("panax: error: ") == 1
    assert "warning: saving step 8 to runs/tiny/checkpoints failed" in " ".join(run.stdout.split())
    assert "error: saving step 12 to runs/tiny/checkpoints failed" in run.stderr
    assert "the checkpoint of step 6 is undamaged" in run.stderr
    assert (here / "runs/tiny/checkpoints/step_00000006/manifest.json").is_file()


LOADER = """
import dataclasses
import tiny_recipe
from panax import Experiment


def loader() -> Experiment:
    \"\"\"Data that no flag can say.\"\"\"
    return dataclasses.replace(tiny_recipe.tiny(), data=[{"x": 1}], held_out=[{"x": 2}])
"""


def test_flags_leave_data_alone_that_is_no_configuration(here):
    (here / "loader.py").write_text(LOADER)
    found = experiment_from(["loader.py", "--num-steps", "9", "--checkpoint.memory.every", "3"], "train")
    assert (found.data, found.held_out, found.num_steps) == ([{"x": 1}], [{"x": 2}], 9)
    assert found.checkpoint.memory.every == 3
