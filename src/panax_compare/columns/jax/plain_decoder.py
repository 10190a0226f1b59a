"""Llama, and Mixtral, in plain JAX: stacked layers, a scan; every expert computes every token, as in a first
implementation."""

import jax
import jax.numpy as jnp
import numpy as np

ATTENTION = {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
DENSE = {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
NORMS = {"norm_1": "input_layernorm.weight", "norm_2": "post_attention_layernorm.weight"}


def load(tensors, config):
    """Convert Hugging Face's tensors to a dictionary; matrices are stored input first, layers are stacked."""

    def layer(n):
        prefix = f"model.layers.{n}."
        weights = {ours: tensors[prefix + theirs] for ours, theirs in NORMS.items()}
        weights |= {ours: tensors[prefix + theirs].T for ours, theirs in ATTENTION.items()}
        if "num_local_experts" not in config:
            return weights | {ours: tensors[prefix + theirs].T for ours, theirs in DENSE.items()}
        mixture = prefix + "block_sparse_moe."
        weights["router"] = tensors[mixture + "gate.weight"].T
        experts = range(config["num_local_experts"])
        for ours, theirs in EXPERTS.items():
            weights[ours] = np.stack([tensors[f"{mixture}experts.{e}.{theirs}.weight"].T for e in experts])
        return weights

    layers = [layer(n) for n in range(config["num_hidden_layers"])]
    return {
        "layers": jax.tree.map(lambda *each: np.stack(each), *layers),
        "embedding": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "head": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T,
    }


def decay_mask(params):
    """Return the mask of parameters that decay: all but the norms."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)


def forward(params, tokens, config, dtype, fused):
    """Compute the logits of the next token at every position."""
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    cosine, sine = rotation(tokens.shape[1], config)
    x = params["embedding"].astype(dtype)[tokens]

    def layer(x, p):
        p = {name: leaf if "norm" in name or name == "router" else leaf.astype(dtype) for name, leaf in p.items()}
        y = norm(p["norm_1"], x, epsilon)
        q, k, v = ((y @ p[name]).reshape(*y.shape[:2], -1, p["q"].shape[-1] // heads) for name in "qkv")
        attended = attend(rotate(q, cosine, sine), rotate(k, cosine, sine), v, fused)
        x = x + attended.reshape(*y.shape[:2], -1) @ p["o"]
        y = norm(p["norm_2"], x, epsilon)
        if "router" in p:
            return x + mixture(p, y, config["num_experts_per_tok"]), None
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return norm(params["norm"], x, epsilon) @ params["head"].astype(dtype)


def mixture(p, x, active):
    scores = jax.nn.softmax((x @ p["router"].astype(x.dtype)).astype(jnp.float32), axis=-1)
    best, chosen = jax.lax.top_k(scores, active)
    weights = (jax.nn.one_hot(chosen, scores.shape[-1]) * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
    inner = jax.nn.silu(jnp.einsum("bse,nef->bsnf", x, p["gate"])) * jnp.einsum("bse,nef->bsnf", x, p["up"])
    return jnp.einsum("bsnf,nfe,bsn->bse", inner, p["down"], weights.astype(x.dtype))


def norm(scale, x, epsilon):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
    return (y * scale).astype(x.dtype)


def rotation(length, config):
    rotary = config.get("rope_parameters") or config
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequency = rotary["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    angle = np.outer(np.arange(length, dtype=np.float32), frequency)
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def rotate(x, cosine, sine):
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)


def attend(q, k, v, fused):
    if fused:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = (jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)
