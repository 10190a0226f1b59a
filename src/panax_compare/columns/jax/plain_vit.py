"""A vision transformer in plain JAX: stacked layers, a scan."""

import jax
import jax.numpy as jnp
import numpy as np

LAYER = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm_before": "layernorm_before",
    "norm_after": "layernorm_after",
}


def load(tensors, config):
    """Convert Hugging Face's tensors to a dictionary; matrices are stored input first, layers are stacked."""

    def pair(name):
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return {"w": weight.T if weight.ndim == 2 else weight, "b": bias}

    layers = [
        {ours: pair(f"vit.encoder.layer.{n}.{theirs}") for ours, theirs in LAYER.items()}
        for n in range(config["num_hidden_layers"])
    ]
    patch = tensors["vit.embeddings.patch_embeddings.projection.weight"]
    return {
        "layers": jax.tree.map(lambda *each: np.stack(each), *layers),
        "patch": {
            "w": patch.transpose(2, 3, 1, 0).reshape(-1, patch.shape[0]),
            "b": tensors["vit.embeddings.patch_embeddings.projection.bias"],
        },
        "class_token": tensors["vit.embeddings.cls_token"],
        "positions": tensors["vit.embeddings.position_embeddings"],
        "norm": pair("vit.layernorm"),
        "head": pair("classifier"),
    }


def decay_mask(params):
    """Return the mask of parameters that decay: all but norms, biases and the class token."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(word in jax.tree_util.keystr(path) for word in ("norm", "'b'", "class_token")), params
    )


def forward(params, images, config, dtype, fused):
    """Compute the logits of images [batch, height, width, channel]."""
    batch, size = images.shape[0], config["patch_size"]
    side = images.shape[1] // size
    patches = (
        images.reshape(batch, side, size, side, size, -1).transpose(0, 1, 3, 2, 4, 5).reshape(batch, side * side, -1)
    )
    x = linear(params["patch"], patches.astype(dtype), dtype)
    first = jnp.broadcast_to(params["class_token"].astype(dtype), (batch, 1, x.shape[-1]))
    x = jnp.concatenate([first, x], axis=1) + params["positions"].astype(dtype)

    def layer(x, p):
        y = norm(p["norm_before"], x, config["layer_norm_eps"])
        q, k, v = (
            linear(p[name], y, dtype).reshape(*y.shape[:2], config["num_attention_heads"], -1)
            for name in ("query", "key", "value")
        )
        x = x + linear(p["out"], attend(q, k, v, fused).reshape(y.shape), dtype)
        y = norm(p["norm_after"], x, config["layer_norm_eps"])
        return x + linear(p["down"], jax.nn.gelu(linear(p["up"], y, dtype), approximate=False), dtype), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return linear(params["head"], norm(params["norm"], x, config["layer_norm_eps"])[:, 0], dtype)


def linear(p, x, dtype):
    return x @ p["w"].astype(dtype) + p["b"].astype(dtype)


def norm(p, x, epsilon):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + epsilon)
    return (y * p["w"] + p["b"]).astype(x.dtype)


def attend(q, k, v, fused):
    if fused:
        return jax.nn.dot_product_attention(q, k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)
