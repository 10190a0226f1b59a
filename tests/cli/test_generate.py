"""`panax generate`, `panax evaluate --tasks` and `panax serve`: results, continued files, and refusals."""

import gzip
import http.client
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_recipe

from panax.cli.main import main
from panax.cli.overrides import experiment_from
from panax.generate import engine as engine_module
from panax.run import QuestionConfig

FAST = ("--tokens", "4", "--rows", "2", "--length", "48")


@pytest.fixture(scope="module")
def six_steps(run_of) -> Path:
    return run_of(6)


@pytest.fixture
def trained(six_steps, tmp_path, monkeypatch) -> Path:
    shutil.copytree(six_steps, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(capsys, *arguments):
    code = main(["generate", "runs/tiny", *arguments])
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return code, out.out, out.err


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path, *records):
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_prompt_is_continued_as_one_text_several_or_json(trained, capsys):
    code, one, _ = run(capsys, "--prompt", "def ", "--tokens", "6", "--seed", "3")
    assert code == 0 and one.startswith("def ") and one.endswith("\n")
    code, out, _ = run(capsys, "--prompt", "def ", "--tokens", "6", "--seed", "3", "--n", "2", "--json")
    answers = json.loads(out)["answers"]
    # The first of several answers is the only one of one.
    assert code == 0 and len(answers) == 2 and "def " + answers[0]["text"] == one.removesuffix("\n")
    assert answers[0]["finish"] in ("end", "length") and answers[0]["tokens"] <= 6
    code, out, _ = run(capsys, "--prompt", "def ", "--tokens", "6", "--seed", "3", "--n", "2")
    assert code == 0 and out.startswith("1 of 2: def ") and "\n2 of 2: def " in out


def test_a_mesh_continues_as_one_device_does(trained, capsys):
    arguments = ("--prompt", "def ", "--tokens", "6", "--temperature", "0")
    code, one, _ = run(capsys, *arguments)
    assert (code, run(capsys, *arguments, "--mesh.tensor", "2", "--mesh.fsdp", "2")[:2]) == (0, (0, one))
    code, _, error = run(capsys, *arguments, "--mesh.tensor", "3")
    assert code == 2 and "heads=2 is not divisible by tensor=3; use tensor in {1, 2}" in error


def test_answers_under_a_schema_an_expression_and_a_grammar(trained, capsys):
    Path("schema.json").write_text('{"type": "array", "items": {"enum": [1, 22]}, "minItems": 1, "maxItems": 2}')
    Path("grammar").write_text('start: "(" start ")" | "x"')
    write("prompts.jsonl", {"prompt": "def "}, {"prompt": "import"})
    files = ("--prompts", "prompts.jsonl", "--rows", "2", "--length", "64", "--tokens", "50")
    assert run(capsys, *files, "--schema", "schema.json")[0] == 0
    for line in lines("prompts.jsonl.answers.jsonl"):
        assert set(json.loads(line["answers"][0]["text"])) <= {1, 22}
    Path("schema.json").write_text('{"type": "integer"}')
    code, _, err = run(capsys, *files, "--schema", "schema.json")
    assert code == 2 and "written by another model or with other settings" in " ".join(err.split())
    code, out, _ = run(capsys, "--prompt", "def ", "--tokens", "9", "--regex", "[0-9]{3}", "--json")
    assert code == 0 and re.fullmatch("[0-9]{3}", json.loads(out)["answers"][0]["text"])
    code, out, _ = run(capsys, "--prompt", "def ", "--tokens", "9", "--grammar", "grammar")
    assert code == 0 and re.fullmatch(r"def \(*x?\)*\n", out)
    # The tokenizer is one of bytes, but the expression explodes.
    code, out, err = run(capsys, "--prompt", "def ", "--tokens", "50", "--regex", r"(\w{0,500}\p{L}{0,500}){0,500}")
    assert code == 3 and out.startswith("def ") and "the answer ended after" in err


def test_a_released_model_generates_what_its_run_does(trained, capsys):
    arguments = ("--prompt", "def ", "--tokens", "6", "--temperature", "0")
    _, of_run, _ = run(capsys, *arguments)
    assert main(["export", "runs/tiny", "exported"]) == 0
    capsys.readouterr()
    assert main(["generate", "hf:exported", *arguments]) == 0
    assert capsys.readouterr().out == of_run
    assert main(["generate", "hf:missing", *arguments]) == 4
    assert "missing" in capsys.readouterr().err


def test_a_file_is_answered_in_its_order_and_broken_lines_have_an_error(trained, capsys):
    good = [{"prompt": "def "}, {"prompt": "import os"}, {"prompt": "x"}]
    Path("prompts.jsonl").write_text(
        "\n".join(map(json.dumps, good)) + '\n{"prompt": 3}\n{"prompt": ""}\n{broken\n'
        + json.dumps({"prompt": "long " * 100}) + '\n{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "class"}\n'
    )  # fmt: skip
    code, out, err = run(capsys, "--prompts", "prompts.jsonl", *FAST)
    assert code == 3 and "5 of 9 prompts have no answer" in err
    assert "9 prompts are answered in prompts.jsonl.answers.jsonl" in out
    answered = lines("prompts.jsonl.answers.jsonl")
    assert [line["index"] for line in answered] == list(range(9))
    assert [line.get("prompt") for line in answered[:3]] == ["def ", "import os", "x"]
    assert ["answers" in line for line in answered] == [True, True, True, False, False, False, False, False, True]
    errors = [line.get("error", "") for line in answered]
    assert "prompts.jsonl, line 4: no prompt; expected" in errors[3] and "the prompt is empty" in errors[4]
    assert (
        "broken JSON" in errors[5] and "this engine has 48 positions" in errors[6] and "no chat template" in errors[7]
    )


def test_an_interrupted_file_is_continued_and_is_as_if_it_had_not_been(trained, capsys, monkeypatch):
    write("prompts.jsonl", *({"prompt": f"def {number}"} for number in range(7)))
    assert run(capsys, "--prompts", "prompts.jsonl", "--output", "whole.jsonl", *FAST)[0] == 0
    real, calls = engine_module.run_decode_step, []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(engine_module, "run_decode_step", interrupted)
    code = main(["generate", "runs/tiny", "--prompts", "prompts.jsonl", "--output", "part.jsonl", *FAST])
    monkeypatch.undo()
    monkeypatch.chdir(trained)
    assert code == 130 and 0 < len(lines("part.jsonl")) < 7
    with open("part.jsonl", "a") as file:
        file.write(f'{{"index": {len(lines("part.jsonl"))}, "prom')  # cut off by a full disk
    capsys.readouterr()
    code, out, _ = run(capsys, "--prompts", "prompts.jsonl", "--output", "part.jsonl", *FAST)
    assert code == 0 and "the others are appended" in out
    assert Path("part.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    code, out, _ = run(capsys, "--prompts", "prompts.jsonl", "--output", "part.jsonl", *FAST)
    assert code == 0 and "has the first 7 answers" in out
    # Other settings, another file of prompts, a file of something else: nothing of it is lost.
    for change, words in (
        (("--seed", "1"), "written by another model or with other settings"),
        (("--prompts", "others.jsonl"), "answers another prompt than that of index 0"),
        (("--output", "prompts.jsonl"), "written by another model or with other settings"),
    ):
        write("others.jsonl", {"prompt": "other"})
        before = Path("part.jsonl").read_bytes(), Path("prompts.jsonl").read_bytes()
        arguments = ("--prompts", "prompts.jsonl", "--output", "part.jsonl", *FAST, *change)
        code, _, err = run(capsys, *arguments)
        assert code in (2, 3) and words in err
        assert before == (Path("part.jsonl").read_bytes(), Path("prompts.jsonl").read_bytes())


@pytest.mark.parametrize(
    "content", ["my notes", '{"prompt": "a"}', '{"prompt": "a"}\n{"prompt": "b"}', '{"index": 7, "x']
)
def test_a_file_of_something_else_is_left_as_it_is(content, trained, capsys):
    """Also its last line, if that has no end."""
    write("prompts.jsonl", {"prompt": "a"})
    Path("notes").write_text(content)
    code, _, err = run(capsys, "--prompts", "prompts.jsonl", "--output", "notes", *FAST)
    assert code in (2, 3) and "choose another output" in err and Path("notes").read_text() == content


def test_prompts_may_be_compressed_or_parquet(trained, capsys):
    with gzip.open("prompts.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run(capsys, "--prompts", "prompts.jsonl.gz", "--output", "one", *FAST)[0] == 0
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}]), "prompts.parquet")
    assert run(capsys, "--prompts", "prompts.parquet", "--output", "two", *FAST)[0] == 0
    assert Path("one").read_bytes() == Path("two").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "there is nothing to continue; pass --prompt TEXT, --prompts FILE, or --chat"),
        (("--prompt", "a", "--prompts", "b"), 2, "--prompt and --prompts exclude each other"),
        (("--prompt", "a", "--output", "b"), 2, "--output is the file for the answers to --prompts"),
        (("--chat", "--json"), 2, "a conversation has one answer at a time"),
        (("--prompts", "missing.jsonl"), 3, "missing.jsonl is not a file"),
        (("--prompt", "a", "--top-p", "2"), 2, "top_p=2.0; expected a probability"),
        (("--prompt", "a", "--n", "0"), 2, "n=0; expected 1 or more"),
        (("--prompts", "prompts.jsonl", "--rows", "0"), 2, "rows=0; expected 1 or more"),
        (("--prompts", "prompts.jsonl", "--length", "65"), 2, "length=65; the model is for at most 64"),
        (("--chat",), 2, "the tokenizer has no chat template"),
        (("--prompt", "a", "--tokens", "9", "--regex", "["), 2, "the regular expression can't be used"),
        (("--prompts", "prompts.jsonl", "--regex", "["), 2, "the regular expression can't be used"),
        (("--prompt", "a", "--regex", "a", "--schema", "b"), 2, "not allowed with argument --regex"),
        (("--prompt", "a", "--schema", "missing.json"), 2, "--schema missing.json can't be read"),
        (("--prompt", "a", "--grammar", "prompts.jsonl"), 2, "the grammar begins with '{'"),
    ],
)
def test_what_can_not_be_done_is_refused(arguments, code, words, trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    write("prompts.jsonl", {"prompt": "a"})
    found, _, err = run(capsys, *arguments)
    assert found == code and words in " ".join(err.split())


def test_files_of_questions_are_scored(trained, capsys):
    write("texts.jsonl", {"text": "import os"}, {"text": "def f(): pass"})
    write("choices.jsonl", {"prompt": "def", "choices": [" f", "zzzz"], "answer": 0})
    write("sums.jsonl", {"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "long " * 100, "answer": "2"})
    files = ("texts.jsonl", "choices.jsonl", "sums.jsonl")
    arguments = ("evaluate", "runs/tiny", "--tasks", *files, "--tokens", "4", "--n", "2", "--samples", "samples.jsonl")
    assert main([*arguments, "--temperature", "1", "--report", "page.html"]) == 0
    out = capsys.readouterr().out
    page = Path("page.html").read_text()
    assert (
        "texts.jsonl: 2 questions" in page
        and "<td>1 + 1 =</td>" in page
        and "a page with the first answers is in page.html" in out
    )
    assert "texts.jsonl, 2 questions" in out and "bits_per_byte" in out and "95 %: " in out
    assert "acc_norm" in out and "exact_match" in out and "pass@2" in out
    assert "1 of 2 questions could not be asked, and no score counts them" in out
    assert "2 answers were cut after 4 tokens" in out
    samples = lines("samples.jsonl")
    assert [sample["task"] for sample in samples] == [files[0]] * 2 + [files[1]] + [files[2]] * 2
    assert "error" in samples[-1] and len(samples[-2]["answers"]) == 2
    for change, words in (
        (("--data", "a"), "--tasks and --data exclude each other"),
        (("--pattern", "("), "is not a regular expression"),
        (("--n", "0"), "n=0; expected 1"),
        (("--samples", "./sums.jsonl"), "is one of --tasks, which it would replace"),
        (("--report", "./sums.jsonl"), "--report ./sums.jsonl is one of --tasks, which it would replace"),
    ):
        assert main([*arguments, *change]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", "runs/tiny", "--samples", "x"]) == main(["evaluate", "runs/tiny", "--report", "x"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached by others; pass --key-file"),
        (("--host", "example.org"), "can be reached by others"),
        (("--key-file", "missing"), "--key-file missing can't be read"),
        (("--key-file", "empty"), "--key-file empty holds no key"),
        (("--port", "99999"), "--port 99999; expected 1 to 65535"),
        (("--port", "TAKEN"), "can't be listened on: "),
    ],
)
def test_a_server_that_can_not_be_is_refused(arguments, words, trained, capsys):
    Path("empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = [str(taken.getsockname()[1]) if each == "TAKEN" else each for each in arguments]
        assert main(["serve", "runs/tiny", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_server_answers_until_it_is_interrupted(trained):
    Path("key").write_text("secret\n")
    command = [
        sys.executable,
        "-m",
        "panax",
        "serve",
        "runs/tiny",
        "--port",
        "0",
        "--length",
        "48",
        "--key-file",
        "key",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        address = re.fullmatch(r"tiny is served at http://(127\.0\.0\.1:\d+)/v1 .*\n", line)[1]
        connection = http.client.HTTPConnection(address, timeout=60)
        body = json.dumps({"prompt": "def ", "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Authorization": "Bearer secret"})
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] <= 3
        connection.close()
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
    assert server.returncode == 0 and "Traceback" not in out + err


def test_training_takes_questions(tmp_path):
    arguments = [
        str(tiny_recipe.__file__),
        "--tasks",
        "a.jsonl",
        "b.jsonl",
        "--tasks-every",
        "50",
        "--questions.n",
        "4",
    ]
    questions = experiment_from(arguments, "train").questions
    assert questions == QuestionConfig(files=("a.jsonl", "b.jsonl"), every=50, n=4)
