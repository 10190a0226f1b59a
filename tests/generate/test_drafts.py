"""Guessed tokens change how many steps an answer takes, and nothing else."""

import pytest
from drawing import blank, drawn
from test_engine import prompt

from panax.core import RecipeError
from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate import engine as engine_module
from panax.generate.drafts import DraftLookup
from panax.kernels import Kernels
from panax.kernels.cpu.native import OWN, unavailable_reason
from panax.models import DecoderConfig, DecoderTask, HybridConfig

SIZES = {"vocab_size": 96, "max_length": 128, "embed": 16, "num_layers": 2, "heads": 2, "ffn": 24}
LACKING = unavailable_reason(OWN, "float32")


@pytest.fixture(scope="module")
def model():
    task = DecoderTask(model=DecoderConfig(**SIZES, windows=(6, 0)))
    return task.incremental_model(*drawn(task.init))


def create(model, drafts):
    return GenerationEngine(model, rows=3, chunk=8, drafts=drafts, kernels=Kernels(exact_policy=True))


def requests():
    phrase = prompt(7, 1)
    settings = [
        Sampling(tokens=40, temperature=0.0),
        Sampling(tokens=25, seed=1, temperature=0.4, repetition_penalty=1.1, top_log_probabilities=2),
        Sampling(tokens=30, seed=2, frequency_penalty=0.3, presence_penalty=0.2, top_p=0.8, n=2),
        Sampling(tokens=1, temperature=0.0),
        Sampling(tokens=30, temperature=0.0, bias=dict.fromkeys(phrase, 3.0)),
    ]
    return [GenerationRequest(phrase * 3 + prompt(index, index), each) for index, each in enumerate(settings)]


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_answers_are_the_same_to_the_bit_in_fewer_steps(model, monkeypatch):
    """By exact kernels, for which it makes no difference how many tokens are run at once."""
    plain = create(model, 0).generate(requests())
    steps = []
    run = engine_module.run_draft_step
    monkeypatch.setattr(engine_module, "run_draft_step", lambda *inputs: steps.append(inputs[2].size) or run(*inputs))
    engine = create(model, 4)
    steps.clear()
    drafted = engine.generate(requests())
    assert [(each.tokens, each.finish) for each in drafted] == [(each.tokens, each.finish) for each in plain]
    assert [each.tokens for each in engine.generate(requests()[::-1])][::-1] != [], "rows are free again"
    # All guesses of a repeated token are right: five tokens a step.
    alone = create(model, 4)
    steps.clear()
    [completion] = alone.generate([GenerationRequest((5, 5, 5), Sampling(tokens=41, temperature=0.0, bias={5: 90.0}))])
    assert completion.ids == (5,) * 41 and len(steps) == 8


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_the_end_of_a_row_and_a_stop_token_are_kept(model):
    """The last guesses would be after the row's last position; what follows a stop token is dropped."""
    longest = GenerationRequest(prompt(60, 3), Sampling(tokens=68, temperature=0.0))
    [plain], [drafted] = (create(model, drafts).generate([longest]) for drafts in (0, 6))
    assert plain.tokens == drafted.tokens and drafted.finish == "length"
    stop = plain.ids[50]
    asked = GenerationRequest(longest.prompt, Sampling(tokens=68, temperature=0.0, stop_ids=(stop,)))
    [plain], [drafted] = (create(model, drafts).generate([asked]) for drafts in (0, 6))
    assert plain.tokens == drafted.tokens and drafted.finish == "stop" and stop not in drafted.ids


def test_what_can_not_be_guessed_is_refused():
    task = DecoderTask(model=HybridConfig(**SIZES, attention_layers=(1,)))
    model = task.incremental_model(*blank(task.init))
    with pytest.raises(RecipeError, match="drafts=4; expected 0 or more, and 0 for a model with recurrent layers"):
        GenerationEngine(model, drafts=4)


def test_guesses_are_what_followed_the_longest_beginning():
    lookup = DraftLookup((5, 1, 2, 3, 7, 2, 3, 8, 1, 2, 3))
    # After (1, 2, 3), not after the later (2, 3).
    assert lookup.guess(2) == [7, 2]
    lookup.add(9)
    assert lookup.guess(4) == []
    lookup.add(3)
    assert lookup.guess(5) == [9, 3, 9, 3, 9]
