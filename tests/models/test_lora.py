"""Adapters: the model as it is at first, its sum merged, gradients of the definition, frozen bases, and every layout."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import panax
from panax.adapters.huggingface import load_adapter, read_adapter_config
from panax.cli.main import main
from panax.core import RecipeError, named_leaves
from panax.layers import Context, Latent
from panax.mesh import MeshShape, Placement, Rules
from panax.models import BaseWidth, DecoderConfig, DecoderTask, LoRA, compute_logits
from panax.optim import AdamW, Schedule
from panax.spmd.composite.low_rank import base_weights, is_low_rank, low_rank_mask, merge_low_rank, with_base_weights
from panax.spmd.composite.quantized_weight import dequantize_weights, is_quantized
from panax.testing import check_task
from panax.train import CompiledStep

ADAPTER = LoRA(rank=4, alpha=6.0)
NORMED = LoRA(rank=4, alpha=6.0, dora=True)
QUANTIZED = LoRA(rank=4, alpha=6.0, base="nf4", targets=("attention",))
LATENT = Latent(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)
MODELS = {
    "dense": DecoderConfig(**tiny.SIZES, attention_bias=True, qk_norm=True),
    "experts": tiny.FEATURES["experts, a gated shared one, norms after the rotation"],
    "latents": DecoderConfig(**{**tiny.SIZES, "kv_heads": 0}, latent=LATENT),
    "delta nets": tiny.FEATURES["delta nets, gated attention in every fourth layer"],
}
WIDE = DecoderConfig(**{**tiny.SIZES, "embed": 128, "ffn": 128, "head_dim": 32}, attention_bias=True)
"""Blocks of 64 inputs divide over two devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun(DecoderTask):
    """A task with adapters that are not zero, as after some steps."""

    noise: float = 0.1

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        params, state = super().init(key)

        def moved(leaf: jax.Array, trained: bool) -> jax.Array:
            return (
                leaf + self.noise * jax.random.normal(jax.random.fold_in(key, leaf.size), leaf.shape)
                if trained
                else leaf
            )

        return jax.tree.map(moved, params, low_rank_mask(params)), state


@jax.jit
def logits_of(params: Any) -> jax.Array:
    position = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (2, 16))
    tokens = (jnp.arange(32, dtype=jnp.int32).reshape(2, 16) * 7) % 96
    hidden, _ = params(tokens, Context(position), dtype=jnp.float32)
    return compute_logits(params, hidden)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_begin_as_the_model_and_merge_into_it(name: str) -> None:
    task = DecoderTask(model=MODELS[name], adapter=ADAPTER)
    key = jax.random.key(0)
    params, _ = jax.jit(task.init)(key)
    plain, _ = jax.jit(dataclasses.replace(task, adapter=None).init)(key)
    for ours, theirs in zip(jax.tree.leaves(base_weights(params)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(logits_of(params), logits_of(plain))
    begun, _ = jax.jit(Begun(model=MODELS[name], adapter=ADAPTER).init)(key)
    size = np.abs(logits_of(plain)).max()
    np.testing.assert_allclose(logits_of(begun), logits_of(jax.jit(merge_low_rank)(begun)), atol=2e-5 * size)
    assert np.abs(logits_of(begun) - logits_of(plain)).max() > 0.01 * size


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_sum(name: str) -> None:
    task = Begun(model=MODELS[name], adapter=ADAPTER)
    params, state = jax.jit(task.init)(jax.random.key(1))
    batch, trained = jax.tree.map(jnp.asarray, tiny.batch(rows=2)), low_rank_mask(params)
    batch["row"] = jnp.arange(2, dtype=jnp.int32)

    def loss(params: Any) -> jax.Array:
        return task.loss(params, state, batch, jax.random.key(0), True).losses["cross_entropy"].mean

    ours = named_leaves(jax.jit(jax.grad(loss))(params))
    theirs = named_leaves(jax.jit(jax.grad(lambda params: loss(merge_low_rank(params))))(params))
    for leaf, adapted in named_leaves(trained).items():
        if adapted:
            distance = np.linalg.norm(ours[leaf] - theirs[leaf])
            assert distance <= 1e-4 * np.linalg.norm(theirs[leaf]), leaf
        elif leaf.endswith(".base"):
            assert not ours[leaf].any()


LAYOUTS = ({"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"stage": 2, "fsdp": 2}, {"replica": 2, "expert": 2})


def of_the_definition(params: Any) -> Any:
    """Parameters without adapters, by the paper's formula, in which norms are constants."""

    def one(node: Any) -> Any:
        if not is_low_rank(node):
            return node
        outputs = node.shape[len(node.shape) - node.num_outputs :]
        copies = node.shape[: len(node.shape) - node.num_inputs - node.num_outputs]
        a, b, base = (
            w.reshape(*copies, *shape)
            for w, shape in ((node.a, (-1, 4)), (node.b, (4, -1)), (node.base, (-1, math.prod(outputs))))
        )
        total = base + node.gain * a @ b
        norms = jax.lax.stop_gradient(jnp.linalg.norm(total, axis=-2, keepdims=True))
        return (total / norms * node.magnitude.reshape(*copies, 1, -1)).reshape(node.shape)

    return jax.tree.map(one, params, is_leaf=is_low_rank)


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        *(
            pytest.param(name, marks=pytest.mark.full if name == "experts" else pytest.mark.slow)
            for name in MODELS
            if name != "dense"
        ),
    ],
)
def test_columns_have_norms_of_their_own(name: str) -> None:
    """The model as it is at first; then values and gradients of the definition, merged too."""
    task = Begun(model=MODELS[name], adapter=NORMED)
    key = jax.random.key(0)
    start, _ = jax.jit(DecoderTask(model=MODELS[name], adapter=NORMED).init)(key)
    plain, state = jax.jit(DecoderTask(model=MODELS[name]).init)(key)
    size = np.abs(logits_of(plain)).max()
    np.testing.assert_allclose(logits_of(start), logits_of(plain), atol=2e-5 * size)
    params, _ = jax.jit(task.init)(key)
    expected = logits_of(jax.jit(of_the_definition)(params))
    assert np.abs(logits_of(plain) - expected).max() > 0.01 * size
    np.testing.assert_allclose(logits_of(params), expected, atol=4e-5 * size)
    np.testing.assert_allclose(logits_of(jax.jit(merge_low_rank)(params)), expected, atol=4e-5 * size)
    batch = {**jax.tree.map(jnp.asarray, tiny.batch(rows=2)), "row": jnp.arange(2, dtype=jnp.int32)}

    def loss(params: Any) -> jax.Array:
        return task.loss(params, state, batch, jax.random.key(0), True).losses["cross_entropy"].mean

    ours = named_leaves(jax.jit(jax.grad(loss))(params))
    theirs = named_leaves(jax.jit(jax.grad(lambda params: loss(of_the_definition(params))))(params))
    for leaf, adapted in named_leaves(low_rank_mask(params)).items():
        if adapted:
            assert np.linalg.norm(ours[leaf] - theirs[leaf]) <= 1e-4 * np.linalg.norm(theirs[leaf]), leaf
            assert theirs[leaf].any() or ".b" not in leaf, leaf


@pytest.mark.parametrize(
    ("name", "lora", "layouts"),
    [
        pytest.param(
            name,
            lora,
            layouts,
            marks=pytest.mark.full if (name, kind, axes) == ("dense", "norms", "context, tensor") else pytest.mark.slow,
            id=f"{kind}-{name}-{axes}",
        )
        for name in MODELS
        for kind, lora in (("sum", ADAPTER), ("norms", NORMED))
        for axes, layouts in (("context, tensor", LAYOUTS[1:2]), ("others", (LAYOUTS[0], *LAYOUTS[2:])))
    ],
)
def test_trains_like_one_device(name: str, lora: LoRA, layouts: Any) -> None:
    report = check_task(Begun(model=MODELS[name], adapter=lora), tiny.batch(rows=8), layouts=layouts)
    assert len(report.compared) == len(layouts), report.left_out


@pytest.mark.parametrize(
    ("dora", "layouts"),
    [
        pytest.param(False, ({"stage": 2, "fsdp": 2},), marks=pytest.mark.full, id="sum-stage, fsdp"),
        *(
            pytest.param(
                dora,
                ({"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"replica": 2, "tensor": 2}),
                marks=pytest.mark.slow,
                id=f"{'norms' if dora else 'sum'}-others",
            )
            for dora in (False, True)
        ),
        pytest.param(True, ({"stage": 2, "fsdp": 2},), marks=pytest.mark.slow, id="norms-stage, fsdp"),
    ],
)
def test_trains_like_one_device_in_4_bits(dora: bool, layouts: Any) -> None:
    report = check_task(
        Begun(model=WIDE, adapter=dataclasses.replace(QUANTIZED, dora=dora), noise=0.02),
        tiny.batch(rows=8),
        layouts=layouts,
    )
    assert len(report.compared) == len(layouts), report.left_out


def test_gradients_beside_matrices_in_4_bits_are_those_beside_their_values() -> None:
    task = Begun(model=WIDE, adapter=QUANTIZED, noise=0.02)
    params, state = jax.jit(task.init)(jax.random.key(1))
    batch = {**jax.tree.map(jnp.asarray, tiny.batch(rows=2)), "row": jnp.arange(2, dtype=jnp.int32)}
    # A weight without an adapter is in 4 bits too.
    assert is_quantized(params.stacks[0].blocks[0].feed_forward.w_up)

    @jax.jit
    def gradients(trained: Any, frozen: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            found = task.loss(eqx.combine(trained, frozen), state, batch, jax.random.key(0), True)
            return found.losses["cross_entropy"].mean

        return jax.grad(loss)(trained)

    values = dequantize_weights(params)
    ours, theirs = (named_leaves(gradients(*eqx.partition(each, low_rank_mask(each)))) for each in (params, values))
    assert ours.keys() == theirs.keys() and len(ours) == 8
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def test_codes_travel_and_values_are_not_kept() -> None:
    """Over fsdp, no matrix of a layer is gathered as floats; on one device, a step needs less beside its state."""
    batch = tiny.batch(rows=8)

    def step_of(adapter: LoRA, shape: MeshShape, layers: int) -> CompiledStep:
        task = DecoderTask(model=dataclasses.replace(WIDE, num_layers=layers), adapter=adapter, remat="none")
        program = panax.Program.create(task, AdamW(schedule=Schedule(peak=1e-3)), num_steps=3)
        count = 2 if shape.fsdp == 2 else 1
        return CompiledStep(program, Placement.create(shape, Rules(), jax.devices()[:count]), tiny.AXES)

    step = step_of(QUANTIZED, MeshShape(fsdp=2), 4)
    text = str(step.trace(step.put(batch)).jaxpr)
    gathered = re.findall(r":(\w+)\[([\d,]*)\] = all_gather\[", text)
    sizes = {
        dtype: [np.prod([int(n) for n in shape.split(",")]) for d, shape in gathered if d == dtype]
        for dtype in ("u8", "f32")
    }
    assert 128 * 128 // 2 in sizes["u8"]
    # The embedding is gathered as it is.
    assert max(size for size in sizes["f32"] if size != 128 * 128) < 128 * 128 // 2

    def temporaries(base: Literal["same", "nf4"], layers: int) -> int:
        step = step_of(dataclasses.replace(QUANTIZED, base=base), MeshShape(), layers)
        return step.get_compiled(step.put(batch)).memory_analysis().temp_size_in_bytes

    per_layer = {base: (temporaries(base, 12) - temporaries(base, 4)) / 8 for base in ("same", "nf4")}
    values = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128)
    assert per_layer["nf4"] - per_layer["same"] < values / 8


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: LoRA(rank=0), "adapter.rank=0; expected a whole number of at least 1"),
        (lambda: LoRA(alpha=0.0), "adapter.alpha=0.0; expected a positive number"),
        (lambda: LoRA(ranks={"attention": 0}), r"adapter.ranks\['attention'\]=0; expected a whole number"),
        (lambda: LoRA(alphas={"attention": -1.0}), r"adapter.alphas\['attention'\]=-1.0; expected a positive number"),
        (
            lambda: jax.eval_shape(
                DecoderTask(
                    model=MODELS["dense"], adapter=LoRA(targets=("attention",), alphas={"feed_forward": 2.0})
                ).init,
                jax.random.key(0),
            ),
            r"adapter.alphas: 'feed_forward' matches no matrix with an adapter; these are attention.w_k, .*attention.w_v",
        ),
        (
            lambda: jax.eval_shape(
                DecoderTask(model=MODELS["dense"], adapter=LoRA(targets=("q_proj",))).init, jax.random.key(0)
            ),
            r"adapter.targets: 'q_proj' matches no matrix of a layer; these are attention.w_q, .*feed_forward.w_down",
        ),
        (
            lambda: DecoderTask(
                model=DecoderConfig(tied=False, embed=64), base=BaseWidth(embed=32, heads=2), adapter=ADAPTER
            ),
            "task.base has no rule for adapters",
        ),
    ],
)
def test_settings_without_meaning_are_refused(task: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        task()


def test_targets_choose_matrices() -> None:
    task = DecoderTask(model=MODELS["experts"], adapter=LoRA(rank=2, targets=("attention.w_q", "*.experts.w_up")))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    adapted = {name.partition(".blocks.")[2][2:-2] for name, one in named_leaves(low_rank_mask(params)).items() if one}
    assert adapted == {"attention.w_q", "feed_forward.experts.w_up"}
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    assert shapes["stacks.1.blocks.0.feed_forward.experts.w_up.a"] == (3, 4, 32, 2)
    assert shapes["stacks.1.blocks.0.feed_forward.experts.w_up.b"] == (3, 4, 2, 16)


BY_PATTERN = LoRA(rank=2, alpha=4.0, ranks={"attention": 8, "attention.w_o": 4}, alphas={"*.w_up": 1.0})


def test_ranks_and_alphas_by_pattern_are_their_matrices_own() -> None:
    """Each matrix computes as with an adapter of its size for all."""
    params, _ = jax.eval_shape(DecoderTask(model=MODELS["dense"], adapter=BY_PATTERN).init, jax.random.key(0))
    nodes = [node for node in jax.tree.leaves(params, is_leaf=is_low_rank) if is_low_rank(node)]
    sizes = {(node.a.shape[-1], node.gain) for node in nodes}
    assert sizes == {(8, 0.5), (4, 1.0), (2, 2.0), (2, 0.5)}
    shapes = {name.partition(".blocks.0.")[2]: leaf.shape for name, leaf in named_leaves(params).items()}
    assert shapes["attention.w_q.a"][-1] == 8 and shapes["attention.w_o.b"][1] == 4
    assert shapes["feed_forward.w_up.a"][-1] == shapes["feed_forward.w_down.a"][-1] == 2


@pytest.mark.full
def test_the_step_trains_ranks_by_pattern_on_a_mesh() -> None:
    check_task(Begun(model=MODELS["dense"], adapter=BY_PATTERN), tiny.batch(rows=8), layouts=LAYOUTS[:1])


RECIPE = '''
from panax import Experiment
from panax.data import BytePairTokenizer, TextData, TextFiles
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule


def small() -> Experiment:
    """A small decoder."""
    data = TextData(
        corpus=TextFiles(paths=("a.txt",)), tokenizer=BytePairTokenizer(vocab_size=300), sequence_length=32, batch_size=8,
        held_out=0,
    )
    model = DecoderConfig(max_length=32, embed=64, num_layers=2, heads=4, kv_heads=2, ffn=64)
    return Experiment(
        name="small", task=DecoderTask(model=model), data=data, num_steps=6, optimizer=AdamW(schedule=Schedule(peak=1e-2)),
    )
'''


def test_a_run_of_adapters_beside_an_earlier_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("the oak, the ash, and the bonny ivy tree " * 40)
    Path("small.py").write_text(RECIPE)
    assert main(["train", "small.py"]) == 0
    first = panax.load("runs/small")
    tune = ["train", "small.py", "--lora", "4", "--name", "tuned", "--init", "checkpoint:runs/small"]
    sizes = ["--task.adapter.targets", "attention", "--task.adapter.ranks", "attention.w_o", "2"]
    assert main([*tune, *sizes]) == 0
    tuned = panax.load("runs/tuned")
    assert tuned.task.adapter == LoRA(rank=4, alpha=8.0, targets=("attention",), ranks={"attention.w_o": 2})
    for ours, theirs in zip(jax.tree.leaves(base_weights(tuned.params)), jax.tree.leaves(first.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    attention = tuned.params.stacks[0].blocks[0].attention
    assert np.abs(attention.w_q.b).max() > 1e-3 and attention.w_q.a.shape == (2, 64, 4)
    assert not hasattr(tuned.params.stacks[0].blocks[0].feed_forward.w_up, "base")
    assert tuned.generate("the oak", tokens=4, temperature=0.0)
    assert main(["export", "runs/tuned", "merged"]) == 0
    plain = DecoderTask(model=first.params.config)
    abstract = jax.eval_shape(plain.init, jax.random.key(0))
    merged, _ = panax.adapters.huggingface.load("merged", plain, *abstract)
    np.testing.assert_array_equal(
        np.asarray(merged.stacks[0].blocks[0].attention.w_q),
        np.asarray(merge_low_rank(tuned.params).stacks[0].blocks[0].attention.w_q),
    )
    # The adapters alone, as PEFT has them.
    assert main(["export", "runs/tuned", "adapters", "--adapter"]) == 0
    assert "PeftModel.from_pretrained(base, 'adapters')" in capsys.readouterr().out
    read = load_adapter("adapters", with_base_weights(tuned.params, base_weights(tuned.params)))
    for ours, theirs in zip(jax.tree.leaves(read), jax.tree.leaves(tuned.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert read_adapter_config("adapters", tuned.params.config).size_of("attention.w_o").rank == 2
    assert main(["export", "runs/small", "none", "--adapter"]) == 2
    assert main(["export", "runs/tuned", "none", "--adapter", "--dtype", "float32"]) == 2
    errors = capsys.readouterr().err
    assert "has no adapters; export the model itself" in errors and "leave out --gguf and --dtype" in errors
    # The same command again finds its checkpoint, of which the run is done.
    assert main([*tune, *sizes]) == 0
    assert "resuming from step 6" in capsys.readouterr().out
    # The same weights in 4 bits, those without adapters too.
    small = [
        "--task.adapter.base",
        "nf4",
        "--task.adapter.targets",
        "attention",
        "--mesh.replica",
        "8",
        "--mesh.fsdp",
        "1",
    ]
    start = ["--name", "narrow", "--init", "checkpoint:runs/small"]
    assert main(["train", "small.py", "--lora", "4", *start, *small]) == 0
    narrow = base_weights(panax.load("runs/narrow").params)
    for ours, theirs in zip(jax.tree.leaves(narrow, is_leaf=is_quantized), jax.tree.leaves(first.params), strict=True):
        if is_quantized(ours):
            values = dequantize_weights(ours)
            assert 0 < np.linalg.norm(values - theirs) < 0.12 * np.linalg.norm(theirs)
        else:
            np.testing.assert_array_equal(ours, theirs)
    assert sum(is_quantized(node) for node in jax.tree.leaves(narrow, is_leaf=is_quantized)) == 7
    capsys.readouterr()
    assert main(["train", "small.py", "--lora", "none"]) == 2
    assert "--lora none; expected the rank of the adapters" in capsys.readouterr().err


def test_a_released_model_with_adapters(tmp_path: Path) -> None:
    plain = DecoderTask(model=dataclasses.replace(MODELS["dense"], attention_bias=False))
    params, _ = jax.jit(plain.init)(jax.random.key(0))
    panax.adapters.huggingface.save(tmp_path, params)
    adapted = dataclasses.replace(plain, adapter=ADAPTER)
    begun, state = jax.jit(Begun(model=plain.model, adapter=ADAPTER).init)(jax.random.key(5))
    loaded, _ = panax.adapters.huggingface.load(tmp_path, adapted, begun, state)
    for ours, theirs in zip(jax.tree.leaves(base_weights(loaded)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    mask = jax.tree.leaves(low_rank_mask(begun))
    for ours, theirs, trained in zip(jax.tree.leaves(loaded), jax.tree.leaves(begun), mask, strict=True):
        assert not trained or np.array_equal(ours, theirs)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3"


def test_the_optimizer_has_state_of_adapters_alone() -> None:
    assert LoRA.of_rank(8) == LoRA(rank=8, alpha=16.0)
    optimizer = AdamW(schedule=Schedule(peak=1.0))
    program = panax.Program.create(DecoderTask(model=MODELS["dense"], adapter=ADAPTER), optimizer, num_steps=3)
    moments = sum(leaf.size for leaf in jax.tree.leaves(program.abstract.optimizer_state))
    trained = sum(
        leaf.size
        for leaf, one in zip(
            jax.tree.leaves(program.abstract.params), jax.tree.leaves(low_rank_mask(program.abstract.params))
        )
        if one
    )
    assert 2 * trained <= moments <= 2 * trained + 10
