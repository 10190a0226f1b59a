"""Llama built from Flax's layers: `nnx.Embed`, `nnx.RMSNorm`, `nnx.Linear`."""

import jax
from flax import nnx

from .plain_decoder import attend, rotate, rotation


class DecoderBlock(nnx.Module):
    """Attention and a gated feed-forward, each after a norm."""

    def __init__(self, config, dtypes, fused, rngs):
        width, ffn, epsilon = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or width // self.heads
        self.fused = fused
        kv_width = config["num_key_value_heads"] * self.head_dim

        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, **dtypes)

        self.norm_1 = nnx.RMSNorm(width, epsilon=epsilon, rngs=rngs, **dtypes)
        self.q = linear(width, self.heads * self.head_dim)
        self.k, self.v = linear(width, kv_width), linear(width, kv_width)
        self.o = linear(self.heads * self.head_dim, width)
        self.norm_2 = nnx.RMSNorm(width, epsilon=epsilon, rngs=rngs, **dtypes)
        self.gate, self.up, self.down = linear(width, ffn), linear(width, ffn), linear(ffn, width)

    def __call__(self, x, cosine, sine):
        y = self.norm_1(x)
        q, k, v = (each(y).reshape(*y.shape[:2], -1, self.head_dim) for each in (self.q, self.k, self.v))
        attended = attend(rotate(q, cosine, sine), rotate(k, cosine, sine), v, self.fused)
        x = x + self.o(attended.reshape(*y.shape[:2], -1))
        y = self.norm_2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Logits of the next token at every position."""

    def __init__(self, config, dtypes, fused, rngs):
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.rotary = nnx.static(config) if hasattr(nnx, "static") else config
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs, **dtypes)
        self.blocks = nnx.List([DecoderBlock(config, dtypes, fused, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(width, epsilon=config["rms_norm_eps"], rngs=rngs, **dtypes)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, tokens):
        cosine, sine = rotation(tokens.shape[1], self.rotary)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


def build(config, compute, stored, fused):
    """Build the module, with weights that are about to be overwritten."""
    return Llama(config, {"dtype": compute, "param_dtype": stored}, fused, nnx.Rngs(0))


def names(config):
    """Return the path of each parameter, the corresponding tensor's name, and its conversion."""

    def same(tensor):
        return tensor

    def turned(tensor):
        return tensor.T

    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    pairs = [
        (("embedding", "embedding"), ("model.embed_tokens.weight", same)),
        (("norm", "scale"), ("model.norm.weight", same)),
        (("head", "kernel"), (head, turned)),
    ]
    for n in range(config["num_hidden_layers"]):
        block, layer = ("blocks", n), f"model.layers.{n}"
        pairs += [((*block, part, "kernel"), (f"{layer}.self_attn.{part}_proj.weight", turned)) for part in "qkvo"]
        pairs += [
            ((*block, part, "kernel"), (f"{layer}.mlp.{part}_proj.weight", turned)) for part in ("gate", "up", "down")
        ]
        pairs.append(((*block, "norm_1", "scale"), (f"{layer}.input_layernorm.weight", same)))
        pairs.append(((*block, "norm_2", "scale"), (f"{layer}.post_attention_layernorm.weight", same)))
    return pairs
