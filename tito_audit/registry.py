"""One file, one plugin: a folder's scan imports every public module and keeps what it defines."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

__all__ = ["plugins"]

T = TypeVar("T")


def plugins(package: str, kind: type[T], name: Callable[[T], str]) -> tuple[T, ...]:
    """The one object of type `kind` that each public module of `package` defines, by module name.

    A module whose name starts with an underscore is not a plugin. Zero objects, two, or a name that
    another module took already is a bug of the file, named in the error.
    """
    folder = importlib.import_module(package)
    found: dict[str, T] = {}
    owners: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda info: info.name):
        if info.name.startswith("_"):
            continue
        path = f"{package}.{info.name}"
        module = importlib.import_module(path)
        mine = [value for value in vars(module).values() if isinstance(value, kind)]
        if len(mine) != 1:
            raise TypeError(f"{path} defines {len(mine)} objects of type {kind.__name__}, not one")
        key = name(mine[0])
        if key in owners:
            raise TypeError(f"{path} takes the name {key!r} of {owners[key]}")
        owners[key] = path
        found[key] = mine[0]
    return tuple(found.values())
