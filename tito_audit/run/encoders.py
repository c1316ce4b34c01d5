"""Encoders of a run: which tokenizers encode with the fast encoder, and what a summary says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tito_audit.run.rows import LogGroup, share_of
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

Encoded: TypeAlias = tuple[tuple[str | None, str | None], ...]
"""For each tokenizer: the name of the encoder that a process used, and why it was not the fast one."""

_WORTH_LOADING = 6 << 20
"""Bytes of logs, about 400,000 tokens, from which loading the fast encoder pays off."""
_TRIED_ROWS = 4
_TRIED_TEXTS = 32
_TRIED_CHARACTERS = 4_096
"""How much of a log the fast encoder is checked on before it is trusted; it takes a tenth of a second."""


def choose_encoder(tokenizer: Tokenizer, logs: Mapping[Path, LogGroup], settings: Settings) -> None:
    """Load the fast encoder where the logs are large enough, before processes are forked."""
    if settings.encoder == "tokenizers":
        return
    wanted = True if settings.encoder == "fastokens" else None
    # A pipe cannot be read twice.
    regular = {file: group for file, group in logs.items() if file.is_file()}
    size = sum(file.stat().st_size for file in regular) * (share_of(settings) or 1)
    if (wanted or size >= _WORTH_LOADING) and tokenizer.use_fast(wanted):
        first = next(iter(regular.items()), None)
        tokenizer.check_fast(_texts(*first, tokenizer.vocabulary) if first is not None else [])


def _texts(file: Path, group: LogGroup, vocabulary: Vocabulary) -> list[str]:
    """Texts from the first rows of a log: of its messages, and decoded from its ids."""
    texts: list[str] = []
    for item in group.head(file, _TRIED_ROWS):
        texts += [message.text for message in item.messages]
        recorded = [item.training_row.token_ids] if item.training_row is not None else []
        recorded += [seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None]
        texts += [vocabulary.text(ids[:_TRIED_CHARACTERS]) for ids in recorded]
    return [text[:_TRIED_CHARACTERS] for text in texts[:_TRIED_TEXTS]]


class Encoders:
    """What encodes for each tokenizer of a run, in this process and in its workers."""

    def __init__(self, tokenizers: Sequence[Tokenizer]) -> None:
        self._tokenizers = tokenizers
        self._elsewhere: dict[int, str | None] = {}

    def here(self) -> Encoded:
        """What encodes in this process."""
        return tuple((one.encoder_name, one.encoder_notice) for one in self._tokenizers)

    def add(self, encoded: Encoded, summary: Summary) -> None:
        """Add what another process used; one that did without the fast encoder counts for all."""
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
        """Put into the summary why the fast encoder was not used although it was wanted."""
        for _, notice in self.here():
            if notice:
                _note(notice, summary)


def _note(notice: str, summary: Summary) -> None:
    if notice not in summary.notices:
        summary.notices.append(notice)
