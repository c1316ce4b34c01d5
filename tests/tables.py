"""Cases that are nothing but data, as TOML: those of `tests/test_NAME.py` stand in `tests/data/tables/NAME.toml`.

A table has the columns of its cases and a row for each; what else a test file needs stands there under its name.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tests.world import ROOT

__all__ = ["stored", "table"]


@cache
def _read(test: str) -> dict[str, Any]:
    name = Path(test).stem.removeprefix("test_")
    return tomllib.loads((ROOT / "tests" / "data" / "tables" / f"{name}.toml").read_text(encoding="utf-8"))


def table(test: str, name: str) -> tuple[Any, list[Any]]:
    """The columns and rows of a table of this test file, as `pytest.mark.parametrize` takes them."""
    cases = _read(test)[name]
    return cases["columns"], cases["rows"]


def stored(test: str, name: str) -> Any:
    """What stands under this name in the data of this test file."""
    return _read(test)[name]
