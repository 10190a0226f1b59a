"""Answers under a constraint meet it, others keep their bits beside them, and a constraint that can't be met is one error."""

import dataclasses
import json
import re
import threading

import jax
import jsonschema
import numpy as np
import pytest
import tokenizers
from loopback import END, byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from panax.core.errors import DataError, RecipeError
from panax.data.text.tokenizer import Tokenizer
from panax.generate import GenerationEngine, GenerationRequest, Grammar, JsonSchema, Regex, Sampling
from panax.generate.constraints import matchers
from panax.models import DecoderConfig, DecoderTask

LENGTH = 160
TASK = DecoderTask(model=DecoderConfig(vocab_size=272, max_length=LENGTH, embed=16, num_layers=1, heads=2, ffn=24))
SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": -50},
        "kind": {"enum": ["a", "bc"]},
        "name": {"type": "string", "maxLength": 6},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
    },
    "required": ["number", "kind", "name"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}},
}


def character_tokenizer(letters, decoder):
    backend = tokenizers.Tokenizer(
        models.WordLevel({letter: place for place, letter in enumerate(letters)}, letters[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(""), "isolated")
    backend.decoder = decoder
    backend.add_special_tokens([END])
    return Tokenizer(backend, end_of_document=END)


def build(tokenizer):
    params, state = TASK.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params)
    return GenerationEngine(TASK.incremental_model(params, state), tokenizer, rows=3, chunk=8)


@pytest.fixture(scope="module")
def engine():
    return build(byte_tokenizer())


def request(constraint, seed=0, tokens=120, **settings):
    return GenerationRequest((seed + 1, 7, 30), Sampling(tokens=tokens, seed=seed, constraint=constraint, **settings))


def test_drawn_answers_are_valid_under_their_schema(engine):
    settings = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}, {"bias": {255: 100.0}}]
    answers = engine.generate([request(JsonSchema(SCHEMA), seed, **settings[seed % 6]) for seed in range(30)])
    cut = 0
    for answer in answers:
        assert answer.finish in ("stop", "length") and not answer.error
        cut += answer.finish == "length"
        if answer.finish == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert list(json.loads(answer.text))[:3] == ["number", "kind", "name"]
    assert cut < 10 and len({answer.text for answer in answers}) > 20


def test_neighbors_of_a_constrained_row_keep_their_bits(engine):
    free = [GenerationRequest((5, n), Sampling(tokens=12, seed=n, top_k=n, top_log_probabilities=2)) for n in range(5)]
    alone = [engine.generate([each])[0].tokens for each in free]
    constrained = request(JsonSchema(SCHEMA), 3, tokens=60)
    constrained_alone = engine.generate([constrained])[0].tokens
    together = engine.generate([free[0], constrained, *free[1:], constrained])
    assert [each.tokens for each in together] == [
        alone[0],
        constrained_alone,
        *alone[1:],
        constrained_alone,
    ]


def test_no_constraint_compiles_a_program(engine):
    from panax.generate import programs

    compiled = [programs.run_prompt_chunk, programs.run_decode_step, programs.copy_row]
    engine.generate([GenerationRequest((1,), Sampling(tokens=2))])
    before = [each._cache_size() for each in compiled]
    engine.generate([request(Regex("[a-c]{2,9}")), GenerationRequest((1,), Sampling(tokens=4)), request(Regex("é*"))])
    assert [each._cache_size() for each in compiled] == before


def test_log_probabilities_are_the_models_and_those_of_the_allowed_tokens(engine):
    [answer] = engine.generate([request(Regex("[ab]{9}"), top_log_probabilities=20)])
    assert answer.finish == "stop" and set(answer.text) == {"a", "b"}
    for each in answer.tokens:
        # One of 272 tokens for the model, one of two here.
        assert each.log_probability < -3.0 and -5.0 < each.sampling_log_probability < 0.0
    [forced] = engine.generate([request(Regex("abc"))])
    assert [each.sampling_log_probability for each in forced.tokens] == [0.0] * 3
    [fifth] = engine.generate([request(Regex("[ab]{9}"), top_k=1)])
    assert [each.sampling_log_probability for each in fifth.tokens] == [0.0] * 9, "top-k is among the allowed tokens"


CONSTRAINTS = {
    "an expression": (Regex("(x|yz){3}[0-9]+é"), lambda text: re.fullmatch("(x|yz){3}[0-9]+é", text)),
    "a grammar": (Grammar('start: "(" start ")" | "x"'), lambda text: text == f"{'(' * (len(text) // 2)}x{')' * (len(text) // 2)}"),  # noqa: E501
    "a grammar with a schema": (
        Grammar('start: "<" %json {"type": "integer", "maximum": 99, "minimum": 0} ">"'),
        lambda text: 0 <= int(text[1:-1]) <= 99,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_expressions_and_grammars(case, engine):
    constraint, holds = CONSTRAINTS[case]
    for answer in engine.generate([request(constraint, seed, n=3) for seed in range(4)]):
        assert answer.finish == "length" or holds(answer.text)


def test_answers_to_one_request_have_states_of_their_own(engine):
    asked = request(Regex("[a-z]{3}[0-9]{3}"), n=5)
    answers = engine.generate([asked])
    assert all(re.fullmatch("[a-z]{3}[0-9]{3}", each.text) for each in answers)
    assert len({each.text for each in answers}) == 5
    [second] = engine.generate([dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, seed=1, n=1))])
    assert second.tokens == answers[1].tokens


def test_an_end_token_ends_a_complete_answer_only(engine):
    end = byte_tokenizer().end_of_document
    likely = {"bias": {end: 100.0}}
    [answer] = engine.generate([request(Regex("a{4,50}"), **likely)])
    assert (answer.text, answer.finish) == ("aaaa", "end")
    [empty] = engine.generate([request(Regex("a*"), **likely)])
    assert (empty.text, empty.finish) == ("", "end")
    [cut] = engine.generate([request(Regex("a{4,50}"), tokens=3, **likely)])
    assert (cut.text, cut.finish) == ("aaa", "length")
    [complete] = engine.generate([request(Regex("a{3}"), tokens=3)])
    assert (complete.text, complete.finish) == ("aaa", "stop")
    [stopped] = engine.generate([request(Regex("ab{9}"), stop=("bb",))])
    assert (stopped.text, stopped.finish) == ("a", "stop")


def test_tokens_of_characters(engine):
    of_one = {
        "type": "object",
        "properties": {"a": {"enum": ["é", "b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    characters = build(character_tokenizer('ab{}":, é\n\t', decoders.Fuse()))
    answers = characters.generate([request(JsonSchema(of_one))])
    assert json.loads(answers[0].text)["a"] in "éb"
    spaced = build(character_tokenizer("ab", decoders.WordPiece()))
    with pytest.raises(RecipeError, match="depends on the tokens beside it"):
        spaced.check_constraint(Regex("a"))
    assert spaced.generate([GenerationRequest((1,), Sampling(tokens=2))])[0].finish == "length"


def test_an_answer_that_can_not_be_continued_is_an_error_of_its_own():
    engine = build(character_tokenizer("abc", decoders.Fuse()))
    with pytest.raises(DataError, match="the schema can't be used: no token of the model's vocabulary can continue"):
        engine.check_constraint(JsonSchema({"type": "object"}))
    free = GenerationRequest((1,), Sampling(tokens=9))
    [alone] = engine.generate([free])
    dead_end, neighbor = engine.generate([request(Grammar('start: "a" ("b" "x" | "c" "y")')), free])
    assert dead_end.finish == "error" and "no token of the model's vocabulary can continue" in dead_end.error
    assert dead_end.text in ("ab", "ac") and neighbor.tokens == alone.tokens and not neighbor.error


def test_an_expression_that_explodes_is_an_error_of_its_own(engine):
    free = GenerationRequest((1,), Sampling(tokens=60))
    [alone] = engine.generate([free])
    exploding, neighbor = engine.generate([request(Regex(r"(\w{0,500}\p{L}{0,500}){0,500}")), free])
    assert exploding.finish == "error" and "too many expressions" in exploding.error
    assert neighbor.tokens == alone.tokens


def chain(count):
    references = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": references | {f"a{count}": {"type": "integer"}}}


REFUSED = {
    "no expression": (lambda: Regex("["), RecipeError, "the regular expression can't be used: .*unclosed character class"),
    "look-around": (lambda: Regex("(?=a)a"), RecipeError, "look-around"),
    "a long expression": (lambda: Regex("a" * 20_000), RecipeError, "longer than 16,384 bytes"),
    "no grammar": (lambda: Grammar("start: other"), RecipeError, 'unknown name: "other"'),
    "another form": (lambda: Grammar('{"grammars": []}'), RecipeError, "the grammar begins with '{'"),
    "endless": (lambda: Grammar("start: start"), DataError, "no token of the model's vocabulary"),
    "a broken schema": (lambda: Grammar("start: %json {"), RecipeError, "is not followed by a schema"),
    "no type": (lambda: JsonSchema({"type": "strng"}), RecipeError, "Invalid type: strng"),
    "no JSON": (lambda: JsonSchema("{"), RecipeError, "the schema can't be read"),
    "no object": (lambda: JsonSchema("[]"), RecipeError, "expected an object"),
    "no value": (lambda: JsonSchema({"a": object()}), RecipeError, "can't be written as JSON"),
    "elsewhere": (lambda: JsonSchema({"$ref": "http://a.example/b"}), RecipeError, "does not fetch resources"),
    "a file": (lambda: JsonSchema({"$ref": "file:///etc/passwd"}), RecipeError, "does not fetch resources"),
    "itself": (lambda: JsonSchema({"$ref": "#"}), DataError, "no token of the model's vocabulary"),
    "unsupported": (lambda: JsonSchema({"not": {}}), RecipeError, "Unimplemented keys"),
    "deep": (lambda: JsonSchema("[" * 100_000), RecipeError, "nested deeper"),
    "large": (lambda: JsonSchema({"enum": ["a" * 200_000]}), RecipeError, "longer than 131,072 bytes"),
    "long patterns": (lambda: JsonSchema({"pattern": "a" * 20_000}), RecipeError, "schema's patterns is longer"),
    "multiples": (
        lambda: JsonSchema({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 0.9967}]}),
        RecipeError,
        "multipleOf have the product 99,400,891",
    ),
    "hidden": (lambda: Grammar('start: %json {"multiple\\u004ff": 100000007}'), RecipeError, "multipleOf"),
    "no end": (lambda: Sampling(constraint=Regex("a"), ignore_end=True), RecipeError, "ignore_end has no effect"),
    "another value": (lambda: Sampling(constraint="a"), RecipeError, "constraint='a'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_constraint_that_can_not_be_used_has_one_message(case, engine):
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words) as caught:
        engine.check_constraint(make())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_long_chains_of_references_do_not_end_the_process(engine):
    """They overflow llguidance's stack elsewhere; here also in a thread with a small one."""
    before = threading.stack_size(1 << 20)
    results = []
    try:
        for make in (
            lambda: JsonSchema(chain(2500)),
            lambda: Grammar("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(1000)) + '\nr1000: "x"'),
        ):
            thread = threading.Thread(target=lambda make=make: results.append(engine.check_constraint(make())))
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert results == [None, None]
    [answer] = engine.generate([request(JsonSchema(chain(2500)))])
    assert int(answer.text) is not None


def test_a_constraint_is_compiled_once(engine, monkeypatch):
    constraint = Regex("[p-t]{2}")
    engine.check_constraint(constraint)
    monkeypatch.setattr(matchers, "_run_with_stack", lambda function: pytest.fail("compiled again"))
    assert len(engine.generate([request(constraint, n=3)])) == 3
    for number in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(matchers, "_run_with_stack", lambda function: function())
            engine.check_constraint(Regex(f"a{number}"))
    assert len(engine._constraints._compiled) == matchers.MAX_COMPILED


def test_a_constraint_needs_a_tokenizer_and_llguidance(engine, monkeypatch):
    with pytest.raises(RecipeError, match="a constraint needs a tokenizer"):
        GenerationEngine(engine._model, rows=3, chunk=8).check_constraint(Regex("a"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"needs llguidance, which is not installed; .*structured"):
        build(byte_tokenizer()).check_constraint(Regex("a"))


def test_a_free_step_uses_an_array_that_is_on_the_device(engine):
    first, second = (engine._constraints.stack([None] * 3) for _ in range(2))
    assert first.bits is second.bits and not np.asarray(first.constrained).any()
