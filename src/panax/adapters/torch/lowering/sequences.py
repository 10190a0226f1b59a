"""Recurrent layers that PyTorch runs as one operation on CPU: here, a scan over positions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....kernels.product import sum_rows
from .products import matmul
from .registry import aten, register_lowering

LSTM = 2
"""PyTorch's mode number of the LSTM among recurrent layers."""


class _Weights(NamedTuple):
    """Weights of one layer in one direction; the rows are four stacked gates: input, forget, cell, output."""

    of_input: Any
    of_hidden: Any
    input_bias: Any
    hidden_bias: Any


class _States(NamedTuple):
    """Values of a layer's hidden states, or the gradients with respect to them.

    Attributes:
        hidden: The hidden states of all positions.
        h: The hidden state at one end of the sequence.
        c: The cell at the same end.
    """

    hidden: Any
    h: Any
    c: Any


def _from_input(x: Any, weights: _Weights) -> Any:
    flat = matmul(x.reshape(-1, x.shape[-1]), weights.of_input.T, (False, True))
    return flat.reshape(*x.shape[:-1], -1) + (weights.input_bias + weights.hidden_bias)


def _activate(gates: Any) -> tuple[Any, Any, Any, Any]:
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


def _lstm(x: Any, weights: _Weights, first_h: Any, first_c: Any, reverse: bool) -> tuple[Any, Any, Any]:
    """Run one layer in one direction.

    Args:
        x: (position, row, feature); the first states are (row, hidden).

    Returns:
        The hidden states of all positions, and the last hidden state and cell.
    """

    def position(carry: Any, from_input: Any) -> Any:
        h, c = carry
        i, f, g, o = _activate(from_input + matmul(h, weights.of_hidden.T, (False, True)))
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), h

    (h, c), hidden = jax.lax.scan(position, (first_h, first_c), _from_input(x, weights), reverse=reverse)
    return hidden, h, c


def _lstm_gradients(
    x: Any, weights: _Weights, states: _States, gradients: _States, reverse: bool
) -> tuple[Any, _Weights, Any, Any]:
    """Return the gradients with respect to `x`, the weights and the first states of `_lstm`.

    The hidden states are known, so all positions' gates are one matmul, and only the cells are computed again
    in a loop. The backward loop computes the gates' gradients; the weights' gradients are matmuls over all
    positions afterwards.

    Args:
        states: The hidden states, with the first hidden state and cell.
        gradients: The gradients with respect to the hidden states, and to the last hidden state and cell.
    """
    hidden, first_h, first_c = states
    by_hidden, by_h, by_c = gradients

    def shift(states: Any, first: Any) -> Any:
        return jnp.concatenate([states[1:], first[None]] if reverse else [first[None], states[:-1]])

    def cell(c: Any, gates: Any) -> Any:
        i, f, g, _ = gates
        c = f * c + i * g
        return c, c

    def position(carry: Any, saved: Any) -> Any:
        d_h, d_c = carry
        d_hidden, (i, f, g, o), c, c_before = saved
        d_h, squashed = d_h + d_hidden, jnp.tanh(c)
        d_c = d_c + d_h * o * (1 - squashed**2)
        d_gates = jnp.concatenate(
            [d_c * g * i * (1 - i), d_c * c_before * f * (1 - f), d_c * i * (1 - g**2), d_h * squashed * o * (1 - o)],
            -1,
        )
        return (matmul(d_gates, weights.of_hidden), d_c * f), d_gates

    before = shift(hidden, first_h)
    before = before.reshape(-1, before.shape[-1])
    gates = _from_input(x, weights) + matmul(before, weights.of_hidden.T, (False, True)).reshape(*x.shape[:2], -1)
    gates = _activate(gates)
    cells = jax.lax.scan(cell, first_c, gates, reverse=reverse)[1]
    saved = (by_hidden, gates, cells, shift(cells, first_c))
    (d_h, d_c), d_gates = jax.lax.scan(position, (by_h, by_c), saved, reverse=not reverse)
    d_gates = d_gates.reshape(-1, d_gates.shape[-1])
    d_bias = sum_rows(d_gates)
    by_weights = _Weights(
        of_input=matmul(d_gates.T, x.reshape(-1, x.shape[-1]), (True, False)),
        of_hidden=matmul(d_gates.T, before, (True, False)),
        input_bias=d_bias,
        hidden_bias=d_bias,
    )
    return matmul(d_gates, weights.of_input).reshape(x.shape), by_weights, d_h, d_c


def _of_lstm(mode: int, has_biases: bool, weights: Any, hidden: int) -> _Weights:
    assert mode == LSTM, "PyTorch runs only LSTMs as one operation"
    zero = jnp.zeros(4 * hidden, weights[0].dtype)
    return _Weights(*weights) if has_biases else _Weights(weights[0], weights[1], zero, zero)


@register_lowering(aten.mkldnn_rnn_layer)
def _rnn_layer(
    out: Any, x: Any, w0: Any, w1: Any, w2: Any, w3: Any, h: Any, c: Any, reverse: bool, batch_sizes: Any, mode: int, hidden: int,
    num_layers: int, has_biases: bool, bidirectional: bool, batch_first: bool, train: bool,
) -> Any:  # fmt: skip
    weights = _of_lstm(mode, has_biases, (w0, w1, w2, w3), hidden)
    # PyTorch has moved positions first already, whatever `batch_first` is.
    first_h, first_c = h.reshape(x.shape[1], hidden), c.reshape(x.shape[1], hidden)
    hidden_states, last_h, last_c = _lstm(x, weights, first_h, first_c, reverse)
    return (
        hidden_states,
        last_h.reshape(out[1].shape),
        last_c.reshape(out[2].shape),
        jnp.zeros(out[3].shape, out[3].dtype),
    )


@register_lowering(aten.mkldnn_rnn_layer_backward)
def _rnn_layer_backward(
    out: Any, x: Any, w0: Any, w1: Any, w2: Any, w3: Any, h: Any, c: Any, output: Any, last_h: Any, last_c: Any, by_output: Any,
    by_h: Any, by_c: Any, reverse: bool, mode: int, hidden: int, num_layers: int, has_biases: bool, train: bool,
    bidirectional: bool,
    batch_sizes: Any, batch_first: bool, workspace: Any,
) -> Any:  # fmt: skip
    weights = _of_lstm(mode, has_biases, (w0, w1, w2, w3), hidden)
    first = h.reshape(x.shape[1], hidden), c.reshape(x.shape[1], hidden)
    shapes = ((*x.shape[:2], hidden), first[0].shape, first[1].shape)
    gradients = [
        jnp.zeros(shape, x.dtype) if gradient is None else gradient.reshape(shape)
        for shape, gradient in zip(shapes, (by_output, by_h, by_c))
    ]
    by_x, by_weights, by_first_h, by_first_c = _lstm_gradients(
        x, weights, _States(output.reshape(shapes[0]), *first), _States(*gradients), reverse=reverse
    )
    return by_x, *by_weights, by_first_h.reshape(h.shape), by_first_c.reshape(c.shape)
