"""The server answers as the engine does, streams, refuses with one message, and drops requests that nobody waits for."""

import concurrent.futures
import http.client
import json
import time

import jax
import pytest
from loopback import Running

from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.models import DecoderConfig, DecoderTask

LENGTH = 64


class Letters:
    """A tokenizer of single characters, with a template of chats."""

    start_of_document, end_of_document, end_ids, role_tokens = (), 255, (255,), {}
    chat_templates = {"default": "{% for each in messages %}{{ each.content }}|{% endfor %}"}  # noqa: RUF012

    def encode(self, text):
        return [ord(letter) % 256 for letter in text]

    def encode_rendered(self, texts):
        return [type("Encoded", (), {"ids": self.encode(text)}) for text in texts]

    def decode(self, ids):
        return "".join(map(chr, ids))


TASK = DecoderTask(model=DecoderConfig(vocab_size=256, max_length=LENGTH, embed=16, num_layers=1, heads=2, ffn=24))


@pytest.fixture(scope="module")
def engine():
    return create_engine()


def create_engine():
    params, _ = TASK.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params)
    return GenerationEngine(TASK.incremental_model(params, {}), Letters(), rows=3, chunk=8)


@pytest.fixture(scope="module")
def server(engine):
    running = Running(engine, Letters())
    yield running
    running.close()


@pytest.fixture(scope="module")
def alone(engine):
    """The engine's answers before there is a server."""
    requests = [
        GenerationRequest(tuple(Letters().encode(text)), Sampling(tokens=9, seed=4)) for text in ("abc", "xyz", "q")
    ]
    return [each.text for each in engine.generate(requests)]


def test_many_clients_get_what_each_would_get_alone(alone, server):
    def ask(text):
        return server.ask("/v1/completions", prompt=text, max_tokens=9, seed=4)["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(9) as clients:
        texts = list(clients.map(ask, ["abc", "xyz", "q"] * 3))
    assert texts == alone * 3
    several = server.ask("/v1/completions", prompt=["abc", "xyz", "q"], max_tokens=9, seed=4)
    assert [choice["text"] for choice in several["choices"]] == alone
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["usage"] == {"prompt_tokens": 7, "completion_tokens": 27, "total_tokens": 34}
    by_ids = server.ask("/v1/completions", prompt=[97, 98, 99], max_tokens=9, seed=4, n=2)
    assert by_ids["choices"][0]["text"] == alone[0] and len(by_ids["choices"]) == 2


def test_a_stream_is_the_same_text_in_parts(alone, server):
    parts = server.stream("/v1/completions", prompt="abc", max_tokens=9, seed=4, stream_options={"include_usage": True})
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == alone[0] and len(parts) > 3
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 9
    chat = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "abc"}], max_tokens=5, seed=4)
    whole = server.ask("/v1/chat/completions", messages=[{"role": "user", "content": "abc"}], max_tokens=5, seed=4)
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in chat)
    assert text == whole["choices"][0]["message"]["content"] and len(text) == 5


def test_a_stream_has_the_log_probabilities_of_the_whole_answer(server):
    asked = {"prompt": "abc", "max_tokens": 6, "seed": 4, "logprobs": 1, "stop": ["never there"]}
    whole = server.ask("/v1/completions", **asked)["choices"][0]["logprobs"]["token_logprobs"]
    parts = [part["choices"][0]["logprobs"] for part in server.stream("/v1/completions", **asked)]
    assert [value for part in parts if part for value in part["token_logprobs"]] == whole


def test_log_probabilities_of_prompt_and_answer(server, engine):
    """As lm-eval's API model asks for them."""
    scored = server.ask("/v1/completions", prompt="abcd", max_tokens=0, echo=True, logprobs=1, temperature=0)
    [choice] = scored["choices"]
    logs = choice["logprobs"]
    assert choice["text"] == "abcd" and logs["tokens"] == list("abcd") and logs["text_offset"] == [0, 1, 2, 3]
    assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
    assert all(value < 0 for value in logs["token_logprobs"][1:])
    for token, value, top in list(zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True))[1:]:
        assert top[token] == value <= max(top.values())
    assert scored["usage"]["completion_tokens"] == 0
    answered = server.ask("/v1/completions", prompt="abcd", max_tokens=3, logprobs=2, temperature=0)["choices"][0]
    assert len(answered["logprobs"]["tokens"]) == 3 and "".join(answered["logprobs"]["tokens"]) == answered["text"]
    chat = server.ask(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=2, logprobs=True, top_logprobs=3
    )["choices"][0]
    assert [len(each["top_logprobs"]) for each in chat["logprobs"]["content"]] == [3, 3]


def test_a_scored_prompt_is_followed_by_a_token_even_if_that_ends_the_answer(monkeypatch):
    """As lm-eval's client expects, which drops the last log-probability."""
    monkeypatch.setattr(Letters, "end_ids", tuple(range(256)))
    running = Running(create_engine(), Letters())
    try:
        scored = {"prompt": "abcd", "max_tokens": 1, "temperature": 0, "logprobs": 1}
        [choice] = running.ask("/v1/completions", **scored, echo=True)["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 5
        [choice] = running.ask("/v1/completions", **scored)["choices"]
        assert choice["finish_reason"] == "stop" and not choice["text"]
    finally:
        running.close()


REFUSED = {
    "no prompt": ("/v1/completions", {}, "prompt: expected a text"),
    "empty": ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
    "mixed": ("/v1/completions", {"prompt": ["a", 3]}, "prompt: expected a text"),
    "a token that is not there": ("/v1/completions", {"prompt": [1, 300]}, "holds the token 300"),
    "too long": ("/v1/completions", {"prompt": "a" * 60, "max_tokens": 5}, "this engine has 64 positions"),
    "unknown": ("/v1/completions", {"prompt": "a", "temprature": 1}, "field 'temprature'; did you mean 'temperature'"),
    "unsupported": ("/v1/completions", {"prompt": "a", "best_of": 2}, "unknown or unsupported field 'best_of'"),
    "another model": (
        "/v1/completions",
        {"prompt": "a", "model": "gpt"},
        "the model 'gpt' is not served here; expected 'tiny'",
    ),
    "text for a number": ("/v1/completions", {"prompt": "a", "temperature": "1"}, "temperature='1'; expected a number"),
    "out of range": ("/v1/completions", {"prompt": "a", "top_p": 2}, "top_p=2"),
    "half a number": ("/v1/completions", {"prompt": "a", "n": 1.5}, "n=1.5"),
    "too many": ("/v1/completions", {"prompt": ["a"] * 2, "n": 100}, "are 200 answers; expected at most 128"),
    "no tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens=0; expected 1 or more, or echo"),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "stop": ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop=[1]; expected"),
    "stop of another type": ("/v1/completions", {"prompt": "a", "stop": 5}, "stop=5; expected"),
    "a scored stream": (
        "/v1/completions",
        {"prompt": "a", "stream": True, "echo": True, "logprobs": 1},
        "stream with echo and logprobs is not supported",
    ),
    "no messages": ("/v1/chat/completions", {"messages": []}, "messages: expected a list"),
    "tools": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        "tools[0]: expected",
    ),
    "top without logprobs": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        "top_logprobs needs logprobs=true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_can_not_be_answered_has_one_message(case, server):
    path, body, words = REFUSED[case]
    status, text = server.send(path, body)
    assert status == 400 and words in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"]
)
def test_a_broken_body_is_refused(raw, server):
    status, text = server.send("/v1/completions", raw=raw)
    assert status == 400 and json.loads(text)["error"]["message"]


def test_a_client_that_leaves_frees_its_row(server, engine):
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "a", "max_tokens": 60, "n": 100, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body))
        if stream:
            connection.getresponse().readline()
        else:
            time.sleep(0.3)
        connection.close()
        begin = time.monotonic()
        # 6,000 tokens would take longer than one request after those that are dropped.
        assert server.ask("/v1/completions", prompt="abc", max_tokens=2)["choices"]
        deadline = begin + 30
        while not engine.is_idle and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.is_idle


def test_pages_of_other_hosts_are_refused_without_a_key(server):
    body = {"prompt": "a", "max_tokens": 1}
    assert server.send("/v1/completions", body, {"Origin": "http://localhost:3000"})[0] == 200
    assert server.send("/v1/completions", body, {"Origin": "http://evil.example"})[0] == 403
    assert server.send("/v1/completions", body, {"Origin": "null"})[0] == 403
    assert server.send("/v1/completions", body, {"Host": "evil.example"})[0] == 403
    assert server.send("/v1/models", None, {"Host": "evil.example:80"})[0] == 403


def test_a_key_is_asked_for(engine, server):
    # The engine's thread is the other server's; here nothing is generated.
    keyed = Running(GenerationEngine(engine._model, Letters(), rows=1, chunk=8), Letters(), key="secret")
    try:
        assert keyed.send("/v1/models")[0] == 401
        assert keyed.send("/v1/models", None, {"Authorization": "Bearer wrong"})[0] == 401
        status, text = keyed.send("/v1/models", None, {"Authorization": "Bearer secret", "Host": "any.example"})
        assert status == 200 and json.loads(text)["data"][0]["id"] == "tiny"
        assert keyed.send("/v1/completions", {"prompt": "a"})[0] == 401
        assert keyed.send("/health")[0] == 200
    finally:
        keyed.close()


def test_an_engine_that_fails_answers_an_error_and_then_as_before(server, engine, monkeypatch, alone):
    from panax.generate import engine as module

    def fail(*arguments):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_decode_step", fail)
        status, text = server.send("/v1/completions", {"prompt": "abc", "max_tokens": 9})
        assert status == 500 and "the device is lost" in json.loads(text)["error"]["message"]
    assert server.ask("/v1/completions", prompt="abc", max_tokens=9, seed=4)["choices"][0]["text"] == alone[0]
