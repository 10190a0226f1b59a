"""GGUF files: read back in the bits that were written, of every type; run by llama.cpp to the same tokens; refused if they can't
express the model, or are damaged."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn
from gguf.quants import dequantize
from huggingface_examples import abstract
from test_huggingface_save import laid_out_on, same_bits

from panax.adapters.huggingface import config_from, load, save_gguf
from panax.adapters.huggingface.gguf.vocabulary import read_vocabulary
from panax.core import CheckpointError, RecipeError
from panax.data import BytePairTokenizer, TextFiles
from panax.layers import Context, Rotary, RotaryScaling
from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape
from panax.models import Decoder, DecoderConfig, DecoderTask, compute_logits

SIZES: dict[str, Any] = {
    "max_length": 64, "embed": 64, "num_layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab_size": 300,
}  # fmt: skip
SCALING = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
GEMMA: dict[str, Any] = {
    **SIZES, "activation": "gelu_tanh", "norm_unit_offset": True, "post_norms": True, "embed_scale": True,
}  # fmt: skip

MODELS = {
    "llama": DecoderConfig(**SIZES, rotary=Rotary(theta=5e5, scaling=SCALING), tied=False),
    "qwen2": DecoderConfig(**{**SIZES, "head_dim": 16}, attention_bias=True),
    "qwen3": DecoderConfig(**SIZES, qk_norm=True),
    "gemma2": DecoderConfig(**GEMMA, windows=(8, 0), attention_soft_cap=5.0, logit_soft_cap=3.0),
    "gemma3": DecoderConfig(
        **GEMMA,
        qk_norm=True,
        windows=(8, 8, 8, 8, 8, 0),
        rotaries=(*(Rotary(),) * 5, Rotary(theta=1e6)),
    ),
    "mixtral": DecoderConfig(**SIZES, feed_forward=MoE(experts=4, active=2), tied=False),
    "qwen3moe": DecoderConfig(**SIZES, qk_norm=True, feed_forward=MoE(experts=4, active=2, ffn=32), tied=False),
}

BOUNDS = {"F16": 1e-2, "Q8_0": 1e-1}
"""Largest median of the distances between log-probabilities. llama.cpp rounds activations to F16 (a part in 2,048), with Q8_0 to
8 bits (a part in 254), in each of some 20 products one after the other; a weight in a wrong place moves them by more than 1."""

TEXTS = [f"the {one} of a {other} is {third}" for one in ("sum", "edge", "root") for other in ("tree", "graph") for third in
         ("small", "large", "odd")]  # fmt: skip


@functools.cache
def draw(config: DecoderConfig) -> Decoder:
    """Parameters of which none is neutral, and larger ones, so that positions differ."""
    model = drawn(lambda key: Decoder.build(key, config))
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf * (2.0 if leaf.ndim > 2 else 1.0) + 0.1 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves)
    ]
    return structure.unflatten(noisy)


def in_half(model: Decoder) -> Decoder:
    """Round matrices as a file in F16 holds them; vectors and routers stay as they are."""

    def rounded(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        exact = ".router" in name or name.rpartition(".")[2].startswith(("b_", "scale"))
        return leaf if exact else leaf.astype(jnp.float16).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(rounded, model)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    model = draw(MODELS[name])
    save_gguf(tmp_path / "model.gguf", model)
    config = config_from(tmp_path)
    task = DecoderTask(model=config)
    loaded, _ = load(tmp_path, task, *abstract(task))
    for (path, ours), theirs in zip(
        jax.tree.flatten_with_path(in_half(model))[0], jax.tree.leaves(loaded), strict=True
    ):
        # The offset of Gemma's norms is added and taken away again: a rounding of numbers below 2.
        where = jax.tree_util.keystr(path)
        loose = 1.2e-7 if config.norm_unit_offset and "scale" in where else 0.0
        rows = slice(SIZES["vocab_size"] if ".table" in where else None)
        np.testing.assert_allclose(theirs[rows], ours[rows], rtol=0, atol=loose, err_msg=where)
    split, _ = load(tmp_path, task, *laid_out_on(task, MeshShape(fsdp=2, tensor=2, replica=2)))
    assert same_bits(split, loaded)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "MXFP4"]
)
def test_every_type_is_read_in_the_bits_of_its_dequantization(kind: str, tmp_path: Path) -> None:
    """A release of random blocks: finite scales, any codes."""
    config = DecoderConfig(**{**SIZES, "embed": 256, "ffn": 512, "num_layers": 2, "head_dim": 64}, qk_norm=True)
    save_gguf(tmp_path / "wide" / "model.gguf", draw(config))
    reader = gguf.GGUFReader(tmp_path / "wide" / "model.gguf")
    written = gguf.GGUFWriter(tmp_path / "narrow.gguf", "qwen3")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            written.add_key_value(key, field.contents(), field.types[0])
    kind_number = gguf.GGMLQuantizationType[kind]
    rng, values = np.random.default_rng(0), {}
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or "ffn" not in tensor.name:
            written.add_tensor(tensor.name, np.asarray(tensor.data).copy())
            continue
        blocks = random_blocks(rng, tuple(int(size) for size in reversed(tensor.shape)), kind_number)
        values[tensor.name] = dequantize(blocks, kind_number).astype(np.float32)
        written.add_tensor(tensor.name, blocks, raw_dtype=kind_number)
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    (tmp_path / "narrow").mkdir()
    (tmp_path / "narrow.gguf").rename(tmp_path / "narrow" / "model.gguf")
    task = DecoderTask(model=config_from(tmp_path / "narrow"))
    loaded, _ = load(tmp_path / "narrow", task, *abstract(task))
    block = loaded.stacks[0].blocks[0].feed_forward
    for layer in range(2):
        for ours, name in ((block.w_gate, "gate"), (block.w_up, "up"), (block.w_down, "down")):
            expected = values[f"blk.{layer}.ffn_{name}.weight"]
            assert np.isfinite(expected).all() and expected.any()
            np.testing.assert_array_equal(np.asarray(ours[layer]), expected.T)
    halves = DecoderTask(model=task.model, parameter_dtype="bfloat16")
    rounded, _ = load(tmp_path / "narrow", halves, *abstract(halves))
    assert same_bits(rounded, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), loaded))


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Bytes of blocks with the scales of a quantization, where the package has one, else drawn with small float16 scales."""
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        blocks = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    else:
        blocks = rng.integers(0, 256, gguf.quant_shape_to_byte_shape(shape, kind), np.uint8)
        size = gguf.GGML_QUANT_SIZES[kind][1]
        each = blocks.reshape(-1, size)
        # Two float16 at the beginning of a block of Q4_K and Q5_K, one at the end of Q6_K.
        places = (slice(0, 2), slice(2, 4)) if kind.name in ("Q4_K", "Q5_K") else (slice(size - 2, size),)
        for place in places:
            each[:, place] = rng.uniform(0.001, 0.01, (len(each), 1)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    BytePairTokenizer(vocab_size=290).train(TextFiles(paths=(str(folder / "texts.txt"),))).save(folder)
    return folder


def of_words(folder: Path) -> Path:
    """A tokenizer of which each token is a text of its own: llama.cpp hides tokens that are parts of characters."""
    # A file without merges, or without a line's end, is not loaded there.
    words = ["t", "2", "\u010a", *(f"t{number}" for number in range(2, 289))]
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": ["t 2"]}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "ByteLevel"}}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_finds_the_same_tokens(name: str, kind: str, tmp_path: Path) -> None:
    """The next token after each beginning of a text with its log-probability, and a greedy answer, against the model as the
    file has it."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is built for x86-64 Linux")
    save_gguf(tmp_path / "model.gguf", draw(MODELS[name]), kind, tokenizer=of_words(tmp_path / "words"))
    task = DecoderTask(model=config_from(tmp_path))
    model, _ = load(tmp_path, task, *abstract(task))
    place = jnp.arange(24, dtype=jnp.int32)[None]

    @jax.jit
    def score(tokens: jax.Array) -> jax.Array:
        hidden, _ = model(tokens[None], Context(place), dtype=jnp.float32)
        return jax.nn.log_softmax(compute_logits(model, hidden))[0]

    tokens = np.random.default_rng(0).integers(0, 290, 24).astype(np.int32)
    ours = np.asarray(score(tokens))
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(tmp_path / "model.gguf"), 64, False
    params.cpuparams.n_threads, params.sampling.temp = 1, 0.0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server, apart, same = xllamacpp.Server(params), [], 0
    for length in range(1, 25):
        (theirs,) = answered(server, tokens[:length], 1)
        apart.append(abs(theirs["logprob"] - ours[length - 1, theirs["id"]]))
        same += theirs["id"] == ours[length - 1].argmax()
    print(f"{name} {kind}: {same} of 24 tokens, log-probabilities at most {max(apart):.1e} apart")
    # The likeliest two are now and then closer than that. 8 bits send tokens to other experts: of a mixture, one step in a few.
    assert np.median(apart) < BOUNDS[kind] * (5 if MODELS[name].feed_forward and kind == "Q8_0" else 1)
    assert same >= (22 if kind == "F16" else 14)
    assert len(set(ours.argmax(-1).tolist())) > 6
    answer = [each["id"] for each in answered(server, tokens[:8], 16)]
    after = np.asarray(score(np.concatenate([tokens[:8], answer]).astype(np.int32)))[7:-1]
    lost = after.max(axis=-1) - np.take_along_axis(after, np.array(answer)[:, None], -1)[:, 0]
    print(
        f"{name} {kind}: of a greedy answer {np.sum(lost == 0)} of 16 tokens, others at most {lost.max():.1e} less likely"
    )
    assert len(answer) == 16 and (lost.max() < 2 * max(apart) if kind == "F16" else np.sum(lost == 0) >= 6)


def answered(server: Any, tokens: np.ndarray, count: int) -> list[dict[str, Any]]:
    """Return llama.cpp's next tokens with their log-probabilities."""
    request = {"prompt": tokens.tolist(), "n_predict": count, "temperature": 0.0, "logprobs": 1}
    answer = server.handle_completions({**request, "ignore_eos": True, "cache_prompt": False})
    return answer["choices"][0]["logprobs"]["content"]


def test_the_tokenizer_has_its_end_and_template(tokenizer_folder: Path, tmp_path: Path) -> None:
    entries = read_vocabulary(tokenizer_folder, 300)
    assert len(entries["tokenizer.ggml.tokens"]) == 300 and entries["tokenizer.ggml.pre"] == "gpt-2"
    end = entries["tokenizer.ggml.eos_token_id"]
    assert entries["tokenizer.ggml.token_type"][end] == 3 and entries["tokenizer.ggml.token_type"][299] == 5
    for file in tokenizer_folder.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    entries = read_vocabulary(tmp_path, 300)
    assert entries["tokenizer.chat_template"] == "{{ messages }}"
    assert (entries["tokenizer.ggml.eos_token_id"], entries["tokenizer.ggml.eot_token_id"]) == (3, 7)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    entries = read_vocabulary(tmp_path, 300)
    assert entries["tokenizer.chat_templates"] == ["tool_use"]
    assert entries["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    assert entries["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": (8,)}, r"it would be read with windows=.*; export without --gguf"),
        ({"rotary": Rotary(interleaved=True)}, r"interleaved|not written as GGUF"),
        ({"attention_sinks": True}, r"can express|not written as GGUF"),
        (
            {"parallel_residual": True, "shared_norm": True, "norm": "layer_unbiased"},
            r"can express|not written as GGUF",
        ),
    ],
)
def test_what_a_file_can_not_express_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = draw(dataclasses.replace(MODELS["llama"], **change))
    with pytest.raises(RecipeError, match=message):
        save_gguf(tmp_path / "new" / "model.gguf", model)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    save_gguf(tmp_path / "model.gguf", draw(MODELS["qwen3"]))
    intact = (tmp_path / "model.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 3, 9, 30, 200, 2000, len(intact) // 2, len(intact) - 8):
        (tmp_path / "model.gguf").write_bytes(intact[:cut])
        with pytest.raises(CheckpointError):
            open_all(tmp_path)
    for _ in range(60):
        broken = bytearray(intact)
        for place in rng.integers(0, 2500, 3):
            broken[place] = rng.integers(0, 256)
        (tmp_path / "model.gguf").write_bytes(broken)
        # Other numbers may be read; what can't be is one of these.
        try:
            open_all(tmp_path)
        except (CheckpointError, RecipeError):
            continue
    (tmp_path / "model.gguf").write_bytes(intact)
    (tmp_path / "other.gguf").write_bytes(intact)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(model.gguf, other.gguf\); expected one"):
        config_from(tmp_path)


def open_all(folder: Path) -> None:
    task = DecoderTask(model=config_from(folder))
    load(folder, task, *abstract(task))


def test_an_unknown_architecture_names_the_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RecipeError, match=r"architecture 'rwkv7' are not read; expected one of gemma2, gemma3, llama"):
        config_from(tmp_path)


def test_weights_out_of_range_are_an_error(tmp_path: Path) -> None:
    model = draw(MODELS["qwen3"])
    model = dataclasses.replace(model, embedding=jax.tree.map(lambda x: x * 1e6, model.embedding))
    with pytest.raises(CheckpointError, match=r"token_embd.weight holds .*, which F16 can't; choose Q8_0"):
        save_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(RecipeError, match="kind='Q2'; expected one of F16, Q8_0"):
        save_gguf(tmp_path / "model.gguf", model, "Q2")
