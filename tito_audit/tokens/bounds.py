"""Checks of a tokenizer's files: plain files, of bounded size, with steps that are known to be fast.

A tokenizer comes from strangers, and its definition may take forever on some text, or all memory: a regex that
backtracks, a replacement that doubles the text thirty times. The steps and regexes of published tokenizers are
listed here. Any other runs in a child process with limits (`limited.py`), though it may be harmless. Refused is
only what no tokenizer needs and no process could bear.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from tito_audit.errors import ODD_VALUES, TitoAuditError, TokenizerError, describe_error
from tito_audit.tokens.vocab import flatten_steps

DEFINITION_BYTES = 256 << 20
"""The largest `tokenizer.json`, or other vocabulary; that of gemma-3 has 33 MB."""
SETTINGS_BYTES = 32 << 20
TEMPLATE_BYTES = 4 << 20
MAX_TOKEN = 4096
"""Characters of one token; published ones have up to a few hundred."""
MAX_ADDED_STATES = 300_000
"""States of the automaton for added tokens, up to 2 kB each; the 65,536 tokens of a speech model have 200,000."""
_MAX_UNIGRAM_STATES = 2_000_000
"""States of the trie of a Unigram model, of up to 360 bytes each; 250,000 tokens have about a million."""
_MAX_UNIGRAM_TOKEN = 128
"""Characters of a Unigram token; Unigram tries tokens at each position of a text."""
_MAX_STEPS = 64
"""Steps of one part; with more the tokenizer is refused."""
_MAX_TRUSTED_STEPS = 16
_MAX_AFFIX = 64
"""Characters of a prefix, a suffix or a replacement."""
_MAX_WORDPIECE_WORD = 1000
"""WordPiece takes quadratic time in the longest word that it reads."""
_MAX_REGEX = 4096
_NONBLOCKING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags that open even a pipe without waiting for a writer."""
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_ESCAPED_LETTER = re.compile(rb"\\u00[2567]")
"""A JSON escape of an ASCII letter, which only hides a key."""


@contextmanager
def reading_definition(where: Path | str) -> Iterator[None]:
    """Turn errors that unreadable or odd content causes inside into TokenizerError about `where`."""
    try:
        yield
    except TitoAuditError:
        raise
    except OSError as error:
        raise TokenizerError(f"{where}: this tokenizer cannot be read ({error}).") from error
    except (*ODD_VALUES, MemoryError) as error:
        raise TokenizerError(
            f"{where}: this tokenizer cannot be read: a part of it is missing or holds something else than it "
            f"should ({describe_error(error)}).\nDownload it again, or pass the folder of another."
        ) from error


def read_file(file: Path, limit: int, *, what: str = "tokenizer") -> bytes:
    """The content of a plain file; TokenizerError if it is no plain file, too large or unreadable.

    FileNotFoundError if there is none.
    """
    try:
        with os.fdopen(os.open(file, _NONBLOCKING), "rb") as source:
            _check_plain_file(file, os.fstat(source.fileno()), limit, what)
            content = source.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TokenizerError(f"{file}: this {what} cannot be read ({error}).") from error
    if len(content) > limit:
        raise _too_large(file, len(content), limit, what)
    return content


def check_file(file: Path) -> None:
    """Raise TokenizerError if a definition is no plain file or too large, without reading it."""
    try:
        _check_plain_file(file, file.stat(), DEFINITION_BYTES, "tokenizer")
    except OSError as error:
        raise TokenizerError(f"{file}: this tokenizer cannot be read ({error}).") from error


def read_template(file: Path) -> str:
    """The text of a chat template file; TokenizerError if it cannot be read, UnicodeDecodeError if not UTF-8."""
    text = read_file(file, TEMPLATE_BYTES, what="chat template").decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_plain_file(file: Path, there: os.stat_result, limit: int, what: str) -> None:
    if not stat.S_ISREG(there.st_mode):
        raise TokenizerError(f"{file}: this {what} cannot be read (it is not a plain file).")
    if there.st_size > limit:
        raise _too_large(file, there.st_size, limit, what)


def _too_large(file: Path, size: int, limit: int, what: str) -> TokenizerError:
    return TokenizerError(
        f"{file}: this {what} has {size:,} bytes, and none may have more than {limit:,}.\n"
        "A real one is far smaller. Check that this is the right file."
    )


def check_definition(content: bytes, file: Path) -> tuple[bytes, str | None]:
    """A `tokenizer.json` as it was checked, for the library to load, and what in it may be slow, None if nothing.

    TokenizerError for what no tokenizer needs: tokens of thousands of characters, the same part twice. Content
    that is not JSON passes: the library explains that better.
    """
    try:
        parts = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content, "JSON that only the library may be able to read"
    if not isinstance(parts, dict):
        return content, "JSON that is no object"
    _check_no_part_twice(content, file)
    added, model = parts.get("added_tokens"), parts.get("model")
    model = model if isinstance(model, dict) else {}
    pieces = model.get("vocab")
    if isinstance(pieces, list):  # Unigram
        pieces = [pair[0] for pair in pieces if isinstance(pair, list) and pair and isinstance(pair[0], str)]
        check_tokens(pieces, file, _MAX_UNIGRAM_STATES, "tokens of a Unigram model")
    elif isinstance(pieces, dict):
        check_tokens(pieces, file)
    listed = added if isinstance(added, list) else ()
    contents = (str(token.get("content")) for token in listed if isinstance(token, dict))
    check_tokens(contents, file, MAX_ADDED_STATES)
    because = _find_slow_step(parts, file) or _find_slow_model(model)
    try:  # serialized again, so that the library reads exactly what was checked
        return orjson.dumps(parts), because
    except orjson.JSONEncodeError:
        return content, "JSON that is nested too deep"


def check_tokens(tokens: Iterable[str], file: Path, most: int | None = None, what: str = "added tokens") -> None:
    """Raise TokenizerError for a token of thousands of characters, or if all together take too much memory.

    The library searches texts for tokens with an automaton that has a state for each distinct prefix of a token.
    """
    texts = list(tokens)
    longest = max(texts, key=len, default="")
    if len(longest) > MAX_TOKEN:
        raise TokenizerError(
            f"{file}: a token of {len(longest):,} characters ({longest[:20]!r}…), and none may have more than "
            f"{MAX_TOKEN:,}.\nNo sampler has such tokens. Download the tokenizer again."
        )
    if most is None or 4 * sum(map(len, texts)) <= most:  # a character has four bytes at most
        return
    states = count_prefixes(texts)
    if states > most:
        raise TokenizerError(
            f"{file}: {len(texts):,} {what} that have {states:,} different beginnings, and {most:,} are the "
            "most.\nThey would take gigabytes of memory. Download the tokenizer again."
        )


def count_prefixes(texts: Iterable[str]) -> int:
    """How many distinct prefixes these texts have, in bytes: the nodes of their trie."""
    ordered = sorted({text.encode("utf-8", "surrogatepass") for text in texts})
    return sum(map(len, ordered)) - sum(len(os.path.commonprefix(pair)) for pair in pairwise(ordered))  # noqa: RUF071 - of bytes


def _check_no_part_twice(content: bytes, file: Path) -> None:
    """Raise TokenizerError if an object has one of the parts twice: it is unknown which one counts."""
    keys = [b'"%s"' % part.encode() for part in _PARTS]
    twice = any(content.count(key) > 1 and len(re.findall(key + rb"\s*:\s*[{\[n]", content)) > 1 for key in keys)
    if not twice and _ESCAPED_LETTER.search(content) is None:
        return

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        whole = dict(pairs)
        if len(whole) < len(pairs):
            names = [name for name, _ in pairs]
            part = next((part for part in _PARTS if names.count(part) > 1), None)
            if part is not None:
                raise TokenizerError(
                    f"{file}: `{part}` is there more than once, so it is unknown which one counts.\n"
                    "Download the tokenizer again."
                )
        return whole

    json.loads(content, object_pairs_hook=refuse_twice)


_KNOWN_BRANCHES = r"""
'(?:[sdmt]|ll|ve|re)
'(?i:[sdmt]|ll|ve|re)
(?i:'s|'t|'re|'ve|'m|'ll|'d)
(?i:[sdmt]|ll|ve|re)
's
't
're
've
'm
'll
'd
 ?\p{L}+
 ?\p{N}+
 ?[^\s\p{L}\p{N}]+
 ?[^\s\p{L}\p{N}]+[\r\n]*
 ?[^\s\p{L}\p{N}]+[\r\n/]*
 ?[\p{P}\p{S}]+[\r\n]*
[^\r\n\p{L}\p{N}]?\p{L}+
[^\r\n\p{L}\p{N}]?+\p{L}+
[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
\p{N}
\p{N}+
\p{N}{1,3}
\p{N}{1,2}
\p{Nd}
\p{Nd}{1,3}
\d
\d+
\d{1,3}
[0-9]
[0-9][0-9][0-9]
[\r\n]
[\r\n]+
\s?\p{L}+
\s?\p{P}+
\s?[!-/:-~！-／：-～‘-‟　-。]+
[一-龥ࠀ-一가-퟿]+
[一-龥぀-ゟ゠-ヿ]+
[\p{Han}]+
\p{Han}+
\s+(?!\S)
\s+
\s
\n
\n+
\s*[\r\n]+
\s*[\r\n]
\s*\r?\n
"""
"""Branches of the regexes of published tokenizers, one a line; a space is one more."""
_ANY_BRANCH = "|".join(map(re.escape, [*_KNOWN_BRANCHES.strip("\n").split("\n"), " "]))
_KNOWN_REGEX = f"(?:{_ANY_BRANCH})(?:\\|(?:{_ANY_BRANCH}))*"
_LINE_BREAK_BRANCHES = frozenset((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\r?\n"))
"""Fast only if another branch matches the white space without a line break that these scan."""
_LINEAR_STEPS = frozenset(
    (
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
        *("Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "UnicodeScripts", "BertPreTokenizer"),
        *("CharDelimiterSplit", "Metaspace", "ByteLevel", "BertProcessing", "RobertaProcessing"),
    )
)


def _find_slow_step(parts: Mapping[str, Any], file: Path) -> str | None:
    """The first step that is not known to be fast, in a few words; None if all are."""
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        steps = flatten_steps(parts.get(name))
        if len(steps) > _MAX_STEPS:
            raise TokenizerError(
                f"{file}: its {name} has {len(steps):,} steps, and none may have more than {_MAX_STEPS}.\n"
                "No sampler has such a tokenizer. Download it again."
            )
        if len(steps) > _MAX_TRUSTED_STEPS:
            return f"a {name} of {len(steps):,} steps"
        for step in steps:
            if not isinstance(step, dict):
                return f"a {name} with the step {str(step)[: 2 * _MAX_AFFIX]}"
            if not _is_linear_step(step):
                shown = {key: step[key] for key in ("type", "pattern") if key in step}
                return f"a {name} with the step {str(shown)[: 2 * _MAX_AFFIX]}"
    return None


def _is_linear_step(step: dict[str, Any]) -> bool:
    """Whether a step takes linear time and memory and never makes a text longer."""
    kind, pattern, content = step.get("type"), step.get("pattern"), step.get("content")
    if kind in _LINEAR_STEPS:
        return True
    if kind == "Prepend":
        return isinstance(step.get("prepend"), str) and len(step["prepend"]) <= _MAX_AFFIX
    if kind == "FixedLength":
        return isinstance(step.get("length"), int) and step["length"] > 0
    if kind in ("Split", "Replace") and isinstance(pattern, dict) and len(pattern) == 1:
        form, text = next(iter(pattern.items()))
        if form not in ("String", "Regex") or not isinstance(text, str) or not text:
            return False
        shortest = len(text) if form == "String" else 1
        grows = kind == "Replace" and not (isinstance(content, str) and len(content) <= shortest)
        if grows or form == "String" or len(text) > _MAX_REGEX:
            return not grows and form == "String"
        # Some files hold line breaks themselves, others their escapes.
        regex = text.replace("\r", r"\r").replace("\n", r"\n")
        branches = set(regex.split("|"))
        fast = r"\s+" in branches or branches.isdisjoint(_LINE_BREAK_BRANCHES)
        return fast and re.fullmatch(_KNOWN_REGEX, regex) is not None
    if kind == "TemplateProcessing":  # each of its sequences at most once
        for pieces in (step.get("single"), step.get("pair")):
            if not isinstance(pieces, list) or len(pieces) > _MAX_AFFIX:
                return False
            sequences = [piece.get("Sequence") for piece in pieces if isinstance(piece, dict)]
            named = [str(sequence.get("id")) for sequence in sequences if isinstance(sequence, dict)]
            if len(named) != len(set(named)):
                return False
        return True
    return False


def _find_slow_model(model: Mapping[str, Any]) -> str | None:
    """What in a model may be slow or may crash the library, in a few words; None if nothing does."""
    kind, tokens, prefix = model.get("type"), model.get("vocab"), model.get("continuing_subword_prefix")
    if isinstance(tokens, list):
        texts = (str(pair[0]) for pair in tokens if isinstance(pair, list) and pair)
        return "long tokens of Unigram" if any(len(text) > _MAX_UNIGRAM_TOKEN for text in texts) else None
    if kind not in (None, "BPE", "Unigram", "WordLevel", "WordPiece"):
        return "a model that is not known"
    longest = model.get("max_input_chars_per_word", 0)
    if kind == "WordPiece" and (not isinstance(longest, int) or longest > _MAX_WORDPIECE_WORD):
        return "words of any length in WordPiece"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(str(model.get(name) or "")) > _MAX_AFFIX:
            return f"a long {name}"
    # For each merge, BPE cuts the length of the prefix off the second token: inside a character it crashes.
    return "merges of BPE with a prefix" if prefix and kind in (None, "BPE") else None
