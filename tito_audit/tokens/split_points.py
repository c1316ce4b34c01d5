"""Where a text may be cut so that its parts encode like the whole, whatever surrounds the cut.

    The quick| brown| fox|.

A tokenizer splits a text with regexes before it merges anything, so nothing before such a split changes how the
text after it is encoded. A table for the splitting steps of a tokenizer says between which two characters, given
the next one, there is always a split. The tables were derived with the tokenizer itself (`tools/split_points.py`)
and are in `cut_tables/`; steps without a table have no safe cuts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.record.arrays import Offsets

if TYPE_CHECKING:
    import tokenizers

TABLES = Path(__file__).parent / "cut_tables"
"""One file for each way of splitting, named by its hash."""
CODE_POINTS = 0x110000
_LOOKED_AT = 1024
"""Characters in which a cut is looked for at a time, at least."""
NUMERIC = "(numeric)"
"""The matcher of the `Digits` step, which is not a regex."""
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regex built into the `ByteLevel` step."""

Bools = NDArray[np.bool_]


class SafeCuts:
    """The safe cuts of one tokenizer. Characters have classes; whether a cut is safe depends on the classes around
    it.

    `safe[before, after, next]`: the classes of the character before the cut and of the two after it. `unknown`
    stands for any character; `end`, for `next`, for the end of the text or a control token. Characters next to
    which there is never a safe cut have the class `unknown`.
    """

    def __init__(self, classes: NDArray[np.uint8], safe: NDArray[np.bool_], contents: Iterable[str]) -> None:
        self.classes = classes
        """`[0x110000]` uint8, the class of every character."""
        self.safe = safe
        """`[K, K, K + 1]` bool."""
        self.unknown, self.end = safe.shape[0] - 1, safe.shape[0]
        words = sorted({content for content in contents if content}, key=lambda content: (-len(content), content))
        self.apart = apart_from(set(words), set(words)) == set(words)
        """Whether no two control tokens can share a character of a text."""
        either = "|".join(map(re.escape, words))
        self._words = re.compile(either if self.apart else f"(?=({either}))") if words else None
        self._around_cut = 2 + max(map(len, words), default=0)
        """Whether a cut is safe depends on no character farther away than this."""
        self._flat = safe.reshape(-1)

    def within(self, text: str) -> Offsets:
        """The positions at which a text may be cut, `[N]` int64, ascending, without 0 and its length.

        `encode(text)` equals `encode(text[:p])` and `encode(text[p:])` joined, for each of them and so for all
        together. Control tokens in the text are handled: no cut is inside one, and their ends are cuts.
        """
        if len(text) < 2:
            return np.empty(0, np.int64)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        classes = self.classes.take(codes)
        following = np.full(len(classes) - 1, self.end, np.uint8)
        following[:-1] = classes[2:]
        # `[N, 2]` where control tokens are spelled; they may overlap if some of them can.
        if self._words is None:
            spans = np.empty((0, 2), np.int64)
        else:
            group = 0 if self.apart else 1
            spans = np.array([match.span(group) for match in self._words.finditer(text)], np.int64).reshape(-1, 2)
        starts = spans[:, 0] - 2
        # A control token ends the text before it; if several overlap, it is unknown which one counts.
        following[starts[starts >= 0]] = self.end if self.apart else self.unknown
        before = classes[:-1]
        after = classes[1:]
        size = self.safe.shape[0]
        key = before.astype(np.intp)
        key *= size
        key += after
        key *= size + 1
        key += following
        safe = self._flat.take(key)
        if len(spans):
            # No cut inside control tokens; where they cannot overlap, cuts at both ends.
            length, wide = len(safe) + 1, 0 if self.apart else 1
            change = np.zeros(length + 2, np.int64)
            np.add.at(change, np.maximum(spans[:, 0] + 1 - wide, 0), 1)
            np.add.at(change, spans[:, 1] + wide, -1)
            safe &= np.cumsum(change)[1:length] == 0
            if self.apart:
                ends = spans[(spans > 0) & (spans < length)]
                safe[ends - 1] = True
        return safe.nonzero()[0] + 1

    def spells_token(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._words is not None and self._words.search(text) is not None

    def may_cut(self, data: bytes, place: int) -> bool:
        """Whether a text that spells no control token may be cut behind this many of its bytes."""
        before, after = data[max(place - 4, 0) : place], data[place : place + 8].decode("utf-8", "ignore")
        if not after or (data[place] & 0xC0) == 0x80:
            return False
        last, classes = self.end if len(after) == 1 else self.classes[ord(after[1])], self.classes
        return bool(self.safe[classes[ord(before.decode("utf-8", "ignore")[-1])], classes[ord(after[0])], last])

    def parts(self, text: str, size: int) -> list[str]:
        """A text in order, cut at the first safe cut after each `size` characters."""
        parts, begin = [], 0
        while (end := self._first_from(text, begin + size)) is not None:
            parts.append(text[begin:end])
            begin = end
        return [*parts, text[begin:]]

    def _first_from(self, text: str, place: int) -> int | None:
        """The first safe cut from a place on, found without looking at all of the text."""
        around = self._around_cut
        for start in range(place, len(text), max(_LOOKED_AT, around)):
            low, stop = max(start - around, 0), start + max(_LOOKED_AT, around)
            cuts = self.within(text[low : stop + around]) + low
            near = cuts[(cuts >= start) & (cuts < stop)]
            if len(near):
                return int(near[0])
        return None


def find_safe_cuts(backend: tokenizers.Tokenizer) -> SafeCuts | None:
    """The safe cuts of a tokenizer; None if there is no table for how it splits texts.

    Also None if it skips merges at random, if control tokens depend on blanks or word boundaries next to them or
    are searched in normalised text, or if this version of `tokenizers` classifies characters differently than the
    one the table was derived with.
    """
    steps = steps_of(backend)
    if steps is None or getattr(backend.model, "dropout", None):
        return None
    added = backend.get_added_tokens_decoder().values()
    composed = steps[1]
    if any(
        token.lstrip or token.rstrip or token.single_word or (composed and token.normalized) for token in added
    ):
        return None
    table = _table(table_name(*steps))
    return None if table is None else SafeCuts(*table, (token.content for token in added))


def steps_of(backend: tokenizers.Tokenizer) -> tuple[list[str], bool] | None:
    """How a tokenizer splits texts; None if its steps are not supported."""
    try:
        parts = [backend.normalizer, backend.pre_tokenizer]
        states = [None if part is None else orjson.loads(part.__getstate__()) for part in parts]
        return splitting_steps(*states)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return None


def table_name(patterns: list[str], composed: bool) -> str:
    """The name of the table for these regexes and this normalisation."""
    return sha256(orjson.dumps([patterns, composed])).hexdigest()[:16]


@lru_cache(maxsize=8)
def _table(key: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_]] | None:
    """The classes and safe cuts of a table; None if there is none, or if it does not fit this version of the
    library."""
    try:
        stored = orjson.loads((TABLES / f"{key}.json").read_bytes())
    except FileNotFoundError:
        return None
    starts, run_classes = np.cumsum(stored["run_lengths"]), np.array(stored["run_classes"], np.uint8)
    size = len(stored["members"]) + 1
    classes = np.repeat(run_classes, stored["run_lengths"])
    shape = (size, size, size + 1)
    bits = np.frombuffer(bytes.fromhex(stored["safe"]), np.uint8)
    safe = np.unpackbits(bits)[: size * size * (size + 1)].astype(np.bool_).reshape(shape)
    edges = np.concatenate((starts - 1, starts[:-1]))
    edges = edges[classes[edges] < size - 1]
    characters = [chr(point) for point in edges.tolist()]
    members = np.array([[mark == "1" for mark in row] for row in stored["members"]])
    for number, matcher in enumerate(stored["matchers"]):
        if not np.array_equal(in_matcher(matcher, characters), members[classes[edges], number]):
            return None
    return classes, safe


def apart_from(chosen: set[str], contents: set[str]) -> set[str]:
    """Those of `chosen` that cannot overlap any of `contents` in a text."""
    starts, chosen_starts = _starts(contents), _starts(chosen)
    firsts, chosen_firsts = {c[0] for c in contents if c}, {c[0] for c in chosen}
    lengths, chosen_lengths = sorted({len(c) for c in contents}), sorted({len(c) for c in chosen})
    mixed = chosen & starts
    for content in chosen:  # does another one begin in it?
        for i, char in enumerate(content):
            if char in firsts:
                rest = content[i:]
                inside = any(rest[:n] in contents for n in lengths if n < len(rest))
                if inside or (i and (rest in starts or rest in contents)):
                    mixed.add(content)
    begun: set[str] = set()
    for content in contents:  # does one of them begin in another?
        for i, char in enumerate(content):
            if i and char in chosen_firsts:
                rest = content[i:]
                mixed |= {rest[:n] for n in chosen_lengths} & chosen
                begun |= {rest} & chosen_starts
    mixed |= {content for content in chosen if begun and not begun.isdisjoint(_starts({content}))}
    return chosen - mixed


def _starts(contents: set[str]) -> set[str]:
    """All proper prefixes of the contents."""
    return {content[:n] for content in contents for n in range(1, len(content))}


def splitting_steps(normalizer: Any, pre_tokenizer: Any) -> tuple[list[str], bool] | None:
    """The regexes that split a text, in order, and whether it is normalised to NFC first.

    None for unsupported steps. `Digits` appears as the regex `(numeric)`.
    """
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        composed = False
    elif normalizer == {"type": "NFC"}:
        composed = True
    else:
        return None
    if not isinstance(pre_tokenizer, dict):
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    patterns = []
    for step in steps[:-1]:
        kind = step.get("type")
        if (
            kind == "Split"
            and step["behavior"] == "Isolated"
            and not step["invert"]
            and "Regex" in step["pattern"]
        ):
            patterns.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step["individual_digits"]:
            patterns.append(NUMERIC)
        else:
            return None
    patterns += [_BYTE_LEVEL] if steps[-1].get("use_regex", True) else []
    return (patterns, composed) if patterns else None


def in_matcher(matcher: str, characters: Sequence[str]) -> Bools:
    """`[N]` which characters a matcher matches, decided by the engine of `tokenizers` itself."""
    from tokenizers import Regex, pre_tokenizers

    inside = np.ones(len(characters), np.bool_)
    if matcher == NUMERIC:
        pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a" + "a".join(characters))
        alone = np.zeros(2 * len(characters), np.bool_)
        alone[[start for _, (start, end) in pieces if end - start == 1]] = True
        return alone[1::2]
    split = pre_tokenizers.Split(Regex(matcher), "removed")
    for _, (start, end) in split.pre_tokenize_str("".join(characters)):
        inside[start:end] = False
    return inside
