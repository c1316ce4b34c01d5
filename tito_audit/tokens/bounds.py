"""What the files of a tokenizer may be: plain files of bounded size that hold what they should.

`tokenizer.json` is looked at before the library loads it, at a fraction of what loading costs: everything before
its model is read as JSON, and the model itself, which holds a hundred thousand tokens, is only searched for texts
that are far too long. A file that is written in an unusual way is read completely.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tito_audit.errors import ODD_VALUES, TitoAuditError, TokenizerError, in_words
from tito_audit.tokens.known_steps import unknown_step
from tito_audit.tokens.tries import check_tries, long_piece

DEFINITION_BYTES = 256 << 20
"""The largest `tokenizer.json`, or other vocabulary; that of gemma-3 has 33 MB."""
SETTINGS_BYTES = 32 << 20
TEMPLATE_BYTES = 4 << 20
LONGEST_TOKEN = 4096
"""Characters of one token; published ones have up to a few hundred."""
_WITHOUT_WAITING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Opens a pipe too, without waiting for someone to write to it."""
_MODEL = b'"model"'
_KEYS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_NEXT = re.compile(rb'}\s*,\s*"([^"]*)"\s*:')
_OF_MODELS = frozenset(
    b"type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "
    b"vocab merges".split()
)
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
"""A prefix that is not empty. BPE cuts the second token of each merge by the bytes of its prefix: the library
makes broken text of some, and may crash while it says so."""
_LIST = re.compile(rb'"vocab"\s*:\s*\[')
_LETTERS = (b"2", b"5", b"6", b"7")
"""How the numbers of letters, quotes and the underscore begin, after `\\u00`."""


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
            f"should ({in_words(error)}).\nDownload it again, or pass the folder of another."
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


def check_file(file: Path, limit: int, *, what: str = "tokenizer") -> None:
    """TokenizerError for what is no plain file or too large; nothing is read."""
    try:
        _check_kind(file, file.stat(), limit, what)
    except OSError as error:
        raise TokenizerError(f"{file}: this {what} cannot be read ({error}).") from error


def read_template(file: Path) -> str:
    """The text of a chat template's file; TokenizerError or UnicodeDecodeError if it has none."""
    return (
        read_file(file, TEMPLATE_BYTES, what="chat template")
        .decode("utf-8")
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )


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


def check_definition(content: bytes, file: Path) -> str | None:
    """What in a `tokenizer.json` is not known to be quick, in a few words; None if nothing is.

    TokenizerError for what no tokenizer needs: tokens of thousands of characters, the same part twice. Content
    that is no JSON passes: the library has better words for it.
    """
    parts = _head(content)
    whole = parts is None
    try:
        parts = orjson.loads(content) if parts is None else parts
    except orjson.JSONDecodeError:
        return "JSON that only the library may be able to read"
    if not isinstance(parts, dict):
        return "JSON that is no object"
    if whole:
        twice = [key for key in _KEYS if len(re.findall(rb'"%s"\s*:\s*[{\[n]' % key.encode(), content)) > 1]
        if twice and not _unique(content, twice):
            raise TokenizerError(
                f"{file}: `{twice[0]}` is there more than once, so it is unknown which one counts.\n"
                "Download the tokenizer again."
            )
        _check_lengths(parts.get("model"), file)
    added = parts.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping):
            check_token(token.get("content"), file)
    check_tries(parts, file)
    try:
        return unknown_step(parts) or long_piece(parts) or _prefixed(parts.get("model"), content)
    except ValueError as error:
        raise TokenizerError(f"{file}: {error}.\nNo sampler has such a tokenizer. Download it again.") from None


def check_token(text: object, file: Path) -> None:
    """TokenizerError for a token of thousands of characters."""
    if isinstance(text, str) and len(text) > LONGEST_TOKEN:
        raise TokenizerError(
            f"{file}: a token of {len(text):,} characters ({text[:20]!r}…), and none may have more than "
            f"{LONGEST_TOKEN:,}.\nNo sampler has such tokens. Download the tokenizer again."
        )


def _head(content: bytes) -> dict[str, Any] | None:
    """Everything before the model; None if the model does not come last, is Unigram, or has odd texts."""
    start = content.find(_MODEL)
    if start < 0 or _has_long_text(content, start) or _has_list(content, start):
        return None
    if _goes_on(content, start) or _is_escaped(content) or _has_prefix(content):
        return None
    try:
        parts = orjson.loads(content[:start].rstrip().removesuffix(b",") + b"}")
    except orjson.JSONDecodeError:
        return None
    return parts if isinstance(parts, dict) and set(_KEYS) - {"model"} <= set(parts) else None


def _goes_on(content: bytes, start: int) -> bool:
    """Whether a part may begin after the model: what follows a closing brace, and is no setting of a model."""
    at = content.find(b"}", start)
    while at >= 0:
        following = _NEXT.match(content, at)
        if following is not None and following[1] not in _OF_MODELS:
            return True
        at = content.find(b"}", at + 1)
    return False


def _is_escaped(content: bytes) -> bool:
    """Whether letters are written as whoever hides a key would write them."""
    at = content.find(b"\\u00")
    while at >= 0:
        if content[at + 4 : at + 5] in _LETTERS:
            return True
        at = content.find(b"\\u00", at + 1)
    return False


def _has_list(content: bytes, start: int) -> bool:
    """Whether the vocabulary after a place is a list, as only that of Unigram is."""
    at = content.find(b'"vocab"', start)
    while at >= 0:
        if _LIST.match(content, at):
            return True
        at = content.find(b'"vocab"', at + 1)
    return False


def _prefixed(model: object, content: bytes) -> str | None:
    """What the library may crash on, in a few words; None if nothing is there."""
    if not isinstance(model, dict) or model.get("type") in ("WordPiece", "WordLevel", "Unigram"):
        return None
    has_one = model.get("continuing_subword_prefix") or _has_prefix(content)
    return "merges of BPE with a prefix" if has_one else None


def _has_prefix(content: bytes) -> bool:
    """Whether a model has a prefix of the pieces within words."""
    at = content.find(b'"continuing_subword_prefix"')
    while at >= 0:
        if _PREFIX.match(content, at):
            return True
        at = content.find(b'"continuing_subword_prefix"', at + 1)
    return False


def _has_long_text(content: bytes, start: int) -> bool:
    """Whether two quotes from a place on are very far from each other."""
    # There is no quote in one of these blocks then; looking for one in each takes a tenth of finding all.
    block = LONGEST_TOKEN // 2
    if all(content.find(b'"', at, at + block) >= 0 for at in range(start, len(content) - block + 1, block)):
        return False
    data = np.frombuffer(content, np.uint8)[start:]
    quotes = np.flatnonzero(data == ord('"'))
    gaps = np.diff(quotes, append=len(data))
    return bool(gaps.size and gaps.max() > LONGEST_TOKEN)


def _check_lengths(model: object, file: Path) -> None:
    """TokenizerError for a vocabulary with tokens that are far too long."""
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for text in _texts(vocabulary):
        if len(text) > LONGEST_TOKEN:
            check_token(text, file)


def _texts(vocabulary: object) -> Iterator[str]:
    if isinstance(vocabulary, dict):
        yield from vocabulary
    elif isinstance(vocabulary, list):
        yield from (pair[0] for pair in vocabulary if isinstance(pair, list) and pair and isinstance(pair[0], str))


def _unique(content: bytes, keys: list[str]) -> bool:
    """Whether no object of the outermost two levels names one of these keys twice."""
    import json

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs) and any(sum(name == key for name, _ in pairs) > 1 for key in keys):
            raise _Twice
        return found

    try:
        json.loads(content, object_pairs_hook=once)
    except _Twice:
        return False
    except (ValueError, RecursionError):
        return True
    return True


class _Twice(Exception):
    pass
