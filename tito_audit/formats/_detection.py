"""Explains detection: the keys that show a row's format, formats it nearly matches, and rows nested inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tito_audit.format import Format, Row
from tito_audit.formats._calls import CALL_LISTS, CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, is_list, is_messages, parsed
from tito_audit.record.finding import Result

_NODES = 2_000
"""How many objects and lists of a row are searched."""
_ENTRIES = 4
_DEEP = 8
_LONG = 60
"""How many characters of a key are shown."""
_PLAIN = dict.fromkeys((*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS))
_DEPTH = 3
_MOST_KEYS = 64
_MOST_OBJECTS = 64
"""How many nested objects are tried."""


@dataclass(frozen=True, slots=True)
class Near:
    """A format that a row nearly matches, and why it does not."""

    format: str
    has: tuple[str, ...]
    """Keys of its signature that the row has."""
    lacks: tuple[str, ...]
    """Keys of its signature that the row lacks; `a or b` if either would do."""
    excess: tuple[str, ...]
    """Keys that it has but must not have."""
    fits: bool
    """Whether it matches but another format came first."""


@dataclass(slots=True)
class Detection:
    """The keys by which formats were recognized, searched and reported once per file and format."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    unsaid: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def look(self, file: str, format: Format, row: Row) -> None:
        """Search the first row of a file and format for them."""
        if (file, format.name) not in self.seen:
            self.seen.add((file, format.name))
            self.unsaid[file, format.name] = told_by(format, row)

    def say(self, result: Result) -> Result:
        """The result, with the keys if it is the first of its file and format."""
        if not self.unsaid or result.rollout is None:
            return result
        keys = self.unsaid.pop((result.place.file, result.rollout.format), ())
        return replace(result, told_by=keys) if keys else result

    def once(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results of several processes, with keys reported once as by a single process."""
        for result in results:
            if not result.told_by or result.rollout is None:
                yield result
                continue
            key = (result.place.file, result.rollout.format)
            yield replace(result, told_by=()) if key in self.seen else result
            self.seen.add(key)


def told_by(format: Format, row: Row) -> tuple[str, ...]:
    """The keys of the row that show its format, as paths; for `generic`, the columns that are read."""
    if format.name == "generic":
        return _plain_columns(row)
    paths = _paths(row)
    ways = format.signature.by_keys
    for way in ways:
        found = [_first(paths, group.names) for group in way.required]
        if all(path is not None for path in found):
            more = [_first(paths, group.names) for group in way.optional]
            return tuple(dict.fromkeys(path for path in (*found, *more) if path is not None))
    every = (_first(paths, (key,)) for way in ways for group in way.required for key in group.names)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def near_formats(row: Row, formats: Sequence[Format], taken: str | None, most: int = 3) -> tuple[Near, ...]:
    """Formats that the row nearly matches, the nearest first."""
    paths = _paths(row)
    found: list[tuple[tuple[int, int], Near]] = []
    for format in formats:
        if format.name in (taken, "generic"):  # plain columns are in rows of many formats
            continue
        fits = format.matches(row)
        near = _nearest(paths, format, fits)
        if near is not None and (fits or _worth_a_word(near)):
            found.append(((len(near.lacks) + len(near.excess) if not fits else 0, -len(near.has)), near))
    found.sort(key=lambda pair: pair[0])
    return tuple(near for _, near in found[:most])


def _nearest(paths: Sequence[str], format: Format, fits: bool) -> Near | None:
    """How the row compares with the format, in the variant of which it lacks the least."""
    nears = []
    for way in format.signature.by_keys:
        has = [path for group in way.required if (path := _first(paths, group.names)) is not None]
        lacks = [" or ".join(group.names) for group in way.required if _first(paths, group.names) is None]
        excess = [path for group in way.absent if (path := _first(paths, group.names)) is not None]
        nears.append(Near(format.name, tuple(has), tuple(lacks), tuple(excess), fits))
    if not nears:
        return Near(format.name, (), (), (), fits) if fits else None
    return min(nears, key=lambda near: (len(near.lacks) + len(near.excess), -len(near.has)))


def _worth_a_word(near: Near) -> bool:
    """Whether the row has more of the format's keys than it lacks, some of them at the top."""
    at_top = any("." not in path for path in near.has)
    return at_top and len(near.has) > len(near.lacks) + len(near.excess) and len(near.has) > 1


def _plain_columns(row: Row) -> tuple[str, ...]:
    """Columns that `generic` reads and that are not empty."""
    lists = [name for name in _PLAIN if is_list(row.get(name))]
    calls = [name for name in CALL_LISTS if isinstance(value := parsed(row, name), list | tuple) and len(value)]
    texts = [name for name in ("messages", "prompt", "completion", "tools") if _is_objects(parsed(row, name))]
    return (*(calls[:1] or ()), *lists, *texts)


def _is_objects(value: object) -> bool:
    return is_messages(value) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _first(paths: Sequence[str], names: Sequence[str]) -> str | None:
    """The first path that is one of the names or ends in one; a row's own keys come before those inside."""
    for name in names:
        for path in paths:
            if path == name or path.endswith(f".{name}"):
                return path
    return None


def _paths(row: Row) -> list[str]:
    """Paths of everything that is in a row and not null, level by level: `choices[].token_ids`."""
    found: dict[str, None] = {}
    level: list[tuple[str, Any]] = [("", row)]
    looked = 0
    for _ in range(_DEEP):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            looked += 1
            if looked > _NODES:
                return list(found)
            below += _inside(path, value, found)
        level = below
    return list(found)


def _inside(path: str, value: Any, found: dict[str, None]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is None:
                continue
            # A model's output may be used as a key; a path has to be readable.
            short = str(key) if len(str(key)) <= _LONG else f"{str(key)[:_LONG]}…"
            name = f"{path}.{short}" if path else short
            found.setdefault(name)
            if isinstance(inner, Mapping | list | tuple):
                yield name, inner
    elif isinstance(value, list | tuple):
        for entry in value[:_ENTRIES]:
            if isinstance(entry, Mapping | list | tuple):
                yield f"{path}[]", entry


# Rows inside a row, for the error message about one that no format recognizes


def wrapped_at(row: Row, formats: Sequence[Format]) -> tuple[str, str] | None:
    """The `--rows-at` path of rows inside this one and their format's name; None if nothing looks like a row."""
    for (path, inner), _ in zip(_rows_inside(row), range(_MOST_OBJECTS), strict=False):
        # A message may hold ids, but then the row is the object around it.
        if "role" in inner:
            continue
        found = next((form.name for form in formats if form.matches(inner)), None)
        if found is not None:
            return path, found
    return None


def _rows_inside(row: Row) -> Iterator[tuple[str, Row]]:
    """The objects in a row with their paths, outer ones first; only the first entry of each list."""
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            for key in list(value)[:_MOST_KEYS]:
                inner = value[key]
                while isinstance(inner, list | tuple) and inner:
                    inner = inner[0]
                if isinstance(inner, dict) and isinstance(key, str) and key and "." not in key:
                    below.append((f"{path}.{key}" if path else key, inner))
        yield from below
        level = below
