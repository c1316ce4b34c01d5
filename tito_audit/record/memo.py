"""memoized: caches results in the object that they belong to, so that they are freed with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class HasMemo(Protocol):
    """An object with a cache of its own, such as a vocabulary or a template."""

    @property
    def memo(self) -> dict[Any, Any]: ...


_Owner = TypeVar("_Owner", bound=HasMemo)
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")
_Function = Callable[Concatenate[_Owner, _Rest], _Result]


def memoized(function: _Function[_Owner, _Rest, _Result]) -> _Function[_Owner, _Rest, _Result]:
    """Cache a function of hashable arguments in the `memo` of its first one.

    `functools.lru_cache` would keep the tokenizers of earlier runs alive, at 50 to 150 MB each.
    """

    @wraps(function)
    def memoizing(owner: _Owner, /, *rest: _Rest.args, **named: _Rest.kwargs) -> _Result:
        key, memo = (function, rest, *named.items()), owner.memo
        if key not in memo:
            memo[key] = function(owner, *rest, **named)
        result: _Result = memo[key]
        return result

    return memoizing
