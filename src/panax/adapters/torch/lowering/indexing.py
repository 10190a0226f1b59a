"""Reads and writes by index: gathers, scatters, embeddings, the negative log-likelihood loss."""

from typing import Any

import jax
import jax.numpy as jnp

from .registry import OutputSpec, aten, register_lowering, upcast


def _index(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@register_lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index_tensor(out: OutputSpec, x: Any, indices: Any) -> Any:
    return x[_index(indices)]


@register_lowering(aten.index_put, aten._unsafe_index_put)
def _index_put(out: OutputSpec, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == jnp.bool_ and values.size == 1:
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        value = values.reshape(()).astype(x.dtype)
        return jnp.where(mask, x + value if accumulate else value, x)
    at = x.at[_index(indices)]
    values = values.astype(x.dtype)
    return at.add(values) if accumulate else at.set(values)


@register_lowering(aten.index_select)
def _index_select(out: OutputSpec, x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, jnp.atleast_1d(index), axis=dim)


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return indices that address each element of `index` at its own position, with `index` along `dim`."""
    grids = list(jnp.indices(index.shape, sparse=True))
    grids[dim % x.ndim] = index
    return tuple(grids)


@register_lowering(aten.gather)
def _gather(out: OutputSpec, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    return x[_along(x, dim, index)] if x.ndim else x.reshape(index.shape)


@register_lowering(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def _scatter(out: OutputSpec, x: Any, dim: int, index: Any, source: Any, *, reduce: str | None = None) -> Any:
    at = x.at[_along(x, dim, index)]
    values = _values(source, index, x)
    if reduce is None:
        return at.set(values)
    return at.add(values) if reduce == "add" else at.multiply(values)


def _values(source: Any, index: Any, x: Any) -> Any:
    source = jnp.asarray(source).astype(x.dtype)
    return source[tuple(slice(n) for n in index.shape)] if source.ndim else source


@register_lowering(aten.scatter_add)
def _scatter_add(out: OutputSpec, x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_along(x, dim, index)].add(_values(source, index, x))


@register_lowering(aten.scatter_reduce.two)
def _scatter_reduce(
    out: OutputSpec, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    places, values = _along(x, dim, index), _values(source, index, x)
    if reduce == "mean":
        start = x if include_self else x.at[places].set(0)
        count = (jnp.ones(x.shape) if include_self else jnp.ones(x.shape).at[places].set(0)).at[places].add(1)
        return start.at[places].add(values) / count.astype(x.dtype)
    neutral = {"sum": 0, "prod": 1, "amax": -jnp.inf, "amin": jnp.inf}[reduce]
    start = x if include_self else x.at[places].set(jnp.asarray(neutral, x.dtype))
    name = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    return getattr(start.at[places], name)(values)


@register_lowering(aten.index_add)
def _index_add(out: OutputSpec, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].add((source * alpha).astype(x.dtype))


@register_lowering(aten.index_copy)
def _index_copy(out: OutputSpec, x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source.astype(x.dtype))


@register_lowering(aten.index_fill)
def _index_fill(out: OutputSpec, x: Any, dim: int, index: Any, value: Any) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(jnp.asarray(value).astype(x.dtype))


@register_lowering(aten.searchsorted.Tensor)
def _searchsorted(out: OutputSpec, sorted: Any, values: Any, *, right: bool = False, **kwargs: Any) -> Any:
    side = "right" if right else "left"
    if sorted.ndim == 1:
        return jnp.searchsorted(sorted, values, side=side)
    find = jnp.vectorize(lambda s, v: jnp.searchsorted(s, v, side=side), signature="(n),(m)->(m)")
    return find(sorted, values)


@register_lowering(aten.bucketize.Tensor)
def _bucketize(out: OutputSpec, values: Any, boundaries: Any, *, right: bool = False, **kwargs: Any) -> Any:
    return jnp.searchsorted(boundaries, values, side="right" if right else "left")


@register_lowering(aten.embedding)
def _embedding(out: OutputSpec, weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    return weight[indices]


@register_lowering(aten.embedding_dense_backward)
def _embedding_backward(
    out: OutputSpec, gradient: Any, indices: Any, rows: int, padding: int, by_frequency: bool
) -> Any:
    flat, g = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    g = upcast(g)
    if padding >= 0:
        g = jnp.where((flat == padding)[:, None], 0, g)
    if by_frequency:
        g = g / jnp.zeros(rows).at[flat].add(1)[flat][:, None]
    return jnp.zeros((rows, g.shape[-1]), g.dtype).at[flat].add(g)


@register_lowering(aten._embedding_bag, aten._embedding_bag_forward_only)
def _embedding_bag(
    out: Any, weight: Any, indices: Any, offsets: Any, by_frequency: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, include_last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """Return the bags' sums (0), means (1) or maxima (2); then each element's bag, the bags' sizes and, for
    maxima, their rows."""
    bags = offsets.shape[0] - int(include_last)
    bag = _bag_of(indices, offsets[:bags])
    counted = indices != padding if padding >= 0 else jnp.ones(indices.shape, bool)
    rows = weight[indices]
    if weights is not None:
        rows = rows * weights[:, None]
    sizes = jnp.zeros(bags, jnp.int32).at[bag].add(counted.astype(jnp.int32))
    if mode == 2:
        low = jnp.where(counted[:, None], rows, -jnp.inf)
        maxima = jnp.full((bags, weight.shape[1]), -jnp.inf).at[bag].max(low)
        places = jnp.full((bags, weight.shape[1]), -1, jnp.int32)
        chosen = jnp.where(low == maxima[bag], indices[:, None], -1)
        maxima = jnp.where(jnp.isfinite(maxima), maxima, 0).astype(weight.dtype)
        return maxima, _unless_empty(bag, out[1]), _unless_empty(sizes, out[2]), places.at[bag].max(chosen)
    total = jnp.zeros((bags, weight.shape[1]), rows.dtype).at[bag].add(jnp.where(counted[:, None], rows, 0))
    if mode == 1:
        total = total / jnp.maximum(sizes, 1)[:, None].astype(total.dtype)
    return total, _unless_empty(bag, out[1]), _unless_empty(sizes, out[2]), jnp.zeros(out[3].shape, jnp.int32)


def _bag_of(indices: Any, starts: Any) -> Any:
    return jnp.searchsorted(starts, jnp.arange(indices.shape[0]), side="right") - 1


def _unless_empty(value: Any, out: OutputSpec) -> Any:
    """Return `value`, or zeros if PyTorch leaves this output empty because it is not needed."""
    return value if value.shape == out.shape else jnp.zeros(out.shape, value.dtype)


@register_lowering(aten._embedding_bag_backward, aten._embedding_bag_dense_backward)
def _embedding_bag_backward(
    out: OutputSpec, gradient: Any, indices: Any, offsets: Any, bag: Any, sizes: Any, maxima: Any, rows: int, by_frequency: bool,
    mode: int, *rest: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    rest = rest[1:] if rest and isinstance(rest[0], bool) else rest
    weights, padding = (rest[0] if rest else kwargs.get("per_sample_weights")), (rest[1] if len(rest) > 1 else -1)
    if mode == 2:
        grid = jnp.broadcast_to(jnp.arange(gradient.shape[1]), maxima.shape)
        safe = jnp.maximum(maxima, 0)
        return (
            jnp.zeros((rows, gradient.shape[1]), gradient.dtype).at[safe, grid].add(jnp.where(maxima >= 0, gradient, 0))
        )
    bag = bag if bag.shape == indices.shape else _bag_of(indices, offsets[: gradient.shape[0]])
    each = gradient[bag]
    if mode == 1:
        each = each / jnp.maximum(sizes, 1)[bag][:, None].astype(each.dtype)
    if weights is not None:
        each = each * weights[:, None]
    if padding >= 0:
        each = jnp.where((indices == padding)[:, None], 0, each)
    return jnp.zeros((rows, gradient.shape[1]), each.dtype).at[indices].add(each)


@register_lowering(aten._embedding_bag_per_sample_weights_backward)
def _embedding_bag_by_weights(
    out: OutputSpec, gradient: Any, weight: Any, indices: Any, offsets: Any, bag: Any, mode: int, padding: int = -1
) -> Any:
    bag = bag if bag.shape == indices.shape else _bag_of(indices, offsets[: gradient.shape[0]])
    each = (gradient[bag] * weight[indices]).sum(-1)
    return jnp.where(indices == padding, 0, each) if padding >= 0 else each


def _classes(x: Any, target: Any, weight: Any, ignored: int) -> tuple[Any, Any, Any]:
    """Return targets that are valid indices, the weight of each, and a mask of those that count; classes are
    dimension 1, or 0 of a single row."""
    counted = target != ignored
    safe = jnp.where(counted, target, 0)
    each = jnp.ones(target.shape, x.dtype) if weight is None else weight[safe]
    return safe, jnp.where(counted, each, 0), counted


@register_lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(out: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    safe, each, _ = _classes(x, target, weight, ignored)
    dim = 1 if x.ndim > 1 else 0
    picked = jnp.take_along_axis(x, jnp.expand_dims(safe, dim), axis=dim).squeeze(dim)
    losses, total = -picked * each, each.sum()
    if reduction == 0:
        return losses, jnp.zeros((), x.dtype)
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


@register_lowering(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    out: OutputSpec, gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    safe, each, _ = _classes(x, target, weight, ignored)
    each = -each * (gradient / total if reduction == 1 else gradient)
    dim = 1 if x.ndim > 1 else 0
    classes = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(classes == jnp.expand_dims(safe, dim), jnp.expand_dims(each, dim), 0)


@register_lowering(aten.one_hot)
def _one_hot(out: OutputSpec, x: Any, classes: int = -1) -> Any:
    return jax.nn.one_hot(x, out.shape[-1], dtype=out.dtype)


@register_lowering(aten.isin.Tensor_Tensor)
def _isin(out: OutputSpec, x: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    return jnp.isin(x, among, invert=invert)
