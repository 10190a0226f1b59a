"""Constraints of answers: JSON schemas, regular expressions, grammars. Which tokens may follow comes from llguidance."""

from .settings import Constraint, Grammar, JsonSchema, Regex

__all__ = ["Constraint", "Grammar", "JsonSchema", "Regex"]
