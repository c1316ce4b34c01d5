"""dataclass: that of the standard library, whose methods are made when they are first used.

`dataclasses` compiles up to six functions for each class, in a third of a millisecond. A scan imports 300 classes
before its first row, and makes values of 90.
"""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "fields", "replace"]


class _Deferred:
    """A method that is made when it is first looked up: that of another class with the same fields."""

    def __init__(self, cls: Any, name: str, frozen: bool) -> None:
        self._cls, self._name, self._frozen = cls, name, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        cls, name = self._cls, self._name
        same: dict[str, Any] = {each.name: each for each in fields(cls)}
        same |= {key: getattr(cls, key) for key in ("__module__", "__post_init__") if hasattr(cls, key)}
        twin: Any = type(cls.__name__, (), {"__doc__": "The same fields.", **same})
        twin.__annotations__ = {each.name: each.type for each in fields(cls)}
        frozen = self._frozen if name == "__init__" else name == "__hash__"
        eq, slots = name in ("__eq__", "__hash__"), not all(each.init for each in fields(cls))
        how = {"init": name == "__init__", "repr": name == "__repr__", "eq": eq, "frozen": frozen, "slots": slots}
        method = vars(dataclasses.dataclass(**how)(twin))[name]
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


def _guard(cls: Any, what: str) -> Any:
    """`__setattr__` or `__delattr__` of a frozen class."""
    names = frozenset(each.name for each in fields(cls))
    change = object.__setattr__ if what == "assign to" else object.__delattr__

    def guard(self: object, name: str, *value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot {what} field {name!r}")
        change(self, name, *value)

    return guard
