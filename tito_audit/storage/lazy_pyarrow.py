"""The names of pyarrow, which is imported once the first is used: that takes longer than a small scan of JSON."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What pyarrow calls so, or one of its modules that it does not import itself."""
    if name.startswith("__"):  # what Python asks any module for
        raise AttributeError(name)
    import pyarrow

    if name == "compute":
        import pyarrow.compute
    elif name == "parquet":
        import pyarrow.parquet
    globals()[name] = value = getattr(pyarrow, name)
    return value
