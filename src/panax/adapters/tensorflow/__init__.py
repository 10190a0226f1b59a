"""TensorFlow: a `tf.Module`, a `tf.function`, or any function on `tf.Variable`s, trained as JAX."""

from .models import task

__all__ = ["task"]
