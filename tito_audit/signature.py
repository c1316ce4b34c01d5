"""The keys that show a log format, in the sentence that people read: rows are checked against them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_KEYS = re.compile(r"(\bno )?\{([^}]+?)(\?)?\}")
_WAYS = re.compile(r"[;,] or (?![^{]*\})")


@dataclass(frozen=True, slots=True)
class KeyWay:
    """One way to recognize a format: by all its keys together. Of each group of keys, one is enough."""

    required: tuple[tuple[str, ...], ...]
    optional: tuple[tuple[str, ...], ...]
    absent: tuple[tuple[str, ...], ...]
    """Keys that must not be there."""


@dataclass(frozen=True)
class Signature:
    """Every way to recognize a format, as `{tokens} with {mask|masks}; or {text}, no {ids}; seed in {seed?}`.

    Keys are in braces, as paths (`choices[].ids`): `|` divides alternatives, an optional key ends in `?`, and one
    after "no" must not be there. A key may show what it holds (`label: true`).
    """

    written: str = ""

    @cached_property
    def by_keys(self) -> tuple[KeyWay, ...]:
        """The ways that go by keys, and not by words alone."""
        ways = []
        for way in _WAYS.split(self.written):
            groups: dict[str, list[tuple[str, ...]]] = {"": [], "?": [], "no ": []}
            for no, names, maybe in _KEYS.findall(way):
                groups[no or maybe].append(tuple(name.partition(": ")[0] for name in names.split("|")))
            ways.append(KeyWay(*map(tuple, groups.values())))
        return tuple(way for way in ways if way.required)

    @cached_property
    def text(self) -> str:
        """The signature for people, with keys in backticks."""
        return _KEYS.sub(self._shown, self.written)

    @staticmethod
    def _shown(keys: re.Match[str]) -> str:
        *others, last = (f"`{name}`" for name in keys[2].split("|"))
        return (keys[1] or "") + (f"{', '.join(others)} or {last}" if others else last)
