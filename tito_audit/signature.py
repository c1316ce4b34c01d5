"""The keys that show a log format, in the sentence that people read: rows are checked against them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_KEYS = re.compile(r"(\bno )?\{([^}]+?)(\?)?\}")
_ALTERNATIVES = re.compile(r"[;,] or (?![^{]*\})")


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """One alternative of a signature: a row needs a key of each group in `required`, and none of `absent`."""

    required: tuple[tuple[str, ...], ...]
    optional: tuple[tuple[str, ...], ...]
    absent: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Signature:
    """How a format is recognized, as `{tokens} with {mask|masks}; or {text}, no {ids}; seed in {seed?}`.

    Keys are in braces, as paths (`choices[].ids`): `|` separates keys of which one is enough, an optional key ends
    in `?`, and one after "no" must not be there. A key may show its value (`label: true`).
    """

    written: str = ""

    @cached_property
    def key_patterns(self) -> tuple[KeyPattern, ...]:
        """The alternatives that require a key; those in words alone are left out."""
        patterns = []
        for alternative in _ALTERNATIVES.split(self.written):
            groups: dict[str, list[tuple[str, ...]]] = {"": [], "?": [], "no ": []}
            for no, names, optional in _KEYS.findall(alternative):
                groups[no or optional].append(tuple(name.partition(": ")[0] for name in names.split("|")))
            patterns.append(KeyPattern(*map(tuple, groups.values())))
        return tuple(pattern for pattern in patterns if pattern.required)

    @cached_property
    def text(self) -> str:
        """The sentence for people, with keys in backticks."""
        return _KEYS.sub(self._in_backticks, self.written)

    @staticmethod
    def _in_backticks(keys: re.Match[str]) -> str:
        *others, last = (f"`{name}`" for name in keys[2].split("|"))
        return (keys[1] or "") + (f"{', '.join(others)} or {last}" if others else last)
