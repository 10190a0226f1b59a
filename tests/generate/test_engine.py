"""Many requests at once have the bits of each alone, and the log-probabilities of the training forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.core.errors import DataError, RecipeError
from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate.batching import Batching
from panax.generate.program_inputs import STOP_IDS
from panax.layers import Context, Latent, MoE
from panax.models import (
    ConvolutionConfig,
    DecoderConfig,
    DecoderTask,
    DeltaNetConfig,
    HybridConfig,
    SideBySideConfig,
    SublayerConfig,
    compute_logits,
)

VOCAB, CHUNK, ROWS = 96, 8, 3
SIZES = {"vocab_size": VOCAB, "max_length": 64, "embed": 16, "num_layers": 2, "heads": 2, "ffn": 24}

CONFIGS = {
    "windows": DecoderConfig(**SIZES, kv_heads=1, windows=(6, 0)),
    "mamba": HybridConfig(**SIZES, attention_layers=(1,)),
}
OTHERS = {
    "convolutions": ConvolutionConfig(**SIZES, attention_layers=(1,)),
    "delta nets": DeltaNetConfig(**SIZES, attention_layers=(1,)),
    "side by side": SideBySideConfig(**SIZES),
    "linear biases": DecoderConfig(**SIZES, rotary=None, alibi_slopes=(0.5, 0.1), embed_norm=True),
    "chunks": DecoderConfig(**SIZES, windows=(5, 0), window_kind="chunked"),
    "sublayers": SublayerConfig(**SIZES, sublayers=("attention", "feed_forward")),
    "experts": DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2)),
    "latent": DecoderConfig(**SIZES, latent=Latent(q_rank=0, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)),
}


def build(name, **settings):
    task = DecoderTask(model=(CONFIGS | OTHERS)[name])
    params, state = drawn(task.init)
    # Larger than they are drawn, so that layers are heard above the token's own embedding.
    params = jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params)
    return params, GenerationEngine(task.incremental_model(params, state), rows=ROWS, chunk=CHUNK, **settings)


@pytest.fixture(scope="module")
def models():
    return {name: build(name) for name in CONFIGS}


def prompt(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def requests():
    """Prompts shorter than a chunk, of whole chunks and between; greedy and drawn."""
    settings = [
        Sampling(tokens=5, temperature=0.0, prompt_log_probabilities=True, top_log_probabilities=2),
        Sampling(tokens=9, seed=1, top_p=0.9),
        Sampling(tokens=4, seed=2, top_k=20, min_p=0.01, frequency_penalty=0.5),
        Sampling(tokens=20, seed=3, temperature=0.7, repetition_penalty=1.2, bias={3: 2.0}),
        Sampling(tokens=6, temperature=0.0, presence_penalty=1.0),
    ]
    lengths = 3, 17, 8, 20, 1
    return [GenerationRequest(prompt(n, n), each) for n, each in zip(lengths, settings, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_neighbors_and_order_change_no_bit(name, models):
    check_independence(models[name][1])


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_neighbors_and_order_change_no_bit_in_other_models(name):
    params, engine = build(name)
    check_independence(engine)
    check_log_probabilities(params, engine)


def check_independence(engine):
    alone = [engine.generate([request])[0].tokens for request in requests()]
    together = [completion.tokens for completion in engine.generate(requests())]
    reverse = [completion.tokens for completion in engine.generate(requests()[::-1])][::-1]
    assert together == alone and reverse == alone
    assert [len(tokens) for tokens in alone] == [request.sampling.tokens for request in requests()]


@pytest.mark.parametrize(
    ("name", "prompts"), [("windows", 2), *(pytest.param(name, 3, marks=pytest.mark.full) for name in CONFIGS | OTHERS)]
)
def test_several_prompts_at_once_change_no_answer(name, prompts):
    params, engine = build(name, batching=Batching(prompts=prompts))
    check_independence(engine)
    check_log_probabilities(params, engine)


@pytest.mark.parametrize(
    "name", ["windows", *(pytest.param(name, marks=pytest.mark.full) for name in CONFIGS | OTHERS if name != "windows")]
)
def test_answers_share_a_prompt_and_are_continued_by_several_tokens(name, models):
    """The tokens of an engine that runs each answer by itself; with fewer rows than answers, and more answers than share."""
    params, engine = build(name, batching=Batching(prompts=2, samples=3, steps=4, pieces=False))
    check_independence(engine)
    check_log_probabilities(params, engine)
    asked = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, n=5), seeds=(7, 3, 9, 3, 1))
        for each in requests()
    ]
    single = models[name][1] if name in models else build(name)[1]
    found, expected = engine.generate(asked), single.generate(asked)
    assert [each.ids for each in found] == [each.ids for each in expected]
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        assert all(a.log_probability == pytest.approx(b.log_probability, abs=2e-6) for a, b in pairs)
    drawn = [each.ids for each in found if each.number == 1]
    assert drawn[1] == drawn[3] and len(set(drawn)) == 4


def test_an_answer_ends_within_the_tokens_of_a_round(models):
    """At stop tokens that the program knows and at others, at its length, and under limits that only the host knows."""
    _, engine = build("windows", batching=Batching(samples=2, steps=8))
    free = models["windows"][1].generate([GenerationRequest((1, 2), Sampling(tokens=20, seed=5))])[0].ids
    others = tuple(token for token in range(VOCAB) if token not in free)[:STOP_IDS]
    for stop_ids in ((free[4],), (*others, free[4])):
        (found,) = engine.generate([GenerationRequest((1, 2), Sampling(tokens=20, seed=5, stop_ids=stop_ids))])
        assert found.ids == free[: free.index(free[4])] and found.finish == "stop" and found.end.token == free[4]
    (found,) = engine.generate([GenerationRequest((1, 2), Sampling(tokens=11, seed=5))])
    assert found.ids == free[:11] and found.finish == "length"
    with pytest.raises(RecipeError, match="expected one for each of the n=2 answers"):
        engine.generate([GenerationRequest((1,), Sampling(tokens=4, n=2), seeds=(1,))])
    with pytest.raises(RecipeError, match="both draw several tokens"):
        build("windows", drafts=2, batching=Batching(steps=2))


def test_a_canceled_request_leaves_no_answer_that_waits_for_its_prompt(models):
    _, engine = build("windows", batching=Batching(samples=3, steps=2))
    expected = [each.ids for each in models["windows"][1].generate(requests())]
    number = engine.submit(GenerationRequest(prompt(20, 20), Sampling(tokens=3, n=3)))
    engine.step()
    engine.cancel(number)
    assert engine.is_idle
    stream = engine.stream([GenerationRequest(prompt(20, 20), Sampling(tokens=3, n=3))])
    next(stream)
    stream.close()
    assert [each.ids for each in engine.generate(requests())] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_the_training_forward(name, models):
    check_log_probabilities(*models[name])


@jax.jit
def compute_log_probabilities(params, row):
    hidden, _ = params(row, Context(jnp.arange(row.shape[1])[None]), dtype=jnp.float32)
    return jax.nn.log_softmax(compute_logits(params, hidden))


def forward_log_probabilities(params, ids):
    """Of the tokens after each of these, by the training forward pass; for all lengths by one program."""
    row = np.zeros((1, params.config.max_length), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(compute_log_probabilities(params, row))[0, : len(ids)]


def check_log_probabilities(params, engine):
    for request, completion in zip(requests(), engine.generate(requests()), strict=True):
        logs = forward_log_probabilities(params, request.prompt + completion.ids)
        first = len(request.prompt) - 1
        for place, token in enumerate(completion.tokens):
            # Sums of at most 32 float32 terms in another order, in each of two layers.
            assert token.log_probability == pytest.approx(logs[first + place, token.token], abs=2e-6)
            assert [each for _, each in token.top] == pytest.approx(
                np.sort(logs[first + place])[::-1][: len(token.top)], abs=2e-6
            )
        if request.sampling.temperature == 0.0 and not request.sampling.presence_penalty:
            assert completion.ids == tuple(logs[first:-1].argmax(-1).tolist())
        if request.sampling.prompt_log_probabilities:
            scored = [logs[place, token] for place, token in enumerate(request.prompt[1:])]
            assert completion.prompt_log_probabilities == pytest.approx(scored, abs=2e-6)
            likeliest = [each.top[0] for each in completion.prompt_tokens]
            assert [token for token, _ in likeliest] == logs[:first].argmax(-1).tolist()
            assert [value for _, value in likeliest] == pytest.approx(logs[:first].max(-1), abs=2e-6)


def test_a_common_beginning_is_computed_once_and_changes_no_bit(models):
    """In whole chunks, also between the answers to one request; a recurrent state is not shared."""
    beginning = prompt(2 * CHUNK + 3, 7)
    asked = [GenerationRequest(beginning + prompt(n, n), Sampling(tokens=4, seed=n, n=2)) for n in (2, 5, 9)]
    for name, reused in (("windows", 3 * CHUNK), ("mamba", 0)):
        engine = models[name][1]
        first = engine.generate([GenerationRequest(prompt(30, 8), Sampling(tokens=1))] * ROWS)
        assert first[0].reused == 0
        apart = []
        for request in asked:
            # Other prompts in all rows, so that nothing is left to share.
            engine.generate([GenerationRequest(prompt(30, 9 + n), Sampling(tokens=1)) for n in range(ROWS)])
            apart.append([each.tokens for each in engine.generate([request])])
        engine.generate([GenerationRequest(prompt(30, 90 + n), Sampling(tokens=1)) for n in range(ROWS)])
        together = engine.generate(asked)
        assert [each.tokens for each in together] == [tokens for each in apart for tokens in each]
        assert max(each.reused for each in together) == reused
        assert together[0].tokens != together[1].tokens, "the answers of one request have seeds of their own"


def test_scores_of_continuations_share_their_beginning_and_change_no_bit(models):
    engine = models["windows"][1]
    beginning = prompt(2 * CHUNK + 4, 11)
    prompts = [beginning + prompt(n, n) for n in (2, 5, 9)]
    scored = {"tokens": 1, "temperature": 0.0, "prompt_log_probabilities": True}
    alone = [engine.generate([GenerationRequest(each, Sampling(**scored))])[0] for each in prompts]
    for first, shared in ((len(beginning), 2 * CHUNK), (2 * CHUNK, CHUNK), (2 * CHUNK + 1, 2 * CHUNK), (1, 0)):
        engine.generate([GenerationRequest(prompt(30, 90 + n), Sampling(tokens=1)) for n in range(ROWS)])
        # All at once: the second and the third wait for the beginning of the first.
        sampling = Sampling(**scored, scored_from=first)
        together = engine.generate([GenerationRequest(each, sampling) for each in prompts])
        assert [each.prompt_tokens for each in together] == [each.prompt_tokens[first - 1 :] for each in alone]
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        assert [each.reused for each in together] == [0, shared, shared]
    [nothing] = engine.generate([GenerationRequest(prompts[0], Sampling(**scored, scored_from=60))])
    assert nothing.prompt_tokens == () and nothing.tokens == alone[0].tokens
    with pytest.raises(RecipeError, match="scored_from=0; expected 1 or more"):
        Sampling(**scored, scored_from=0)


def test_no_request_compiles_a_program(models):
    from panax.generate import programs

    compiled = [programs.run_prompt_chunk, programs.run_decode_step, programs.copy_row]
    before = [each._cache_size() for each in compiled]
    models["windows"][1].generate([GenerationRequest(prompt(n), Sampling(tokens=n, n=2)) for n in (1, 5, 30)])
    assert [each._cache_size() for each in compiled] == before


def test_a_stop_token_ends_an_answer_and_is_not_in_it(models):
    engine = models["windows"][1]
    [whole] = engine.generate([GenerationRequest(prompt(4), Sampling(tokens=12, seed=5))])
    cut = whole.ids.index(whole.ids[6])
    [stopped] = engine.generate([GenerationRequest(prompt(4), Sampling(tokens=12, seed=5, stop_ids=(whole.ids[6],)))])
    *_, last = engine.stream([GenerationRequest(prompt(4), Sampling(tokens=12, seed=5, stop_ids=(whole.ids[6],)))])
    assert last.token is None and last.completion is not None
    assert stopped.ids == whole.ids[:cut] and (stopped.finish, whole.finish) == ("stop", "length")
    # It was drawn all the same, and so it is an action.
    assert stopped.actions == whole.tokens[: cut + 1] and whole.end is None and whole.actions == whole.tokens


def test_requests_are_read_when_a_row_is_free(models):
    """So that a file of any length can be answered."""
    read = []

    def many():
        for number in range(20):
            read.append(number)
            yield GenerationRequest(prompt(3, number), Sampling(tokens=2))

    stream = models["windows"][1].stream(many())
    first = next(stream)
    assert len(read) <= ROWS + 1 and first.completion is None
    assert sum(event.completion is not None for event in stream) == 20


def test_a_stream_that_is_closed_frees_its_rows(models):
    engine = models["windows"][1]
    stream = engine.stream([GenerationRequest(prompt(3), Sampling(tokens=30))])
    next(stream)
    with pytest.raises(RecipeError, match="the engine is in use by another stream"):
        next(engine.stream([]))
    stream.close()
    assert engine.generate([GenerationRequest(prompt(3), Sampling(tokens=2))])[0].finish == "length"


def test_requests_can_be_added_and_dropped_while_others_run(models):
    engine = models["windows"][1]
    wanted = [each.tokens for each in engine.generate(requests())]
    done = {}

    def step():
        done.update((event.number, event.completion.tokens) for event in engine.step() if event.completion is not None)

    dropped = engine.submit(GenerationRequest(prompt(9), Sampling(tokens=40)))
    numbers = [engine.submit(request) for request in requests()[:2]]
    step()
    with pytest.raises(RecipeError, match="the engine is in use"):
        next(engine.stream([]))
    step()
    engine.cancel(dropped)
    numbers += [engine.submit(request) for request in requests()[2:]]
    while not engine.is_idle:
        step()
    assert [done[number] for number in numbers] == wanted and dropped not in done
    engine.cancel_all()
    assert engine.step() == []


def test_an_engine_survives_an_error_in_its_requests(models):
    engine = models["windows"][1]
    wanted = [each.tokens for each in engine.generate(requests())]
    with pytest.raises(DataError, match="the prompt has no token"):
        engine.generate([*requests()[:2], GenerationRequest(())])
    assert [each.tokens for each in engine.generate(requests())] == wanted


REFUSED = {
    "no prompt": (GenerationRequest(()), DataError, "the prompt has no token"),
    "an unknown token": (GenerationRequest((5, VOCAB)), DataError, "holds the token 96; the model has tokens 0 to 95"),
    "a negative token": (GenerationRequest((-1, 5)), DataError, "holds the token -1"),
    "too long": (GenerationRequest((1,) * 60, Sampling(tokens=5)), RecipeError, "are 65; this engine has 64 positions"),
    "a stop text": (GenerationRequest((1,), Sampling(tokens=1, stop=("a",))), RecipeError, "stop texts need a token"),
    "a bias": (GenerationRequest((1,), Sampling(tokens=1, bias={96: 1.0})), RecipeError, "name the token 96"),
    "a stop token": (GenerationRequest((1,), Sampling(tokens=1, stop_ids=(-1,))), RecipeError, "name the token -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_can_not_be_answered_is_refused(case, models):
    request, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        models["windows"][1].generate([request])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0; expected 0 or more"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -3}, "top_k=-3; expected 0"),
        ({"tokens": 0}, "tokens=0; expected 1"),
        ({"n": 0}, "n=0; expected 1"),
        ({"top_p": 0.0}, "top_p=0.0; expected a probability"),
        ({"min_p": 1.5}, "min_p=1.5; expected a share"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0; expected a number above 0"),
        ({"seed": 2**32 - 1, "n": 2}, "expected seeds up to"),
        ({"top_log_probabilities": 21}, "top_log_probabilities=21; expected 0 to 20"),
        ({"stop": ("a", "")}, "stop has an empty text"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"rows": 0}, "rows=0"), ({"length": 0}, "length=0"), ({"length": 65}, "length=65; the model is for at most 64")],
)
def test_an_engine_that_can_not_be_is_refused(settings, words, models):
    with pytest.raises(RecipeError, match=words):
        GenerationEngine(models["windows"][1]._model, **settings)
