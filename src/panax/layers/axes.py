"""Logical axes of Panax's layers, with their default sharding rules and traits. Plain Python, without jax."""

from ..core.params.logical import MESH_AXES, DivisibilityPolicy, Role, register_axes
from ..core.params.logical import LogicalAxis as Axis

# Layers stored on their stages do not use the stage axis here; embeddings, which belong to no single stage, do.
_AT_REST = ("fsdp", "expert", "stage")
_ELECTIVE = DivisibilityPolicy.ELECTIVE

register_axes(
    Axis("batch", "rows of the global batch", compute=("replica", "fsdp", "expert"), storage=(), role=Role.ROWS),
    Axis("seq", "positions in a row, inside attention, feed-forward and loss", compute=("context",), storage=(),
         role=Role.POSITIONS),
    Axis("residual", "positions in a row, in the residual stream between them", compute=("context", "tensor"), storage=(),
         role=Role.STREAM),
    Axis("embed", "width of the residual stream", storage=_AT_REST, undivided=DivisibilityPolicy.OFF_STAGES, role=Role.WIDTH),
    Axis("norm", "scale and bias of a normalization over the residual stream or a head"),
    Axis("heads", "query heads", compute=("tensor",), parallel=True),
    Axis("kv_heads", "key and value heads", compute=("tensor",), parallel=True, may_be_whole=True,
         undivided=DivisibilityPolicy.REPLICATED),
    Axis("head_dim", "width of one head"),
    Axis("q_latent", "latent of the queries: the output of its down-projection"),
    Axis("kv_latent", "latent of keys and values, without the rotated part of the key: the output of their down-projection"),
    Axis("q_rank", "latent of the queries: the input of their up-projection", storage=_AT_REST,
         undivided=DivisibilityPolicy.FEWER),
    Axis("kv_rank", "latent of keys and values: the input of their up-projection", storage=_AT_REST,
         undivided=DivisibilityPolicy.FEWER),
    Axis("key_value", "one head's key, without its rotated part, and its value, side by side"),
    Axis("value_dim", "width of one head's value, if it differs from its key's"),
    Axis("ssm_heads", "heads of a state-space layer", compute=("tensor",), parallel=True),
    Axis("ssm_head_dim", "width of one of them"),
    Axis("ssm_groups", "what writes and reads the states of adjacent heads", compute=("tensor",), parallel=True,
         may_be_whole=True, undivided=DivisibilityPolicy.REPLICATED),
    Axis("ssm_state", "columns of a head's state"),
    Axis("tap", "positions that a convolution along a row reads"),
    Axis("ffn", "width of the feed-forward layer", compute=("tensor",), parallel=True),
    Axis("vocab", "rows of the embedding and of the output head", compute=("tensor",), parallel=True,
         single="the loss splits a vocabulary over one mesh axis"),
    Axis("position", "learned positions"),
    Axis("patch_row", "rows of pixels in a patch of an image"),
    Axis("patch_column", "columns of pixels in a patch of an image"),
    Axis("channel", "colors of a pixel"),
    Axis("class", "classes of a classifier", read_out=True),
    Axis("layer", "layers stacked in storage", compute=("stage",), role=Role.LAYERS, copies=True),
    Axis("stage", "stages of a pipeline, where layers are stacked by stage", copies=True),
    Axis("expert", "experts", compute=("expert",), copies=True),
    Axis("expert_ffn", "width of an expert", compute=("tensor",), parallel=True, may_be_whole=True),
    Axis("router", "experts that a router scores", in_float32=True, read_out=True),
    # Tables are stored as they are computed with; only rows are communicated.
    Axis("row", "rows of a table, split over all devices", compute=MESH_AXES, table=True),
    Axis("row_width", "numbers in a row of a table"),
    Axis("row_of_columns", "rows of a table with columns that are split too", compute=MESH_AXES[:-1], table=True),
    Axis("row_columns", "numbers in such a row", compute=MESH_AXES[-1:]),
    Axis("row_everywhere", "rows of a small table, which every device holds", table=True),
    Axis("inputs", "inputs of a perceptron's layer: of any count, so replicated on every device, in storage too"),
    Axis("hidden", "numbers that it gives, whole on every device"),
    Axis("environment", "environments in parallel, with their states; rows of replay buffers",
         compute=("replica", "fsdp", "expert")),
    Axis("seed", "runs side by side that know nothing of each other", copies=True),
    Axis("bucket", "distances that share a bias of attention"),
    # For adapted models, which do not name their axes:
    Axis("features", "dimension of a weight that is computed in parallel", compute=("tensor",), undivided=_ELECTIVE),
    Axis("width", "dimension along which a weight is sharded in storage", storage=("fsdp", "expert"), undivided=_ELECTIVE),
    Axis("statistic", "side of a matrix that an optimizer keeps of a weight", storage=("fsdp", "expert", "context", "tensor"),
         undivided=_ELECTIVE),
    Axis("member", "weights of equal layers or experts side by side", compute=("expert",), undivided=_ELECTIVE,
         copies=True),
)  # fmt: skip
