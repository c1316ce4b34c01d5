"""Plugins found by their folder: one file, one plugin."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def plugins(package: str, kind: type[T], name: Callable[[T], str]) -> tuple[T, ...]:
    """The one object of type `kind` in each public module of `package`, in order of module names.

    A module whose name starts with an underscore is not a plugin. TypeError, naming the module, if it defines none
    or several, or if the name is taken.
    """
    objects: dict[str, T] = {}
    owners: dict[str, str] = {}
    for module in module_names(package):
        path = f"{package}.{module}"
        plugin = _defined(path, kind)
        key = name(plugin)
        if key in owners:
            raise TypeError(f"{path} takes the name {key!r} of {owners[key]}")
        owners[key] = path
        objects[key] = plugin
    return tuple(objects.values())


def module_names(package: str) -> tuple[str, ...]:
    """The public modules of a package in order; imports none of them."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    infos = pkgutil.iter_modules(spec.submodule_search_locations)
    return tuple(sorted(info.name for info in infos if not info.name.startswith("_")))


def plugin_of_module(package: str, kind: type[T], module: str) -> T | None:
    """The plugin of one public module of `package`, imported without its siblings; None if there is none."""
    path = f"{package}.{module}"
    if not module.isidentifier() or module.startswith("_") or importlib.util.find_spec(path) is None:
        return None
    return _defined(path, kind)


def _defined(path: str, kind: type[T]) -> T:
    """The one object of type `kind` that a module defines."""
    objects = [value for value in vars(importlib.import_module(path)).values() if isinstance(value, kind)]
    if len(objects) != 1:
        raise TypeError(f"{path} defines {len(objects)} objects of type {kind.__name__}, not one")
    return objects[0]
