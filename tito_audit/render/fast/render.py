"""The same templates in minijinja, several times faster, for a guess at what the reference environment writes.

minijinja is another program: what it writes counts only where something else bears it out, such as recorded ids
that it leads to. It runs only templates that `tame.py` has read; a rendering that takes more instructions or
writes more than expected, or shows a value that the two engines write differently, is given up. This module
imports minijinja and is itself imported late; jinja2 it imports only for a template that asks for a filter of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import minijinja

from tito_audit.errors import RenderError
from tito_audit.render.facts import Facts
from tito_audit.render.globals import Refused, raise_exception, strftime_now, to_json, without_generation

_FUEL = 100_000
_FUEL_FOR_EACH = 2_000
"""Instructions a rendering may take, and for each message or tool on top: many times what templates need."""
_MOST_WRITTEN = 1 << 30
_SIZE_LIMIT = 16 * 1024 * 1024
_SLOW = 2.0
"""Seconds after which a template is not run here again."""
_REPLACED = "\ufffd"
"""What minijinja writes for half a surrogate pair."""
_BLANKS = "\x1c\x1d\x1e\x1f"
"""White space to Python alone: what is trimmed there is not trimmed here."""
_REFUSALS = {"InvalidOperation", "UndefinedError", "UnknownMethod"}
"""Errors at which the reference environment raises too."""


class GivenUp(Exception):
    """Only the reference environment can tell what the template writes."""


def open_fast(source: str, facts: Facts) -> FastTemplate | None:
    """A tame template in minijinja; None if it has to be left to the reference environment."""
    try:
        return FastTemplate(without_generation(source), facts)
    except Exception:  # a template that the reference environment compiles alone
        return None


class FastTemplate:
    """A chat template as minijinja runs it. Not to be run by two threads at once."""

    def __init__(self, source: str, facts: Facts) -> None:
        self._environment = minijinja.Environment(
            templates={"chat": source},
            trim_blocks=True,
            lstrip_blocks=True,
            debug=False,
            filters={
                "tojson": self._tojson,
                "list": self._list,
                "string": self._string,
                "join": self._join,
                **_FILTERS,
            },
            tests={"iterable": self._iterable, "sequence": self._sequence},
            globals={"raise_exception": _refuse, "strftime_now": strftime_now},
            finalizer=self._written,
        )
        self._most_fuel = _MOST_WRITTEN // facts.longest_constant
        self._off = False
        self._left = 0
        self._shown: set[int] = set()
        self._absent = False
        self._tools: object = None
        self._tool_texts: dict[int, str] = {}
        self._joins_values = facts.joins_values
        self._has_documents = facts.has_documents

    def run(self, variables: Mapping[str, Any]) -> str:
        """What the template writes; RenderError if the reference would raise too, GivenUp if unknown."""
        if self._off:
            raise GivenUp
        messages, tools = variables["messages"], variables["tools"]
        self._keep(tools)
        self._left = _SIZE_LIMIT
        self._shown = set()
        self._absent = False
        fuel = _FUEL + _FUEL_FOR_EACH * (len(messages) + len(tools or ()))
        self._environment.fuel = min(fuel, self._most_fuel)
        began = time.monotonic()
        try:
            text = self._environment.render_template("chat", **variables)
        except BaseException as error:
            self._judge(error)
        finally:
            self._off |= time.monotonic() - began > _SLOW
        if (self._joins_values or self._shown) and self._is_odd(variables):
            raise GivenUp
        if self._absent and (tools is None or self._has_documents or _has_null(variables)):
            raise GivenUp
        if _REPLACED in text and any(map(_has_surrogate, variables.values())):
            raise GivenUp
        if any(blank in text for blank in _BLANKS):
            raise GivenUp
        return text

    def _judge(self, error: BaseException) -> None:
        """Tell an error that the reference environment has as well from one of this engine."""
        kind = getattr(error, "kind", None)
        if isinstance(error, Refused | AttributeError) or kind in _REFUSALS:
            raise RenderError("chat template: refused") from None
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            # One without fuel may loop; one that does not compile or panics will do so again.
            self._off |= not isinstance(error, GivenUp | UnicodeError)
            raise GivenUp from None
        raise error

    def _keep(self, tools: object) -> None:
        """Hold on to the tools, whose JSON is written in every rendering; their ids stay theirs as long."""
        if tools is not self._tools:
            self._tools = tools
            self._tool_texts = {}
            for tool in tools if isinstance(tools, list) else ():
                self._tool_texts[id(tool)] = ""

    # What the template calls

    def _written(self, value: Any) -> Any:
        """Count what is written; minijinja then writes it itself."""
        if type(value) is str:
            self._left -= len(value)
            if self._left < 0:
                self._off = True
                raise GivenUp
        elif value is not None:
            self._show(value)
        return NotImplemented

    def _show(self, value: Any) -> None:
        """Take note of a number: the engines write some differently, and 2.0 comes here as 2."""
        if type(value) is int:
            self._shown.add(value)
        elif type(value) is float and not 1e-4 <= abs(value) < 1e16:
            raise GivenUp

    def _is_odd(self, value: Any) -> bool:
        """True if a value holds a number that the template may have written in another way."""
        if type(value) is float:
            if self._joins_values and not 1e-4 <= abs(value) < 1e16:
                return True
            return value.is_integer() and (self._joins_values or int(value) in self._shown)
        if isinstance(value, dict):
            return any(map(self._is_odd, value.values()))
        return isinstance(value, list) and any(map(self._is_odd, value))

    def _tojson(self, value: Any, **options: Any) -> str:
        if type(value) is not dict:
            if value is None:  # null, or nothing at all, which is no JSON
                raise GivenUp
            self._show(value)
        if options:
            text = to_json(value, **options)
        elif id(value) in self._tool_texts:
            text = self._tool_texts[id(value)] = self._tool_texts[id(value)] or to_json(value)
        else:
            text = to_json(value)
        self._left -= len(text)
        if self._left < 0:
            self._off = True
            raise GivenUp
        return text

    def _string(self, value: Any) -> str:
        if type(value) is not str:
            self._show(_known(value))
        return str(value)

    def _join(self, values: Any, between: str = "") -> str:
        return between.join([self._string(value) for value in _known(values)])

    # What is not defined comes here as None. To the reference it is an empty list, and null is none.

    def _list(self, value: Any) -> list[Any]:
        self._absent |= value is None
        return [] if value is None else list(value)

    def _iterable(self, value: Any) -> bool:
        self._absent |= value is None
        return value is None or hasattr(value, "__iter__")

    def _sequence(self, value: Any) -> bool:
        self._absent |= value is None
        return value is None or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _known(value: Any) -> Any:
    """The value, unless it is None: that stands for null and for what is not defined."""
    if value is None:
        raise GivenUp
    return value


def _of_jinja(name: str, value: Any) -> Any:
    """What a filter of the reference environment makes of a value."""
    from jinja2 import filters

    return getattr(filters, name)(_known(value))


_FILTERS = {
    "capitalize": lambda value: str(_known(value)).capitalize(),
    "dictsort": lambda value: _of_jinja("do_dictsort", value),
    "title": lambda value: _of_jinja("do_title", value),
}
"""Those that the engines do not do alike."""


def _refuse(message: object = None) -> None:
    raise_exception(message)


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(map(_has_surrogate, value.values()))
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_null(item) for key, item in value.items() if key != "documents")
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))
