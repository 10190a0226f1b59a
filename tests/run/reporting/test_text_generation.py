"""A text is continued by any task that generates: the decoder is one of them, and nothing here knows of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_recipe

from panax import fit, load
from panax.core import Evaluation, LayoutError, RecipeError, Task
from panax.core.protocols import IncrementalModel
from panax.data.text.tokenizer import EncodedText, Tokenizer
from panax.mesh import MeshShape
from panax.run.reporting.generation import TextModel, generate_text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Next(IncrementalModel):
    """Continues a row by the numbers that follow its last one."""

    by: jax.Array
    vocab_size = 128
    max_length = 128

    def empty_cache(self, rows, length):
        return ()

    def extend(self, tokens, start, count, cache):
        return (tokens + self.by).astype(jnp.float32)[..., None], cache

    def logits(self, hidden):
        return jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), self.vocab_size) * 1e6


class Counting(Task):
    """A task with that model."""

    generates = True

    def init(self, key):
        return {"by": jnp.int32(1)}, {}

    def loss(self, params, state, batch, key, train):
        return Evaluation({}, state, {})

    def parameter_axes(self, params):
        return {"by": ()}

    def incremental_model(self, params, state, dtype="float32"):
        return Next(params["by"])


class Letters(Tokenizer):
    """A tokenizer of ASCII letters."""

    end_ids = (ord("h"),)
    role_tokens: dict[str, str] = {}  # noqa: RUF012
    chat_templates = {"default": "{{ messages[0].content }}{% if add_generation_prompt %}c{% endif %}"}  # noqa: RUF012

    def __init__(self):
        self.start_of_document, self.end_of_document = (), ord("h")

    def encode(self, text):
        return [ord(letter) for letter in text]

    def encode_rendered(self, texts):
        return [EncodedText(self.encode(text), (np.zeros(0), np.zeros(0))) for text in texts]

    def decode(self, ids):
        return "".join(map(chr, ids))


PARAMS = {"by": jnp.int32(1)}


def test_a_task_of_ones_own_continues_a_text():
    assert generate_text(TextModel(Counting(), PARAMS, {}, Letters()), "ab", tokens=3) == "cde"
    # As far as the end of the document.
    assert generate_text(TextModel(Counting(), PARAMS, {}, Letters()), "ab", tokens=30) == "cdefg"


def test_a_chat_continues_the_rendered_prompt():
    assert generate_text(TextModel(Counting(), PARAMS, {}, Letters()), "ab", tokens=2, chat=True) == "de"
    with pytest.raises(RecipeError, match="the tokenizer has no chat template, which a conversation"):
        without = Letters()
        without.chat_templates = {}
        generate_text(TextModel(Counting(), PARAMS, {}, without), "ab", chat=True)
    with pytest.raises(RecipeError, match="the chat template fails on the prompt: no"):
        failing = Letters()
        failing.chat_templates = {"default": "{{ raise_exception('no') }}"}
        generate_text(TextModel(Counting(), PARAMS, {}, failing), "ab", chat=True)


@pytest.mark.parametrize(
    ("task", "tokenizer", "prompt", "settings", "message"),
    [
        (Counting(), None, "a", {}, "Counting has no tokenizer; a text model with its tokenizer continues a text"),
        (Counting(), Letters(), "", {}, "the prompt is empty; pass at least one character"),
        (Counting(), Letters(), "a", {"tokens": 0}, "tokens=0; expected 1 or more"),
        (Counting(), Letters(), "a", {"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_what_can_not_be_continued_is_an_error(task, tokenizer, prompt, settings, message):
    with pytest.raises(RecipeError, match=message):
        generate_text(TextModel(task, PARAMS, {}, tokenizer), prompt, **settings)


def test_a_task_that_does_not_generate_reports_it():
    class Silent(Counting):
        generates = False
        incremental_model = Task.incremental_model

    with pytest.raises(RecipeError, match="Silent does not generate; a text model"):
        generate_text(TextModel(Silent(), PARAMS, {}, Letters()), "a")
    with pytest.raises(RecipeError, match="Silent does not generate; a task that does sets `generates`"):
        Silent().incremental_model(PARAMS, {})
    assert tiny.task().generates


@pytest.mark.full
def test_a_run_generates_on_its_mesh_what_its_checkpoint_does_on_one_device(tmp_path):
    experiment = dataclasses.replace(
        tiny_recipe.tiny(), directory=str(tmp_path), num_steps=10, mesh=MeshShape(fsdp=2, tensor=2)
    )
    result = fit(experiment, quiet=True)
    settings = {"tokens": 12, "temperature": 0.0}
    texts = [result.generate(prompt, **settings) for prompt in ("def ", "import json")]
    loaded = load(result.checkpoint)
    assert texts == [loaded.generate(prompt, **settings) for prompt in ("def ", "import json")]
    sharded = load(result.checkpoint, mesh=MeshShape(fsdp=2, tensor=2))
    assert texts == [sharded.generate(prompt, **settings) for prompt in ("def ", "import json")]
    up = sharded.params.stacks[0].blocks[0].feed_forward.w_up
    # Split over tensor, whole along fsdp: each device has read its part.
    assert {shard.data.shape for shard in up.addressable_shards} == {(*up.shape[:-1], up.shape[-1] // 2)}
    with pytest.raises(LayoutError, match=r"mesh\.stage=2: generation has no pipeline"):
        load(result.checkpoint, mesh=MeshShape(fsdp=1, stage=2))
