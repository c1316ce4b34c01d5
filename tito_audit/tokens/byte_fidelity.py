"""Whether the tokens of a text are known to have exactly its bytes, without joining them.

A byte-level tokenizer whose parts are all known here may leave out bytes of a text, but never adds or changes any:
if as many bytes come out as went in, they are the same. A tokenizer that normalises to NFC has this property for
texts that NFC leaves unchanged.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import tokenizers

_ASCII = bytes(range(0x80))
_LAST_OF_ALPHABET = "\u0143"
"""The last of the characters by which byte-level vocabularies write bytes."""
_LONGEST = 1 << 15
"""How many non-ASCII bytes are checked; with more, comparing the texts is just as fast."""
_LEFT_ALONE = re.compile(
    rb"(?:[\xc2-\xcb\xcf-\xd1][\x80-\xbf]"
    rb"|\xe2(?:\x80[\x82-\xbf]|[\x81\x82\x85-\x8b\x8d-\xaa\xac-\xae][\x80-\xbf])"
    rb"|\xe3(?:\x80[\x80-\xa9]|\x82[\x80-\x98\x9b-\xbf]|[\x81\x83-\xbf][\x80-\xbf])"
    rb"|[\xe4-\xe9\xeb\xec][\x80-\xbf]{2}|\xea[\xb0-\xbf][\x80-\xbf]|\xed[\x80-\x9d][\x80-\xbf]"
    rb"|\xef(?:[\xbc-\xbf][\x80-\xbf]|\xb8[\x80-\x8f])"
    rb"|\xf0\x9f[\x80-\xbf]{2})*"
)
"""Characters that NFC never changes, moves or joins to the one before: Latin, Cyrillic, most symbols, kana,
Chinese, Korean syllables, emoji."""


def is_plain(data: bytes) -> bool:
    """Whether NFC is known to leave this UTF-8 text unchanged."""
    if data.isascii():
        return True
    rest = data.translate(None, _ASCII)
    return len(rest) <= _LONGEST and _LEFT_ALONE.fullmatch(rest) is not None


def keeps_bytes(form: str | None, data: bytes) -> bool:
    """Whether tokens with as many bytes as this text are known to have the same bytes; `form`: see
    `normal_form`."""
    return form is not None and (not form or is_plain(data))


@lru_cache(maxsize=8)
def normal_form(backend: tokenizers.Tokenizer) -> str | None:
    """How a tokenizer normalises a text before it splits it, "" or "NFC"; None if it may write other bytes."""
    try:
        normalizers = _steps(backend.normalizer, "normalizers")
        cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return None
    if any(step != {"type": "NFC"} for step in normalizers) or not _by_bytes(cuts) or not _has_all_bytes(backend):
        return None
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    if not all(map(_is_literal, contents)) or (normalizers and not all(is_plain(c.encode()) for c in contents)):
        return None
    return "NFC" if normalizers else ""


def _by_bytes(cuts: list[dict[str, Any]]) -> bool:
    """Whether text is only split and written as bytes."""
    kinds = [step.get("type") for step in cuts]
    prefixed = any(step.get("add_prefix_space") for step in cuts)
    return kinds.count("ByteLevel") == 1 and set(kinds) <= {"ByteLevel", "Split", "Digits"} and not prefixed


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether the model merges bytes into tokens and has a token for each byte, so every byte can be written."""
    from tokenizers import models, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE) or model.byte_fallback or model.unk_token is not None:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return all(model.token_to_id(character) is not None for character in pre_tokenizers.ByteLevel.alphabet())


def _is_literal(content: str) -> bool:
    """Whether an added token's bytes are certain to be its content, even if the model may produce its id too."""
    if not content.replace("▁", "").strip():
        return False
    ascii_signs = all("!" <= character <= "~" for character in content)
    return ascii_signs or max(content) > _LAST_OF_ALPHABET


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """One part of a tokenizer as its JSON steps; raises for a part that is code."""
    if part is None:
        return []
    pending, steps = [orjson.loads(part.__getstate__())], []
    while pending:
        step = pending.pop(0)
        if isinstance(step.get(name), list):
            pending = [*step[name], *pending]
        else:
            steps.append(step)
    return steps
