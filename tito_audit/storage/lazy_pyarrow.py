"""The names of pyarrow, which is imported once the first is used: that takes longer than a small scan of JSON."""

from __future__ import annotations

import importlib
from typing import Any

_APART = ("compute", "parquet")
"""Modules of pyarrow that it does not import itself."""


def __getattr__(name: str) -> Any:
    """What pyarrow calls so."""
    if name.startswith("__"):  # what Python asks any module for
        raise AttributeError(name)
    library = importlib.import_module("pyarrow")
    value = importlib.import_module(f"pyarrow.{name}") if name in _APART else getattr(library, name)
    globals()[name] = value
    return value
