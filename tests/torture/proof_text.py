"""What a repaired text log lost: bytes between rows, rows, keys, spellings; read with `json` alone."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from tests.torture.proof_named import Change, Named

_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)
"""A string that is never closed goes to the end of the file."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r'[^\s,:"\[\]{}]+')
_SPACE = re.compile(r"[ \t\n\r]*")
_SHOWN = 40
_CLOSE = 1e-6
"""Relative difference below which a number was rounded, not replaced."""


@dataclass(slots=True)
class Cut:
    """A text in rows: `leads[i]` is what stands before `texts[i]`."""

    leads: list[bytes] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tail: bytes = b""


def lost_in_text(before: bytes, after: bytes, named: Named, *, same_packing: bool = True) -> list[str]:
    """What a JSON log lost, compressed or not."""
    losses = []
    if same_packing and _packing(before) != _packing(after):
        losses.append(f"compression: {_packing(before)} became {_packing(after)}")
    if same_packing and before != after:
        losses += _lost_members(before, after, named)
    before, after = unpacked(before), unpacked(after)
    if before == after:
        return losses
    if before.startswith(_BOM) and not after.startswith(_BOM):
        losses.append("the byte-order mark is gone")
    kind = kind_of(before)
    old, new = cut(before, kind), cut(after, kind)
    return losses + list(_compared(old, new, named, kind))


def unpacked(data: bytes) -> bytes:
    """The bytes without their compression."""
    if _packing(data) == "gzip":
        return gzip.decompress(data)
    if _packing(data) == "zstd":
        with pa.input_stream(pa.py_buffer(data), compression="zstd") as stream:
            return bytes(stream.read())
    return data


def _packing(data: bytes) -> str:
    if data.startswith(b"\x1f\x8b"):
        return "gzip"
    return "zstd" if data.startswith(b"\x28\xb5\x2f\xfd") else "none"


def _lost_members(before: bytes, after: bytes, named: Named) -> list[str]:
    """Where a gzip file has another number of members, or their headers say less, without a word of it."""
    if _packing(before) != "gzip" or _packing(after) != "gzip":
        return []
    old, new = members(before), members(after)
    return [] if old == new or "gzip member" in named.notices else [f"gzip members: {old} became {new}"]


def members(data: bytes) -> int:
    """How many members a gzip file has."""
    count = 0
    while data[:2] == b"\x1f\x8b":
        count += 1
        member = zlib.decompressobj(31)
        member.decompress(data)
        data = member.unused_data.lstrip(b"\0")
    return count


# Rows


def kind_of(data: bytes) -> str:
    """Whether a text is `lines`, `values` (documents one after another) or an `array` of rows."""
    body = data.removeprefix(_BOM)
    lines = [line for line in body.split(b"\n") if line.strip()]
    first = body.lstrip()[:1]
    if first == b"[":
        return "lines" if len(lines) > 1 and _reads(lines[0]) else "array"
    if first != b"{" or not lines or _reads(lines[0]):
        return "lines"
    text = next(iter(_cut_nested(body, array=False).texts), b"")
    if b"\n" in text.strip() and _reads(text):
        return "values"
    return "lines" if len(lines) > 1 and lines[1].lstrip()[:1] == b"{" and _reads(lines[1]) else "values"


def cut(data: bytes, kind: str) -> Cut:
    """The rows of a text and what is between them; all together they are the text."""
    body = data.removeprefix(_BOM)
    start = data[: len(data) - len(body)]
    if kind != "lines":
        return _cut_nested(body, array=kind == "array", start=start)
    rows, lead = Cut(), start
    for number, line in enumerate(body.split(b"\n")):
        end = b"\n" if number < body.count(b"\n") else b""
        text = line.strip()
        if text:
            at = line.index(text)
            rows.leads.append(lead + line[:at])
            rows.texts.append(text)
            rows.numbers.append(number)
            lead = line[at + len(text) :] + end
        else:
            lead += line + end
    rows.tail = lead
    return rows


def _cut_nested(data: bytes, *, array: bool, start: bytes = b"") -> Cut:
    rows, depth, lead, began, at = Cut(), 0, start, 0, 0
    done = False

    def put(end: int) -> None:
        nonlocal lead, began
        piece = data[began:end]
        text = piece.strip()
        if text:
            place = piece.index(text)
            rows.leads.append(lead + piece[:place])
            rows.texts.append(text)
            rows.numbers.append(len(rows.texts) - 1)
            lead = piece[place + len(text) :]
        else:
            lead += piece
        began = end

    for match in _TOKEN.finditer(data):
        token, at = match[0], match.end()
        if done or token[:1] == b'"':
            continue
        if token in b"[{":
            depth += 1
            if array and depth == 1:
                lead += data[began:at]
                began = at
        elif token == b",":
            if array and depth == 1:
                put(match.start())
                lead += data[began:at]
                began = at
        else:
            depth = max(depth - 1, 0)
            if depth == 0 and array:
                put(match.start())
                lead += data[began:at]
                began, done = at, True
            elif depth == 0:
                put(at)
    put(len(data))
    rows.tail = lead
    return rows


def _compared(old: Cut, new: Cut, named: Named, kind: str) -> Iterator[str]:
    at, clean = 0, True
    for lead, text, number in zip(old.leads, old.texts, old.numbers, strict=True):
        change = named.of(number)
        into = 1 if change is None else change.into
        if into == 0:
            clean = False
            continue
        if at + into > len(new.texts):
            yield f"row {number} and those after it are gone"
            return
        if new.leads[at] != lead and (clean or not _stands_in(new.leads[at], kind, first=at == 0)):
            yield f"row {number}: what precedes it, {lead[-_SHOWN:]!r}, became {new.leads[at][-_SHOWN:]!r}"
        for place in range(at, at + into):
            if place > at and not _stands_in(new.leads[place], kind, first=False):
                yield f"row {number}: between its parts is {new.leads[place][:_SHOWN]!r}"
            if change is None:
                if new.texts[place] != text:
                    yield f"row {number}: no repair names it, and it became {_around(text, new.texts[place])}"
            else:
                yield from (f"row {number}: {loss}" for loss in _in_row(text, new.texts[place], change, named))
        at += into
        clean = True
    if at != len(new.texts):
        yield f"{len(new.texts) - at} rows are there that no repair names"
    end = new.tail.removeprefix(_BOM)
    if new.tail != old.tail and (clean or end.strip(b" \t\r\n[]") or (b"]" in old.tail and b"]" not in end)):
        yield f"the end of the file, {old.tail[-_SHOWN:]!r}, became {new.tail[-_SHOWN:]!r}"


def _stands_in(lead: bytes, kind: str, *, first: bool) -> bool:
    """Whether bytes may stand before a row where the one before it was left out or added."""
    bare = lead.removeprefix(_BOM).strip()
    if kind == "array":
        return bare == (b"[" if first else b",")
    return bare == b"" and (first or kind == "values" or b"\n" in lead)


def _around(old: bytes, new: bytes) -> str:
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(at - 10, 0)
    return f"{new[start : at + _SHOWN]!r} from {old[start : at + _SHOWN]!r} at byte {at}"


# Inside a row


@dataclass(slots=True)
class Node:
    """A value of a JSON text, with where it stands."""

    kind: str
    start: int
    end: int
    members: list[tuple[str, str, str, Node]] = field(default_factory=list)
    """Of a container: what precedes an entry, its key as written ("" in lists), the colon, the value."""
    tail: str = ""


def _in_row(old: bytes, new: bytes, change: Change, named: Named) -> Iterator[str]:
    try:
        was = old.decode("utf-8")
        now = new.decode("utf-8")
    except UnicodeDecodeError as error:
        yield f"it is not UTF-8 any more ({error})"
        return
    if not _reads(new):
        yield "it is not JSON any more"
        return
    if _strict(was) and not _strict(now):
        yield "it is JSON only for Python: NaN, infinite or half of a character"
    try:
        pair = _node(was, 0), _node(now, 0)
    except (ValueError, IndexError, RecursionError) as error:
        yield f"it cannot be compared ({error!r})"
        return
    yield from _Values(was, now, change, named).compared(*pair, "")


@dataclass(frozen=True, slots=True)
class _Values:
    old: str
    new: str
    change: Change
    named: Named

    def compared(self, old: Node, new: Node, place: str) -> Iterator[str]:
        was, now = self.old[old.start : old.end], self.new[new.start : new.end]
        if was == now:
            return
        if place and self.change.allows(place):
            yield from self.spelling(old, new, place)
        elif old.kind == new.kind == "object":
            yield from self.objects(old, new, place)
        elif old.kind == new.kind == "list" and len(old.members) == len(new.members):
            for (gap, _, _, a), (other, _, _, b) in zip(old.members, new.members, strict=True):
                if gap != other:
                    yield f"{place}[]: the space before an entry changed"
                yield from self.compared(a, b, f"{place}[]")
            if old.tail != new.tail:
                yield f"{place}: the space at the end changed"
        else:
            yield f"{place}: no repair names it, and {was[:_SHOWN]} became {now[:_SHOWN]}"

    def objects(self, old: Node, new: Node, place: str) -> Iterator[str]:
        """Members in order, repeated keys and all; a named key may come, go or change its last value."""

        def name(key: str) -> str:
            return f"{place}.{json.loads(key, strict=False)}".removeprefix(".")

        olds = [name(key) for _, key, _, _ in old.members]
        news = [name(key) for _, key, _, _ in new.members]
        gone = [key for key in dict.fromkeys(olds) if key not in news]
        for key in gone:
            if key not in self.change.places:
                yield f"{key}: the key is gone"
            elif olds.count(key) > 1:
                yield f"{key}: all {olds.count(key)} values of the repeated key are gone"
        for key in dict.fromkeys(news):
            if key not in olds and key not in self.change.places:
                yield f"{key}: a key that no repair names"
        left = [member for member, key in zip(old.members, olds, strict=True) if key not in gone]
        same = [member for member, key in zip(new.members, news, strict=True) if key in olds]
        if [key for _, key, _, _ in left] != [key for _, key, _, _ in same]:
            was, now = ([key for _, key, _, _ in members] for members in (left, same))
            yield f"{place or 'row'}: keys {was} became {now}"
            return
        names = [name(key) for _, key, _, _ in left]
        for number, (a, b) in enumerate(zip(left, same, strict=True)):
            if a[2] != b[2] or (a[0] != b[0] and not gone):
                yield f"{names[number]}: the space around the key changed"
            if names[number] in names[number + 1 :]:
                if self.old[a[3].start : a[3].end] != self.new[b[3].start : b[3].end]:
                    yield f"{names[number]}: an earlier value of a repeated key changed"
                continue
            yield from self.compared(a[3], b[3], names[number])
        if old.tail != new.tail and not gone and len(news) == len(olds):
            yield f"{place or 'row'}: the space before the bracket changed"

    def spelling(self, old: Node, new: Node, place: str) -> Iterator[str]:
        """Where a value inside a named place is the same and written otherwise."""
        was, now = self.old[old.start : old.end], self.new[new.start : new.end]
        if was == now:
            return
        if old.kind == new.kind == "list" and len(old.members) == len(new.members):
            for a, b in zip(old.members, new.members, strict=True):
                yield from self.spelling(a[3], b[3], place)
        elif old.kind == new.kind == "object":
            news = {key: node for _, key, _, node in new.members}
            for _, key, _, node in old.members:
                if key in news:
                    yield from self.spelling(node, news[key], f"{place}.{key}")
        elif old.kind == new.kind == "scalar" and _equal(was, now) and not self.named.respelled(place):
            yield f"{place}: {was[:_SHOWN]} is written as {now[:_SHOWN]}"


def _equal(was: str, now: str) -> bool:
    if was[0] == '"' or now[0] == '"':
        return was[0] == now[0] and json.loads(was, strict=False) == json.loads(now, strict=False)
    try:
        a, b = Decimal(was), Decimal(now)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    integral = "." not in was and "e" not in was.lower()
    return a == b or (not integral and abs(a - b) <= abs(a) * Decimal(_CLOSE))


def _reads(data: bytes) -> bool:
    """Whether Python reads it as JSON, whatever its numbers, or would if it were nested less deeply."""
    try:
        _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        return _is_whole(data)
    except ValueError:
        return False
    return True


def _is_whole(data: bytes) -> bool:
    """Whether the first bracket is closed at the end."""
    depth = 0
    for match in _TOKEN.finditer(data):
        depth += (match[0] in (b"[", b"{")) - (match[0] in (b"]", b"}"))
        if depth == 0 and match[0] != b",":
            return not data[match.end() :].strip()
    return False


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


def _refuse(word: str) -> Any:
    raise ValueError(word)


_STRICT = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def _strict(text: str) -> bool:
    """Whether every reader of JSON reads it: without NaN, infinity and half characters."""
    try:
        value = _STRICT.decode(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return False
    return True


def _node(text: str, at: int) -> Node:
    at = _space(text, at)
    sign = text[at]
    if sign == '"':
        match = _STRING.match(text, at)
        if match is None:
            raise ValueError("a string without an end")
        return Node("scalar", at, match.end())
    if sign not in "[{":
        match = _SCALAR.match(text, at)
        if match is None:
            raise ValueError(f"no value at {at}")
        return Node("scalar", at, match.end())
    node = Node("object" if sign == "{" else "list", at, at)
    place = at + 1
    while True:
        start = place
        place = _space(text, place)
        if text[place] in "]}":
            node.tail, node.end = text[start:place], place + 1
            return node
        if text[place] == ",":
            place = _space(text, place + 1)
        gap, key, colon = text[start:place], "", ""
        if sign == "{":
            match = _STRING.match(text, place)
            if match is None:
                raise ValueError("an object without a key")
            key, place = match[0], _space(text, _space(text, match.end()) + 1)
            colon = text[match.end() : place]
        value = _node(text, place)
        node.members.append((gap, key, colon, value))
        place = value.end


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
