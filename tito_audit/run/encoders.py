"""Which tokenizers of a run use the fast encoder, and what the summary says about it."""

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
from tito_audit.run.rows import LogGroup, sample_share
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

EncodersUsed: TypeAlias = tuple[tuple[str | None, str | None], ...]
"""For each tokenizer: the encoder that a process used, and why that was not the fast one; None for no reason."""

_LOADING_COST, _COST_PER_ENTRY = 200_000, 9
"""Loading the fast encoder costs as much as encoding this many characters, plus so many per vocabulary entry."""
_PLAIN_CHARACTERS, _PACKED_CHARACTERS = (0.025, 1), (0.2, 16)
"""The least and the most characters that a byte holds: of uncompressed JSON, and of any other log."""
_FEWEST_SAMPLED_ROWS, _MOST_SAMPLED_ROWS = 8, 256
"""How many rows the amount of text is estimated from."""
_TRIED_CHARACTERS = 4_096
"""How much of each text the fast encoder is checked on before it is trusted; all take about 0.1 s."""


def begin_encoder(tokenizer: Tokenizer, logs: Mapping[Path, LogGroup], settings: Settings) -> bool:
    """Start building the fast encoder if it is wanted and the logs hold enough text; returns whether it started.

    It is built in a thread: no process may fork before `choose_encoder`.
    """
    if settings.encoder == "tokenizers":
        return False
    if settings.encoder == "auto":  # only if encoding the logs with the reference would take longer than loading
        least = _LOADING_COST + _COST_PER_ENTRY * tokenizer.vocabulary.size
        regular = {file: group for file, group in logs.items() if file.is_file()}  # a pipe cannot be read twice
        size = sum(file.stat().st_size for file in regular) * (sample_share(settings) or 1)
        plain = all(file.suffix in (".jsonl", ".json") for file in regular)
        fewest, most = _PLAIN_CHARACTERS if plain else _PACKED_CHARACTERS
        if size * most < least:
            return False
        rows = 1 if settings.row is not None else settings.limit
        if rows is not None or size * fewest < least:
            by_byte, by_row = _characters_per_byte_and_row(*next(iter(regular.items())), tokenizer.vocabulary)
            if by_byte * size < least or (rows is not None and by_row * rows < least):
                return False
    tokenizer.start_building_fast()
    return True


def choose_encoder(tokenizer: Tokenizer, head: Sequence[Rollout], settings: Settings) -> None:
    """Switch to the fast encoder if it agrees with the reference on texts of the first rollouts."""
    first = [item for item in head if item.place.row < head[0].place.row + 4]
    texts = [text[:_TRIED_CHARACTERS] for text in rollout_texts(first, tokenizer.vocabulary)[:32]]
    try:
        ids = tokenizer.encode_single_threaded(texts)  # while the fast encoder is still being built
    except EncodeError:
        ids = None
    if tokenizer.use_fast(True if settings.encoder == "fastokens" else None):
        if ids is None:  # the audit of each row says what the reference cannot encode
            tokenizer.use_fast(False)
        else:
            tokenizer.check_fast(texts, ids)


def rollout_texts(rollouts: Sequence[Rollout], vocabulary: Vocabulary) -> list[str]:
    """The texts of rollouts: their messages, and the beginnings of what their ids decode to."""
    texts: list[str] = []
    for item in rollouts:
        texts += [message.text for message in item.messages]
        texts += [vocabulary.text(ids[:_TRIED_CHARACTERS]) for ids in _recorded_ids(item)]
    return texts


def _characters_per_byte_and_row(file: Path, group: LogGroup, vocabulary: Vocabulary) -> tuple[float, float]:
    """How many characters a log holds per byte and per row, estimated from its first rows.

    A repeated text counts once, as it is encoded once; a rollout without messages counts as what its ids spell.
    """
    first = replace(group, settings=replace(group.settings, row=None, sample=None), join=None)
    seen: set[str] = set()
    characters = rows = position = 0
    with suppress(StorageError):
        log = first.open_for_audit(file)
        for raw in islice(log, _MOST_SAMPLED_ROWS):
            # A log is read in blocks: once the position moves, the rows so far span the bytes up to the last.
            if log.position != position and rows >= _FEWEST_SAMPLED_ROWS:
                return characters / max(position, 1), characters / rows
            position, rows = log.position, rows + 1
            with suppress(RecordError):
                for item in first.read_row(raw, Place(str(file), raw.index)).rollouts:
                    new = {message.text for message in item.messages} - seen
                    seen |= new
                    characters += sum(map(len, new))
                    if not item.messages:
                        characters += sum(int(vocabulary.byte_lengths(ids).sum()) for ids in _recorded_ids(item))
    return characters / max(position, 1), characters / max(rows, 1)


def _recorded_ids(item: Rollout) -> list[Ids]:
    """The ids of the training row, and those of the last call."""
    recorded = [item.training_row.token_ids] if item.training_row is not None else []
    return [*recorded, *(seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None)]


class Encoders:
    """Which encoder each tokenizer of a run used, in this process and in its workers."""

    def __init__(self, tokenizers: Sequence[Tokenizer]) -> None:
        self._tokenizers = tokenizers
        self._elsewhere: dict[int, str | None] = {}

    def used_here(self) -> EncodersUsed:
        """The encoders of this process."""
        return tuple((each.encoder_name, each.encoder_notice) for each in self._tokenizers)

    def add(self, encoded: EncodersUsed, summary: Summary) -> None:
        """Add what another process used; if one lacked the fast encoder, the summary says so for all."""
        for number, (name, notice) in enumerate(encoded):
            if notice is not None:
                self._elsewhere[number] = name
                _add_notice(notice, summary)

    def report_encoders(self, summary: Summary) -> None:
        """Put the names of the encoders and the notices into a summary."""
        names = [self._elsewhere.get(number) or name for number, (name, _) in enumerate(self.used_here())]
        summary.encoder = "; ".join(dict.fromkeys(name for name in names if name)) or None
        self.report_notices(summary)

    def report_notices(self, summary: Summary) -> None:
        """Put into a summary why a wanted fast encoder was not used."""
        for _, notice in self.used_here():
            if notice:
                _add_notice(notice, summary)


def _add_notice(notice: str, summary: Summary) -> None:
    if notice not in summary.notices:
        summary.notices.append(notice)
