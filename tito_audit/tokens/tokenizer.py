"""Text to ids, each distinct segment once, and what a fast encoder says proved by the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tito_audit.errors import TokenizerError
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.tokens.byte_fidelity import normal_form
from tito_audit.tokens.cache import Store, Tables
from tito_audit.tokens.encoders import Encoder, FastEncoder, ReferenceEncoder, on_one_processor
from tito_audit.tokens.prefix_cache import KnownTexts, PrefixEncoder
from tito_audit.tokens.segments import Cuts, SegmentEncoder, find_cuts
from tito_audit.tokens.selfcheck import disagreement, probes, shown
from tito_audit.tokens.verify_pieces import Piece, picked_segments, pieces_to_prove
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    import tokenizers

    from tito_audit.tokens.split_points import SafeCuts

_CACHED_CHARACTERS = 32 * 1024 * 1024
"""How much text a tokenizer remembers the ids of; with its ids about four bytes a character."""
_FAST_CACHED_CHARACTERS = 8 * 1024 * 1024
"""The same for the fast encoder, which is asked again about whole texts only."""
_ONE_IN = 64
"""Of how many segments that agree with the log one is encoded by the reference all the same."""


@dataclass
class Tokenizer:
    """A tokenizer with its chat templates. It adds no special tokens: what encodes is the text alone.

    A text with lone surrogates, which no UTF-8 log can hold but `"\\ud83d"` in JSON can, is encoded
    with U+FFFD in their place, a surrogate pair as the character it means.

    `encode` is the word of the reference, `tokenizers`. `encode_fast_batch` is the word of a fast encoder
    once `use_fast` found one that can be trusted so far; what is reported is `proved` first.
    """

    name: str
    """The folder or hub name it was loaded from."""
    backend: tokenizers.Tokenizer = field(repr=False)
    """The library's tokenizer, with truncation and padding off; loaded late where a store has its tables."""
    vocabulary: Vocabulary = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What a template reads as `bos_token`, `eos_token`, `pad_token` and so on."""
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Jinja sources by name; a single one is called "default". {} when it comes without."""
    eos_ids: tuple[int, ...] = ()
    """The end tokens that its files state: `eos_token` first, then those of the generation settings."""
    bos_id: int | None = None
    store: Store | None = field(default=None, repr=False)
    """What earlier runs worked out about it; None: nothing is kept."""
    cached_characters: int = field(default=_CACHED_CHARACTERS, repr=False)
    encoder_notice: str | None = field(default=None, init=False, repr=False)
    """Why the run goes without the fast encoder, for the reader of a report; None where it was not wanted."""
    disagreements: int = field(default=0, init=False, repr=False)
    """How often the fast encoder was found wrong; the first time is the last."""

    def __post_init__(self) -> None:
        self._fast: PrefixEncoder | None = None
        self._fast_name = ""

    def encode(self, text: str) -> Ids:
        """The ids of one text, `[N]` int32, not to be written to."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order. Equal segments are encoded once, in this call and across calls."""
        return self._reference.encode_batch(texts)

    def prefetch(self, texts: Sequence[str]) -> None:
        """Encode texts that will be asked for, several at a time."""
        self.encode_batch(texts)

    def load(self) -> None:
        """Load what is loaded late otherwise, in every process that was forked meanwhile anew."""
        _ = self.cuts, self.backend.encode

    def save(self) -> None:
        """Keep what this run worked out for the next one, where there is a store."""
        if self.store is not None:
            self.store.save(
                lambda: Tables(
                    self.vocabulary.entries, self.cuts.tokens, self.normal_form, self.eos_ids, self.bos_id
                )
            )

    def use_fast(self, wanted: bool | None = None) -> bool:
        """True if a fast encoder is at work from now on.

        `None` tries, and leaves an `encoder_notice` where there is none that agrees with the reference;
        `True` raises TokenizerError there; `False` goes back to the reference. To be called before a
        process forks: no thread is started.
        """
        if wanted is False:
            self._fast = self.encoder_notice = None
            vars(self).pop("_known", None)
            return False
        if self._fast is not None:
            return True
        if not self.disagreements:  # what was wrong once is not asked again
            try:
                self.adopt(FastEncoder(self.backend))
            except TokenizerError as error:
                self._go_without(str(error))
        if wanted and self._fast is None:
            raise TokenizerError(
                f"{self.name}: the fast encoder that was asked for cannot be used.\n{self.encoder_notice}\n"
                "Leave the choice of the encoder to tito-audit."
            )
        return self._fast is not None

    def adopt(self, encoder: Encoder) -> bool:
        """True if this encoder passed the self-check: it is the fast one from now on."""
        refused = disagreement(ReferenceEncoder(self.backend), encoder, probes(self.vocabulary))
        if refused is not None:
            self._go_without(refused)
            return False
        # Whole texts: to cut, look up and join costs more than it takes fastokens to encode again.
        whole = SegmentEncoder(encoder.encode_batch, Cuts({}), _FAST_CACHED_CHARACTERS)
        self._fast = PrefixEncoder(whole, self.cuts)
        self._fast_name = encoder.name
        self.encoder_notice = None
        return True

    @property
    def encoder_name(self) -> str:
        """Which encoders are at work, as a report says it."""
        return (
            ReferenceEncoder.name
            if self._fast is None
            else f"{self._fast_name}, proved by {ReferenceEncoder.name}"
        )

    def check_fast(self, texts: Sequence[str]) -> bool:
        """True if the fast encoder gives these texts, a sample of a log, the ids of the reference.

        Otherwise the fast encoder is given up. No thread is started, so a process may fork afterwards; the
        reference encodes all of it, and remembers nothing.
        """
        fast = self._fast
        if fast is None:
            return True
        with on_one_processor():
            found = fast.encode_batch(texts)
        whole = ReferenceEncoder(self.backend).encode_alone(texts)
        for text, fast_ids, ids in zip(texts, found, whole, strict=True):
            if not np.array_equal(fast_ids, ids):
                self._give_up(text)
                return False
        return True

    def encode_fast_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text as the fast encoder has them; those of the reference where there is none."""
        return (self._fast or self._reference).encode_batch(texts)

    def proved(self, text: str, fast_ids: Ids, recorded_ids: Ids) -> Ids:
        """The ids of a text as the reference has them, `[N]` int32.

        `fast_ids` are taken over where `recorded_ids` has the same: of these nothing is reported. The reference
        encodes the others: the pieces of the text that hold them, where it is plain which these are, else the
        segments that stand nowhere in `recorded_ids` between the same control tokens.
        """
        if self._fast is None:
            return self.encode(text)
        if self._safe_cuts is not None:
            pieces = pieces_to_prove(text, fast_ids, recorded_ids, self.vocabulary, self.cuts, self._safe_cuts)
            if pieces is not None and self._agreed(pieces):
                return fast_ids
        parts = self.cuts.parts(text, fast_ids)
        if parts is None:
            return self._checked_whole(text, fast_ids)
        recorded = set(self.cuts.divide(recorded_ids))
        doubtful = [(segment, stretch[2]) for segment, stretch in parts if stretch not in recorded]
        return fast_ids if self._confirmed(doubtful) else self.encode(text)

    def leads_to(self, text: str, recorded_ids: Ids, one_in: int = _ONE_IN, *, goes_on: bool = False) -> bool:
        """True if `encode_fast_batch` gives these ids for a text, or them and more where it `goes_on`.

        What the text begins with and another one led to is not encoded again; of the rest the reference agrees
        on a sample.
        """
        known, shared = self._known.find(text)
        characters, first = known.up_to(shared) if known is not None else (0, 0)
        begun = known.ids[:first] if known is not None else empty_ids()
        if not np.array_equal(begun[: len(recorded_ids)] if goes_on else begun, recorded_ids[:first]):
            return False
        rest, left = text[characters:], recorded_ids[first:]
        if rest or not known:  # an encoder may make something of an empty text
            (fast,) = self.encode_fast_batch([rest])
            if not np.array_equal(fast[: len(left)] if goes_on else fast, left):
                return False
            if not self.sampled_check([rest], [fast], one_in):
                return False
        elif len(left):
            return False
        if not goes_on:
            self._known.keep(text, recorded_ids.copy(), known, shared)
        return True

    def sampled_check(self, texts: Sequence[str], fast_ids: Sequence[Ids], one_in: int = _ONE_IN) -> bool:
        """True if the reference agrees on a sample of the segments, the same one in every run.

        For texts of which all was recorded as the fast encoder has it. Otherwise it is given up.
        """
        if self._fast is None:
            return True
        sample: set[tuple[str, bytes]] = set()
        for text, ids in zip(texts, fast_ids, strict=True):
            picked = set(picked_segments(ids, self.cuts, one_in).tolist())
            if not picked:
                continue
            parts = self.cuts.parts(text, ids)
            if parts is None:
                sample.add((text, ids.tobytes()))
                continue
            for number, (segment, (_, _, data)) in enumerate(parts):
                if number in picked or (segment and not data):
                    sample.add((segment, data))
        return self._confirmed(sorted(sample))

    @cached_property
    def normal_form(self) -> str | None:
        """What is done to a text before it is cut, "" or "NFC"; None if other bytes may come out than went in."""
        if self.store is not None and self.store.tables is not None:
            return self.store.tables.normal_form
        return normal_form(self.backend)

    @cached_property
    def cuts(self) -> Cuts:
        """Where texts may be cut: at control tokens, by their literal text."""
        if self.store is not None and self.store.tables is not None:
            return Cuts(self.store.tables.cuts)
        return find_cuts(self.backend, self.vocabulary)

    @cached_property
    def _known(self) -> KnownTexts:
        """What led to recorded ids lately."""
        return KnownTexts(self.cuts)

    @cached_property
    def _safe_cuts(self) -> SafeCuts | None:
        """Where texts may be cut between words, if that is known."""
        from tito_audit.tokens.split_points import find_safe_cuts  # here: most runs have nothing to prove

        return find_safe_cuts(self.backend)

    @cached_property
    def _reference(self) -> SegmentEncoder:
        return SegmentEncoder(self._encode_by_reference, self.cuts, self.cached_characters)

    def _encode_by_reference(self, texts: Sequence[str]) -> list[Ids]:
        return ReferenceEncoder(self.backend).encode_batch(texts)

    def _go_without(self, because: str) -> None:
        self._fast = None
        self.encoder_notice = f"{self.name} is encoded by {ReferenceEncoder.name}, which is slower: {because}."

    def _confirmed(self, segments: Sequence[tuple[str, bytes]]) -> bool:
        """True if the reference gives every segment these ids; otherwise the fast encoder is given up."""
        found = self._reference.encode_segments([segment for segment, _ in segments])
        for (segment, data), ids in zip(segments, found, strict=True):
            if ids.tobytes() != data:
                self._give_up(segment)
                return False
        return True

    def _agreed(self, pieces: Sequence[Piece]) -> bool:
        """True if the reference gives every piece of a text these ids."""
        found = self.encode_batch([piece for piece, _ in pieces])
        return all(np.array_equal(ids, own) for (_, own), ids in zip(pieces, found, strict=True))

    def _checked_whole(self, text: str, fast_ids: Ids) -> Ids:
        """What the reference says of a whole text; the fast encoder is given up if it said otherwise."""
        ids = self.encode(text)
        if not np.array_equal(ids, fast_ids):
            self._give_up(text)
        return ids

    def _give_up(self, text: str) -> None:
        self.disagreements += 1
        self.encoder_notice = (
            f"{self._fast_name} disagreed with {ReferenceEncoder.name} at {shown(text)}; "
            f"the run went on with {ReferenceEncoder.name}."
        )
        self._fast = None
        vars(self).pop("_known", None)
