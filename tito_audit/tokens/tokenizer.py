"""Text to ids: each distinct segment is encoded once, and the reference verifies the fast encoder's ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from tito_audit.errors import TokenizerError
from tito_audit.record.arrays import Ids, Offsets, empty_ids
from tito_audit.record.prefix import common_ends, common_prefix, same_ids
from tito_audit.tokens.cache import LazyBackend, StoredTokenizer, Tables, definition_of, merges_of
from tito_audit.tokens.encoders import (
    Building,
    Encoder,
    FastEncoder,
    ReferenceEncoder,
    disagreement,
    on_one_processor,
    probes,
    shown,
)
from tito_audit.tokens.segments import Cuts, KnownTexts, PrefixEncoder, SegmentEncoder, find_cuts
from tito_audit.tokens.split_points import SafeCuts, find_safe_cuts
from tito_audit.tokens.vocab import Vocabulary, keeps_bytes, normal_form

if TYPE_CHECKING:
    import tokenizers

    from tito_audit.tokens.split_points import SafeCuts


# The pieces of a text, encoded by a fast encoder, that the reference must confirm.

Piece = tuple[str, Ids]
"""A piece of a text and the ids that a fast encoder gave it."""

_LIKEWISE = 4 * 4
"""How many bytes of ids two segments must end with in common to be compared: four ids."""
_WORTH = 128
"""From so many tokens on, finding the pieces takes less than encoding the segment."""
_REMEMBERED, _SHORT = 256, 1 << 16
"""How many of these segments are remembered, and of how many bytes of ids at most."""
_TRIED = 8
"""With how many recorded segments a segment is compared."""


def pieces_to_prove(
    text: str, fast: Ids, recorded: Ids, vocabulary: Vocabulary, controls: Cuts, safe: SafeCuts
) -> Iterable[Piece] | None:
    """Pieces of a text that cover every fast token that is not recorded at its place.

    None if they cannot be found: the fast tokens must spell the whole text, the recorded tokens at least its
    beginning, and all tokens need bytes.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        return None
    ends, recorded_ends = _ends(fast, vocabulary), _ends(recorded, vocabulary)
    if ends is None or recorded_ends is None or ends[-1] != len(data) or recorded_ends[-1] > len(data):
        return None
    token_at = np.empty(len(data) + 1, np.int32)  # the recorded token that ends at each byte
    token_at.fill(-1)
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
        # The control tokens around it must be in the text too: it may only be cut there.
        low, high = max(start - 1, 0), min(stop + 1, len(fast))
        around = data[int(ends[low - 1]) if low else 0 : int(ends[high - 1])]
        stretch_recorded = slice(
            int(token_at[first]) + 1, int(token_at[last]) + 1 if last < recorded_ends[-1] else None
        )
        stretch = data[first:last]
        if vocabulary.data(fast[low:high]) != around or not stretch.startswith(
            vocabulary.data(recorded[stretch_recorded])
        ):
            return None
        tokens_asked = differing[stretch_of == number] - start
        pieces.append(_cells(stretch, fast[start:stop], ends[start:stop] - first, tokens_asked, safe))
    return chain.from_iterable(pieces)


def piece_beside(
    segment: str,
    data: bytes,
    place: bytes,
    recorded: Iterable[bytes],
    vocabulary: Vocabulary,
    safe: SafeCuts | None,
) -> tuple[Piece, bytes | None]:
    """The piece of a segment that covers every token but those with which a recorded segment ends too, or which
    the one at its `place` begins and ends with; and the ids of that one.

    The whole segment and None if there is none. Text that is inserted before an answer, or taken from it, leaves
    most of the answer's tokens as they were. `data`, `place` and `recorded` are ids as bytes.
    """
    ids, written = np.frombuffer(data, np.int32), segment.encode("utf-8", "replace")
    ends = _ends(ids, vocabulary) if safe is not None and not safe.spells_token(segment) else None
    if safe is None or ends is None or vocabulary.data(ids) != written:
        return (segment, ids), None
    (head, tail), beside = common_ends(ids, np.frombuffer(place, np.int32)), place
    if 2 * (head + tail) < len(ids):
        for other in islice((each for each in recorded if each.endswith(data[-_LIKEWISE:])), _TRIED):
            size = common_prefix(ids[::-1], np.frombuffer(other, np.int32)[::-1])
            head, tail, beside = (0, size, other) if size > head + tail else (head, tail, beside)
    if not head and not tail:
        return (segment, ids), None
    # From the tokens that differ outwards, to cuts at the end of a token.
    places, stop = [0, *ends.tolist()], max(len(ids) - tail, min(head + 1, len(ids)))
    while head and not safe.may_cut(written, places[head]):
        head -= 1
    while stop < len(ids) and not safe.may_cut(written, places[stop]):
        stop += 1
    return (written[places[head] : places[stop]].decode(), ids[head:stop]), beside


def picked_segments(ids: Ids, controls: Cuts, one_in: int) -> list[int]:
    """Numbers of the non-empty segments between control tokens that a sample contains.

    Picked by a segment's length and the two ids at either end, so the choice does not depend on what surrounds it.
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


def _ends(ids: Ids, vocabulary: Vocabulary) -> Offsets | None:
    """The byte at which each token ends, `[N]`; None if there are no tokens, or some have no bytes."""
    lengths = vocabulary.byte_lengths(ids)
    if not len(ids) or lengths.min() < 1:
        return None
    ends: Offsets = lengths.cumsum()
    return ends


def _cells(data: bytes, ids: Ids, ends: Offsets, tokens: Offsets, safe: SafeCuts) -> Iterator[Piece]:
    """The pieces between safe cuts that contain these `tokens`, each made while it is looked at: there may be as
    many as tokens. Only cuts at the end of a token count."""
    text = data.decode("utf-8")
    cuts = safe.within(text)
    if len(text) != len(data):
        # The bytes at which characters start, `[characters]`.
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
"""How many characters of text a tokenizer keeps the ids of; about four bytes each, ids included."""
_FAST_CACHED_CHARACTERS = 8 * 1024 * 1024
"""The same for the fast encoder, which only sees whole texts."""
_AT_ONCE = 1 << 12
"""How many pieces of a text are proved at a time."""
_EXPECTED = 1 << 15
"""How many characters of expected texts count."""
_PASSED = {"passed": True}
_ONE_IN = 64
"""One in this many segments that agree with the log is encoded by the reference as a check."""


@dataclass
class Tokenizer:
    """A tokenizer with its chat templates. It adds no special tokens: only the text is encoded.

    A text with lone surrogates, which JSON can hold as `"\\ud83d"` and UTF-8 cannot, is encoded with U+FFFD in
    their place; a surrogate pair is encoded as its character.

    `encode` uses the reference, `tokenizers`. `encode_fast_batch` uses a fast encoder once `use_fast` has found
    one that passes its checks; what is reported must be `proved` first.
    """

    name: str
    """The folder or hub name it was loaded from, with the revision if one was given."""
    backend: tokenizers.Tokenizer = field(repr=False)
    """The library's tokenizer, without truncation and padding; loaded late if a store has its tables."""
    vocabulary: Vocabulary = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The tokens that a template reads as `bos_token`, `eos_token`, `pad_token` and so on."""
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Jinja sources by name; a single one is called "default". {} when there is none."""
    eos_ids: tuple[int, ...] = ()
    """The end tokens that its files state: `eos_token` first, then those of the generation settings."""
    bos_id: int | None = None
    folder: Path | None = field(default=None, repr=False)
    """Where its files are; None if it was not loaded from files."""
    store: StoredTokenizer | None = field(default=None, repr=False)
    """What earlier runs computed about it; None: nothing is stored."""
    commit: str | None = None
    """The commit of the hub repository that its files are from; None if they are from a folder."""
    cached_characters: int = field(default=_CACHED_CHARACTERS, repr=False)
    encoder_notice: str | None = field(default=None, init=False, repr=False)
    """Why the run does without the fast encoder, for readers of a report; None if it was not wanted."""
    disagreements: int = field(default=0, init=False, repr=False)
    """How often the fast encoder was found wrong; it is dropped the first time."""

    def __post_init__(self) -> None:
        self._fast: PrefixEncoder | None = None
        self._fast_name = ""
        self._building: Building | None = None
        self._agreed_with: dict[tuple[str, bytes], bytes] = {}
        """By segment with its ids, what a recorded segment has to be for the reference to have given them: later
        prompts hold both again."""
        self._checked: str | None = None
        """The note that says whether the fast encoder has passed the self-check."""

    def encode(self, text: str) -> Ids:
        """The ids of one text, `[N]` int32, read-only."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order. Equal segments are encoded once, in this call and across calls."""
        return self._reference.encode_batch(texts)

    @property
    def segments(self) -> SegmentEncoder:
        """What `encode` encodes with, segment by segment."""
        return self._reference

    def load(self) -> None:
        """Load now what would otherwise be loaded on first use, again in each forked process."""
        _ = self.cuts, self.backend.model
        _ = self._safe_cuts if self._fast is not None else None

    def expect(self, texts: Iterable[str]) -> None:
        """Say which texts will be encoded soon: for a few, only parts of the tokenizer are loaded."""
        if isinstance(self.backend, LazyBackend):
            several = list(dict.fromkeys(texts))
            self.backend.excerpted &= bool(several)
            self.backend.expected = several[: bisect_right(list(accumulate(map(len, several))), _EXPECTED)]

    def save(self) -> None:
        """Store what this run computed for the next one, if there is a store."""
        if self.store is not None:
            entries = self.vocabulary.entries
            self.store.save(
                lambda: Tables(entries, self.cuts.tokens, self.normal_form, self.eos_ids, self.bos_id),
                # Making it takes a second, which only pays off with the fast encoder.
                definition=lambda: definition_of(self.backend) if self._checked is not None else None,
                merges=lambda: merges_of(self.backend, entries, self.normal_form),
            )

    def begin_fast(self) -> None:
        """Start building the fast encoder in a thread; `use_fast` waits for it. No process may fork in between."""
        if self._fast is None and self._building is None and not self.disagreements:
            store = self._unchanged_store
            if isinstance(self.backend, LazyBackend):
                self.backend.excerpted = False  # what is compared with the fast encoder is too much for them
            definition = store.definition if store is not None else None
            if definition is None:
                _ = self.backend.model  # load it here, not in two threads at once
            self._building = Building(lambda: FastEncoder(self.backend, definition))

    def use_fast(self, wanted: bool | None = None) -> bool:
        """Whether a fast encoder is used from now on.

        `None` tries one and leaves an `encoder_notice` if none agrees with the reference; `True` raises
        TokenizerError in that case; `False` goes back to the reference. Call it before a process forks: it starts
        no thread.
        """
        if wanted is False:
            self._fast = self.encoder_notice = None
            vars(self).pop("_known_texts", None)
            return False
        if self._fast is not None:
            return True
        if not self.disagreements:  # not if it was wrong before
            try:
                # Adopt `fastokens` if it agrees. It is built from the stored definition, and not checked again if
                # this build has passed.
                self.begin_fast()
                assert self._building is not None, "it was begun"
                building, self._building = self._building, None
                encoder = building.encoder()
                store = self._unchanged_store
                self._checked = f"self-check {encoder.build}"
                passed = store is not None and store.note(self._checked) == _PASSED
                if self.adopt(encoder, passed=passed) and store is not None and not passed:
                    store.add_note(self._checked, _PASSED)
            except TokenizerError as error:
                self._go_without(str(error))
        if wanted and self._fast is None:
            raise TokenizerError(
                f"{self.name}: the requested fast encoder cannot be used.\n{self.encoder_notice}\n"
                "Leave the choice of the encoder to tito-audit."
            )
        return self._fast is not None

    def adopt(self, encoder: Encoder, *, passed: bool = False) -> bool:
        """Whether this encoder passes the self-check, or has `passed` it in an earlier run; if so, it becomes the
        fast encoder."""
        if not passed:
            refused = disagreement(ReferenceEncoder(self.backend), encoder, probes(self.vocabulary))
            if refused is not None:
                self._go_without(refused)
                return False
        # Whole texts: cutting, looking up and joining costs more than encoding again with fastokens.
        whole = SegmentEncoder(encoder.encode_batch, Cuts({}), _FAST_CACHED_CHARACTERS, lambda: self._safe_cuts)
        self._fast = PrefixEncoder(whole, self.cuts)
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

    def encode_alone(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text by the reference, which caches nothing and starts no thread: a process may fork
        afterwards."""
        return ReferenceEncoder(self.backend).encode_alone(texts)

    def check_fast(self, texts: Sequence[str], reference_ids: Sequence[Ids] | None = None) -> bool:
        """Whether the fast encoder gives these texts, a sample of a log, the same ids as `encode_alone`.

        If not, the fast encoder is dropped. No thread is started, so a process may fork afterwards.
        """
        fast = self._fast
        if fast is None:
            return True
        with on_one_processor():
            fast_batch = fast.encode_batch(texts)
        whole = self.encode_alone(texts) if reference_ids is None else reference_ids
        for text, fast_ids, ids in zip(texts, fast_batch, whole, strict=True):
            if not np.array_equal(fast_ids, ids):
                self._give_up(text)
                return False
        return True

    def encode_fast_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text by the fast encoder, or by the reference if there is none."""
        return (self._fast or self._reference).encode_batch(texts)

    def proved(self, text: str, fast_ids: Ids, recorded_ids: Ids) -> Ids:
        """The ids of a text as the reference gives them, `[N]` int32.

        Those of `fast_ids` that equal `recorded_ids` are accepted: nothing is reported about them. The reference
        encodes the rest: the pieces of the text that contain them, if these can be found, or else the segments
        that do not occur in `recorded_ids` between the same control tokens.
        """
        if self._fast is None:
            return self.encode(text)
        # What lies before the last control token that both begin with is the same.
        begin, first = self.cuts.tail(text, fast_ids, common_prefix(fast_ids, recorded_ids))
        parts = self.cuts.parts(text[begin:], fast_ids[first:])
        stretches = self.cuts.divide(recorded_ids[first:])
        recorded, doubtful = set(stretches), []
        for at, (segment, stretch) in enumerate(parts or ()):
            if stretch not in recorded:
                place = stretches[at][2] if at == 0 or len(stretches) == len(parts or ()) else b""
                doubtful.append((segment, stretch[2], place))
        if parts and self._agreed_beside(doubtful, [stretch[2] for stretch in stretches]):
            return fast_ids
        if self._safe_cuts is not None:
            pieces = pieces_to_prove(text, fast_ids, recorded_ids, self.vocabulary, self.cuts, self._safe_cuts)
            if pieces is not None and self._agreed(pieces):
                return fast_ids
        if self.cuts.parts(text, fast_ids) is None:
            # The ids of a whole text by the reference; the fast encoder is dropped if its ids differ
            ids = self.encode(text)
            if not np.array_equal(ids, fast_ids):
                self._give_up(text)
            return ids
        if parts and self._confirmed([(segment, data) for segment, data, _ in doubtful]):
            return fast_ids
        return self.encode(text)

    def leads_to(self, text: str, recorded_ids: Ids, one_in: int = _ONE_IN, *, goes_on: bool = False) -> bool:
        """Whether `encode_fast_batch` gives these ids for a text, or begins with them if it `goes_on`.

        What the text shares with an earlier one that led to recorded ids is not encoded again; on a sample of the
        rest the reference has to agree.
        """
        base, shared, characters, first = self._known_texts.find(text)
        begun = base.ids[:first] if base is not None else empty_ids()
        if not same_ids(begun[: len(recorded_ids)] if goes_on else begun, recorded_ids[:first]):
            return False
        rest, left = text[characters:], recorded_ids[first:]
        if base and self.has_more_bytes(left, rest):
            return False
        if rest or not base:  # an empty text may have ids too
            (fast,) = self.encode_fast_batch([rest])
            if not same_ids(fast[: len(left)] if goes_on else fast, left):
                return False
            if not self.sampled_check([rest], [fast], one_in):
                return False
        elif len(left):
            return False
        if not goes_on:
            self._known_texts.keep(text, recorded_ids.copy(), base, shared)
        return True

    def has_more_bytes(self, ids: Ids, text: str) -> bool:
        """Whether these ids have more bytes than any ids that a text encodes as, or the text."""
        data = text.encode("utf-8", "surrogatepass")
        return self.vocabulary.byte_count(ids) > len(data) and keeps_bytes(self.normal_form, data)

    def sampled_check(self, texts: Sequence[str], fast_ids: Sequence[Ids], one_in: int = _ONE_IN) -> bool:
        """Whether the reference agrees on a sample of the segments, the same sample in every run.

        For texts whose recorded ids are those of the fast encoder. If it disagrees, the fast encoder is dropped.
        """
        if self._fast is None:
            return True
        sample: set[tuple[str, bytes]] = set()
        for text, ids in zip(texts, fast_ids, strict=True):
            picked = picked_segments(ids, self.cuts, one_in)
            if picked:
                parts = self.cuts.some_parts(text, ids, picked)
                sample.update(parts if parts is not None else [(text, ids.tobytes())])
        return not sample or self._confirmed(sorted(sample))

    @cached_property
    def normal_form(self) -> str | None:
        """How a text is normalised before it is split, "" or "NFC"; None if it may change bytes."""
        if self.store is not None and self.store.tables is not None:
            return self.store.tables.normal_form
        return normal_form(self.backend)

    @cached_property
    def cuts(self) -> Cuts:
        """Where texts may be cut: the control tokens, by their literal text."""
        if self.store is not None and self.store.tables is not None:
            return Cuts(self.store.tables.cuts)
        return find_cuts(self.backend, self.vocabulary)

    @cached_property
    def _known_texts(self) -> KnownTexts:
        return KnownTexts(self.cuts)

    @cached_property
    def _safe_cuts(self) -> SafeCuts | None:
        """Where texts may be cut between words; None if unknown."""
        return find_safe_cuts(self.backend)

    @cached_property
    def _reference(self) -> SegmentEncoder:
        return SegmentEncoder(
            lambda texts: ReferenceEncoder(self.backend).encode_batch(texts),
            self.cuts,
            self.cached_characters,
            lambda: self._safe_cuts,
        )

    @property
    def _unchanged_store(self) -> StoredTokenizer | None:
        """The store, if it holds this tokenizer in its current state."""
        return None if isinstance(self.backend, LazyBackend) and self.backend.changed else self.store

    def _go_without(self, because: str) -> None:
        self._fast = None
        self.encoder_notice = f"{self.name} is encoded by {ReferenceEncoder.name}, which is slower: {because}."

    def _confirmed(self, segments: Sequence[tuple[str, bytes]]) -> bool:
        """Whether the reference gives every segment these ids; if not, the fast encoder is dropped."""
        batch = self._reference.encode_segments([segment for segment, _ in segments])
        for (segment, data), ids in zip(segments, batch, strict=True):
            if ids.tobytes() != data:
                self._give_up(segment)
                return False
        return True

    def _agreed_beside(self, segments: Sequence[tuple[str, bytes, bytes]], recorded: Collection[bytes]) -> bool:
        """Whether the reference gives segments these ids, but for those that the recorded segment at their place,
        or one that ends likewise, has too; False if these are many."""
        pieces: list[Piece] = []
        beside: dict[tuple[str, bytes], bytes] = {}
        for segment, data, place in segments:
            if self._agreed_with.get((segment, data)) not in recorded:
                piece, other = piece_beside(segment, data, place, recorded, self.vocabulary, self._safe_cuts)
                pieces.append(piece)
                if other is not None and len(data) <= _SHORT:
                    beside[segment, data] = other
        if sum(len(ids) for _, ids in pieces) > _WORTH or not self._agreed(pieces):
            return False
        if len(self._agreed_with) > _REMEMBERED:
            self._agreed_with.clear()
        self._agreed_with |= beside
        return True

    def _agreed(self, pieces: Iterable[Piece]) -> bool:
        """Whether the reference gives every piece of a text these ids."""
        rest = iter(pieces)
        while some := list(islice(rest, _AT_ONCE)):
            batch = self.encode_batch([piece for piece, _ in some])
            if not all(np.array_equal(ids, own) for (_, own), ids in zip(some, batch, strict=True)):
                return False
        return True

    def _give_up(self, text: str) -> None:
        self.disagreements += 1
        if self.store is not None and self._checked is not None:
            self.store.add_note(self._checked, {"passed": False})
        self.encoder_notice = (
            f"{self._fast_name} disagreed with {ReferenceEncoder.name} at {shown(text)}; "
            f"the run went on with {ReferenceEncoder.name}."
        )
        self._fast = None
        vars(self).pop("_known_texts", None)
