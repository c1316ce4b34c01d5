"""What the files of a tokenizer may be: plain files of bounded size that hold what they should.

A tokenizer comes from strangers, and some of what its file may say takes for ever on some text, or all memory: a
regex that backtracks, a replacement that doubles the text thirty times. Published tokenizers use a few steps and
regexes, which are listed here. What is not listed may be harmless too, but runs in a process of its own
(`limited.py`). Few things are refused at once: those that no tokenizer needs and that no process could bear.
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
from tito_audit.tokens.vocab import flat_steps

DEFINITION_BYTES = 256 << 20
"""The largest `tokenizer.json`, or other vocabulary; that of gemma-3 has 33 MB."""
SETTINGS_BYTES = 32 << 20
TEMPLATE_BYTES = 4 << 20
LONGEST_TOKEN = 4096
"""Characters of one token; published ones have up to a few hundred."""
ADDED_STATES = 300_000
"""States of the automaton of added tokens, of up to 2 kB each; a speech model's 65,536 tokens have 200,000."""
_UNIGRAM_STATES = 2_000_000
"""States of the trie of a Unigram model, of up to 360 bytes each; 250,000 tokens have about a million."""
_UNIGRAM_TOKEN = 128
"""Characters of a token of Unigram, which looks for tokens from each place of a text on."""
_MOST_STEPS = 64
"""No part has more steps."""
_FEW_STEPS = 16
_SHORT = 64
"""Characters of a prefix, a suffix or a replacement."""
_WORD = 1000
"""WordPiece takes time by the square of the longest word that it reads."""
_LONGEST_REGEX = 4096
_WITHOUT_WAITING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Opens a pipe too, without waiting for someone to write to it."""
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_ESCAPED = re.compile(rb"\\u00[2567]")
"""A letter that is written as whoever hides one would write it."""


@contextmanager
def reading_definition(where: Path | str) -> Iterator[None]:
    """A block that reads the files of a tokenizer: TokenizerError for whatever they hold that no tokenizer has.

    `where`: the folder or the file, for the message.
    """
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
    """The content of a plain file; TokenizerError if it is something else, too large or unreadable.

    FileNotFoundError if there is none.
    """
    try:
        with os.fdopen(os.open(file, _WITHOUT_WAITING), "rb") as source:
            _check_kind(file, os.fstat(source.fileno()), limit, what)
            content = source.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TokenizerError(f"{file}: this {what} cannot be read ({error}).") from error
    if len(content) > limit:
        raise _too_large(file, len(content), limit, what)
    return content


def check_file(file: Path) -> None:
    """TokenizerError for a definition that is no plain file or too large; nothing is read."""
    try:
        _check_kind(file, file.stat(), DEFINITION_BYTES, "tokenizer")
    except OSError as error:
        raise TokenizerError(f"{file}: this tokenizer cannot be read ({error}).") from error


def read_template(file: Path) -> str:
    """The text of a chat template's file; TokenizerError or UnicodeDecodeError if it has none."""
    text = read_file(file, TEMPLATE_BYTES, what="chat template").decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_kind(file: Path, there: os.stat_result, limit: int, what: str) -> None:
    if not stat.S_ISREG(there.st_mode):
        raise TokenizerError(f"{file}: this {what} cannot be read (it is not a plain file).")
    if there.st_size > limit:
        raise _too_large(file, there.st_size, limit, what)


def _too_large(file: Path, size: int, limit: int, what: str) -> TokenizerError:
    return TokenizerError(
        f"{file}: this {what} has {size:,} bytes, and none may have more than {limit:,}.\n"
        "A real one is far smaller. Check that this is the right file."
    )


def checked_definition(content: bytes, file: Path) -> tuple[bytes, str | None]:
    """A `tokenizer.json` as it was checked, for the library to load, and what in it is not known to be quick, in a
    few words; None if everything is.

    TokenizerError for what no tokenizer needs: tokens of thousands of characters, the same part twice. Content
    that is no JSON passes: the library has better words for it.
    """
    try:
        parts = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content, "JSON that only the library may be able to read"
    if not isinstance(parts, dict):
        return content, "JSON that is no object"
    _check_once(content, file)
    added, model = parts.get("added_tokens"), parts.get("model")
    model = model if isinstance(model, dict) else {}
    pieces = model.get("vocab")
    if isinstance(pieces, list):  # Unigram
        pieces = [pair[0] for pair in pieces if isinstance(pair, list) and pair and isinstance(pair[0], str)]
        check_tokens(pieces, file, _UNIGRAM_STATES, "tokens of a Unigram model")
    elif isinstance(pieces, dict):
        check_tokens(pieces, file)
    listed = added if isinstance(added, list) else ()
    check_tokens((str(token.get("content")) for token in listed if isinstance(token, dict)), file, ADDED_STATES)
    because = _unknown_step(parts, file) or _unknown_model(model)
    try:  # written again, so that the library reads what was read here, however the file is written
        return orjson.dumps(parts), because
    except orjson.JSONEncodeError:
        return content, "JSON that is nested too deep"


def check_tokens(tokens: Iterable[str], file: Path, most: int | None = None, what: str = "added tokens") -> None:
    """TokenizerError for a token of thousands of characters, or if all would take too much memory together.

    The library searches texts for tokens by an automaton, which has a state for each different beginning of one.
    """
    texts = list(tokens)
    longest = max(texts, key=len, default="")
    if len(longest) > LONGEST_TOKEN:
        raise TokenizerError(
            f"{file}: a token of {len(longest):,} characters ({longest[:20]!r}…), and none may have more than "
            f"{LONGEST_TOKEN:,}.\nNo sampler has such tokens. Download the tokenizer again."
        )
    if most is None or 4 * sum(map(len, texts)) <= most:  # a character has four bytes at most
        return
    states = beginnings(texts)
    if states > most:
        raise TokenizerError(
            f"{file}: {len(texts):,} {what} that have {states:,} different beginnings, and {most:,} are the "
            "most.\nThey would take gigabytes of memory. Download the tokenizer again."
        )


def beginnings(texts: Iterable[str]) -> int:
    """How many different beginnings texts have, in bytes."""
    ordered = sorted({text.encode("utf-8", "surrogatepass") for text in texts})
    return sum(map(len, ordered)) - sum(len(os.path.commonprefix(pair)) for pair in pairwise(ordered))  # noqa: RUF071 - of bytes


def _check_once(content: bytes, file: Path) -> None:
    """TokenizerError if an object names one of the parts twice: it is unknown which one counts."""
    keys = [b'"%s"' % part.encode() for part in _PARTS]
    several = any(content.count(key) > 1 and len(re.findall(key + rb"\s*:\s*[{\[n]", content)) > 1 for key in keys)
    if not several and _ESCAPED.search(content) is None:
        return

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        whole = dict(pairs)
        if len(whole) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next((part for part in _PARTS if names.count(part) > 1), None)
            if twice is not None:
                raise TokenizerError(
                    f"{file}: `{twice}` is there more than once, so it is unknown which one counts.\n"
                    "Download the tokenizer again."
                )
        return whole

    json.loads(content, object_pairs_hook=once)


_BRANCHES = r"""
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
"""Branches of the regexes of published tokenizers, one a line; one more is a space."""
_KNOWN_REGEX = "(?:{0})(?:\\|(?:{0}))*".format("|".join(map(re.escape, [*_BRANCHES.strip("\n").split("\n"), " "])))
_LINES = frozenset((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\r?\n"))
"""Quick only where another branch takes the white space without a line break that they look through."""
_HARMLESS = frozenset(
    (
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
        *("Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "UnicodeScripts", "BertPreTokenizer"),
        *("CharDelimiterSplit", "Metaspace", "ByteLevel", "BertProcessing", "RobertaProcessing"),
    )
)


def _unknown_step(parts: Mapping[str, Any], file: Path) -> str | None:
    """The first step of a tokenizer that is not known to be quick, in a few words; None if all are."""
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        steps = flat_steps(parts.get(name))
        if len(steps) > _MOST_STEPS:
            raise TokenizerError(
                f"{file}: its {name} has {len(steps):,} steps, and none may have more than {_MOST_STEPS}.\n"
                "No sampler has such a tokenizer. Download it again."
            )
        if len(steps) > _FEW_STEPS:
            return f"a {name} of {len(steps):,} steps"
        for step in steps:
            if not (isinstance(step, dict) and _is_quick(step)):
                shown = {key: step[key] for key in ("type", "pattern") if key in step} if _is(step) else step
                return f"a {name} with the step {str(shown)[: 2 * _SHORT]}"
    return None


def _is(step: Any) -> bool:
    return isinstance(step, dict)


def _is_quick(step: dict[str, Any]) -> bool:
    """Whether a step takes time and memory in proportion to the text, and makes none longer."""
    kind, pattern, content = step.get("type"), step.get("pattern"), step.get("content")
    if kind in _HARMLESS:
        return True
    if kind == "Prepend":
        return isinstance(step.get("prepend"), str) and len(step["prepend"]) <= _SHORT
    if kind == "FixedLength":
        return isinstance(step.get("length"), int) and step["length"] > 0
    if kind in ("Split", "Replace") and isinstance(pattern, dict) and len(pattern) == 1:
        form, text = next(iter(pattern.items()))
        if form not in ("String", "Regex") or not isinstance(text, str) or not text:
            return False
        shortest = len(text) if form == "String" else 1
        grows = kind == "Replace" and not (isinstance(content, str) and len(content) <= shortest)
        return not grows and (form == "String" or _is_known(text))
    if kind == "TemplateProcessing":  # each of its sequences at most once
        for pieces in (step.get("single"), step.get("pair")):
            if not isinstance(pieces, list) or len(pieces) > _SHORT:
                return False
            named = [
                str(piece["Sequence"].get("id")) for piece in pieces if _is(piece) and _is(piece.get("Sequence"))
            ]
            if len(named) != len(set(named)):
                return False
        return True
    return False


def _is_known(regex: str) -> bool:
    """Whether a regex is an alternative of branches that are known to be quick."""
    if len(regex) > _LONGEST_REGEX:
        return False
    # Some files have the line breaks themselves where others have their escapes.
    regex = regex.replace("\r", r"\r").replace("\n", r"\n")
    branches = set(regex.split("|"))
    return re.fullmatch(_KNOWN_REGEX, regex) is not None and (r"\s+" in branches or not branches & _LINES)


def _unknown_model(model: Mapping[str, Any]) -> str | None:
    """What about a model is not known to be quick, or may crash the library; None if nothing is."""
    kind, tokens, prefix = model.get("type"), model.get("vocab"), model.get("continuing_subword_prefix")
    if isinstance(tokens, list):
        texts = (str(pair[0]) for pair in tokens if isinstance(pair, list) and pair)
        return "long tokens of Unigram" if any(len(text) > _UNIGRAM_TOKEN for text in texts) else None
    if kind not in (None, "BPE", "Unigram", "WordLevel", "WordPiece"):
        return "a model that is not known"
    longest = model.get("max_input_chars_per_word", 0)
    if kind == "WordPiece" and (not isinstance(longest, int) or longest > _WORD):
        return "words of any length in WordPiece"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(str(model.get(name) or "")) > _SHORT:
            return f"a long {name}"
    # BPE cuts the second token of each merge by the bytes of its prefix, and may crash within a character.
    return "merges of BPE with a prefix" if prefix and kind in (None, "BPE") else None
