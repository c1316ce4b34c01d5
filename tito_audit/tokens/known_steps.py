"""Which steps of a tokenizer are known to take time and memory in proportion to the text.

A tokenizer comes from strangers, and some of what its file may say takes for ever on some text: a regex that
backtracks, a replacement that doubles the text thirty times. Published tokenizers use a few steps and regexes,
which are listed here. What is not listed may be harmless too, but runs in a process of its own (`limited.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import tokenizers

_MOST_STEPS = 16
MOST_STEPS = 64
"""No part has more steps."""
_GROWTH = 8
"""How many times longer all replacements together may make a text."""
_SHORT = 64
"""Characters of a prefix, a suffix or a replacement."""
_WORD = 1000
"""WordPiece takes time by the square of the longest word that it reads."""

_KNOWN_BRANCHES = frozenset(
    {
        r"'(?:[sdmt]|ll|ve|re)",
        r"'(?i:[sdmt]|ll|ve|re)",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"(?i:[sdmt]|ll|ve|re)",
        r"'s",
        r"'t",
        r"'re",
        r"'ve",
        r"'m",
        r"'ll",
        r"'d",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}",
        r"\p{N}+",
        r"\p{N}{1,3}",
        r"\p{N}{1,2}",
        r"\p{Nd}",
        r"\p{Nd}{1,3}",
        r"\d",
        r"\d+",
        r"\d{1,3}",
        r"[0-9]",
        r"[0-9][0-9][0-9]",
        r"[\r\n]",
        r"[\r\n]+",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"[一-龥ࠀ-一가-퟿]+",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[\p{Han}]+",
        r"\p{Han}+",
        r"\s+(?!\S)",
        r"\s+",
        r"\s",
        r" ",
        r"\n",
        r"\n+",
    }
)
"""Branches of the regexes of published tokenizers."""
_LINES = frozenset({r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\r?\n"})
"""Quick only where another branch takes the white space without a line break that they look through."""
_HARMLESS = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
        *("Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "UnicodeScripts", "BertPreTokenizer"),
        *("CharDelimiterSplit", "Metaspace", "ByteLevel", "BertProcessing", "RobertaProcessing"),
    }
)
_INNER = ("normalizers", "pretokenizers", "processors")


def unknown_step(parts: Mapping[str, Any]) -> str | None:
    """The first step of a tokenizer that is not known to be quick, in a few words; None if all are.

    `parts` has its `normalizer`, `pre_tokenizer` and `post_processor` as JSON values. ValueError for a part with
    more steps than any tokenizer can need.
    """
    growth = 1.0
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        steps = list(_flat(parts.get(name)))
        if len(steps) > _MOST_STEPS:
            if len(steps) > MOST_STEPS:
                raise ValueError(f"its {name} has {len(steps):,} steps, and none may have more than {MOST_STEPS}")
            return f"a {name} of {len(steps):,} steps"
        for step in steps:
            grown = _growth_of(step)
            if grown is None:
                return f"a {name} with the step {_name(step)}"
            growth *= grown
    return None if growth <= _GROWTH else f"a normalizer that makes texts {growth:,.0f} times longer"


def unknown_part(backend: tokenizers.Tokenizer) -> str | None:
    """What of a loaded tokenizer is not known to be quick, whatever its file looked like; None if nothing is."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "post_processor")}
    try:
        states = {
            name: None if part is None else orjson.loads(part.__getstate__()) for name, part in parts.items()
        }
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return "a step written in Python"
    return unknown_step(states) or unknown_model(backend.model)


def unknown_model(model: object) -> str | None:
    """What about a model of `tokenizers` is not known to be quick; None if nothing is."""
    kind = type(model).__name__
    if kind == "WordPiece" and _number(getattr(model, "max_input_chars_per_word", 0)) > _WORD:
        return "words of any length in WordPiece"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(getattr(model, name, None) or "") > _SHORT:
            return f"a long {name}"
    return None if kind in ("BPE", "Unigram", "WordLevel", "WordPiece") else f"the model {kind}"


def _flat(part: Any) -> Iterator[Any]:
    """The steps of one part, in order, without the sequences around them."""
    pending = [part]
    while pending:
        step = pending.pop()
        if step is None:
            continue
        inner = next((step[key] for key in _INNER if isinstance(step.get(key), list)), None) if _is(step) else None
        if inner is not None and step.get("type") == "Sequence":
            pending += reversed(inner)
        else:
            yield step


def _is(step: Any) -> bool:
    return isinstance(step, dict)


def _growth_of(step: Any) -> float | None:
    """How many times longer a step makes a text; None if that, or its time, is unknown."""
    if not isinstance(step, dict):
        return None
    kind = step.get("type")
    if kind in _HARMLESS:
        return 1
    if kind == "Prepend":
        return 1 if isinstance(step.get("prepend"), str) and len(step["prepend"]) <= _SHORT else None
    if kind == "FixedLength":
        return 1 if _number(step.get("length")) > 0 else None
    pattern = step.get("pattern")
    if kind == "Split" and isinstance(pattern, dict):
        return 1 if _quick(pattern) else None
    if kind == "Replace" and isinstance(pattern, dict):
        content = step.get("content")
        if not _quick(pattern) or not isinstance(content, str) or len(content) > _SHORT:
            return None
        shortest = len(pattern["String"]) if "String" in pattern else 1
        return max(1.0, len(content) / shortest)
    if kind == "TemplateProcessing":
        return 1 if all(_once(step.get(key)) for key in ("single", "pair")) else None
    return None


def _quick(pattern: Mapping[str, Any]) -> bool:
    """Whether a search for this pattern takes time in proportion to the text."""
    if set(pattern) == {"String"}:
        return isinstance(pattern["String"], str) and bool(pattern["String"])
    if set(pattern) != {"Regex"} or not isinstance(pattern["Regex"], str):
        return False
    # Some files have the line breaks themselves where others have their escapes.
    branches = set(branches_of(pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")))
    if branches & _LINES and r"\s+" not in branches:
        return False
    return branches <= _KNOWN_BRANCHES | _LINES


def branches_of(regex: str) -> list[str]:
    """The alternatives of a regex, `a|b|c`, as they are written."""
    branches, start, depth, inside, at = [], 0, 0, False, 0
    while at < len(regex):
        char = regex[at]
        if char == "\\":
            at += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            branches.append(regex[start:at])
            start = at + 1
        at += 1
    return [*branches, regex[start:]]


def _once(template: Any) -> bool:
    """Whether the template of a post-processor holds each of its sequences at most once."""
    if not isinstance(template, list):
        return False
    named = [str(piece["Sequence"].get("id")) for piece in template if _is(piece) and _is(piece.get("Sequence"))]
    return len(named) == len(set(named)) and len(template) <= _SHORT


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _name(step: Any) -> str:
    """A step in a few words."""
    if not isinstance(step, dict):
        return repr(step)[:_SHORT]
    pattern = step.get("pattern")
    shown = str(step.get("type"))[:_SHORT]
    if not isinstance(pattern, dict) or not pattern:
        return shown
    text = str(next(iter(pattern.values())))
    return f"{shown} {text[:_SHORT]!r}{'…' if len(text) > _SHORT else ''}"
