"""The logical axes of the layers that Panax ships, with the default rules and their traits. Plain Python, without jax."""

from ..core.logical import LogicalAxis, Role, Undivided, register_axes

# Layers that rest on their stages leave the stage axis to the embeddings, which no stage holds alone.
_AT_REST = ("fsdp", "expert", "stage")

register_axes(
    LogicalAxis("batch", "rows of the global batch", compute=("replica", "fsdp", "expert"), storage=(), role=Role.ROWS),
    LogicalAxis(
        "seq",
        "positions in a row, inside attention, feed-forward and loss",
        compute=("context",),
        storage=(),
        role=Role.POSITIONS,
    ),
    LogicalAxis(
        "residual",
        "positions in a row, in the residual stream between them",
        compute=("context", "tensor"),
        storage=(),
        role=Role.STREAM,
    ),
    LogicalAxis(
        "embed", "width of the residual stream", storage=_AT_REST, undivided=Undivided.OFF_STAGES, role=Role.WIDTH
    ),
    LogicalAxis("norm", "scale and bias of a normalisation over the residual stream or a head"),
    LogicalAxis("heads", "query heads", compute=("tensor",), parallel=True),
    LogicalAxis(
        "kv_heads",
        "key and value heads",
        compute=("tensor",),
        undivided=Undivided.REPLICATED,
        parallel=True,
        may_be_whole=True,
    ),
    LogicalAxis("head_dim", "width of one head"),
    LogicalAxis("q_latent", "latent of the queries, where it is projected down to"),
    LogicalAxis(
        "kv_latent",
        "latent of keys and values and the rotated part of the key, side by side, where they are projected down to",
    ),
    LogicalAxis(
        "q_rank",
        "latent of the queries, where these are projected up from it",
        storage=_AT_REST,
        undivided=Undivided.FEWER,
    ),
    LogicalAxis(
        "kv_rank",
        "latent of keys and values, where these are projected up from it",
        storage=_AT_REST,
        undivided=Undivided.FEWER,
    ),
    LogicalAxis("key_value", "one head's key, without its rotated part, and its value, side by side"),
    LogicalAxis("value_dim", "width of one head's value, where it is not that of its key"),
    LogicalAxis("ffn", "width of the feed-forward layer", compute=("tensor",), parallel=True),
    LogicalAxis(
        "vocab",
        "rows of the embedding and of the output head",
        compute=("tensor",),
        parallel=True,
        single="the loss splits a vocabulary over one mesh axis",
    ),
    LogicalAxis("position", "learned positions"),
    LogicalAxis("patch_row", "rows of pixels in a patch of an image"),
    LogicalAxis("patch_column", "columns of pixels in a patch of an image"),
    LogicalAxis("channel", "colours of a pixel"),
    LogicalAxis("class", "what a classifier tells apart"),
    LogicalAxis("layer", "layers stacked in storage", compute=("stage",), role=Role.LAYERS),
    LogicalAxis("expert", "experts", compute=("expert",)),
    LogicalAxis("expert_ffn", "width of an expert", compute=("tensor",), parallel=True, may_be_whole=True),
    LogicalAxis("router", "experts, where a router scores all of them", in_float32=True),
    LogicalAxis(
        "features",
        "of an adapted model: the dimension of a weight that is computed in parallel",
        compute=("tensor",),
        undivided=Undivided.ELECTIVE,
    ),
    LogicalAxis(
        "width",
        "of an adapted model: the dimension along which a weight rests split",
        storage=("fsdp", "expert"),
        undivided=Undivided.ELECTIVE,
    ),
    LogicalAxis(
        "member",
        "of an adapted model: weights of equal layers or experts side by side",
        compute=("expert",),
        undivided=Undivided.ELECTIVE,
    ),
)
