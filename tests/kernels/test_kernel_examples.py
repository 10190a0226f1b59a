"""The examples in the docstrings of the kernels."""

import doctest
import importlib
import pkgutil

import panax.kernels


def test_docstring_examples():
    names = [module.name for module in pkgutil.iter_modules(panax.kernels.__path__, "panax.kernels.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) >= 6
    assert not any(result.failed for result in results)
