"""Safe cuts: where a text may be cut so that its parts encode like the whole.

    The quick| brown| fox|.

A tokenizer splits a text with regexes before it merges anything, so nothing before a split changes how the text
after it is encoded. A table for a tokenizer's splitting steps says between which two characters, given the one
after them, there is always a split. `tools/split_points.py` derived the tables in `cut_tables/` with the
tokenizers themselves; steps without a table have no safe cuts.
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
"""One file for each sequence of splitting steps, named by its hash."""
CODE_POINTS = 0x110000
_WINDOW = 1024
"""The least characters that are searched for a cut at a time."""
NUMERIC_MATCHER = "(numeric)"
"""The matcher of the `Digits` step, which is not a regex."""
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regex built into the `ByteLevel` step."""

Bools = NDArray[np.bool_]


class SafeCuts:
    """The safe cuts of one tokenizer, by the classes of the characters around a cut.

    `safe[before, after, next]`: the class of the character before the cut and of the two after it. The class
    `unknown` is for characters next to which no cut is safe; `end`, for `next`, is the end of the text or a
    control token.
    """

    def __init__(self, classes: NDArray[np.uint8], safe: NDArray[np.bool_], contents: Iterable[str]) -> None:
        self.classes = classes
        """`[0x110000]` uint8, the class of each code point"""
        self.safe = safe
        """`[K, K, K + 1]` bool."""
        self.unknown, self.end = safe.shape[0] - 1, safe.shape[0]
        words = sorted({content for content in contents if content}, key=lambda content: (-len(content), content))
        self.apart = without_overlaps(set(words), set(words)) == set(words)
        """Whether no two control tokens can share a character of a text."""
        either = "|".join(map(re.escape, words))
        self._words = re.compile(either if self.apart else f"(?=({either}))") if words else None
        self._around_cut = 2 + max(map(len, words), default=0)
        """No character farther away decides whether a cut is safe."""
        self._flat = safe.reshape(-1)

    def find(self, text: str) -> Offsets:
        """The positions at which a text may be cut, `[N]` int64, ascending, without 0 and its length.

        For each position p, and so for all together, `encode(text)` is `encode(text[:p])` and `encode(text[p:])`
        joined. No cut is inside a control token; the ends of control tokens are cuts.
        """
        if len(text) < 2:
            return np.empty(0, np.int64)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        classes = self.classes.take(codes)
        following = np.full(len(classes) - 1, self.end, np.uint8)
        following[:-1] = classes[2:]
        # `[N, 2]` the spans of control tokens, which may overlap unless they are `apart`
        if self._words is None:
            spans = np.empty((0, 2), np.int64)
        else:
            group = 0 if self.apart else 1
            spans = np.array([match.span(group) for match in self._words.finditer(text)], np.int64).reshape(-1, 2)
        starts = spans[:, 0] - 2
        # A control token ends the text before it; of overlapping ones it is unknown which counts.
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
        """Whether a text without control tokens may be cut at this byte position."""
        before, after = data[max(place - 4, 0) : place], data[place : place + 8].decode("utf-8", "ignore")
        if not after or (data[place] & 0xC0) == 0x80:
            return False
        last, classes = self.end if len(after) == 1 else self.classes[ord(after[1])], self.classes
        return bool(self.safe[classes[ord(before.decode("utf-8", "ignore")[-1])], classes[ord(after[0])], last])

    def divide(self, text: str, size: int) -> list[str]:
        """The parts of a text, each up to the first safe cut after `size` characters."""
        parts, begin, start, around = [], 0, size, self._around_cut
        while start < len(text):
            low, stop = max(start - around, 0), start + max(_WINDOW, around)
            cuts = self.find(text[low : stop + around]) + low
            near = cuts[(cuts >= start) & (cuts < stop)]
            start = stop
            if len(near):
                parts.append(text[begin : int(near[0])])
                begin = int(near[0])
                start = begin + size
        return [*parts, text[begin:]]


def find_safe_cuts(backend: tokenizers.Tokenizer) -> SafeCuts | None:
    """The safe cuts of a tokenizer; None if there is no table for its splitting steps.

    Also None if it drops merges at random, if control tokens depend on the text beside them or are searched in
    normalized text, or if this version of `tokenizers` classifies characters otherwise than the one that the table
    was derived with.
    """
    steps = find_splitting_steps(backend)
    if steps is None or getattr(backend.model, "dropout", None):
        return None
    added = backend.get_added_tokens_decoder().values()
    composed = steps[1]
    if any(
        token.lstrip or token.rstrip or token.single_word or (composed and token.normalized) for token in added
    ):
        return None
    table = _load_table(table_name(*steps))
    return None if table is None else SafeCuts(*table, (token.content for token in added))


def find_splitting_steps(backend: tokenizers.Tokenizer) -> tuple[list[str], bool] | None:
    """What `parse_splitting_steps` returns for a tokenizer; None also for parts written in Python."""
    try:
        parts = [backend.normalizer, backend.pre_tokenizer]
        states = [None if part is None else orjson.loads(part.__getstate__()) for part in parts]
        return parse_splitting_steps(*states)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return None


def table_name(patterns: list[str], composed: bool) -> str:
    """The file name of the table for these regexes, with NFC before them if `composed`."""
    return sha256(orjson.dumps([patterns, composed])).hexdigest()[:16]


@lru_cache(maxsize=8)
def _load_table(key: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_]] | None:
    """The classes and safe cuts of a table; None without a table, or if it does not fit this library version."""
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
        if not np.array_equal(match_characters(matcher, characters), members[classes[edges], number]):
            return None
    return classes, safe


def without_overlaps(chosen: set[str], contents: set[str]) -> set[str]:
    """The `chosen` texts that cannot overlap any of `contents` in a text."""
    starts, chosen_starts = _proper_prefixes(contents), _proper_prefixes(chosen)
    firsts, chosen_firsts = {c[0] for c in contents if c}, {c[0] for c in chosen}
    lengths, chosen_lengths = sorted({len(c) for c in contents}), sorted({len(c) for c in chosen})
    mixed = chosen & starts
    for content in chosen:  # does one of `contents` begin inside it?
        for i, char in enumerate(content):
            if char in firsts:
                rest = content[i:]
                inside = any(rest[:n] in contents for n in lengths if n < len(rest))
                if inside or (i and (rest in starts or rest in contents)):
                    mixed.add(content)
    begun: set[str] = set()
    for content in contents:  # does a chosen one begin inside of one of `contents`?
        for i, char in enumerate(content):
            if i and char in chosen_firsts:
                rest = content[i:]
                mixed |= {rest[:n] for n in chosen_lengths} & chosen
                begun |= {rest} & chosen_starts
    mixed |= {content for content in chosen if begun and not begun.isdisjoint(_proper_prefixes({content}))}
    return chosen - mixed


def _proper_prefixes(contents: set[str]) -> set[str]:
    """All proper prefixes of these texts."""
    return {content[:n] for content in contents for n in range(1, len(content))}


def parse_splitting_steps(normalizer: Any, pre_tokenizer: Any) -> tuple[list[str], bool] | None:
    """The regexes that split a text, in order, and whether it is normalized to NFC first.

    None for unsupported steps. The step `Digits` stands as `NUMERIC_MATCHER`.
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
            patterns.append(NUMERIC_MATCHER)
        else:
            return None
    patterns += [_BYTE_LEVEL] if steps[-1].get("use_regex", True) else []
    return (patterns, composed) if patterns else None


def match_characters(matcher: str, characters: Sequence[str]) -> Bools:
    """Which characters a matcher matches, `[N]`, by the regex engine of `tokenizers`."""
    from tokenizers import Regex, pre_tokenizers

    inside = np.ones(len(characters), np.bool_)
    if matcher == NUMERIC_MATCHER:
        pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a" + "a".join(characters))
        alone = np.zeros(2 * len(characters), np.bool_)
        alone[[start for _, (start, end) in pieces if end - start == 1]] = True
        return alone[1::2]
    split = pre_tokenizers.Split(Regex(matcher), "removed")
    for _, (start, end) in split.pre_tokenize_str("".join(characters)):
        inside[start:end] = False
    return inside
