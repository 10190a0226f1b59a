"""The same images, the same weights: a vision transformer against `transformers`' own, in float32, and its files both ways."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

from panax.adapters.huggingface import config_from, load, save
from panax.adapters.huggingface.export import named_tensors
from panax.core import named_leaves
from panax.core.errors import CheckpointError, RecipeError
from panax.mesh import MeshShape, Placement
from panax.models import VIT_PRESETS, DecoderConfig, DecoderTask, Vit, VitConfig, VitTask
from panax.models.vision.vit import normalize_images
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig

torch.set_num_threads(2)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

ROWS, PIXELS, CLASSES, RATE = 8, 24, 7, 0.05
AXES = {"image": ("batch", None, None, None), "label": ("batch",)}

TOLERANCE = 1e-5
"""Largest distance allowed, as a part of the reference's norm, for each tensor: a tenth of what is promised.

Both programs round float32 to a relative 2**-24 = 6e-8 in each of some 20 dependent operations a layer, in other orders: over two
layers forward and back, errors of a few times sqrt(80) * 6e-8 = 5e-7 are left in a tensor's norm. The largest found is 8e-7."""

OF_ROUNDING = 2.0**-20
"""A key's bias shifts all scores of a query alike: its gradient is nothing but rounding, and is compared with the norm of the
whole gradient instead, at sixteen roundings."""


class Example(NamedTuple):
    folder: Path
    theirs: Any
    task: VitTask
    params: Vit


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Example:
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=PIXELS,
        patch_size=8,
        num_labels=CLASSES,
        layer_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            # Drawn wide, biases too: what is left out shows.
            value.normal_(0.0, 0.3) if value.ndim == 1 else value.normal_(0.0, 0.15)
    theirs.save_pretrained(folder)
    task = VitTask(model=config_from(folder))
    return Example(folder, theirs, task, load(folder, task, abstract(task), {})[0])


def abstract(task: VitTask) -> Vit:
    return jax.eval_shape(task.init, jax.random.key(0))[0]


def images(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((ROWS, PIXELS, PIXELS, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, CLASSES, ROWS).astype(np.int32)}


def their_logits(model: Any, image: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(np.ascontiguousarray(image.transpose(0, 3, 1, 2)))).logits


def apart(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_config_is_read(example):
    assert example.task.model == VitConfig(
        num_classes=CLASSES,
        image_size=PIXELS,
        patch=8,
        embed=32,
        num_layers=2,
        heads=4,
        ffn=48,
        norm_epsilon=1e-5,
    )


def test_logits(example):
    image = images()["image"]
    ours = jax.jit(lambda params, image: params(image, dtype=jnp.float32))(example.params, image)
    with torch.no_grad():
        distance = apart(ours, their_logits(example.theirs, image))
    print(f"vit logits: {distance:.1e} apart")
    assert distance < TOLERANCE


def test_gradients(example):
    batch = images()
    on_device = {**jax.tree.map(jnp.asarray, batch), "row": jnp.arange(ROWS)}

    def mean_loss(params: Vit) -> jax.Array:
        return example.task.loss(params, {}, on_device, jax.random.key(0), True).losses["cross_entropy"].mean

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(example.params)
    model = example.theirs
    model.zero_grad()
    label = torch.from_numpy(batch["label"]).long()
    their_loss = torch.nn.functional.cross_entropy(their_logits(model, batch["image"]), label)
    their_loss.backward()
    theirs = in_files(model)
    ours = dict(named_tensors(gradients, "vit"))
    assert float(loss) == pytest.approx(float(their_loss.detach()), rel=TOLERANCE)
    assert ours.keys() == theirs.keys()
    total_norm = np.sqrt(sum(np.sum(leaf**2) for leaf in theirs.values()))
    keys = {name for name in theirs if name.endswith("attention.key.bias")}
    assert len(keys) == 2
    assert all(np.linalg.norm(ours[name] - theirs[name]) < OF_ROUNDING * total_norm for name in keys)
    distances = {name: apart(ours[name], theirs[name]) for name in ours.keys() - keys}
    print(f"vit gradients: at most {max(distances.values()):.1e} apart")
    assert {name: d for name, d in distances.items() if d > TOLERANCE} == {}


def in_files(model: Any) -> dict[str, np.ndarray]:
    """Gradients by the names that the files have."""
    renamed = {
        "vit.layers.": "vit.encoder.layer.",
        ".attention.q_proj.": ".attention.attention.query.",
        ".attention.k_proj.": ".attention.attention.key.",
        ".attention.v_proj.": ".attention.attention.value.",
        ".attention.o_proj.": ".attention.output.dense.",
        ".mlp.fc1.": ".intermediate.dense.",
        ".mlp.fc2.": ".output.dense.",
    }
    actual = {}
    for name, value in model.named_parameters():
        for theirs, in_file in renamed.items():
            name = name.replace(theirs, in_file)
        actual[name] = value.grad.numpy().copy()
    return actual


def test_the_example_puts_every_part_to_work(example):
    """Parity proves nothing about tensors that an example does not depend on."""
    leaves = jax.tree.leaves(example.params)
    image = jnp.asarray(images()["image"])
    logits = jax.jit(lambda params: params(image, dtype=jnp.float32))
    unchanged = logits(example.params)
    changes = {"norm_epsilon": 0.1, "activation": "gelu_tanh"}
    for name, value in changes.items():
        structure = jax.tree.structure(
            abstract(VitTask(model=dataclasses.replace(example.task.model, **{name: value})))
        )
        assert apart(logits(structure.unflatten(leaves)), unchanged) > 2 * TOLERANCE, name
    for name, leaf in named_leaves(example.params).items():
        assert np.asarray(leaf).any(), name


def test_three_steps_from_their_weights_are_as_they_would(example, tmp_path):
    """On a mesh, and back into files that `transformers` reads."""
    task = example.task
    optimizer = Sgd(schedule=Schedule(peak=RATE, decay="constant"))
    program = Program.create(task, optimizer, num_steps=10, config=StepConfig(clip_norm=None))
    step = CompiledStep(program, Placement.create(MeshShape(fsdp=4, tensor=2)), AXES)
    state = step.init(0)
    state = dataclasses.replace(state, params=load(example.folder, task, state.params, {})[0])
    losses = []
    for i in range(3):
        state, scalars = step(state, step.put(images(i)))
        losses.append(float(scalars["loss"]))
    save(tmp_path, state.params)

    model = transformers.AutoModelForImageClassification.from_pretrained(example.folder, attn_implementation="eager")
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    for i, loss in enumerate(losses):
        batch = images(i)
        sgd.zero_grad()
        label = torch.from_numpy(batch["label"]).long()
        theirs = torch.nn.functional.cross_entropy(their_logits(model, batch["image"]), label)
        assert loss == pytest.approx(float(theirs.detach()), rel=TOLERANCE)
        theirs.backward()
        sgd.step()
    saved = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.linalg.norm(saved[name] - value) <= TOLERANCE * torch.linalg.norm(value), name


def test_saved_files_are_theirs_to_the_bit(example, tmp_path):
    save(tmp_path, example.params)
    saved = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    for name, value in example.theirs.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    assert saved.config.layer_norm_eps == 1e-5 and saved.config.num_labels == CLASSES
    assert config_from(tmp_path) == example.task.model


def test_classes_keep_their_names(example, tmp_path):
    save(tmp_path, example.params, classes=("cat", "dog"))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["id2label"]["0"] == "cat" and raw["label2id"]["dog"] == 1 and len(raw["id2label"]) == CLASSES
    assert raw["id2label"].get("2", "LABEL_2") == "LABEL_2"
    assert config_from(tmp_path) == example.task.model


def test_preprocessing_goes_along(example, tmp_path):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config = dataclasses.replace(example.task.model, mean=mean, std=std)
    model = jax.tree.structure(abstract(VitTask(model=config))).unflatten(jax.tree.leaves(example.params))
    save(tmp_path, model)
    assert config_from(tmp_path) == config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3)).astype(np.uint8)
    theirs = processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    np.testing.assert_allclose(normalize_images(jnp.asarray(image), config), theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(RecipeError, match=r"mean is \(0\.485, 0\.456, 0\.406\) there, \(0\.5, 0\.5, 0\.5\) here"):
        load(tmp_path, example.task, abstract(example.task), {})


@pytest.mark.parametrize("bare", [False, True], ids=["other classes", "no head"])
def test_a_head_that_the_files_lack_stays_as_drawn(example, bare, tmp_path):
    folder = example.folder
    if bare:
        folder = tmp_path
        example.theirs.vit.save_pretrained(folder)
    task = VitTask(model=dataclasses.replace(example.task.model, num_classes=3))
    drawn = jax.jit(task.init)(jax.random.key(1))[0]
    with pytest.warns(UserWarning, match="no head for 3 classes .*: the head keeps its random initial values"):
        result, _ = load(folder, task, drawn, {})
    assert result.head is not None and np.array_equal(result.head.w, drawn.head.w)
    assert np.array_equal(result.positions, example.params.positions)
    with pytest.raises(RecipeError, match="the parameters given are abstract"):
        load(folder, task, abstract(task), {})


def test_what_does_not_fit_is_named(example, tmp_path):
    config = example.task.model
    other = VitTask(model=dataclasses.replace(config, patch=12, norm_epsilon=1e-6))
    with pytest.raises(RecipeError, match=r"patch is 8 there, 12 here; norm_epsilon is 1e-05 there, 1e-06 here"):
        load(example.folder, other, abstract(other), {})
    decoder = DecoderTask(model=DecoderConfig(vocab_size=8))
    with pytest.raises(RecipeError, match="is a vision transformer, the task a DecoderTask"):
        load(example.folder, decoder, jax.eval_shape(decoder.init, jax.random.key(0))[0], {})
    mean = VitTask(model=dataclasses.replace(config, pooling="mean"))
    with pytest.raises(RecipeError, match=r"model\.pooling='mean', expected 'class_token'"):
        save(tmp_path / "mean", abstract(mean))
    with pytest.raises(RecipeError, match="model_type='llama' is not a vision transformer"):
        save(tmp_path / "llama", example.params, model_type="llama")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "tanh"}, "hidden_act='tanh' in a vit model; expected one of"),
        ({"patch_size": [8, 8]}, r"patch_size=\[8, 8\] in a vit model; expected a value of type int"),
        ({"num_attention_heads": 5}, "embed=32 is not divisible by heads=5"),
    ],
)
def test_configurations_that_it_does_not_compute_are_refused(example, change, message, tmp_path):
    raw = json.loads((example.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(RecipeError, match=message):
        config_from(tmp_path)


def test_a_damaged_preprocessor_is_an_error(example, tmp_path):
    (tmp_path / "config.json").write_text((example.folder / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 3}')
    with pytest.raises(CheckpointError, match="expected image_mean and image_std"):
        config_from(tmp_path)


def test_the_releases_configuration_is_the_preset(tmp_path):
    """google/vit-base-patch16-224, but for its epsilon."""
    transformers.ViTConfig(num_labels=1000).save_pretrained(tmp_path)
    assert config_from(tmp_path) == dataclasses.replace(VIT_PRESETS["vit_b16"], norm_epsilon=1e-12)
