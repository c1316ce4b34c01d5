"""Plugins found by their folder: one file, one plugin."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def load_plugins(package: str, kind: type[T], name: Callable[[T], str]) -> tuple[T, ...]:
    """Import all public modules of `package`, and return the one object of type `kind` that each defines.

    They are in order of module names. Modules whose name starts with an underscore are no plugins. TypeError names
    the module that defines none or several, or whose plugin has the name of another.
    """
    objects: dict[str, T] = {}
    owners: dict[str, str] = {}
    for module in module_names(package):
        path = f"{package}.{module}"
        plugin = _import_plugin(path, kind)
        key = name(plugin)
        if key in owners:
            raise TypeError(f"{path} takes the name {key!r} of {owners[key]}")
        owners[key] = path
        objects[key] = plugin
    return tuple(objects.values())


def module_names(package: str) -> tuple[str, ...]:
    """The names of a package's public modules in order; none of them is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    infos = pkgutil.iter_modules(spec.submodule_search_locations)
    return tuple(sorted(info.name for info in infos if not info.name.startswith("_")))


def load_plugin(package: str, kind: type[T], module: str) -> T | None:
    """The plugin of one public module, imported without its siblings; None if there is no such module."""
    path = f"{package}.{module}"
    if not module.isidentifier() or module.startswith("_") or importlib.util.find_spec(path) is None:
        return None
    return _import_plugin(path, kind)


def _import_plugin(path: str, kind: type[T]) -> T:
    """The one object of type `kind` in a module; TypeError if there are none or several."""
    objects = [value for value in vars(importlib.import_module(path)).values() if isinstance(value, kind)]
    if len(objects) != 1:
        raise TypeError(f"{path} defines {len(objects)} objects of type {kind.__name__}, not one")
    return objects[0]
