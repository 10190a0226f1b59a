"""A vision transformer built from Flax's layers: `nnx.Conv`, `nnx.MultiHeadAttention`, `nnx.Linear`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

ENCODER = "vit.encoder.layer"


class VitBlock(nnx.Module):
    """Attention and a feed-forward, each after a norm."""

    def __init__(self, config, dtypes, attention, rngs):
        width, epsilon = config["hidden_size"], config["layer_norm_eps"]
        self.norm_1 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs, **dtypes)
        self.attention = nnx.MultiHeadAttention(
            config["num_attention_heads"], width, decode=False, attention_fn=attention, rngs=rngs, **dtypes
        )
        self.norm_2 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs, **dtypes)
        self.up = nnx.Linear(width, config["intermediate_size"], rngs=rngs, **dtypes)
        self.down = nnx.Linear(config["intermediate_size"], width, rngs=rngs, **dtypes)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x)), approximate=False))


class FlaxVit(nnx.Module):
    """Logits of images [batch, height, width, channel]."""

    def __init__(self, config, dtypes, attention, rngs):
        width, patch = config["hidden_size"], config["patch_size"]
        self.patch = nnx.Conv(
            config["num_channels"], width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs, **dtypes
        )
        tokens = (config["image_size"] // patch) ** 2 + 1
        stored = dtypes["param_dtype"]
        self.class_token = nnx.Param(jnp.zeros((1, 1, width), stored))
        self.positions = nnx.Param(jnp.zeros((1, tokens, width), stored))
        self.blocks = nnx.List([VitBlock(config, dtypes, attention, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.LayerNorm(width, epsilon=config["layer_norm_eps"], rngs=rngs, **dtypes)
        self.head = nnx.Linear(width, len(config["id2label"]), rngs=rngs, **dtypes)
        self.dtype = dtypes["dtype"]

    def __call__(self, images):
        x = self.patch(images.astype(self.dtype))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        first = jnp.broadcast_to(self.class_token[...].astype(self.dtype), (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...].astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def fused_attention(query, key, value, **_):
    """Call `jax.nn.dot_product_attention` instead of Flax's attention."""
    return jax.nn.dot_product_attention(query, key, value)


def build(config, compute, stored, fused):
    """Build the module, with weights that are about to be overwritten."""
    dtypes = {"dtype": compute, "param_dtype": stored}
    attention = fused_attention if fused else partial(nnx.dot_product_attention)
    return FlaxVit(config, dtypes, attention, nnx.Rngs(0))


def names(config):
    """Return the path of each parameter, the corresponding tensor's name, and its conversion."""

    def same(tensor):
        return tensor

    def turned(tensor):
        return tensor.T

    def linear(path, name):
        return [((*path, "kernel"), (f"{name}.weight", turned)), ((*path, "bias"), (f"{name}.bias", same))]

    def norm(path, name):
        return [((*path, "scale"), (f"{name}.weight", same)), ((*path, "bias"), (f"{name}.bias", same))]

    embeddings = "vit.embeddings"
    patch = f"{embeddings}.patch_embeddings.projection"
    pairs = [
        (("patch", "kernel"), (f"{patch}.weight", lambda tensor: tensor.transpose(2, 3, 1, 0))),
        (("patch", "bias"), (f"{patch}.bias", same)),
        (("class_token",), (f"{embeddings}.cls_token", same)),
        (("positions",), (f"{embeddings}.position_embeddings", same)),
        *norm(("norm",), "vit.layernorm"),
        *linear(("head",), "classifier"),
    ]
    for n in range(config["num_hidden_layers"]):
        block, layer = ("blocks", n), f"{ENCODER}.{n}"
        pairs += norm((*block, "norm_1"), f"{layer}.layernorm_before")
        pairs += norm((*block, "norm_2"), f"{layer}.layernorm_after")
        for part in ("query", "key", "value"):
            pairs += linear((*block, "attention", part), f"{layer}.attention.attention.{part}")
        pairs += linear((*block, "attention", "out"), f"{layer}.attention.output.dense")
        pairs += linear((*block, "up"), f"{layer}.intermediate.dense")
        pairs += linear((*block, "down"), f"{layer}.output.dense")
    return pairs
