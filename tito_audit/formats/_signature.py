"""What a format's signature says, held against a row: the keys it was told by, and the formats it nearly has.

A signature is prose for people with keys in backticks. Parts behind `; or` and `, or` are other ways to tell the
format, `a or b` means one of the two, `no a` that it must not be there; words without keys ask for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tito_audit.format import Format, Row
from tito_audit.formats._calls import CALL_LISTS, CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, is_list, is_messages, parsed
from tito_audit.record.finding import Result

__all__ = ["Detection", "Near", "Way", "near_formats", "told_by", "ways_of"]

_KEY = re.compile(r"`([^`]+)`")
_NODES = 2_000
"""Objects and lists of a row that are looked into."""
_ENTRIES = 4
_DEEP = 8
_LONG = 60
"""Characters of a key that are shown."""
_PLAIN = dict.fromkeys((*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to tell a format by its keys."""

    groups: tuple[tuple[str, ...], ...] = ()
    """Of each group one key has to be there."""
    more: tuple[str, ...] = ()
    """Keys that may be there."""
    absent: tuple[str, ...] = ()
    """Keys that must not be there."""


@dataclass(frozen=True, slots=True)
class Near:
    """A format that a row was not taken for, and why."""

    format: str
    has: tuple[str, ...]
    """Keys of its signature that the row has."""
    lacks: tuple[str, ...]
    """Keys of its signature that the row does not have; `a or b` where one would do."""
    excess: tuple[str, ...]
    """Keys that it must not have and has."""
    fits: bool
    """Whether it would have been taken, had not another been asked before."""


@dataclass(slots=True)
class Detection:
    """The keys that formats were told by: looked for once a file and format, and said once."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    unsaid: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def look(self, file: str, format: Format, row: Row) -> None:
        """Look for them in a row that was taken for the format, unless another of the file was."""
        if (file, format.name) not in self.seen:
            self.seen.add((file, format.name))
            self.unsaid[file, format.name] = told_by(format, row)

    def say(self, result: Result) -> Result:
        """The result, with the keys if none of its file and format had them."""
        if not self.unsaid or result.rollout is None:
            return result
        keys = self.unsaid.pop((result.place.file, result.rollout.format), ())
        return replace(result, told_by=keys) if keys else result

    def once(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results of several processes, each of which said keys once, as one would give them."""
        for result in results:
            if not result.told_by or result.rollout is None:
                yield result
                continue
            key = (result.place.file, result.rollout.format)
            yield replace(result, told_by=()) if key in self.seen else result
            self.seen.add(key)


@cache
def ways_of(signature: str) -> tuple[Way, ...]:
    """The ways to tell a format, as its signature says."""
    ways: list[Way] = []
    for part in signature.split(";"):
        part = part.strip()
        for way in re.split(r"(?<=`), or (?=`)", part):
            read = _way(way)
            if ways and not part.startswith(("or ", "before")) and part != signature.split(";")[0].strip():
                extra = tuple(key for group in read.groups for key in group)
                ways[-1] = Way(ways[-1].groups, (*ways[-1].more, *extra), ways[-1].absent)
            elif read.groups:
                ways.append(read)
    return tuple(ways)


def _way(text: str) -> Way:
    groups: list[list[str]] = []
    absent: list[str] = []
    parts = _KEY.split(text)
    run = 0  # how many groups before this one were only joined by commas
    for before, key in zip(parts[::2], parts[1::2], strict=False):
        name = key.partition(": ")[0]
        if (
            not re.fullmatch(r"[A-Za-z_][\w.\[\]]*", name)
            or name.endswith("[]")
            or before.endswith("starts with ")
        ):
            run = 0
        elif re.search(r"\bno $", before):
            absent.append(name)
            run = 0
        elif before == " or " and groups:
            joined = groups[len(groups) - max(run, 1) :]
            groups[len(groups) - max(run, 1) :] = [[one for group in joined for one in group] + [name]]
            run = 1
        else:
            run = run + 1 if before == ", " else 1
            groups.append([name])
    return Way(tuple(map(tuple, groups)), absent=tuple(absent))


def told_by(format: Format, row: Row) -> tuple[str, ...]:
    """The keys of the row that show its format, as paths; of generic columns, those that are read."""
    if format.name == "generic":
        return _plain_columns(row)
    paths = _paths(row)
    ways = ways_of(format.signature)
    for way in ways:
        found = [_first(paths, group) for group in way.groups]
        if all(path is not None for path in found):
            more = [_first(paths, (key,)) for key in way.more]
            return tuple(dict.fromkeys(path for path in (*found, *more) if path is not None))
    every = (_first(paths, (key,)) for way in ways for group in way.groups for key in group)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def near_formats(row: Row, formats: Sequence[Format], taken: str | None, most: int = 3) -> tuple[Near, ...]:
    """Formats that the row was nearly taken for, the nearest first."""
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
    """The format held against the row, in that of its ways which lacks the least."""
    nears = []
    for way in ways_of(format.signature):
        has = [path for group in way.groups if (path := _first(paths, group)) is not None]
        lacks = [" or ".join(group) for group in way.groups if _first(paths, group) is None]
        excess = [path for key in way.absent if (path := _first(paths, (key,))) is not None]
        nears.append(Near(format.name, tuple(has), tuple(lacks), tuple(excess), fits))
    if not nears:
        return Near(format.name, (), (), (), fits) if fits else None
    return min(nears, key=lambda near: (len(near.lacks) + len(near.excess), -len(near.has)))


def _worth_a_word(near: Near) -> bool:
    """Whether the row has more of the format than it lacks, some of it at its top."""
    at_top = any("." not in path for path in near.has)
    return at_top and len(near.has) > len(near.lacks) + len(near.excess) and len(near.has) > 1


def _plain_columns(row: Row) -> tuple[str, ...]:
    """Columns that `generic` reads, as far as something is in them."""
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
            # A model's own words may be keys; a path is there to be read.
            short = str(key) if len(str(key)) <= _LONG else f"{str(key)[:_LONG]}…"
            name = f"{path}.{short}" if path else short
            found.setdefault(name)
            if isinstance(inner, Mapping | list | tuple):
                yield name, inner
    elif isinstance(value, list | tuple):
        for entry in value[:_ENTRIES]:
            if isinstance(entry, Mapping | list | tuple):
                yield f"{path}[]", entry
