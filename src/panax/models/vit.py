"""The vision transformer: cut an image into patches, run the stacked layers, pool, and score the classes."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, Shaped

from ..core import Module, constant, dropout, normal, parameter, scope, stack, stacked
from ..core.errors import RecipeError
from ..layers import Attention, FeedForward, Norm
from ..parallel import RematPolicy, rematerialise, scan_layers
from ..spmd import add_bias, contract, gather
from .vit_config import VitConfig


class Drawing(NamedTuple):
    """What dropout draws with.

    Attributes:
        row: Each image's index in the global batch.
    """

    key: Key[Array, ""]
    row: Int[Array, " batch"]


class VitBlock(Module):
    """One layer: attention, then the feed-forward, each normalised before and added."""

    attention_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward
    dropout: float = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: VitConfig) -> "VitBlock":
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
        return cls(
            attention_norm=norm(next(keys)),
            attention=Attention.create(
                next(keys),
                sizes,
                w_o=normal("heads", "head_dim", gain=output_gain),
                causal=False,
                **dict.fromkeys(("q_norm", "k_norm", "rotary", "window", "clip", "soft_cap", "scale")),
                **absent,
            ),
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
            dropout=config.dropout,
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], position: Int[Array, "batch seq"], drawing: Drawing | None
    ) -> Float[Array, "batch seq embed"]:
        with scope("attention"):
            branch = self.attention(self.attention_norm(x), position, None)
            x = x + _dropped(branch, self.dropout, drawing, 0)
        with scope("feed_forward"):
            branch = self.feed_forward(self.feed_forward_norm(x))
            return x + _dropped(branch, self.dropout, drawing, 1)


class Patches(Module):
    """Non-overlapping squares of pixels, each projected to the width of the residual stream: a reshape and a product."""

    w: Float[Array, "patch_row patch_column channel embed"] = parameter(normal("patch_row", "patch_column", "channel"))
    b: Float[Array, " norm"] = parameter(constant(0.0))

    def __call__(self, image: Shaped[Array, "batch row column channel"], config: VitConfig, dtype: Any) -> Any:
        """Float[Array, "batch seq embed"], the patches in the order of reading."""
        batch, across, size = image.shape[0], config.image_size // config.patch, config.patch
        cut = image.reshape(batch, across, size, across, size, config.channels).swapaxes(2, 3)
        # Cut while they are bytes: a fourth of what is moved.
        pixels = normalised(cut.reshape(batch, across * across, size, size, config.channels), config).astype(dtype)
        x = contract(
            "batch seq patch_row patch_column channel, patch_row patch_column channel embed -> batch seq embed",
            pixels,
            self.w,
        )
        return add_bias(x, self.b, "norm")


class ClassHead(Module):
    """A score for each class."""

    w: Float[Array, "embed class"] = parameter(normal(std=0.02))
    b: Float[Array, " class"] = parameter(constant(0.0))

    def __call__(self, pooled: Float[Array, "batch embed"]) -> Float[Array, "batch class"]:
        scores = contract("batch embed, embed class -> batch class", pooled, self.w, out_dtype=jnp.float32)
        return add_bias(scores, self.b, "class")


class Vit(Module):
    """From images to a score for each class."""

    patches: Patches
    final_norm: Norm
    head: ClassHead
    config: VitConfig = eqx.field(static=True)
    blocks: VitBlock = stacked("layer")
    class_token: Float[Array, " norm"] | None = parameter(normal(std=0.02))
    positions: Float[Array, "position embed"] = parameter(normal("embed"))

    @classmethod
    def build(cls, key: jax.Array, config: VitConfig) -> "Vit":
        """Draw all parameters.

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
        absent: dict[str, Any] = {} if config.pooling == "class_token" else {"class_token": None}
        return cls.create(
            own_key,
            sizes,
            patches=Patches.create(patch_key, sizes),
            blocks=stack(layer_key, config.num_layers, functools.partial(VitBlock.build, config=config)),
            final_norm=Norm.build(key, config.embed, kind="layer", epsilon=config.norm_epsilon),
            head=ClassHead.create(head_key, sizes),
            config=config,
            **absent,
        )

    def __call__(
        self,
        image: Shaped[Array, "batch row column channel"],
        *,
        dtype: Any,
        remat: RematPolicy = "none",
        drawing: Drawing | None = None,
    ) -> Float[Array, "batch class"]:
        """Each class's score, float32.

        Args:
            image: Bytes, which are normalised here, or floats, which are taken as they are.
            dtype: What activations and products are in.
            drawing: None where nothing is dropped.

        Raises:
            RecipeError: The images are of another shape than the model's.
        """
        return self.head(self.pooled(image, dtype=dtype, remat=remat, drawing=drawing))

    def pooled(
        self,
        image: Shaped[Array, "batch row column channel"],
        *,
        dtype: Any,
        remat: RematPolicy = "none",
        drawing: Drawing | None = None,
    ) -> Float[Array, "batch embed"]:
        """What the head reads of each image: the normalised class token, or the mean of the normalised patches."""
        x = self._layers(self._embedded(image, dtype, drawing), remat, drawing)
        with scope("final_norm"):
            # A norm is of each position alone: where one is read, one is normalised.
            return self.final_norm(x).mean(axis=1) if self.class_token is None else self.final_norm(x[:, 0])

    def _embedded(self, image: jax.Array, dtype: Any, drawing: Drawing | None) -> jax.Array:
        _check(image.shape[1:], self.config)
        with scope("patches"):
            x = self.patches(image, self.config, dtype)
            if self.class_token is not None:
                token = gather(self.class_token, "norm", dtype)
                x = jnp.concatenate([jnp.broadcast_to(token[None, None], (x.shape[0], 1, token.shape[0])), x], axis=1)
            x = x + gather(self.positions, "position embed", dtype)[None]
            # Past the numbers of the layers, which have keys of their own.
            return _dropped(x, self.config.dropout, _folded(drawing, self.config.num_layers), 0)

    def _layers(self, x: jax.Array, remat: RematPolicy, drawing: Drawing | None) -> jax.Array:
        position = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])

        def one_block(x: jax.Array, block: VitBlock, index: jax.Array) -> jax.Array:
            return block(x, position, _folded(drawing, index))

        run = rematerialise(one_block, remat)

        def step(x: jax.Array, scanned: tuple[VitBlock, jax.Array]) -> tuple[jax.Array, None]:
            block, index = scanned
            with scope(f"layers.{'*' if isinstance(index, Tracer) else int(index)}"):
                return run(x, block, index), None

        return scan_layers(step, x, (self.blocks, jnp.arange(self.config.num_layers)))[0]


def normalised(image: Shaped[Array, "*rest channel"], config: VitConfig) -> Float[Array, "*rest channel"]:
    """Bytes as the model takes them, float32; floats as they are."""
    if jnp.issubdtype(image.dtype, jnp.floating):
        return image
    ones = (1,) * (image.ndim - 1)
    mean, std = (jnp.asarray(values, jnp.float32).reshape(*ones, -1) for values in (config.mean, config.std))
    return (image.astype(jnp.float32) / 255.0 - mean) / std


def _dropped(x: jax.Array, rate: float, drawing: Drawing | None, place: int) -> jax.Array:
    if drawing is None:
        return x
    return dropout(x, rate, jax.random.fold_in(drawing.key, place), drawing.row)


def _folded(drawing: Drawing | None, number: Any) -> Drawing | None:
    return None if drawing is None else drawing._replace(key=jax.random.fold_in(drawing.key, number))


def _check(shape: tuple[int, ...], config: VitConfig) -> None:
    expected = (config.image_size, config.image_size, config.channels)
    if shape != expected:
        raise RecipeError(
            f"the data's images have the shape {shape} (height, width, channel), the model's {expected}; set "
            f"task.model.image_size and channels to the data's, or the data's size to the model's"
        )
