"""Text to ids: each distinct segment is encoded once, and the reference encoder proves what the fast one gives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from tito_audit.errors import TokenizerError
from tito_audit.record.arrays import Ids, Offsets, empty_ids
from tito_audit.record.prefix import common_ends, common_prefix, same_ids
from tito_audit.tokens.cache import LazyBackend, StoredTokenizer, Tables, compact_definition, excerpt_parts
from tito_audit.tokens.encoders import (
    Encoder,
    EncoderBuild,
    FastEncoder,
    ReferenceEncoder,
    find_disagreement,
    on_one_processor,
    probe_texts,
    quote_text,
)
from tito_audit.tokens.segments import (
    ControlTokens,
    KnownTexts,
    PrefixEncoder,
    SegmentEncoder,
    find_control_tokens,
)
from tito_audit.tokens.split_points import SafeCuts, find_safe_cuts
from tito_audit.tokens.vocab import Vocabulary, find_normal_form, keeps_bytes

if TYPE_CHECKING:
    import tokenizers


# What the reference must confirm of a text that the fast encoder encoded

Piece = tuple[str, Ids]
"""A piece of a text and the ids that a fast encoder gave it."""

_COMMON_END_BYTES = 4 * 4
"""Bytes of the four ids with which two segments must both end to be compared."""
_MAX_PIECE_TOKENS = 128
"""With more tokens in all pieces, other ways to confirm a text are cheaper."""
_MAX_CONFIRMED, _MAX_CONFIRMED_BYTES = 256, 1 << 16
"""How many confirmed segments are remembered, and the most bytes of ids of one."""
_MAX_COMPARED = 8
"""How many recorded segments a segment is compared with."""


def find_unproven_pieces(
    text: str, fast: Ids, recorded: Ids, vocabulary: Vocabulary, controls: ControlTokens, safe: SafeCuts
) -> Iterable[Piece] | None:
    """Pieces of a text that cover every fast token that is not recorded at the same bytes.

    None if they cannot be found: the fast tokens must spell the whole text, the recorded tokens at least its
    beginning, and every token must have bytes.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        return None
    ends, recorded_ends = _byte_ends(fast, vocabulary), _byte_ends(recorded, vocabulary)
    if ends is None or recorded_ends is None or ends[-1] != len(data) or recorded_ends[-1] > len(data):
        return None
    token_at = np.full(len(data) + 1, -1, np.int32)  # the recorded token that ends at each byte
    token_at[recorded_ends] = np.arange(len(recorded), dtype=np.int32)
    at = token_at[ends]
    same = recorded[at] == fast
    same &= at >= 0
    differing = (~same).nonzero()[0]
    whole = recorded_ends[-1] == len(data)
    if not whole and ends[ends.searchsorted(recorded_ends[-1])] != recorded_ends[-1]:
        return None
    between = controls.positions(fast)
    between = between[same[between]]
    starts, stops = np.concatenate(([0], between + 1)), np.concatenate((between, [len(fast)]))
    stretch_of = between.searchsorted(differing)
    pieces: list[Iterator[Piece]] = []
    for number in sorted(set(stretch_of.tolist())):
        start, stop = int(starts[number]), int(stops[number])
        first, last = int(ends[start - 1]) if start else 0, int(ends[stop - 1])
        # The text must spell the control tokens around the stretch: only there it may be cut.
        low, high = max(start - 1, 0), min(stop + 1, len(fast))
        around = data[int(ends[low - 1]) if low else 0 : int(ends[high - 1])]
        stretch_recorded = slice(
            int(token_at[first]) + 1, int(token_at[last]) + 1 if last < recorded_ends[-1] else None
        )
        stretch = data[first:last]
        begun = vocabulary.bytes_of(recorded[stretch_recorded])
        if vocabulary.bytes_of(fast[low:high]) != around or not stretch.startswith(begun):
            return None
        unproven, own_ends = differing[stretch_of == number] - start, ends[start:stop] - first
        pieces.append(_pieces_between_cuts(stretch, fast[start:stop], own_ends, unproven, safe))
    return chain.from_iterable(pieces)


def find_differing_piece(
    segment: str,
    data: bytes,
    place: bytes,
    recorded: Iterable[bytes],
    vocabulary: Vocabulary,
    safe: SafeCuts | None,
) -> tuple[Piece, bytes | None]:
    """The part of a segment that differs from a recorded segment, and the ids of that recorded segment.

    Compared are start and end with the recorded segment at the same `place`, and the end with others. The whole
    segment and None if none of them fits. Text that is inserted before an answer, or removed from it, leaves most
    of the answer's tokens as they were. `data`, `place` and `recorded` are ids as bytes.
    """
    ids, written = np.frombuffer(data, np.int32), segment.encode("utf-8", "replace")
    if safe is None or safe.spells_token(segment) or not len(ids):
        return (segment, ids), None
    ends, spelled, _ = vocabulary.spell(ids)
    places = [0, *ends.tolist()]
    if spelled != written or True in (ends[1:] == ends[:-1]) or not places[1]:  # a token without bytes
        return (segment, ids), None
    (head, tail), beside = common_ends(ids, np.frombuffer(place, np.int32)), place
    if 2 * (head + tail) < len(ids):
        alike = [each for each in recorded if each.endswith(data[-_COMMON_END_BYTES:])]
        for other in alike[:_MAX_COMPARED]:
            size = common_prefix(ids[::-1], np.frombuffer(other, np.int32)[::-1])
            head, tail, beside = (0, size, other) if size > head + tail else (head, tail, beside)
    if not head and not tail:
        return (segment, ids), None
    # Widen the differing part to safe cuts that are ends of tokens.
    stop = max(len(ids) - tail, min(head + 1, len(ids)))
    while head and not safe.may_cut(written, places[head]):
        head -= 1
    while stop < len(ids) and not safe.may_cut(written, places[stop]):
        stop += 1
    return (written[places[head] : places[stop]].decode(), ids[head:stop]), beside


def sample_segments(ids: Ids, controls: ControlTokens, one_in: int) -> list[int]:
    """The numbers of a sample of the non-empty segments between control tokens, about one in `one_in`.

    The choice depends only on a segment's length and its two ids at either end, not on what surrounds it.
    """
    if not len(ids):
        return []
    data, picked, start = np.ascontiguousarray(ids, np.int32).data.cast("B"), [], 0
    for number, end in enumerate([*controls.positions(ids).tolist(), len(ids)]):
        if end > start:
            first, last = data[4 * start : 4 * min(start + 2, end)], data[4 * max(end - 2, start) : 4 * end]
            if crc32(last, crc32(first, end - start)) % one_in == 0:
                picked.append(number)
        start = end + 1
    return picked


def _byte_ends(ids: Ids, vocabulary: Vocabulary) -> Offsets | None:
    """The byte at which each token ends, `[N]`; None if there are no tokens or one has no bytes."""
    lengths = vocabulary.byte_lengths(ids)
    if not len(ids) or lengths.min() < 1:
        return None
    ends: Offsets = lengths.cumsum()
    return ends


def _pieces_between_cuts(data: bytes, ids: Ids, ends: Offsets, tokens: Offsets, safe: SafeCuts) -> Iterator[Piece]:
    """The pieces between safe cuts that contain these `tokens`, made lazily: there may be one a token.

    Only cuts at the end of a token count.
    """
    text = data.decode("utf-8")
    cuts = safe.find(text)
    if len(text) != len(data):
        # The byte at which each character starts
        starts: Offsets = ((np.frombuffer(data, np.uint8) & 0xC0) != 0x80).nonzero()[0]
        cuts = starts[cuts]
    is_cut = np.zeros(len(data) + 1, np.bool_)
    is_cut[cuts] = True
    is_cut[-1] = True
    stops = is_cut[ends].nonzero()[0] + 1  # tokens up to each cut
    numbers = sorted(set(stops.searchsorted(tokens, side="right").tolist()))
    bounds = np.concatenate(([0], stops))
    at = np.concatenate(([0], ends[stops - 1]))
    for number in numbers:
        yield data[at[number] : at[number + 1]].decode("utf-8"), ids[bounds[number] : bounds[number + 1]]


_CACHED_CHARACTERS = 32 * 1024 * 1024
"""Characters of all cached segments; each takes about four bytes, ids included."""
_FAST_CACHED_CHARACTERS = 8 * 1024 * 1024
"""The same for the fast encoder, which encodes whole texts."""
_PIECES_AT_ONCE = 1 << 12
"""How many pieces the reference encodes at a time."""
_MAX_EXPECTED = 1 << 15
"""Characters of expected texts; later ones are ignored."""
_PASSED = {"passed": True}
_ONE_IN = 64
"""The reference checks one in this many segments that agree with the log."""


@dataclass
class Tokenizer:
    """A tokenizer with its chat templates. Encoding adds no special tokens.

    A lone surrogate, which JSON can hold as `"\\ud83d"` and UTF-8 cannot, is encoded as U+FFFD, a surrogate pair
    as its character.

    `encode` uses the reference, `tokenizers`. `encode_fast_batch` uses a fast encoder once `use_fast` has found
    one that passes its checks; `prove` its ids before reporting anything about them.
    """

    name: str
    """The folder or hub name it was loaded from, with the revision if one was given."""
    backend: tokenizers.Tokenizer = field(repr=False)
    """The library's tokenizer, without truncation and padding; loaded on first use if its tables are stored."""
    vocabulary: Vocabulary = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What a template reads as `bos_token`, `eos_token`, `pad_token` and so on."""
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Jinja sources by name; a single one is named "default"."""
    eos_ids: tuple[int, ...] = ()
    """The end tokens that its files state: `eos_token` first, then those of the generation settings."""
    bos_id: int | None = None
    folder: Path | None = field(default=None, repr=False)
    """The folder of its files; None if it was not loaded from files."""
    store: StoredTokenizer | None = field(default=None, repr=False)
    """The cache of what earlier runs computed about it; None: there is none."""
    commit: str | None = None
    """The commit of the hub repository that its files are from; None if they are from a folder."""
    cached_characters: int = field(default=_CACHED_CHARACTERS, repr=False)
    encoder_notice: str | None = field(default=None, init=False, repr=False)
    """Why the fast encoder is not used, for a report; None if it is, or was not wanted."""
    disagreements: int = field(default=0, init=False, repr=False)
    """How often the fast encoder was wrong; it is dropped the first time."""

    def __post_init__(self) -> None:
        self._fast: PrefixEncoder | None = None
        self._fast_name = ""
        self._fast_build: EncoderBuild | None = None
        self._confirmed_with: dict[tuple[str, bytes], bytes] = {}
        """By segment and its ids, the recorded segment beside which the reference confirmed them: later prompts
        hold both again."""
        self._self_check_note: str | None = None
        """The name of the note that says whether the fast encoder passed the self-check."""

    def encode(self, text: str) -> Ids:
        """The ids of one text, `[N]` int32, read-only."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order; equal segments are encoded once, within a call and across calls."""
        return self._reference.encode_batch(texts)

    @property
    def segments(self) -> SegmentEncoder:
        """The encoder behind `encode`."""
        return self._reference

    def load(self) -> None:
        """Load now what each forked process would otherwise load on first use."""
        _ = self.control_tokens, self.backend.model
        _ = self._safe_cuts if self._fast is not None else None

    def expect(self, texts: Iterable[str]) -> None:
        """Announce the texts that will be encoded soon: for a few, only parts of the tokenizer are loaded."""
        if isinstance(self.backend, LazyBackend):
            several = list(dict.fromkeys(texts))
            self.backend.excerpted &= bool(several)
            self.backend.expected = several[: bisect_right(list(accumulate(map(len, several))), _MAX_EXPECTED)]

    def save(self) -> None:
        """Store what this run computed for the next one."""
        if self.store is not None:
            entries = self.vocabulary.entries
            self.store.save(
                lambda: Tables(entries, self.control_tokens.tokens, self.normal_form, self.eos_ids, self.bos_id),
                # Making it takes a second, which pays off only with the fast encoder.
                definition=lambda: compact_definition(self.backend) if self._self_check_note is not None else None,
                merges=lambda: excerpt_parts(self.backend, entries, self.normal_form),
            )

    def start_building_fast(self) -> None:
        """Start building the fast encoder in a thread; do not fork before `use_fast`, which waits for it."""
        if self._fast is None and self._fast_build is None and not self.disagreements:
            store = self._unchanged_store
            if isinstance(self.backend, LazyBackend):
                self.backend.excerpted = False  # the self-check encodes too much for excerpts
            definition = store.definition if store is not None else None
            if definition is None:
                _ = self.backend.model  # load it here, not in two threads
            self._fast_build = EncoderBuild(lambda: FastEncoder(self.backend, definition))

    def use_fast(self, wanted: bool | None = None) -> bool:
        """Whether a fast encoder is used from now on.

        `None` tries one and leaves an `encoder_notice` if it cannot be used; `True` raises TokenizerError in that
        case; `False` goes back to the reference. Leaves no thread behind, so the process may fork afterwards.
        """
        if wanted is False:
            self._fast = self.encoder_notice = None
            vars(self).pop("_known_texts", None)
            return False
        if self._fast is not None:
            return True
        if not self.disagreements:  # not if it was wrong before
            try:
                self.start_building_fast()
                assert self._fast_build is not None, "it was begun"
                building, self._fast_build = self._fast_build, None
                encoder = building.encoder()
                store = self._unchanged_store
                self._self_check_note = f"self-check {encoder.build}"
                passed = store is not None and store.note(self._self_check_note) == _PASSED
                if self.adopt_fast(encoder, passed=passed) and store is not None and not passed:
                    store.add_note(self._self_check_note, _PASSED)
            except TokenizerError as error:
                self._refuse_fast(str(error))
        if wanted and self._fast is None:
            raise TokenizerError(
                f"{self.name}: the requested fast encoder cannot be used.\n{self.encoder_notice}\n"
                "Leave the choice of the encoder to tito-audit."
            )
        return self._fast is not None

    def adopt_fast(self, encoder: Encoder, *, passed: bool = False) -> bool:
        """Use this fast encoder if it passes the self-check, or `passed` it in an earlier run; whether it did."""
        if not passed:
            refused = find_disagreement(ReferenceEncoder(self.backend), encoder, probe_texts(self.vocabulary))
            if refused is not None:
                self._refuse_fast(refused)
                return False
        # Texts are not cut: cutting, looking up and joining takes longer than encoding again with fastokens.
        uncut, size = ControlTokens({}), _FAST_CACHED_CHARACTERS
        whole = SegmentEncoder(encoder.encode_batch, uncut, size, lambda: self._safe_cuts)
        self._fast = PrefixEncoder(whole, self.control_tokens)
        self._fast_name = encoder.name
        self.encoder_notice = None
        return True

    @property
    def encoder_name(self) -> str:
        """The encoders in use, as a report names them."""
        return (
            ReferenceEncoder.name
            if self._fast is None
            else f"{self._fast_name}, proved by {ReferenceEncoder.name}"
        )

    def encode_single_threaded(self, texts: Sequence[str]) -> list[Ids]:
        """The reference's ids of each text, without cache and threads: the process may fork afterwards."""
        return ReferenceEncoder(self.backend).encode_single_threaded(texts)

    def check_fast(self, texts: Sequence[str], reference_ids: Sequence[Ids] | None = None) -> bool:
        """Whether the fast encoder gives these texts, a sample of a log, the ids of the reference.

        If not, the fast encoder is dropped. Starts no thread, so the process may fork afterwards.
        """
        fast = self._fast
        if fast is None:
            return True
        with on_one_processor():
            fast_batch = fast.encode_batch(texts)
        whole = self.encode_single_threaded(texts) if reference_ids is None else reference_ids
        for text, fast_ids, ids in zip(texts, fast_batch, whole, strict=True):
            if not np.array_equal(fast_ids, ids):
                self._drop_fast(text)
                return False
        return True

    def encode_fast_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text by the fast encoder if there is one, else by the reference."""
        return (self._fast or self._reference).encode_batch(texts)

    def prove(self, text: str, fast_ids: Ids, recorded_ids: Ids) -> Ids:
        """The ids that the reference gives a text, `[N]` int32.

        Where `fast_ids` equal `recorded_ids` they are accepted, since nothing is reported there. The reference
        encodes the rest: the pieces of text with the other tokens, if these can be found, or else the segments
        that do not occur in `recorded_ids` between the same control tokens.
        """
        if self._fast is None:
            return self.encode(text)
        # Skip what both begin with, up to the last control token.
        begin, first = self.control_tokens.find_last_before(text, fast_ids, common_prefix(fast_ids, recorded_ids))
        parts = self.control_tokens.pair_segments(text[begin:], fast_ids[first:])
        stretches = self.control_tokens.id_segments(recorded_ids[first:])
        recorded, doubtful = set(stretches), []
        for at, (segment, stretch) in enumerate(parts or ()):
            if stretch not in recorded:
                place = stretches[at][2] if at == 0 or len(stretches) == len(parts or ()) else b""
                doubtful.append((segment, stretch[2], place))
        if parts and self._confirm_differing_pieces(doubtful, list(map(itemgetter(2), stretches))):
            return fast_ids
        controls, safe = self.control_tokens, self._safe_cuts
        if safe is not None:
            pieces = find_unproven_pieces(text, fast_ids, recorded_ids, self.vocabulary, controls, safe)
            if pieces is not None and self._confirm_pieces(pieces):
                return fast_ids
        if self.control_tokens.pair_segments(text, fast_ids) is None:
            ids = self.encode(text)
            if not np.array_equal(ids, fast_ids):
                self._drop_fast(text)
            return ids
        if parts and self._confirm_segments([(segment, data) for segment, data, _ in doubtful]):
            return fast_ids
        return self.encode(text)

    def encodes_to(self, text: str, recorded_ids: Ids, one_in: int = _ONE_IN, *, goes_on: bool = False) -> bool:
        """Whether `encode_fast_batch` gives a text these ids; with `goes_on`, ids that begin with them.

        What the text shares with an earlier text that encodes to its recorded ids is not encoded again. The
        reference must agree on a sample of the rest.
        """
        base, shared, characters, first = self._known_texts.find_longest(text)
        begun = base.ids[:first] if base is not None else empty_ids()
        if not same_ids(begun[: len(recorded_ids)] if goes_on else begun, recorded_ids[:first]):
            return False
        rest, left = text[characters:], recorded_ids[first:]
        if base and self.has_too_many_bytes(left, rest):
            return False
        if rest or not base:  # an empty text may have ids too
            (fast,) = self.encode_fast_batch([rest])
            if not same_ids(fast[: len(left)] if goes_on else fast, left):
                return False
            if not self.check_sample([rest], [fast], one_in):
                return False
        elif len(left):
            return False
        if not goes_on:
            self._known_texts.remember(text, recorded_ids.copy(), base, shared)
        return True

    def has_too_many_bytes(self, ids: Ids, text: str) -> bool:
        """Whether these ids have more bytes than the text, and encoding the text never adds bytes."""
        data = text.encode("utf-8", "surrogatepass")
        return self.vocabulary.byte_count(ids) > len(data) and keeps_bytes(self.normal_form, data)

    def check_sample(self, texts: Sequence[str], fast_ids: Sequence[Ids], one_in: int = _ONE_IN) -> bool:
        """Whether the reference agrees with the fast encoder on a sample of segments, the same in every run.

        For texts whose recorded ids are the fast ones. If the reference disagrees, the fast encoder is dropped.
        """
        if self._fast is None:
            return True
        sample: set[tuple[str, bytes]] = set()
        for text, ids in zip(texts, fast_ids, strict=True):
            picked = sample_segments(ids, self.control_tokens, one_in)
            if picked:
                parts = self.control_tokens.pick_segments(text, ids, picked)
                sample.update(parts if parts is not None else [(text, ids.tobytes())])
        return not sample or self._confirm_segments(sorted(sample))

    @cached_property
    def normal_form(self) -> str | None:
        """How texts are normalized before they are split, "" or "NFC"; None if encoding may change bytes."""
        if self.store is not None and self.store.tables is not None:
            return self.store.tables.normal_form
        return find_normal_form(self.backend)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens at which texts may be cut."""
        if self.store is not None and self.store.tables is not None:
            return ControlTokens(self.store.tables.cuts)
        return find_control_tokens(self.backend, self.vocabulary)

    @cached_property
    def _known_texts(self) -> KnownTexts:
        return KnownTexts(self.control_tokens)

    @cached_property
    def _safe_cuts(self) -> SafeCuts | None:
        """Where texts may be cut between words; None if unknown."""
        return find_safe_cuts(self.backend)

    @cached_property
    def _reference(self) -> SegmentEncoder:
        return SegmentEncoder(
            lambda texts: ReferenceEncoder(self.backend).encode_batch(texts),
            self.control_tokens,
            self.cached_characters,
            lambda: self._safe_cuts,
        )

    @property
    def _unchanged_store(self) -> StoredTokenizer | None:
        """The store; None if the tokenizer was changed since it was loaded."""
        return None if isinstance(self.backend, LazyBackend) and self.backend.changed else self.store

    def _refuse_fast(self, because: str) -> None:
        self._fast = None
        self.encoder_notice = f"{self.name} is encoded by {ReferenceEncoder.name}, which is slower: {because}."

    def _confirm_segments(self, segments: Sequence[tuple[str, bytes]]) -> bool:
        """Whether the reference gives each segment these ids; if not, the fast encoder is dropped."""
        batch = self._reference.encode_segments([segment for segment, _ in segments])
        for (segment, data), ids in zip(segments, batch, strict=True):
            if ids.tobytes() != data:
                self._drop_fast(segment)
                return False
        return True

    def _confirm_differing_pieces(
        self, segments: Sequence[tuple[str, bytes, bytes]], recorded: Collection[bytes]
    ) -> bool:
        """Whether the reference confirms where segments differ from recorded ones; False if that is much.

        A segment is its text, its ids, and the ids of the recorded segment at its place; see
        `find_differing_piece`.
        """
        pieces: list[Piece] = []
        size = 0
        beside: dict[tuple[str, bytes], bytes] = {}
        for segment, data, place in segments:
            if self._confirmed_with.get((segment, data)) not in recorded:
                around = recorded, self.vocabulary, self._safe_cuts
                piece, other = find_differing_piece(segment, data, place, *around)
                pieces.append(piece)
                size += len(piece[1])
                if other is not None and len(data) <= _MAX_CONFIRMED_BYTES:
                    beside[segment, data] = other
        if size > _MAX_PIECE_TOKENS or not self._confirm_pieces(pieces):
            return False
        if len(self._confirmed_with) > _MAX_CONFIRMED:
            self._confirmed_with.clear()
        self._confirmed_with |= beside
        return True

    def _confirm_pieces(self, pieces: Iterable[Piece]) -> bool:
        """Whether the reference gives each piece these ids."""
        rest = iter(pieces)
        while some := list(islice(rest, _PIECES_AT_ONCE)):
            texts, own = zip(*some, strict=True)
            if not all(map(same_ids, own, self._reference.encode_batch(texts))):
                return False
        return True

    def _drop_fast(self, text: str) -> None:
        self.disagreements += 1
        if self.store is not None and self._self_check_note is not None:
            self.store.add_note(self._self_check_note, {"passed": False})
        self.encoder_notice = (
            f"{self._fast_name} disagreed with {ReferenceEncoder.name} at {quote_text(text)}; "
            f"the run went on with {ReferenceEncoder.name}."
        )
        self._fast = None
        vars(self).pop("_known_texts", None)
