"""Where a tokenizer's pre-tokenizer always cuts, derived by experiment.

A regex sees of a character only which of its single-character parts (`\\p{L}`, `[\\r\\n]`, `'`) match it. So
characters that the same parts match are interchangeable: they are one class. Then every string of class
representatives up to some length is pre-tokenized, whole and cut in two at every place; a place

    class of the character before | class of the one after, class of the next one (or the end)

at which whole and cut differ once is never safe. The strings grow until two lengths in a row say the same
and long random strings, of any members of the classes, find nothing more. That is a bounded search and no
proof: three characters were too few for o200k, four for all of its places.

To be independent of a normalizer, there is never a cut next to a character that it could change.

    python -m tools.split_points FOLDER      derive the table for the tokenizer of a folder
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.errors import TokenizerError
from tito_audit.tokens.split_points import (
    CODE_POINTS,
    NUMERIC_MATCHER,
    TABLES,
    find_splitting_steps,
    match_characters,
    table_name,
)

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Derived", "derive", "write_table"]

_CONTRACTIONS = frozenset("strevmld")
"""The letters of 's 't 're 've 'm 'll 'd; one that ends a contraction and one that begins one stand for all."""
_SHORTEST, _LONGEST, _MOST_STRINGS = 6, 8, 20_000_000
_RANDOM_STRINGS = 200_000

Bools = NDArray[np.bool_]
Classes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Derived:
    """The result for one pre-tokenizer and normalizer."""

    classes: Classes
    """`[0x110000]` the class of each character; the last class holds those that border no cut."""
    safe: Bools
    """`[K, K, K + 1]` before, after, next; K - 1 stands for any next character at all, K for the end."""
    matchers: tuple[str, ...]
    members: Bools
    """`[K - 1, matchers]` which matchers match the characters of a class."""
    longest: int
    """The length of the strings at which nothing more was found."""


def derive(
    backend: tokenizers.Tokenizer, patterns: Sequence[str], composed: bool, longest: int = _LONGEST
) -> Derived:
    """Where the pre-tokenizer of a tokenizer always cuts.

    Takes seconds to minutes. TokenizerError if a pattern is not understood or the search does not converge.
    """
    found = sorted({matcher for pattern in patterns for matcher in _matchers(pattern)})
    letters = {matcher[-2] if matcher.startswith("(?i:") else matcher for matcher in found if _is_letter(matcher)}
    matchers = [matcher for matcher in found if not (_is_letter(matcher) and letters <= _CONTRACTIONS)]
    characters = [chr(point) for point in range(CODE_POINTS) if not 0xD800 <= point < 0xE000]
    members = np.stack([match_characters(matcher, characters) for matcher in matchers], axis=1)
    # One number for each row of `members`, in their order.
    numbers = members @ (1 << np.arange(len(matchers), dtype=np.int64)[::-1])
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    vectors: Bools = members[first]
    classes: Classes = np.full(CODE_POINTS, len(vectors), np.uint8)
    classes[[ord(character) for character in characters]] = inverse
    uncertain = _uncertain(backend, classes, composed)
    # Characters of a class that must not border a cut still occur in the strings.
    kept = classes.copy()
    kept[uncertain] = len(vectors)
    strings = _Strings(backend, classes, uncertain, len(vectors), letters & _CONTRACTIONS if letters else set())
    safe, length = strings.search(longest)
    return Derived(kept, safe, tuple(matchers), vectors, length)


_ONE = re.compile(r"\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w]|\[\^?(?:\\.|&(?!&)|[^\[\]\\&])+\]|[^\\()|?*+{}^$.\[\]]")
_QUANTIFIER = re.compile(r"[?*+]+|\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\(\?(i?):|\(\?[=!]|\((?!\?)")


def _matchers(pattern: str) -> Iterator[str]:
    """The parts of a regex that match one character each; TokenizerError if one is not understood."""
    if pattern == NUMERIC_MATCHER:
        yield pattern
        return
    any_case, at = [False], 0
    while at < len(pattern):
        if pattern[at] == ")":
            any_case.pop()
            at += 1
        elif pattern[at] == "|":
            at += 1
        elif group := _GROUP.match(pattern, at):
            any_case.append(any_case[-1] or group[1] == "i")
            at = group.end()
        elif quantifier := _QUANTIFIER.match(pattern, at):
            at = quantifier.end()
        elif one := _ONE.match(pattern, at):
            yield f"(?i:{one[0]})" if any_case[-1] else one[0]
            at = one.end()
        else:
            raise TokenizerError(f"the regex {pattern!r} cannot be understood at {pattern[at : at + 8]!r}")


def _is_letter(matcher: str) -> bool:
    return matcher.removeprefix("(?i:").removesuffix(")").isalpha()


def _uncertain(backend: tokenizers.Tokenizer, classes: Classes, composed: bool) -> Bools:
    """`[0x110000]` the characters that must not border a cut.

    Halves of surrogate pairs, which are joined in pairs; unassigned characters, which another version of the
    library may know. With NFC, all that combine, compose with the character before, or are not in NFC; and those
    that become a character of another class when a mark follows.
    """
    out = np.zeros(CODE_POINTS, np.bool_)
    for point in range(CODE_POINTS):
        character = chr(point)
        category = unicodedata.category(character)
        if category in ("Cs", "Cn"):
            out[point] = True
            continue
        if not composed:
            continue
        if unicodedata.combining(character) or unicodedata.normalize("NFC", character) != character:
            out[point] = True
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            first, second = (int(part, 16) for part in parts)
            out[second] = True
            out[first] |= classes[first] != classes[point]
    if composed:
        assert backend.normalizer is not None
        out[0x1160:0x1200] = out[0xD7B0:0xD800] = True  # vowels and finals of Hangul, composed by rule
        for point in np.flatnonzero(~out).tolist():
            out[point] = backend.normalizer.normalize_str(chr(point)) != chr(point)
    return out


class _Strings:
    """All strings of representatives up to a length, as numbers: digit by digit, the first the highest."""

    def __init__(
        self, backend: tokenizers.Tokenizer, classes: Classes, uncertain: Bools, count: int, letters: set[str]
    ) -> None:
        assert backend.pre_tokenizer is not None
        self.pre_tokenize: Callable[[str], list[Any]] = backend.pre_tokenizer.pre_tokenize_str
        self.count = count
        self.members = [np.flatnonzero((classes == one) & ~uncertain) for one in range(count)]
        for one, points in enumerate(self.members):
            if not len(points):
                self.members[one] = np.flatnonzero(classes == one)
        self.alphabet: list[str] = []
        class_of: list[int] = []
        for one in range(count):
            inside = [chr(point) for point in self.members[one].tolist()]
            plain = next((char for char in inside if char.lower() not in letters), inside[0])
            own = [char for char in "slSL" if char.lower() in letters and char in inside]
            if own[2:]:  # capitals of the same class behave as small letters do
                own = own[:2]
            self.alphabet += dict.fromkeys([plain, *own])
            class_of += [one] * (len(self.alphabet) - len(class_of))
        self.class_of = np.array(class_of, np.int64)
        self.class_by_point = classes
        self.letters = sorted(letters | {letter.upper() for letter in letters})
        self.unsafe = np.zeros((count + 1, count + 1, count + 2), np.bool_)
        self.cuts: list[NDArray[np.uint16]] = [np.zeros(1, np.uint16)]

    def search(self, longest: int) -> tuple[Bools, int]:
        """The safe places, and the length of the strings at which they were settled."""
        size = len(self.alphabet)
        for length in range(1, longest + 1):
            if size**length > _MOST_STRINGS:
                break
            before = self.unsafe.copy()
            self._try_all(length)
            if length >= _SHORTEST and np.array_equal(before, self.unsafe) and not self._try_random(length):
                return self._table(), length
        raise TokenizerError(f"cuts are not settled by all strings of {length - 1} out of {size} characters")

    def _try_all(self, length: int) -> None:
        size, alphabet = len(self.alphabet), self.alphabet
        marks = (self._marks("".join(chars)) for chars in itertools.product(alphabet, repeat=length))
        whole = np.fromiter(marks, np.uint16, size**length)
        self.cuts.append(whole)
        number = np.arange(len(whole))
        for at in range(1, length):
            rest = size ** (length - at)
            parts = self.cuts[at][number // rest] | (1 << at) | (self.cuts[length - at][number % rest] << at)
            bad = np.unique(number[parts != whole] // max(1, size ** (length - at - 2)))
            after_next = at + 1 == length
            following = self.class_of[bad % size] if not after_next else np.full(len(bad), self.count + 1)
            bad = bad if after_next else bad // size
            self.unsafe[self.class_of[bad // size % size], self.class_of[bad % size], following] = True

    def _marks(self, text: str) -> int:
        """The places at which a text is cut, as bits."""
        marks = 0
        for _, (_, end) in self.pre_tokenize(text):
            marks |= 1 << end
        return marks & ((1 << len(text)) - 1)

    def _try_random(self, length: int) -> bool:
        """Whether long random strings, each cut once, refute a safe place."""
        draw = random.Random(length)
        table, found = self._table(), False
        for _ in range(_RANDOM_STRINGS):
            kinds = draw.sample(range(self.count), min(self.count, draw.randint(1, 5)))
            text = "".join(self._drawn(draw, kinds) for _ in range(draw.randint(length + 1, 24)))
            codes = self.class_by_point[[ord(char) for char in text]].tolist()
            after = [*codes[1:], self.count + 1]
            places = [at for at in range(1, len(text)) if table[codes[at - 1], codes[at], after[at]]]
            if not places:
                continue
            at = draw.choice(places)
            if self._marks(text) != self._marks(text[:at]) | (1 << at) | (self._marks(text[at:]) << at):
                self.unsafe[codes[at - 1], codes[at], after[at]] = found = True
        return found

    def _drawn(self, draw: random.Random, kinds: Sequence[int]) -> str:
        if self.letters and draw.random() < 0.15:
            return draw.choice(self.letters)
        members = self.members[draw.choice(kinds)]
        few = len(members) if draw.random() < 0.3 else min(len(members), 40)
        return chr(int(members[draw.randrange(few)]))

    def _table(self) -> Bools:
        safe = ~self.unsafe
        safe[self.count], safe[:, self.count] = False, False
        every = np.delete(safe, self.count, axis=2).all(axis=2)
        safe[:, :, self.count] = every
        return safe


def _stored(derived: Derived, patterns: list[str], composed: bool) -> dict[str, Any]:
    """A table as its file holds it."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(derived.classes.astype(np.int16))) + 1))
    return {
        "regexes": patterns,
        "nfc": composed,
        "settled_at": derived.longest,
        "matchers": derived.matchers,
        "members": ["".join("01"[int(bit)] for bit in row) for row in derived.members],
        "safe": np.packbits(derived.safe.reshape(-1)).tobytes().hex(),
        "run_lengths": np.diff(np.append(starts, CODE_POINTS)).tolist(),
        "run_classes": derived.classes[starts].tolist(),
    }


def write_table(folder: str, into: Path = TABLES) -> Path:
    """Derive the table for the tokenizer of a folder and write it; takes up to some minutes."""
    from tito_audit.tokens.load import load_tokenizer

    backend = load_tokenizer(folder).backend
    steps = find_splitting_steps(backend)
    if steps is None:
        raise TokenizerError(f"{folder}: its pre-tokenizer is not understood, so no cut is known to be safe.")
    file = into / f"{table_name(*steps)}.json"
    file.write_bytes(orjson.dumps(_stored(derive(backend, *steps), *steps)) + b"\n")
    return file


def main() -> None:
    """Derive and write the tables that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tools.split_points", description=write_table.__doc__)
    parser.add_argument("folder", nargs="+", help="a folder with a tokenizer.json")
    parser.add_argument("-o", "--output", type=Path, default=TABLES, help="where to write it")
    arguments = parser.parse_args()
    for folder in arguments.folder:
        print(write_table(folder, arguments.output))


if __name__ == "__main__":
    main()
