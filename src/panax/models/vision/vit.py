"""The vision transformer: cut an image into patches, run the stacked layers, pool, and score the classes."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ...core import Module, constant, dropout, normal, parameter, scope, stack, stacked_modules
from ...core.errors import RecipeError
from ...layers import Attention, Context, FeedForward, Norm, Stack, TransformerBlock, run_stacks
from ...parallel import RematPolicy
from ...spmd import add_bias, contract, gather
from .vit_config import VitConfig


def build_vit_block(key: jax.Array, config: VitConfig) -> TransformerBlock:
    """Initialize one layer."""
    keys = iter(jax.random.split(key, 4))
    # Each layer adds two branches; their sum keeps its scale at any depth.
    output_gain = (2 * config.num_layers) ** -0.5
    norm = functools.partial(Norm.build, size=config.embed, kind="layer", epsilon=config.norm_epsilon)
    sizes = {
        "embed": config.embed,
        "norm": config.embed,
        "heads": config.heads,
        "kv_heads": config.heads,
        "head_dim": config.embed // config.heads,
    }
    absent: dict[str, Any] = {} if config.attention_bias else {"b_q": None, "b_k": None, "b_v": None}
    return TransformerBlock(
        attention_norm=norm(next(keys)),
        attention=Attention.create(
            next(keys),
            sizes,
            w_o=normal("heads", "head_dim", gain=output_gain),
            causal=False,
            **dict.fromkeys(("q_norm", "k_norm", "rotary", "window", "clip", "soft_cap", "scale")),
            **absent,
        ),
        attention_post_norm=None,
        feed_forward_norm=norm(next(keys)),
        feed_forward=FeedForward.build(
            next(keys),
            config.embed,
            config.ffn,
            gated=False,
            bias=True,
            activation=config.activation,
            output_gain=output_gain,
        ),
        feed_forward_post_norm=None,
        dropout=config.dropout,
    )


class Patches(Module):
    """Patch embedding: non-overlapping squares of pixels, projected to the residual width by a reshape and a
    matmul.
    """

    w: Float[Array, "patch_row patch_column channel embed"] = parameter(normal("patch_row", "patch_column", "channel"))
    b: Float[Array, " norm"] = parameter(constant(0.0))

    def __call__(self, image: Shaped[Array, "batch row column channel"], config: VitConfig, dtype: Any) -> Any:
        """Return the patch embeddings, Float[Array, "batch seq embed"], in row-major order."""
        batch, across, size = image.shape[0], config.image_size // config.patch, config.patch
        cut = image.reshape(batch, across, size, across, size, config.channels).swapaxes(2, 3)
        # Split into patches while the pixels are bytes, which moves a quarter of the data.
        pixels = normalize_images(cut.reshape(batch, across * across, size, size, config.channels), config).astype(
            dtype
        )
        x = contract(
            "batch seq patch_row patch_column channel, patch_row patch_column channel embed -> batch seq embed",
            pixels,
            self.w,
        )
        return add_bias(x, self.b, "norm")


class ClassHead(Module):
    """The classification head."""

    w: Float[Array, "embed class"] = parameter(normal(std=0.02))
    b: Float[Array, " class"] = parameter(constant(0.0))

    def __call__(self, pooled: Float[Array, "batch embed"]) -> Float[Array, "batch class"]:
        scores = contract("batch embed, embed class -> batch class", pooled, self.w, out_dtype=jnp.float32)
        return add_bias(scores, self.b, "class")


class Vit(Module):
    """A vision transformer, from images to class logits."""

    patches: Patches
    final_norm: Norm
    head: ClassHead
    config: VitConfig = eqx.field(static=True)
    blocks: TransformerBlock | None = stacked_modules("layer")
    class_token: Float[Array, " norm"] | None = parameter(normal(std=0.02))
    positions: Float[Array, "position embed"] = parameter(normal("embed"))

    @classmethod
    def build(cls, key: jax.Array, config: VitConfig) -> "Vit":
        """Initialize all parameters.

        >>> tiny = VitConfig.of_size("Ti")
        >>> model = jax.eval_shape(lambda key: Vit.build(key, tiny), jax.random.key(0))
        >>> model.positions.shape, model.blocks.feed_forward.w_up.shape
        ((197, 192), (12, 192, 768))
        """
        patch_key, head_key, layer_key, own_key = jax.random.split(key, 4)
        sizes = {
            "patch_row": config.patch,
            "patch_column": config.patch,
            "channel": config.channels,
            "embed": config.embed,
            "norm": config.embed,
            "class": config.num_classes,
            "position": config.num_tokens,
        }
        absent: dict[str, Any] = {} if config.has_class_token else {"class_token": None}
        return cls.create(
            own_key,
            sizes,
            patches=Patches.create(patch_key, sizes),
            blocks=stack(layer_key, config.num_layers, functools.partial(build_vit_block, config=config)),
            final_norm=Norm.build(key, config.embed, kind="layer", epsilon=config.norm_epsilon),
            head=ClassHead.create(head_key, sizes),
            config=config,
            **absent,
        )

    def __call__(
        self, image: Shaped[Array, "batch row column channel"], *, dtype: Any, remat: RematPolicy = "none"
    ) -> Float[Array, "batch class"]:
        """Return the class logits, in float32, without dropout.

        Args:
            image: Bytes, which are normalized, or floats, which are used unchanged.
            dtype: Dtype of activations and matmuls.

        Raises:
            RecipeError: The images' shape differs from the model's.
        """
        context = shared_context(self.config, image.shape[0])
        return self.head(self.pool(run_stacks(self.stacks, self.enter(image, context, dtype), context, remat)[0]))

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacked layers; empty if a pipeline holds them."""
        return () if self.blocks is None else (Stack(first=0, repeats=self.config.num_layers, blocks=(self.blocks,)),)

    def enter(
        self, image: Shaped[Array, "batch row column channel"], context: Context, dtype: Any
    ) -> Float[Array, "batch seq embed"]:
        """Embed the images and apply dropout; the result is the first layer's input."""
        _check(image.shape[1:], self.config)
        with scope("patches"):
            x = self.patches(image, self.config, dtype)
            if self.class_token is not None:
                token = gather(self.class_token, "norm", dtype)
                x = jnp.concatenate([jnp.broadcast_to(token[None, None], (x.shape[0], 1, token.shape[0])), x], axis=1)
            x = x + gather(self.positions, "position embed", dtype)[None]
            if context.key is None or context.row is None:
                return x
            # Past the layers' indices, which have their own keys.
            key = jax.random.fold_in(jax.random.fold_in(context.key, self.config.num_layers), 0)
            return dropout(x, self.config.dropout, key, context.row)

    def pool(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """Pool each image for the head: the normalized class token, or the mean of the normalized patches."""
        with scope("final_norm"):
            # The norm is per position, so only the class token needs it.
            return self.final_norm(x).mean(axis=1) if self.class_token is None else self.final_norm(x[:, 0])


def shared_context(
    config: VitConfig, rows: int, row: Int[Array, " batch"] | None = None, key: jax.Array | None = None
) -> Context:
    """Return the context that all layers share.

    Args:
        rows: Number of images.
        row: Each image's index in the global batch; with `key`, the seed of its dropout.
    """
    position = jnp.broadcast_to(jnp.arange(config.num_tokens)[None], (rows, config.num_tokens))
    return Context(position, row=row, key=key)


def normalize_images(image: Shaped[Array, "*rest channel"], config: VitConfig) -> Float[Array, "*rest channel"]:
    """Normalize images of bytes to float32; return floats unchanged."""
    if jnp.issubdtype(image.dtype, jnp.floating):
        return image
    ones = (1,) * (image.ndim - 1)
    mean, std = (jnp.asarray(values, jnp.float32).reshape(*ones, -1) for values in (config.mean, config.std))
    return (image.astype(jnp.float32) / 255.0 - mean) / std


def _check(shape: tuple[int, ...], config: VitConfig) -> None:
    expected = (config.image_size, config.image_size, config.channels)
    if shape != expected:
        raise RecipeError(
            f"the data's images have the shape {shape} (height, width, channel), the model's {expected}; set "
            f"task.model.image_size and channels to the data's, or the data's size to the model's"
        )
