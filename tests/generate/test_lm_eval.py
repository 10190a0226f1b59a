"""lm-eval computes the same with a model of Panax, with a server of Panax, and with its own `hf` model of the same weights."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import panax
from panax.core.errors import DataError, RecipeError
from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate.lm_eval_settings import read_settings
from panax.run import LoadedModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LENGTH = 48
TEXTS = (
    "The sun rises in the east and sets in the west. ",
    "Two and three make five; five and five make ten. ",
    "def add(a, b):\n    return a + b\n",
    "A ä character, and another one: é. Then a line.\n",
)
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}{{ '<s>' + each.role + ': ' + each.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


class Released(NamedTuple):
    """A released decoder in a folder, as transformers reads it and as Panax does."""

    folder: str
    theirs: Any
    tokenizer: Any
    ours: LoadedModel
    engine: GenerationEngine


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Released:
    import tokenizers
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("released")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(folder)
    ours = panax.load(f"hf:{folder}")
    return Released(str(folder), theirs, fast, ours, ours.create_engine(rows=4))


@pytest.fixture(scope="module")
def hf(released):
    from lm_eval.models.huggingface import HFLM

    # A row of the engine has two positions less for scores.
    return HFLM(pretrained=released.theirs, tokenizer=released.tokenizer, batch_size=2, max_length=LENGTH - 2)


@pytest.fixture
def model(released):
    return panax.generate.LmEvalModel(released.engine, released.ours.tokenizer)


def tasks(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """A task of multiple choices, one of answers, one of whole texts."""
    files = {
        "choices": [
            {"question": question, "choices": choices, "answer": number % 2}
            for number, (question, choices) in enumerate(
                [
                    ("The sun rises in the", ["east", "west", "é and ä"]),
                    ("Two and three make ", ["five", "ten", "b"]),
                    ("A" + " long question" * 30, ["east", "west", "a"]),
                    ("def", [" add", "(a", "\n"]),
                ]
            )
        ],
        "answers": [{"question": text[:size], "answer": text[size:]} for text in TEXTS for size in (3, 9, 20)]
        + [{"question": "long " * 40, "answer": "a"}],
        "texts": [{"text": text * times} for text in TEXTS for times in (1, 5)],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def task(name: str, **others: Any) -> dict[str, Any]:
        data = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
        return {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **others}

    return [
        task(
            "choices",
            output_type="multiple_choice",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{answer}}",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        task(
            "answers",
            output_type="generate_until",
            doc_to_text="{{question}}",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": [". ", "e"], "max_gen_toks": 12, "do_sample": False, **settings},
            metric_list=[{"metric": "exact_match"}],
        ),
        task(
            "texts",
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
        ),
    ]


def evaluate(model: Any, asked: list[dict[str, Any]], **settings: Any) -> dict[str, list[Any]]:
    """The responses to each task, by sample, after their scores."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        # It lists the machine's packages, for seconds.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=asked,
            # Without it, thousands of files are read.
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            verbosity="ERROR",
            **settings,
        )
    samples = {
        name: [sample["resps"] for sample in sorted(each, key=lambda sample: sample["doc_id"])]
        for name, each in results["samples"].items()
    }
    scores = {
        name: {score: value for score, value in each.items() if isinstance(value, float)}
        for name, each in results["results"].items()
    }
    return {name: [scores[name], samples[name]] for name in samples}


def check_equal(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> None:
    assert ours.keys() == theirs.keys()
    for name, (scores, samples) in ours.items():
        assert scores == pytest.approx(theirs[name][0], rel=1e-5), name
        for found, expected in zip(samples, theirs[name][1], strict=True):
            if name == "answers":
                assert found == expected
            else:
                for [one], [other] in zip(found, expected, strict=True):
                    assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.full
def test_each_sample_is_that_of_their_model(model, hf, tmp_path):
    asked = tasks(tmp_path)
    with pytest.warns(UserWarning, match="contexts are longer than a row of the engine and were cut from the left"):
        ours = evaluate(model, asked)
    check_equal(ours, evaluate(hf, asked))
    # One question with three choices, and one prompt.
    assert model.num_cut == 4
    assert len({text for [[text]] in ours["answers"][1]}) > 3


@pytest.mark.full
def test_chats_and_examples_are_those_of_their_model(model, hf, tmp_path):
    asked = [{**task, "num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}} for task in tasks(tmp_path)[:2]]
    for each in asked:
        each["fewshot_split"] = "test"
    with pytest.warns(UserWarning, match="were cut from the left"):
        ours = evaluate(model, asked, apply_chat_template=True, fewshot_as_multiturn=True)
    check_equal(ours, evaluate(hf, asked, apply_chat_template=True, fewshot_as_multiturn=True))


@pytest.mark.full
def test_a_server_gives_their_client_the_same(released, hf, tmp_path):
    import uvicorn
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from panax.generate.serving import ServedModel, create_app

    app = create_app(ServedModel(released.engine, released.ours.tokenizer, "tiny"))
    config = uvicorn.Config(app, port=0, log_level="error")
    socket = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        for asked in tasks(tmp_path):
            client = LocalCompletionsAPI(
                model="tiny",
                base_url=f"http://127.0.0.1:{socket.getsockname()[1]}/v1/completions",
                tokenizer=released.folder,
                tokenizer_backend="huggingface",
                add_bos_token=True,
                # It counts the token that is drawn after a scored text, but not before an answer.
                max_length=LENGTH - (asked["task"] == "answers"),
                max_retries=1,
            )
            check_equal(evaluate(client, [asked]), evaluate(hf, [asked]))
    finally:
        server.should_exit = True
        thread.join()


class Request(NamedTuple):
    """A request of lm-eval, of which models read the arguments."""

    args: tuple[Any, ...]


@pytest.mark.full
def test_answers_are_sampled_and_stored(model, released):
    class Stored:
        def __init__(self):
            self.values = {}

        def add_partial(self, kind, arguments, result):
            self.values[kind, json.dumps(arguments)] = result

    stored = Stored()
    model.set_cache_hook(stored)
    drawn = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8, "until": []}
    repeated = model.generate_until([Request(("The sun", drawn))] * 3, disable_tqdm=True)
    # Each repetition of a request has its own seed, and the whole call the same ones again.
    assert len(set(repeated)) == 3
    assert model.generate_until([Request(("The sun", drawn))] * 3, disable_tqdm=True) == repeated
    other = panax.generate.LmEvalModel(released.engine, released.ours.tokenizer, seed=7)
    assert other.generate_until([Request(("The sun", drawn))] * 3, disable_tqdm=True) != repeated
    [(score, is_greedy)] = model.loglikelihood([Request(("The sun", " rises"))], disable_tqdm=True)
    [rolled] = model.loglikelihood_rolling([Request(("The sun",))], disable_tqdm=True)
    assert stored.values["loglikelihood", '["The sun", " rises"]'] == (score, is_greedy)
    assert stored.values["loglikelihood_rolling", '["The sun"]'] == rolled
    # Greedy tokens are greedy, and others are not.
    prompt = model.tok_encode("Two and")
    [greedy] = released.engine.generate([GenerationRequest(tuple(prompt), Sampling(tokens=3, temperature=0.0))])
    others = [*greedy.ids[:2], (greedy.ids[2] + 1) % 256]
    scored = model._loglikelihood_tokens([(None, prompt, list(greedy.ids)), (None, prompt, others)], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in scored] == [True, False] and scored[0][0] > scored[1][0]
    assert model.loglikelihood([Request(("", "The sun"))], disable_tqdm=True)[0][0] == pytest.approx(
        model._loglikelihood_tokens([(None, [0], model.tok_encode("The sun", add_special_tokens=False))])[0][0]
    )


@pytest.mark.full
def test_requests_that_can_not_be_answered_are_refused(model, released):
    for settings, words in (
        ({"num_beams": 4}, "generation_kwargs has 'num_beams', which is not supported"),
        ({"max_gen_toks": LENGTH}, f"an answer of {LENGTH} tokens leaves no room for its context"),
        ({}, "an answer of 256 tokens leaves no room"),
    ):
        with pytest.raises(RecipeError, match=words):
            model.generate_until([Request(("a", settings))], disable_tqdm=True)
    with pytest.raises(DataError, match="a continuation has 61 tokens; expected 1 to 46"):
        model.loglikelihood([Request(("a", "\u1234" * 20 + "b"))], disable_tqdm=True)
    with pytest.raises(RecipeError, match="only the default template is applied"):
        model.chat_template("tool_use")
    assert model.chat_template(False) is None and model.chat_template(True) == TEMPLATE
    prefilled = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    assert model.apply_chat_template(prefilled, add_generation_prompt=False).endswith("<s>assistant: b")
    tokenizer = released.ours.tokenizer
    assert model.tokenizer_name == f"panax-{tokenizer.fingerprint}"


@pytest.mark.full
def test_without_lm_eval_the_way_to_install_it_is_named():
    """The room itself imports nothing of it."""
    program = (
        "import sys\n"
        "import panax.generate\n"
        "assert not {'lm_eval', 'dill', 'datasets'} & sys.modules.keys()\n"
        "sys.modules['lm_eval'] = None\n"
        "try:\n"
        "    panax.generate.LmEvalModel\n"
        "except panax.core.RecipeError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert said.startswith("lm-eval is not installed; install it with: ") and "eval" in said


def test_settings_of_tasks_are_those_of_sampling():
    assert read_settings({"until": "x", "max_tokens": 3, "max_gen_toks": 4}, 9, 5).tokens == 4
    sampled = read_settings({"do_sample": True, "top_p": 0.9, "top_k": 5, "until": None}, 9, 5)
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.tokens, sampled.seed) == (1.0, 0.9, 5, 9, 5)
    assert read_settings({"temperature": 0.5}, 9, 0).temperature == 0.5
    assert read_settings({"temperature": 0.5, "do_sample": False}, 9, 0).temperature == 0.0
    for settings in ({"until": [3]}, {"temperature": -1}, {"top_p": 2}, {"temprature": 1}):
        with pytest.raises(RecipeError):
            read_settings(settings, 9, 0)
