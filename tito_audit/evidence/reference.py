"""The canonical side of every comparison: what tokenizer and template write today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from tito_audit.align.pieces import Pieces
from tito_audit.evidence.roles import Headers, headers_of
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.memo import memoized
from tito_audit.record.prefix import same_ids, starts_with
from tito_audit.record.speakers import DEFAULT_SPEAKERS, Speakers
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Prefix, Vocabulary, keeps_bytes
from tito_audit.ways.recorded_values import turn_end_ids

_ONE_IN = 1024
"""One in this many segments that equal the recorded ids is checked with the reference encoder."""


@dataclass(slots=True)
class Reference:
    """A tokenizer and, if there is a chat template, the renderer."""

    tokenizer: Tokenizer
    renderer: Renderer | None
    speakers: Speakers = DEFAULT_SPEAKERS
    """Which roles were sampled."""

    vocabulary: Vocabulary = field(init=False)
    _end_ids: frozenset[int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.vocabulary = self.tokenizer.vocabulary

    def end_ids(self) -> frozenset[int]:
        """Ids that end a turn: the tokenizer's end tokens and those of published templates."""
        if self._end_ids is None:
            self._end_ids = turn_end_ids(self.vocabulary) | frozenset(self.tokenizer.eos_ids)
        return self._end_ids

    def headers(self, kwargs: Mapping[str, object]) -> Headers:
        """The message headers that the template writes with these arguments."""
        generation_prompt = self.renderer.generation_prompt(kwargs) if self.renderer is not None else ""
        return headers_in(self.vocabulary, generation_prompt, self.speakers)

    def pieces(self, ids: Ids, data: bytes | None = None) -> Pieces:
        """Token ids with their bytes, which are `data` if given; ids outside the vocabulary have none."""
        return pieces_of(ids, self.vocabulary, data)

    def pieces_of_each(self, several: Sequence[Ids]) -> list[Pieces]:
        """What `pieces` returns for each of several sequences, spelled at once."""
        ids = np.concatenate(several) if several else empty_ids()
        end, data, control = self.vocabulary.spell(ids)
        each, start, first = list[Pieces](), 0, 0
        for own in several:
            stop = start + len(own)
            last = int(end[stop - 1]) if stop > start else first
            # Copies: a difference keeps its own pieces, not those of the whole row.
            each.append(
                Pieces(
                    ids[start:stop].copy(), end[start:stop] - first, data[first:last], control[start:stop].copy()
                )
            )
            start, first = stop, last
        return each

    def has_bytes_of(self, ids: Ids, text: str) -> bool:
        """Whether these ids, an encoding of `text`, have its bytes; False if a normalizer changed them."""
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone surrogate, which no tokenizer keeps
            return False
        if len(data) != self.vocabulary.byte_count(ids):
            return False
        return keeps_bytes(self.tokenizer.normal_form, data) or self.vocabulary.bytes_of(ids) == data

    def spells(self, ids: Ids, text: str) -> bool:
        """Whether these ids decode to exactly this text; False for a text with U+FFFD, which may stand for any
        broken character."""
        return "\ufffd" not in text and self.decode(ids) == text

    @property
    def reencodes_exactly(self) -> bool:
        """Whether decoding the ids of any text and encoding them again gives the same ids."""
        tokenizer, vocabulary = self.tokenizer, self.vocabulary
        if tokenizer.normal_form is None or vocabulary.prefix is not Prefix.NEVER:
            return False
        return vocabulary.special_ids.issubset(tokenizer.control_tokens.tokens.values())

    def last_control_token(self, prompt: Ids) -> int:
        """The index of a prompt's last control token, 0 without one: what follows may merge with a completion."""
        end, size = len(prompt), 64
        while end:
            start = max(end - size, 0)
            control = self.vocabulary.control(prompt[start:end]).nonzero()[0]
            if len(control):
                return start + int(control[-1])
            end, size = start, 4 * size
        return 0

    def decode(self, ids: Ids) -> str:
        """The text of these ids, control tokens as their literal text."""
        return self.vocabulary.text(ids)

    def text_of(self, pieces: Pieces) -> str:
        """What `decode` returns for the ids of `pieces`, which need not be spelled again."""
        plain = self.vocabulary.prefix is Prefix.NEVER
        return pieces.data.decode("utf-8", errors="replace") if plain else self.decode(pieces.ids)

    def encode(self, text: str) -> Ids:
        """`[N]` today's ids of a text."""
        return self.tokenizer.encode(text)

    def encode_as(self, text: str, recorded: Ids, *, goes_on: bool = False) -> Ids:
        """`[N]` today's ids of a text, to be compared with `recorded`; with `goes_on`, the text may be longer.

        If the fast encoder gives the recorded ids, they are accepted and a sample is checked; otherwise the
        reference encoder decides.
        """
        (fast,) = self.tokenizer.encode_fast_batch([text])
        alike = starts_with(fast, recorded) if goes_on else same_ids(fast, recorded)
        if alike and self.tokenizer.check_sample([text], [fast], _ONE_IN):
            return fast
        return self.tokenizer.prove(text, fast, recorded)

    def encode_all_as(self, texts: Sequence[str], recorded: Sequence[Ids]) -> list[Ids]:
        """What `encode_as` returns for each of several texts, encoded in one batch."""
        fast = self.tokenizer.encode_fast_batch(texts)
        alike = list(map(same_ids, fast, recorded))
        equal = list(compress(texts, alike)), list(compress(fast, alike))
        agreed = self.tokenizer.check_sample(*equal, _ONE_IN)
        return [
            ids if agreed and same else self.tokenizer.prove(text, ids, own)
            for text, ids, own, same in zip(texts, fast, recorded, alike, strict=True)
        ]

    def leads_to(self, text: str, recorded: Ids, *, goes_on: bool = False) -> bool:
        """Whether a text encodes as these ids; with `goes_on`, as ids that start with these."""
        return self.tokenizer.encodes_to(text, recorded, _ONE_IN, goes_on=goes_on)


def pieces_of(ids: Ids, vocabulary: Vocabulary | None, data: bytes | None = None) -> Pieces:
    """Token ids with their bytes, which are `data` if given.

    Without a vocabulary the bytes of an id are its own four, so comparing bytes compares ids.
    """
    if vocabulary is None:
        plain = np.ascontiguousarray(ids, np.int32)
        return Pieces(plain, 4 * np.arange(1, len(ids) + 1), plain.tobytes(), np.zeros(len(ids), np.bool_))
    end, own, control = vocabulary.spell(ids)
    return Pieces(ids, end, own if data is None else data, control)


@memoized
def headers_in(vocabulary: Vocabulary, generation_prompt: str, speakers: Speakers) -> Headers:
    """The message headers of a template with this generation prompt, among the tokens of a vocabulary."""
    texts = {token: vocabulary.piece(token) for token in vocabulary.added_ids}
    headers = headers_of(generation_prompt, tuple(texts.values()), speakers)
    plain = vocabulary.added_ids - vocabulary.special_ids
    return replace(headers, ids=frozenset(token for token in plain if texts[token] in headers.literals))
