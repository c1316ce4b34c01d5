"""Text to ids, each distinct text once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

CACHED_CHARACTERS = 32 * 1024 * 1024
"""How much text a tokenizer remembers the ids of; with its ids about four bytes a character."""


@dataclass
class Tokenizer:
    """A tokenizer with its chat templates. It adds no special tokens: what encodes is the text alone.

    A text with lone surrogates, which no UTF-8 log can hold but `"\\ud83d"` in JSON can, is encoded
    with U+FFFD in their place, a surrogate pair as the character it means.
    """

    name: str
    """The folder or hub name it was loaded from."""
    backend: tokenizers.Tokenizer = field(repr=False)
    """The library's tokenizer, with truncation and padding off."""
    vocabulary: Vocabulary = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What a template reads as `bos_token`, `eos_token`, `pad_token` and so on."""
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Jinja sources by name; a single one is called "default". {} when it comes without."""
    eos_ids: tuple[int, ...] = ()
    """The end tokens that its files state: `eos_token` first, then those of the generation settings."""
    bos_id: int | None = None
    cached_characters: int = field(default=CACHED_CHARACTERS, repr=False)

    def __post_init__(self) -> None:
        self._cache: OrderedDict[str, Ids] = OrderedDict()
        self._held = 0

    def encode(self, text: str) -> Ids:
        """The ids of one text, `[N]` int32, not to be written to."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order. Equal texts are encoded once, in this call and across calls."""
        found: dict[str, Ids] = {}
        missing: list[str] = []
        for text in dict.fromkeys(texts):
            ids = self._cache.get(text)
            if ids is None:
                missing.append(text)
            else:
                self._cache.move_to_end(text)
                found[text] = ids
        if missing:
            encoded = self.backend.encode_batch_fast(
                [_well_formed(text) for text in missing], add_special_tokens=False
            )
            for text, encoding in zip(missing, encoded, strict=True):
                found[text] = _frozen(encoding.ids)
            self._remember((text, found[text]) for text in missing)
        return [found[text] for text in texts]

    def prefetch(self, texts: Sequence[str]) -> None:
        """Encode texts that will be asked for, several at a time."""
        self.encode_batch(texts)

    def _remember(self, entries: Iterable[tuple[str, Ids]]) -> None:
        """Keep these, and let the texts go that were not asked for the longest."""
        for text, ids in entries:
            if len(text) > self.cached_characters // 4:
                continue
            self._cache[text] = ids
            self._held += len(text)
        while self._held > self.cached_characters:
            text, _ = self._cache.popitem(last=False)
            self._held -= len(text)


def _frozen(values: list[int]) -> Ids:
    ids: Ids = np.array(values, np.int32) if values else empty_ids()
    ids.flags.writeable = False
    return ids


def _well_formed(text: str) -> str:
    """The text as UTF-8 can write it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
