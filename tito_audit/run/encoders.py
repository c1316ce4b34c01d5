"""A run's encoders: which tokenizers use the fast encoder, and what the summary says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from tito_audit.errors import EncodeError, RecordError, StorageError
from tito_audit.record.arrays import Ids
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.rows import LogGroup, share_of
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

Encoded: TypeAlias = tuple[tuple[str | None, str | None], ...]
"""For each tokenizer: the name of the encoder that a process used, and why it was not the fast encoder."""

_TO_START, _PER_ENTRY = 200_000, 9
"""Loading the fast encoder takes as long as the reference takes to encode this many characters, plus so many per
vocabulary entry."""
_PLAIN, _PACKED = (0.025, 1), (0.2, 16)
"""How many characters a byte of a log holds, at least and at most: for uncompressed JSON, and for any other
log."""
_JUDGED_ROWS, _MOST_JUDGED = 8, 256
"""How many rows are used to estimate the text of a log."""
_TRIED_CHARACTERS = 4_096
"""How much of a log the fast encoder is checked on before it is trusted; takes a tenth of a second."""


def begin_encoder(tokenizer: Tokenizer, logs: Mapping[Path, LogGroup], settings: Settings) -> bool:
    """Whether the fast encoder is wanted because the logs hold enough text; if so, starts building it.

    No process may fork before `choose_encoder`.
    """
    if settings.encoder == "tokenizers":
        return False
    regular = {file: group for file, group in logs.items() if file.is_file()}  # a pipe cannot be read twice
    if settings.encoder == "fastokens" or _is_worth_loading(tokenizer.vocabulary, regular, settings):
        tokenizer.start_building_fast()
        return True
    return False


def choose_encoder(tokenizer: Tokenizer, head: Sequence[Rollout], settings: Settings) -> None:
    """Use the encoder being built, if it agrees with the reference on texts from the first rollouts."""
    first = [item for item in head if item.place.row < head[0].place.row + 4]
    texts = [text[:_TRIED_CHARACTERS] for text in texts_of(first, tokenizer.vocabulary)[:32]]
    try:
        ids = tokenizer.encode_single_threaded(texts)  # before waiting for the encoder
    except EncodeError:
        ids = None
    if tokenizer.use_fast(True if settings.encoder == "fastokens" else None):
        if ids is None:  # the reference has to say so about each row
            tokenizer.use_fast(False)
        else:
            tokenizer.check_fast(texts, ids)


def texts_of(rollouts: Sequence[Rollout], vocabulary: Vocabulary) -> list[str]:
    """The texts of rollouts: of each its messages, and what its ids hold, as far as an encoder is tried on it."""
    texts: list[str] = []
    for item in rollouts:
        texts += [message.text for message in item.messages]
        texts += [vocabulary.text(ids[:_TRIED_CHARACTERS]) for ids in _recorded(item)]
    return texts


def _is_worth_loading(vocabulary: Vocabulary, logs: Mapping[Path, LogGroup], settings: Settings) -> bool:
    """Whether the reference would take longer to encode the logs than the fast encoder takes to load."""
    least = _TO_START + _PER_ENTRY * vocabulary.size
    size = sum(file.stat().st_size for file in logs) * (share_of(settings) or 1)
    fewest, most = _PLAIN if all(file.suffix in (".jsonl", ".json") for file in logs) else _PACKED
    rows = 1 if settings.row is not None else settings.limit
    if size * most < least:
        return False
    if rows is None and size * fewest >= least:
        return True
    by_byte, by_row = _density(*next(iter(logs.items())), vocabulary)
    characters = by_byte * size if rows is None else min(by_byte * size, by_row * rows)
    return characters >= least


def _density(file: Path, group: LogGroup, vocabulary: Vocabulary) -> tuple[float, float]:
    """How many characters a log holds per byte and per row, estimated from its first rows.

    A text in several rows counts once: it is encoded once.
    """
    first = replace(group, settings=replace(group.settings, row=None, sample=None), join=None)
    seen: set[str] = set()
    characters = rows = position = 0
    with suppress(StorageError):
        log = first.open_quick(file)
        for raw in islice(log, _MOST_JUDGED):
            # The rows so far span the bytes up to the last position: a log is read in blocks.
            if log.position != position and rows >= _JUDGED_ROWS:
                return characters / max(position, 1), characters / rows
            position, rows = log.position, rows + 1
            with suppress(RecordError):
                for item in first.read(raw, Place(str(file), raw.index)).rollouts:
                    characters += _length(item, vocabulary, seen)
    return characters / max(position, 1), characters / max(rows, 1)


def _length(item: Rollout, vocabulary: Vocabulary, seen: set[str]) -> int:
    """How many new characters a rollout has: in its messages, or in its ids if it has none."""
    if not item.messages:
        return sum(int(vocabulary.byte_lengths(ids).sum()) for ids in _recorded(item))
    new = {message.text for message in item.messages} - seen
    seen |= new
    return sum(map(len, new))


def _recorded(item: Rollout) -> list[Ids]:
    """The ids of the training row, and those of the last call."""
    recorded = [item.training_row.token_ids] if item.training_row is not None else []
    return [*recorded, *(seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None)]


class Encoders:
    """The encoder of each tokenizer of a run, in this process and in its workers."""

    def __init__(self, tokenizers: Sequence[Tokenizer]) -> None:
        self._tokenizers = tokenizers
        self._elsewhere: dict[int, str | None] = {}

    def here(self) -> Encoded:
        """The encoders in this process."""
        return tuple((each.encoder_name, each.encoder_notice) for each in self._tokenizers)

    def add(self, encoded: Encoded, summary: Summary) -> None:
        """Add what another process used; if one did without the fast encoder, that counts for all."""
        for number, (name, notice) in enumerate(encoded):
            if notice is not None:
                self._elsewhere[number] = name
                _note(notice, summary)

    def settle(self, summary: Summary) -> None:
        """Put the names of the encoders into the summary."""
        names = [self._elsewhere.get(number) or name for number, (name, _) in enumerate(self.here())]
        summary.encoder = "; ".join(dict.fromkeys(name for name in names if name)) or None
        self.warn(summary)

    def warn(self, summary: Summary) -> None:
        """Put into the summary why a wanted fast encoder was not used."""
        for _, notice in self.here():
            if notice:
                _note(notice, summary)


def _note(notice: str, summary: Summary) -> None:
    if notice not in summary.notices:
        summary.notices.append(notice)
