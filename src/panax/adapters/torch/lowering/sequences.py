"""Recurrent layers that PyTorch runs as one operation on CPU: a scan over positions here."""

from typing import Any

import jax
import jax.numpy as jnp

from .products import product
from .registry import aten, lowers

LSTM = 2
"""PyTorch's number of the LSTM among recurrent layers."""


def _lstm(x: Any, w_input: Any, w_hidden: Any, b_input: Any, b_hidden: Any, h: Any, c: Any, reverse: bool) -> Any:
    """One layer in one direction. x: (position, row, feature); the four gates lie side by side: input, forget, cell, output."""
    from_input = product(x, w_input.T) + (b_input + b_hidden)

    def position(carry: Any, gates: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(gates + product(h, w_hidden.T), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), outputs = jax.lax.scan(position, (h, c), from_input, reverse=reverse)
    return outputs, h, c


def _of_lstm(mode: int, has_biases: bool, weights: Any, hidden: int) -> tuple[Any, Any, Any, Any]:
    assert mode == LSTM, "PyTorch runs only LSTMs as one operation"
    zero = jnp.zeros(4 * hidden, weights[0].dtype)
    return weights if has_biases else (weights[0], weights[1], zero, zero)


@lowers(aten.mkldnn_rnn_layer)
def _rnn_layer(
    out: Any, x: Any, w0: Any, w1: Any, w2: Any, w3: Any, h: Any, c: Any, reverse: bool, batch_sizes: Any, mode: int, hidden: int,
    num_layers: int, has_biases: bool, bidirectional: bool, batch_first: bool, train: bool,
) -> Any:  # fmt: skip
    weights = _of_lstm(mode, has_biases, (w0, w1, w2, w3), hidden)
    # PyTorch has put positions first already, whatever `batch_first` says.
    first_h, first_c = h.reshape(x.shape[1], hidden), c.reshape(x.shape[1], hidden)
    outputs, last_h, last_c = _lstm(x, *weights, first_h, first_c, reverse)
    return outputs, last_h.reshape(out[1].shape), last_c.reshape(out[2].shape), jnp.zeros(out[3].shape, out[3].dtype)


@lowers(aten.mkldnn_rnn_layer_backward)
def _rnn_layer_backward(
    out: Any, x: Any, w0: Any, w1: Any, w2: Any, w3: Any, h: Any, c: Any, output: Any, last_h: Any, last_c: Any, by_output: Any,
    by_h: Any, by_c: Any, reverse: bool, mode: int, hidden: int, num_layers: int, has_biases: bool, train: bool,
    bidirectional: bool,
    batch_sizes: Any, batch_first: bool, workspace: Any,
) -> Any:  # fmt: skip
    weights = _of_lstm(mode, has_biases, (w0, w1, w2, w3), hidden)

    def forward(x: Any, *rest: Any) -> Any:
        return _lstm(x, *rest, reverse=reverse)

    rows = x.shape[1]
    results, transpose = jax.vjp(forward, x, *weights, h.reshape(rows, hidden), c.reshape(rows, hidden))
    given = [
        jnp.zeros(result.shape, result.dtype) if gradient is None else gradient.reshape(result.shape)
        for result, gradient in zip(results, (by_output, by_h, by_c))
    ]
    by_x, by_w0, by_w1, by_b0, by_b1, by_first_h, by_first_c = transpose(tuple(given))
    return by_x, by_w0, by_w1, by_b0, by_b1, by_first_h.reshape(h.shape), by_first_c.reshape(c.shape)
