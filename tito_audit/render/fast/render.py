"""Runs templates in minijinja, several times faster, to guess what the reference environment writes.

minijinja is another program: its output counts only if recorded ids confirm it, or if both engines are known to
write such messages alike. It runs only templates that `static_check.py` has proven safe. A rendering is abandoned
if it takes more instructions or writes more than expected, or holds a value that the engines write differently.
This module imports minijinja, so it is imported late; it imports jinja2 only for certain filters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import minijinja

from tito_audit.errors import RenderError
from tito_audit.render.facts import Facts
from tito_audit.render.globals import TemplateRefused, raise_exception, strftime_now, to_json, without_generation

_FUEL = 100_000
_FUEL_PER_MESSAGE = 2_000
"""Instructions that a rendering may take, and how many more for each message and tool: many times what is
needed."""
_MAX_WRITTEN = 1 << 30
_find_python_whitespace = re.compile("[\x1c\x1d\x1e\x1f]").search
"""Finds characters that are white space to Python, which trims them, but not to minijinja."""
_REFUSALS = {"InvalidOperation", "UndefinedError", "UnknownMethod"}
"""Errors that the reference environment raises too."""


class NeedsReference(Exception):
    """Only the reference environment can tell what the template writes."""


def compile_fast(source: str, facts: Facts) -> FastTemplate | None:
    """A template that was proven safe, in minijinja; None if only the reference environment compiles it."""
    try:
        return FastTemplate(without_generation(source), facts)
    except Exception:  # minijinja does not compile it
        return None


class FastTemplate:
    """A chat template run by minijinja. Not thread-safe."""

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
            tests={"iterable": self._is_sequence, "sequence": self._is_sequence},
            globals={
                "raise_exception": lambda message=None: raise_exception(message),
                "strftime_now": strftime_now,
            },
            finalizer=self._count_output,
        )
        self._most_fuel = _MAX_WRITTEN // facts.longest_constant
        self._disabled = False
        self._size_left = 0
        self._numbers: set[int] = set()
        self._met_none = False
        self._tools: object = None
        self._tool_texts: dict[int, str] = {}
        self._joins_values = facts.joins_values
        self._has_documents = facts.has_documents

    def run(self, variables: Mapping[str, Any]) -> str:
        """What the template writes; RenderError if the reference raises too, NeedsReference if unknown."""
        if self._disabled:
            raise NeedsReference
        messages, tools = variables["messages"], variables["tools"]
        # Their JSON is written in every rendering: cache it by id, and keep them alive
        if tools is not self._tools:
            self._tools = tools
            self._tool_texts = {}
            for tool in tools if isinstance(tools, list) else ():
                self._tool_texts[id(tool)] = ""
        self._size_left = 16 << 20
        self._numbers = set()
        self._met_none = False
        fuel = _FUEL + _FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
        self._environment.fuel = min(fuel, self._most_fuel)
        began = time.monotonic()
        try:
            text = self._environment.render_template("chat", **variables)
        except BaseException as error:
            # RenderError for an error that the reference raises too, else NeedsReference
            kind = getattr(error, "kind", None)
            if isinstance(error, TemplateRefused | AttributeError) or kind in _REFUSALS:
                raise RenderError("chat template: refused") from None
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                # It may loop (out of fuel), or panics, or does not compile: it will do so again.
                self._disabled |= not isinstance(error, NeedsReference | UnicodeError)
                raise NeedsReference from None
            raise error
        finally:
            self._disabled |= time.monotonic() - began > 2.0  # too slow to be run here again
        if (self._joins_values or self._numbers) and self._has_ambiguous_number(variables):
            raise NeedsReference
        if self._met_none and (tools is None or self._has_documents or _has_null(variables)):
            raise NeedsReference
        # minijinja writes U+FFFD for a lone surrogate.
        if "\ufffd" in text and any(map(_has_surrogate, variables.values())):
            raise NeedsReference
        if _find_python_whitespace(text):
            raise NeedsReference
        return text

    # What the template calls

    def _count_output(self, value: Any) -> Any:
        """Count what minijinja is about to write; NotImplemented lets it write that."""
        if type(value) is str:
            self._size_left -= len(value)
            if self._size_left < 0:
                self._spend(0)
        elif value is not None:
            self._record_number(value)
        return NotImplemented

    def _record_number(self, value: Any) -> None:
        """Record a number: the engines write some differently, and 2.0 arrives here as 2."""
        if type(value) is int:
            self._numbers.add(value)
        elif type(value) is float and not 1e-4 <= abs(value) < 1e16:
            raise NeedsReference

    def _has_ambiguous_number(self, value: Any) -> bool:
        """Whether a value holds a number that the engines may write differently."""
        if type(value) is float:
            if self._joins_values and not 1e-4 <= abs(value) < 1e16:
                return True
            return value.is_integer() and (self._joins_values or int(value) in self._numbers)
        if isinstance(value, dict):
            return any(map(self._has_ambiguous_number, value.values()))
        return isinstance(value, list) and any(map(self._has_ambiguous_number, value))

    def _tojson(self, value: Any, **options: Any) -> str:
        if type(value) is not dict:
            if value is None:  # null, or undefined, which JSON cannot express
                raise NeedsReference
            self._record_number(value)
        if options:
            text = to_json(value, **options)
        elif id(value) in self._tool_texts:
            text = self._tool_texts[id(value)] = self._tool_texts[id(value)] or to_json(value)
        else:
            text = to_json(value)
        self._spend(len(text))
        return text

    def _string(self, value: Any) -> str:
        if type(value) is str:
            return value
        self._record_number(_require_value(value))
        text = str(value)
        self._spend(len(text))
        return text

    def _join(self, values: Any, between: str = "") -> str:
        if values is None:  # null or undefined
            raise NeedsReference
        text = between.join([self._string(value) for value in values])
        self._spend(len(text))
        return text

    def _spend(self, size: int) -> None:
        """Count the size of a value; NeedsReference if all together are too large."""
        self._size_left -= size
        if self._size_left < 0:
            self._disabled = True
            raise NeedsReference

    # Undefined arrives here as None. The reference takes undefined for an empty list, but not null.

    def _list(self, value: Any) -> list[Any]:
        self._met_none |= value is None
        if type(value) is str:
            self._spend(16 * len(value))  # each character becomes an item
        return [] if value is None else list(value)

    def _is_sequence(self, value: Any) -> bool:
        """Whether a value is a sequence to Jinja, as all that can be iterated are here: texts, lists and dicts."""
        self._met_none |= value is None
        return value is None or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _require_value(value: Any) -> Any:
    """The value; NeedsReference for None, which may be null or undefined."""
    if value is None:
        raise NeedsReference
    return value


def _apply_jinja_filter(name: str, value: Any) -> Any:
    """The result of one of Jinja's own filters."""
    from jinja2 import filters

    return getattr(filters, name)(_require_value(value))


_FILTERS = {
    "capitalize": lambda value: str(_require_value(value)).capitalize(),
    "dictsort": lambda value: _apply_jinja_filter("do_dictsort", value),
    "title": lambda value: _apply_jinja_filter("do_title", value),
}
"""Filters that the engines implement differently."""


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
