"""dataclass: that of the standard library, whose methods are made when they are first used.

`dataclasses` compiles up to six functions for each class, in a third of a millisecond. A scan imports 300 classes
before its first row, and makes values of 90.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import MISSING, FrozenInstanceError, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "fields", "replace"]


class _Factory:
    """The default of a parameter for which a value is made."""

    def __repr__(self) -> str:
        return "<factory>"


class _Deferred:
    """A method that is made when it is first looked up."""

    def __init__(self, cls: Any, name: str, frozen: bool) -> None:
        self._cls, self._name, self._frozen = cls, name, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        cls, name = self._cls, self._name
        if name == "__init__":
            method = _init(cls, self._frozen)
        else:  # It depends on nothing but the fields: that of another class with the same ones.
            how = [
                (each.name, Any, field(repr=each.repr, hash=each.hash, compare=each.compare))
                for each in fields(cls)
            ]
            method = vars(dataclasses.make_dataclass("Same", how, init=False, frozen=True))[name]
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)
        return method.__get__(instance, owner)


class _Pickled:
    """How values of frozen classes with slots are pickled."""

    def __getstate__(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        for each, value in zip(fields(self), state, strict=True):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, repr=True):  # noqa: ANN001, ANN201 - as there
        """`dataclasses.dataclass`; no field may be an InitVar."""
        if cls is None:
            return partial(dataclass, frozen=frozen, slots=slots, eq=eq, repr=repr)
        own = frozenset(vars(cls))
        cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots)
        wanted = {"__init__": True, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}
        for name in wanted.keys() - own:
            if wanted[name]:
                setattr(cls, name, _Deferred(cls, name, frozen))
        if eq and not frozen and "__hash__" not in own:
            cls.__hash__ = None
        if frozen:
            cls.__setattr__, cls.__delattr__ = _guard(cls, "assign to"), _guard(cls, "delete")
            if slots and "__getstate__" not in own:
                cls.__getstate__, cls.__setstate__ = _Pickled.__getstate__, _Pickled.__setstate__
        return cls


def _init(cls: Any, frozen: bool) -> Any:
    """`__init__` of a class, with the parameters and the body that `dataclasses` writes."""
    values: dict[str, Any] = {"_factory": _Factory(), "_set": object.__setattr__}
    types: dict[str, Any] = {}
    parameters, body = ["self"], []
    for spec in sorted(fields(cls), key=attrgetter("kw_only")):
        value, default = spec.name, ""
        if spec.default is not MISSING:
            default = f"_default_{spec.name}"
            values[default] = spec.default
        elif spec.default_factory is not MISSING:
            default, make = "_factory", f"_make_{spec.name}"
            values[make] = spec.default_factory
            value = f"{make}() if {spec.name} is _factory else {spec.name}" if spec.init else f"{make}()"
        if spec.init:
            types[spec.name] = spec.type
            if spec.kw_only and "*" not in parameters:
                parameters.append("*")
            parameters.append(f"{spec.name}={default}" if default else spec.name)
        elif not default:
            continue
        elif default != "_factory":
            value = default
        body.append(f"_set(self, {spec.name!r}, {value})" if frozen else f"self.{spec.name} = {value}")
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else ["pass"]
    text = f"def make({', '.join(values)}):\n def __init__({', '.join(parameters)}):\n  {'; '.join(body)}"
    made: dict[str, Any] = {}
    exec(f"{text}\n return __init__", vars(sys.modules[cls.__module__]), made)
    method = made["make"](**values)
    method.__annotations__ = {**types, "return": None}
    return method


def _guard(cls: Any, what: str) -> Any:
    """`__setattr__` or `__delattr__` of a frozen class."""
    names = frozenset(each.name for each in fields(cls))
    change = object.__setattr__ if what == "assign to" else object.__delattr__

    def guard(self: object, name: str, *value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot {what} field {name!r}")
        change(self, name, *value)

    return guard
