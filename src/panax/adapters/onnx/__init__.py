"""ONNX files: fine-tuning of graphs that any framework exported."""

from .models import task

__all__ = ["task"]
