"""Each operation of PyTorch, and its derivative, is in JAX what it is in PyTorch. A group is one program, so that it compiles
once."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from panax.adapters.torch.objective import Form, Objective
from panax.adapters.torch.state.random_ops import ReplayDrawsMode
from panax.adapters.torch.tracing.aten_trace import trace
from panax.adapters.torch.tracing.graph import TracedProgram, to_jax_function
from panax.adapters.torch.tracing.values import as_numpy

INDEX = torch.tensor([[0, 3, 1], [2, 2, 0]])
MASK = torch.tensor([[True, False, True, True], [False, False, True, True], [True, True, True, False]])

POINTWISE = {
    name: (function, [(3, 4)])
    for name, function in {
        "sin": torch.sin,
        "cos": torch.cos,
        "tan": torch.tan,
        "atan": torch.atan,
        "sinh": torch.sinh,
        "cosh": torch.cosh,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "exp2": torch.exp2,
        "expm1": torch.expm1,
        "sigmoid": torch.sigmoid,
        "erf": torch.erf,
        "erfc": torch.erfc,
        "relu": torch.relu,
        "silu": F.silu,
        "mish": F.mish,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "elu": F.elu,
        "selu": F.selu,
        "celu": F.celu,
        "leaky_relu": F.leaky_relu,
        "softplus": F.softplus,
        "logsigmoid": F.logsigmoid,
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "relu6": F.relu6,
        "softsign": F.softsign,
        "tanhshrink": F.tanhshrink,
        "abs": torch.abs,
        "square": torch.square,
        "sign_times": lambda x: x * torch.sign(x),
        "log": lambda x: torch.log(x.abs() + 1),
        "log2": lambda x: torch.log2(x.abs() + 1),
        "log1p": lambda x: torch.log1p(x.abs()),
        "sqrt": lambda x: torch.sqrt(x.abs() + 1),
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
        "reciprocal": lambda x: 1 / (x.abs() + 1),
        "pow3": lambda x: x**3,
        "pow_real": lambda x: (x.abs() + 1) ** 1.7,
        "exponent": lambda x: 2.0**x,
        "clamp": lambda x: x.clamp(-0.5, 0.7),
        "clamp_min": lambda x: x.clamp_min(0.1),
        "frac": torch.frac,
        "lgamma": lambda x: torch.lgamma(x.abs() + 1),
        "remainder": lambda x: torch.remainder(x, 0.7),
        "fmod": lambda x: torch.fmod(x, 0.7),
        "where": lambda x: torch.where(MASK, x, x * x),
        "masked_fill": lambda x: x.masked_fill(MASK, 0.5),
        "rounded": lambda x: x * torch.round(x * 3),
        "floor_div": lambda x: x * (x.detach() // 0.3),
        "nan_to_num": torch.nan_to_num,
        "prelu_glu": lambda x: F.glu(x, dim=1),
        "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "int_arithmetic": lambda x: x * (torch.arange(4) // 3 + torch.arange(4) % 3 * 2 - 1),
        "bool_arithmetic": lambda x: x * (MASK & ~(x > 0) | (x < -1)).float(),
        "to_int": lambda x: x * (x * 3).to(torch.int64),
    }.items()
}

BINARY = {
    "add_alpha": (lambda a, b: torch.add(a, b, alpha=2.5), [(3, 4), (4,)]),
    "sub_alpha": (lambda a, b: torch.sub(a, b, alpha=2.5), [(3, 4), (3, 1)]),
    "rsub": (lambda a: 3 - a, [(3, 4)]),
    "div": (lambda a, b: a / (b.abs() + 1), [(3, 4), (3, 4)]),
    "div_floor": (lambda a, b: a * torch.div(a, b.abs() + 0.1, rounding_mode="floor"), [(3, 4), (3, 4)]),
    "maximum": (torch.maximum, [(3, 4), (3, 4)]),
    "minimum": (torch.minimum, [(3, 4), (3, 4)]),
    "atan2": (torch.atan2, [(3, 4), (3, 4)]),
    "hypot": (torch.hypot, [(3, 4), (3, 4)]),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.7), [(3, 4), (3, 4)]),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.3), [(3, 4), (3, 4), (4,)]),
    "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1, value=0.3), [(3, 4), (3, 4), (3, 4)]),
    "pow_tensors": (lambda a, b: (a.abs() + 0.5) ** b, [(3, 4), (3, 4)]),
    "logaddexp": (torch.logaddexp, [(3, 4), (3, 4)]),
    "xlogy": (lambda a, b: torch.xlogy(a, b.abs() + 0.1), [(3, 4), (3, 4)]),
    "compare": (lambda a, b: a * ((a > b) | (a <= 0.1) & (b != a)).float(), [(3, 4), (3, 4)]),
    "complex": (
        lambda a, b: torch.view_as_real(torch.complex(a, b) * torch.polar(a.abs() + 0.1, b)).sum(-1),
        [(3, 4)] * 2,
    ),
    "mse": (F.mse_loss, [(3, 4), (3, 4)]),
    "smooth_l1": (F.smooth_l1_loss, [(3, 4), (3, 4)]),
    "huber": (F.huber_loss, [(3, 4), (3, 4)]),
    "kl": (lambda a, b: F.kl_div(F.log_softmax(a, 1), F.softmax(b, 1), reduction="batchmean"), [(3, 4), (3, 4)]),
    "bce_logits": (lambda a, b: F.binary_cross_entropy_with_logits(a, torch.sigmoid(b)), [(3, 4), (3, 4)]),
    "bce": (lambda a, b: F.binary_cross_entropy(torch.sigmoid(a), torch.sigmoid(b)), [(3, 4), (3, 4)]),
    "cosine": (F.cosine_similarity, [(3, 4), (3, 4)]),
    "margin": (lambda a, b: F.margin_ranking_loss(a, b, torch.ones(3, 4), 0.3), [(3, 4), (3, 4)]),
    "distance": (lambda a, b: torch.cdist(a, b).sum(0), [(3, 4), (5, 4)]),
}

REDUCTIONS = {
    name: (function, [(3, 4)])
    for name, function in {
        "sum": lambda x: x.sum(1),
        "mean": lambda x: x.mean(0, keepdim=True),
        "prod": lambda x: x.prod(1),
        "amax": lambda x: x.amax(1),
        "amin": lambda x: x.amin(0),
        "max": lambda x: x.max(),
        "min_dim": lambda x: x.min(1).values,
        "max_dim": lambda x: x.max(0).values,
        "var": lambda x: x.var(1),
        "std": lambda x: x.std(),
        "norm": lambda x: x.norm(),
        "norm1": lambda x: x.norm(1, dim=1),
        "var_mean": lambda x: sum(torch.var_mean(x, 1, correction=0)),
        "logsumexp": lambda x: x.logsumexp(1),
        "softmax": lambda x: x.softmax(0),
        "log_softmax": lambda x: x.log_softmax(1),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: x.cumprod(1),
        "sort": lambda x: x.sort(1, descending=True).values,
        "topk": lambda x: x.topk(2, 1).values,
        "median_by_sort": lambda x: x.sort(1).values[:, 2],
        "argmax": lambda x: x * x.argmax(1)[:, None],
        "any_all": lambda x: x * ((x > 0).any(1) & ~(x > 2).all(1))[:, None],
        "cummax": lambda x: x.cummax(1).values,
        "normalize": lambda x: F.normalize(x, dim=1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "min": lambda x: x.min() * x,
    }.items()
}

SHAPES = {
    name: (function, [(2, 3, 4)])
    for name, function in {
        "view": lambda x: x.view(6, 4),
        "permute": lambda x: x.permute(2, 0, 1),
        "transpose": lambda x: x.transpose(0, 2).reshape(-1),
        "expand": lambda x: x[:, :1].expand(2, 5, 4),
        "slice": lambda x: x[:, 1:, ::2],
        "select": lambda x: x[1, -1],
        "cat": lambda x: torch.cat([x, x * 2], 1),
        "stack": lambda x: torch.stack([x, x.exp()], -1),
        "chunk": lambda x: x.chunk(2, 2)[1],
        "split": lambda x: x.split([1, 3], 2)[1],
        "unbind": lambda x: x.unbind(1)[2],
        "repeat": lambda x: x.repeat(2, 1, 3),
        "interleave": lambda x: x.repeat_interleave(2, 1),
        "flip": lambda x: x.flip(0, 2),
        "roll": lambda x: x.roll((1, -2), (0, 2)),
        "roll_flat": lambda x: x.roll(3),
        "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
        "pad_negative": lambda x: F.pad(x, (-1, 2)),
        "reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
        "replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
        "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
        "diagonal": lambda x: x.diagonal(0, 1, 2),
        "tril": torch.tril,
        "triu": lambda x: torch.triu(x, 1),
        "unfold": lambda x: x.unfold(2, 2, 1),
        "squeeze": lambda x: x[:, :1].squeeze(1)[None],
        "as_strided": lambda x: x.as_strided((2, 3), (4, 2), 1),
        "movedim": lambda x: x.movedim(0, -1),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
        "in_place_slice": lambda x: _written(x),
        "outer": lambda x: torch.einsum("bij,bkj->bik", x, x),
        "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[1, 1], indexing="ij")[0],
        "block_diag": lambda x: torch.block_diag(x[0], x[1]),
        "kron": lambda x: torch.kron(x[0], x[1]),
        "diag_embed": lambda x: torch.diag_embed(x),
        "rot90": lambda x: x.rot90(1, (1, 2)),
        "tensordot": lambda x: torch.tensordot(x, x, ([2], [2])),
    }.items()
}


def _written(x):
    y = x.clone()
    y[:, 0] = x[:, 1] * 2
    y[0].mul_(3)
    y[:, :, 1:3] += x[:, :, :2]
    y.diagonal(0, 1, 2).add_(1)
    return y


INDEXING = {
    "index": (lambda x: x[INDEX], [(4, 5)]),
    "index_two": (lambda x: x[INDEX, torch.tensor([1, 0, 4])], [(4, 5)]),
    "index_negative": (lambda x: x[torch.tensor([-1, 0])], [(4, 5)]),
    "index_later": (lambda x: x[:, INDEX], [(2, 4, 3)]),
    "index_apart": (lambda x: x[torch.tensor([0, 1, 1]), :, torch.tensor([2, 0, 1])], [(2, 4, 3)]),
    "index_put": (lambda x, v: x.index_put((INDEX[0],), v), [(4, 5), (3, 5)]),
    "index_put_add": (lambda x, v: x.index_put((INDEX[1],), v, accumulate=True), [(4, 5), (3, 5)]),
    "masked_set": (lambda x: _masked(x), [(3, 4)]),
    "index_select": (lambda x: x.index_select(1, INDEX[0]), [(3, 4)]),
    "gather": (lambda x: x.gather(1, INDEX), [(2, 4)]),
    "take_along": (lambda x: x.take_along_dim(INDEX, 1), [(2, 4)]),
    "scatter": (lambda x, v: x.scatter(1, INDEX[:, :2], v), [(2, 4), (2, 2)]),
    "scatter_add": (lambda x, v: x.scatter_add(1, INDEX, v), [(2, 4), (2, 3)]),
    "scatter_mean": (lambda x, v: x.scatter_reduce(1, INDEX, v, "mean"), [(2, 4), (2, 3)]),
    "scatter_amax": (lambda x, v: x.scatter_reduce(1, INDEX, v, "amax", include_self=False), [(2, 4), (2, 3)]),
    "index_add": (lambda x, v: x.index_add(0, INDEX[0], v, alpha=2), [(4, 5), (3, 5)]),
    "index_copy": (lambda x, v: x.index_copy(0, INDEX[0], v), [(4, 5), (3, 5)]),
    "embedding": (lambda w: F.embedding(INDEX, w, padding_idx=2), [(4, 5)]),
    "embedding_frequency": (lambda w: F.embedding(INDEX, w, scale_grad_by_freq=True), [(4, 5)]),
    "bag_sum": (lambda w: F.embedding_bag(INDEX, w, mode="sum"), [(4, 5)]),
    "bag_mean": (lambda w: F.embedding_bag(INDEX.reshape(-1), w, torch.tensor([0, 2, 2]), mode="mean"), [(4, 5)]),
    "bag_max": (lambda w: F.embedding_bag(INDEX, w, mode="max"), [(4, 5)]),
    "bag_weighted": (lambda w, s: F.embedding_bag(INDEX, w, mode="sum", per_sample_weights=s), [(4, 5), (2, 3)]),
    "nll": (lambda x: F.nll_loss(x.log_softmax(1), INDEX[:, 1], weight=torch.tensor([1.0, 2, 0.5, 1])), [(2, 4)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, INDEX[:, 0], label_smoothing=0.1), [(2, 4)]),
    "cross_entropy_2d": (lambda x: F.cross_entropy(x, INDEX, ignore_index=0), [(2, 4, 3)]),
    "cross_entropy_sum": (lambda x: F.cross_entropy(x, INDEX[:, 0], reduction="none"), [(2, 4)]),
    "cross_entropy_soft": (lambda x, t: F.cross_entropy(x, t.softmax(1)), [(2, 4), (2, 4)]),
    "one_hot": (lambda x: x * F.one_hot(INDEX, 4).sum(1), [(2, 4)]),
    "searchsorted": (lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0, 1]), x.detach()), [(2, 4)]),
    "tril_indices": (lambda x: x[tuple(torch.tril_indices(4, 4, -1))], [(4, 4)]),
}


def _masked(x):
    y = x.clone()
    y[MASK] = 0.25
    return y * x


PRODUCTS = {
    "matmul": (torch.matmul, [(3, 4), (4, 5)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "broadcast": (torch.matmul, [(2, 1, 3, 4), (3, 4, 5)]),
    "vector": (torch.matmul, [(3, 4), (4,)]),
    "dot": (torch.dot, [(4,), (4,)]),
    "addmm": (lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (lambda x, a, b: torch.baddbmm(x, a, b, beta=0.5), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "linear": (F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "bilinear": (F.bilinear, [(3, 4), (3, 5), (2, 4, 5), (2,)]),
    "einsum": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), [(2, 3, 4, 5), (2, 3, 6, 5)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 4, 5)] * 3),
    "attention_causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 3, 4, 5)] * 3),
    "attention_masked": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.tril(torch.ones(4, 4, dtype=torch.bool))
        ),
        [(2, 3, 4, 5)] * 3,
    ),
    "attention_grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 4, 5), (2, 2, 4, 5), (2, 2, 4, 5)],
    ),
    "attention_biased": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3),
        [(2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), (4, 4)],
    ),
    "fft": (lambda x: torch.fft.rfft(x).abs() + torch.fft.irfft(torch.fft.rfft(x)).sum(), [(3, 8)]),
    "fft_two": (lambda x: torch.view_as_real(torch.fft.fft2(x, norm="ortho")), [(4, 4)]),
    "grouped": (lambda a, b: F.grouped_mm(a, b, offs=torch.tensor([3, 3, 8], dtype=torch.int32)), [(8, 4), (3, 4, 8)]),
    "lstm": (
        lambda x, *w: torch.lstm(x, (torch.zeros(1, 2, 4), torch.ones(1, 2, 4)), w, True, 1, 0.0, True, False, True)[0],
        [(2, 3, 5), (16, 5), (16, 4), (16,), (16,)],
    ),
    "lstm_both_ways": (
        lambda x, h, c, *w: torch.cat(
            [
                each.reshape(-1, 4) * (n + 1)
                for n, each in enumerate(torch.lstm(x, (h, c), w, True, 1, 0.0, True, True, True))
            ]
        ),
        [(2, 3, 5), (2, 2, 4), (2, 2, 4), *[(16, 5), (16, 4), (16,), (16,)] * 2],
    ),
    "gru": (
        lambda x, *w: torch.gru(x, torch.zeros(1, 2, 4), w, True, 1, 0.0, True, False, True)[0],
        [(2, 3, 5), (12, 5), (12, 4), (12,), (12,)],
    ),
    "inverse": (lambda x: torch.linalg.inv(x + 4 * torch.eye(3)), [(3, 3)]),
}

IMAGES = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 4, 8), (6, 4, 3), (6,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2), [(2, 4, 9, 9), (6, 4, 3, 3)]),
    "conv_groups": (lambda x, w: F.conv2d(x, w, groups=2, padding="same"), [(2, 4, 5, 5), (6, 2, 3, 3)]),
    "conv3d": (F.conv3d, [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2)]),
    "conv_transpose": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        [(2, 4, 4, 4), (4, 3, 3, 3)],
    ),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [(2, 3, 8, 8)]),
    "max_pool_ceil": (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), [(2, 3, 7, 7)]),
    "max_pool_overlapping": (lambda x: F.max_pool2d(x, (3, 2), (1, 3), (1, 0), (2, 1)), [(2, 3, 9, 10)]),
    "max_pool_of_equals": (lambda x: F.max_pool2d(x.round(), 3, 2, 1), [(2, 3, 9, 9)]),
    "max_pool_of_all": (lambda x: F.max_pool2d(x, 7, 1, 3), [(2, 3, 8, 8)]),
    "max_pool_3d": (lambda x: F.max_pool3d(x, 3, 2, 1), [(2, 2, 5, 6, 7)]),
    "max_pool_indices": (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1].to(x.dtype) + 0 * x.sum(),
        [(2, 3, 8, 9)],
    ),
    "max_pool_not_finite": (
        lambda x: F.max_pool2d(torch.where(x > 1, torch.nan, torch.where(x < 0, -torch.inf, x)), 2, 2).nan_to_num(),
        [(2, 3, 8, 8)],
    ),
    "max_pool_1d": (lambda x: F.max_pool1d(x, 2), [(2, 3, 8)]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), [(2, 3, 8, 8)]),
    "avg_pool_inside": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [(2, 3, 8, 8)]),
    "avg_pool_ceil": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), [(2, 3, 8, 8)]),
    "avg_pool_1d": (lambda x: F.avg_pool1d(x, 2), [(2, 3, 8)]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 3, 8, 7)]),
    "adaptive_one": (lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 8, 7)]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [(2, 3, 4, 4)]),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), [(2, 3, 4, 4)]),
    "bilinear_corners": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True), [(2, 3, 4, 4)]),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), [(2, 3, 4, 4)]),
    "linear": (lambda x: F.interpolate(x, size=9, mode="linear"), [(2, 3, 4)]),
    "unfold": (lambda x: F.unfold(x, 3, padding=1, stride=2), [(2, 3, 6, 6)]),
    "fold": (lambda x: F.fold(x, (4, 4), 2), [(2, 12, 9)]),
    "grid_sample": (lambda x, g: F.grid_sample(x, torch.tanh(g), align_corners=False), [(2, 3, 4, 4), (2, 5, 5, 2)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(2, 3, 4), (4,), (4,)]),
    "layer_norm_two": (lambda x: F.layer_norm(x, (3, 4)), [(2, 3, 4)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [(2, 3, 4), (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3, 3), (4,), (4,)]),
    "instance_norm": (lambda x: F.instance_norm(x), [(2, 4, 3, 3)]),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(4, 3, 2), (3,), (3,)]),
    "batch_norm_eval": (
        lambda x, w, b: F.batch_norm(x, torch.full((3,), 0.2), torch.full((3,), 1.5), w, b),
        [(4, 3, 2), (3,), (3,)],
    ),
    "local_response": (lambda x: F.local_response_norm(x, 2), [(2, 4, 3, 3)]),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [(4, 3), (4, 1)]),
}

RANDOM = {
    "dropout": (lambda x: F.dropout(x, 0.4), [(8, 8)]),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), [(4, 4, 2, 2)]),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.4, training=True), [(8, 8)]),
    "rand": (lambda x: x * torch.rand(8, 8), [(8, 8)]),
    "rand_like": (lambda x: x * torch.rand_like(x), [(8, 8)]),
    "randn": (lambda x: x + torch.randn_like(x) * x, [(8, 8)]),
    "randint": (lambda x: x * torch.randint(2, 7, (8, 8)), [(8, 8)]),
    "randperm": (lambda x: x[torch.randperm(8)] * x, [(8, 8)]),
    "bernoulli": (lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())), [(8, 8)]),
    "uniform_in_place": (lambda x: x * torch.empty(8, 8).uniform_(-1, 2), [(8, 8)]),
    "normal_in_place": (lambda x: x * torch.empty(8, 8).normal_(1, 2), [(8, 8)]),
    "exponential": (lambda x: x * torch.empty(8, 8).exponential_(2), [(8, 8)]),
    "attention_dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), [(2, 3, 4, 5)] * 3),
    "multinomial": (lambda x: x[0] * torch.multinomial(torch.ones(8), 4).sum(), [(8, 8)]),
}

GROUPS = {
    "pointwise": POINTWISE,
    "binary": BINARY,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "indexing": INDEXING,
    "products": PRODUCTS,
    "images": IMAGES,
    "random": RANDOM,
}

# Float32, sums of some tens of terms in another order; transcendental functions differ by some units in the last place.
TOLERANCE = 2e-5


class Group(nn.Module):
    """Functions on parameters of their own, each projected to a number by weights that are no pattern."""

    def __init__(self, cases):
        super().__init__()
        torch.manual_seed(0)
        self.cases = cases
        self.inputs = nn.ParameterDict(
            {
                f"{name}-{i}": nn.Parameter(torch.randn(shape))
                for name, (_, shapes) in cases.items()
                for i, shape in enumerate(shapes)
            }
        )

    def forward(self, batch):
        total, values = torch.zeros(()), {}
        for name, (function, shapes) in self.cases.items():
            found = function(*(self.inputs[f"{name}-{i}"] for i in range(len(shapes))))
            found = found.reshape(-1)
            projected = (found * torch.cos(torch.arange(found.numel()))).sum()
            total, values[name] = total + projected, (projected, 1.0)
        return total, values


@pytest.mark.parametrize("name", GROUPS)
def test_values_and_derivatives_are_those_of_pytorch(name):
    module = Group(GROUPS[name])
    form = Form.of({"x": torch.zeros(1)})
    objective = Objective(lambda module, batch: (lambda total, values: ((total, 1.0), values))(*module(batch)), form)
    leaves = {"x": torch.zeros(1)}
    program = TracedProgram.create(trace(module, objective, leaves, train=True, autocast=None))
    key = jax.random.key(3)
    parameters = dict(module.named_parameters())
    run = to_jax_function(program)

    def loss(trained):
        outputs = run(trained, untrained, jax.random.key_data(key))
        return outputs[0], outputs

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        trained = tuple(as_numpy(parameters[each]) for each in program.traced.trained)
        untrained = [as_numpy(p) for each, p in parameters.items() if each not in program.traced.trained]
        untrained = (*untrained, jax.numpy.zeros(1))
        gradients, outputs = jax.jit(
            jax.grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0}
        )(trained)
    with ReplayDrawsMode(key):
        total, values = module({"x": torch.zeros(1)})
    expected = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()), allow_unused=True)))
    for place, (case, (value, _)) in enumerate(values.items()):
        actual = float(outputs[2 + 2 * place])
        assert actual == pytest.approx(float(value.detach()), rel=TOLERANCE, abs=TOLERANCE * 10), case
    assert set(program.traced.trained) == {each for each, gradient in expected.items() if gradient is not None}
    for each, gradient in zip(program.traced.trained, gradients):
        theirs = expected[each].numpy()
        distance = np.abs(np.asarray(gradient) - theirs).max()
        assert distance <= TOLERANCE * max(1.0, np.abs(theirs).max()), (each, distance, np.abs(theirs).max())
