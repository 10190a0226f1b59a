"""Each family with its head tied if its example's is not, and the other way round: logits, and the export."""

from pathlib import Path

import pytest
import torch
import transformers
from family_examples import EXAMPLES
from huggingface_examples import (
    EAGER,
    abstract,
    apart,
    our_logits,
    positions,
    reloaded,
    their_logits,
    tiny,
    tokens,
)

from panax.adapters.huggingface import config_from, load, save
from panax.models import DecoderTask

TOLERANCE = 1e-5
FEW = ("llama", "mixtral")
LEFT_OUT = ("deepseek_v3_direct", "dbrx")
"""A second example of a family, and one that `transformers` does not tie."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in FEW else pytest.mark.slow)
        for name in EXAMPLES
        if name not in LEFT_OUT
    ],
)
def test_the_head_is_tied_or_not(name: str, tmp_path: Path) -> None:
    config = tiny(name)
    config.tie_word_embeddings = tied = not config.tie_word_embeddings
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.15 * torch.randn_like(value))
    theirs.save_pretrained(tmp_path / "theirs")
    head, table = theirs.get_output_embeddings().weight, theirs.get_input_embeddings().weight
    task = DecoderTask(model=config_from(tmp_path / "theirs"))
    assert (head is table) == tied == task.model.tied
    params, state = load(tmp_path / "theirs", task, *abstract(task))
    expected = their_logits(theirs, tokens())
    assert apart(our_logits(params, state, tokens(), positions(), None), expected) < TOLERANCE
    save(tmp_path / "ours", params, state, model_type=EXAMPLES[name][0])
    assert apart(their_logits(reloaded(tmp_path / "ours"), tokens()), expected) == 0
