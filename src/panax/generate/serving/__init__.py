"""A server of OpenAI's interface around an engine."""

from .app import ServedModel, create_app

__all__ = ["ServedModel", "create_app"]
