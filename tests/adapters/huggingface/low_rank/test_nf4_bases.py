"""Frozen matrices in 4 bits: bitsandbytes' own codes and scales, kept as they are, read onto a mesh, trained and merged."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from huggingface_examples import EAGER, abstract, apart, our_logits, positions, reloaded, their_logits, tokens
from safetensors.torch import load_file, save_file

import panax
from panax.adapters.huggingface import config_from, load
from panax.cli.main import main
from panax.core import CheckpointError, LayoutError, RecipeError, named_leaves
from panax.data import BytePairTokenizer, TextFiles
from panax.kernels.quantized import NF4, quantize
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask, LoRA
from panax.spmd.composite.low_rank import base_weights, merge_low_rank
from panax.spmd.composite.quantized_weight import dequantize_weights, is_quantized

LORA = LoRA(rank=4, alpha=8.0, base="nf4", targets=("attention",))
SETTINGS: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("bitsandbytes.functional")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release in bfloat16."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS, **EAGER))
    folder = tmp_path_factory.mktemp("plain")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def store_in_nf4(library: Any, plain: Path, folder: Path, *, nested: bool, block: int = 64) -> dict[str, torch.Tensor]:
    """Write a release as bitsandbytes stores it; return its matrices by bitsandbytes' own dequantization, in float32."""
    stored, wide = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = wide[name] = weight
            continue
        codes, state = library.quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type="nf4")
        stored[name] = codes
        stored |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        wide[name] = library.dequantize_4bit(codes, state)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    return wide


def with_nf4(folder: Path, shape: MeshShape | None = None, lora: LoRA = LORA) -> tuple[DecoderTask, Any]:
    """The task of a folder's model with adapters beside matrices of 4 bits, and its parameters."""
    task = DecoderTask(model=config_from(folder), adapter=lora)
    given = abstract(task)
    if shape is not None:
        axes = task.parameter_axes(given[0]), task.state_axes(given[1])
        shardings = Placement.create(shape).storage_shardings(given, axes)
        given = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), given, shardings)
    params, _ = load(folder, task, *given)
    return task, base_weights(params)


def codes_of(tensor: torch.Tensor, rows: int) -> np.ndarray:
    """The codes of a stored matrix, two in a byte, the first one in its low bits."""
    packed = tensor.numpy().reshape(rows, -1)
    return packed << 4 | packed >> 4


@pytest.mark.parametrize("nested", [False, True], ids=["scales", "quantized scales"])
def test_a_stored_release_keeps_its_bits(library: Any, plain: Path, tmp_path: Path, nested: bool) -> None:
    wide = store_in_nf4(library, plain, tmp_path / "nf4", nested=nested)
    stored = load_file(tmp_path / "nf4" / "model.safetensors")
    _, params = with_nf4(tmp_path / "nf4")
    block = params.stacks[0].blocks[0]
    for layer in range(2):
        attention, prefix = block.attention, f"model.layers.{layer}"
        for weight, name in (
            (attention.w_q, "self_attn.q_proj"),
            (attention.w_v, "self_attn.v_proj"),
            (attention.w_o, "self_attn.o_proj"),
            (block.feed_forward.w_down, "mlp.down_proj"),
        ):
            tensor, rows = f"{prefix}.{name}.weight", wide[f"{prefix}.{name}.weight"].shape[0]
            assert is_quantized(weight)
            codes = np.asarray(weight.codes[layer]).reshape(rows, -1)
            assert np.array_equal(codes, codes_of(stored[tensor], rows)), tensor
            values = np.asarray(dequantize_weights(weight)[layer], np.float32)
            inputs = int(np.prod(values.shape[: weight.num_inputs]))
            assert np.array_equal(values.reshape(inputs, rows).T, wide[tensor].numpy()), tensor


def test_a_release_in_16_bits_is_quantized_as_bitsandbytes_does(library: Any, plain: Path, tmp_path: Path) -> None:
    store_in_nf4(library, plain, tmp_path / "nf4", nested=False)
    ours, theirs = (named_leaves(with_nf4(folder)[1]) for folder in (plain, tmp_path / "nf4"))
    assert sum(leaf.dtype == jnp.uint8 for leaf in ours.values()) == 7
    for name, leaf in ours.items():
        assert np.array_equal(leaf, theirs[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_table_codes_and_values_are_bitsandbytes(library: Any, dtype: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    x[0, :64] = 0.0
    x[1, 64:128] *= 1e-30
    codes, state = library.quantize_4bit(x, blocksize=64, quant_type="nf4")
    assert tuple(state.code.tolist()) == NF4.values
    ours = quantize(jnp.asarray(x.float().numpy()), NF4, 64)
    # A block of zeros has no nearest code in bitsandbytes, which divides by its scale.
    assert np.array_equal(np.asarray(ours.codes)[1:], codes_of(codes, 64)[1:])
    assert np.array_equal(np.asarray(ours.scales).reshape(-1), state.absmax.numpy())
    theirs = library.dequantize_4bit(codes, state).float().numpy()
    assert np.array_equal(np.asarray(ours.dequantize(dtype), np.float32)[1:], theirs[1:])
    assert not np.asarray(ours.dequantize())[0, :64].any()


def test_logits_are_those_of_the_dequantized_model(library: Any, plain: Path, tmp_path: Path) -> None:
    wide = store_in_nf4(library, plain, tmp_path / "nf4", nested=True)
    theirs = reloaded(plain).float()
    theirs.load_state_dict({name: tensor.float() for name, tensor in wide.items()})
    task, params = with_nf4(tmp_path / "nf4")
    assert apart(our_logits(params, {}, tokens(), positions(), None), their_logits(theirs, tokens())) < 1e-5
    # Loaded without adapters, the same values in the task's dtype.
    task = dataclasses.replace(task, adapter=None)
    loaded, _ = load(tmp_path / "nf4", task, *abstract(task))
    for ours, read in zip(jax.tree.leaves(merge_low_rank(params)), jax.tree.leaves(loaded), strict=True):
        assert np.array_equal(ours, read)


def test_each_device_reads_its_codes(library: Any, plain: Path, tmp_path: Path) -> None:
    store_in_nf4(library, plain, tmp_path / "nf4", nested=True)
    expected = named_leaves(with_nf4(tmp_path / "nf4")[1])
    _, params = with_nf4(tmp_path / "nf4", MeshShape(replica=2, fsdp=2, tensor=2))
    for name, leaf in named_leaves(params).items():
        assert np.array_equal(leaf, expected[name]), name
    codes = params.stacks[0].blocks[0].attention.w_q.codes
    assert codes.shape == (2, 4, 32, 64) and codes.sharding.shard_shape(codes.shape) == (2, 2, 32, 32)


def test_other_blocks_are_refused(library: Any, plain: Path, tmp_path: Path) -> None:
    store_in_nf4(library, plain, tmp_path / "nf4", nested=False, block=128)
    with pytest.raises(CheckpointError, match=r'in other blocks than 64 values .* leave adapter.base "same"'):
        with_nf4(tmp_path / "nf4")
    with pytest.raises(LayoutError, match=r"w_q.base.scales: embed=2 is not divisible by fsdp=4"):
        with_nf4(plain, MeshShape(fsdp=4))
    narrow = dataclasses.replace(config_from(plain), embed=96, heads=3, kv_heads=3)
    with pytest.raises(RecipeError, match=r'adapter.base="nf4": .*: 96 inputs are not whole blocks of 64'):
        DecoderTask(model=narrow, adapter=LORA).init(jax.random.key(0))


def test_a_frozen_matrix_keeps_values_of_bfloat16(plain: Path) -> None:
    """Codes stand for values in the task's dtype when they are merged."""
    task = DecoderTask(model=config_from(plain), adapter=LORA, parameter_dtype="bfloat16")
    params, _ = load(plain, task, *abstract(task))
    merged = merge_low_rank(base_weights(params))
    assert merged.stacks[0].blocks[0].feed_forward.w_up.dtype == ml_dtypes.bfloat16


def test_a_run_beside_a_stored_release(library: Any, plain: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """By its rank alone the adapters keep the codes; the run resumes, answers, and is exported merged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    Path("a.txt").write_text("the oak, the ash, and the bonny ivy tree " * 30)
    store_in_nf4(library, plain, tmp_path / "nf4", nested=True)
    BytePairTokenizer(vocab_size=300).train(TextFiles(paths=("a.txt",))).save(tmp_path / "nf4")
    command = ["train", "hf:nf4", "--data", "a.txt", "--lora", "4", "--mesh.fsdp", "2", "--mesh.replica", "4"]
    command += [
        "--data.batch-size",
        "8",
        "--name",
        "tuned",
        "--data.sequence-length",
        "16",
        "--optimizer.schedule.warmup-steps",
        "0",
    ]
    assert main([*command, "--num-steps", "2"]) == 0
    assert main([*command, "--num-steps", "3"]) == 0
    assert "resuming from step 2 of 3" in capsys.readouterr().out
    tuned = panax.load("runs/tuned")
    expected = named_leaves(with_nf4(tmp_path / "nf4")[1])
    for name, leaf in named_leaves(base_weights(tuned.params)).items():
        assert np.array_equal(leaf, expected[name]), name
    assert np.abs(tuned.params.stacks[0].blocks[0].feed_forward.w_up.b).max() > 0
    assert tuned.generate("the oak", tokens=4, temperature=0.0)
    assert main(["export", "runs/tuned", "merged"]) == 0
    merged = load_file("merged/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    ours = merge_low_rank(tuned.params).stacks[0].blocks[0].feed_forward.w_up[0]
    assert np.array_equal(merged.float().numpy(), np.asarray(ours, np.float32).T)
    assert "quantization_config" not in json.loads(Path("merged/config.json").read_text())
