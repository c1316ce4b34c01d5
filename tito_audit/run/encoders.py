"""Encoders of a run: which tokenizer encodes fast, and what a summary says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tito_audit.run.rows import LogGroup, share_of
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

__all__ = ["Encoded", "Encoders", "choose_encoder"]

Encoded: TypeAlias = tuple[tuple[str | None, str | None], ...]
"""Of each tokenizer, what encodes in a process, as a summary names it, and why no fast encoder does."""

_WORTH_LOADING = 6 << 20
"""Bytes of logs, about 400,000 tokens, from which on loading the fast encoder pays."""
_TRIED_ROWS = 4
_TRIED_TEXTS = 32
_TRIED_CHARACTERS = 4_096
"""How much of a log the fast encoder is tried on before it is trusted: as much as takes a tenth of a second."""


def choose_encoder(tokenizer: Tokenizer, logs: Mapping[Path, LogGroup], settings: Settings) -> None:
    """Load the fast encoder where the logs are worth it, before processes are forked."""
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
    """Texts out of the first rows of a log: what messages say, and what ids spell."""
    texts: list[str] = []
    for item in group.head(file, _TRIED_ROWS):
        texts += [message.text for message in item.messages]
        recorded = [item.training_row.token_ids] if item.training_row is not None else []
        recorded += [seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None]
        texts += [vocabulary.text(ids[:_TRIED_CHARACTERS]) for ids in recorded]
    return [text[:_TRIED_CHARACTERS] for text in texts[:_TRIED_TEXTS]]


class Encoders:
    """What encodes for each tokenizer of a run, in this process and in those that are forked from it."""

    def __init__(self, tokenizers: Sequence[Tokenizer]) -> None:
        self._tokenizers = tokenizers
        self._elsewhere: dict[int, str | None] = {}

    def here(self) -> Encoded:
        """What encodes in this process."""
        return tuple((one.encoder_name, one.encoder_notice) for one in self._tokenizers)

    def hear(self, said: Encoded, summary: Summary) -> None:
        """What another process says: one that went without a fast encoder counts for all."""
        for number, (name, notice) in enumerate(said):
            if notice is not None:
                self._elsewhere[number] = name
                if notice not in summary.notices:
                    summary.notices.append(notice)

    def settle(self, summary: Summary) -> None:
        """Say in the summary what encoded."""
        here = self.here()
        names = [self._elsewhere.get(number) or name for number, (name, _) in enumerate(here)]
        summary.encoder = "; ".join(dict.fromkeys(name for name in names if name)) or None
        self.warn(summary)

    def warn(self, summary: Summary) -> None:
        """Say in the summary why no fast encoder is at work, where one was wanted."""
        for _, notice in self.here():
            if notice and notice not in summary.notices:
                summary.notices.append(notice)
