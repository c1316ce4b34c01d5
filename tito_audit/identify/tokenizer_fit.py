"""Whether a tokenizer can have written the ids of a log, judged by its first rollouts.

The tests are coarse, so that no fault of a row is mistaken for a misfit: whether logged texts are found in the
decoded ids, whether encoding the decoded text reproduces the ids, whether the ids are in the vocabulary, and
whether the log spells a control token of the template in pieces. Measured on real logs of three models with seven
tokenizers: the right tokenizer finds at least 99 % of the texts and 98 % of the ids, a wrong one up to 18 % of the
texts and 91 % of the ids. In between there is no verdict.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tito_audit.errors import RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Rollout
from tito_audit.record.runs import trained_runs
from tito_audit.terminal.words import listed, many, percent
from tito_audit.tokens.tokenizer import Tokenizer

_TEXT = 8
"""Characters that a text needs to be looked for."""
_LOOKED = 200
"""Characters of a text that are looked for."""
_DECODED = 1 << 16
"""Ids of a row that are decoded at the most."""
_ENCODED = 2_048
"""Ids of a sequence whose text is encoded again at the most."""
_REAL = 12
"""A sequence with fewer distinct ids is a placeholder."""
_FOUND = 0.2
"""Texts count against the tokenizer if no larger share of them is found."""
_LEAST, _LEAST_ALONE = 24, 512
"""Ids needed for a verdict on the round trip, with texts in the log and without."""
_OUTSIDE_ROWS, _OUTSIDE_SHARE = 4, 0.8
"""Rows needed to prove a misfit, and the share of them with ids past the end of the vocabulary."""
_IN_PIECES = 4
"""How often the rows, two at least, must spell a token of the template in pieces."""

TestableRows: TypeAlias = Sequence[tuple[Rollout, list[Ids]]]
"""Rollouts, each with its id sequences."""


@dataclass(slots=True)
class _FitCounts:
    """What rows show about a tokenizer."""

    rows: int = 0
    ids: int = 0
    outside: int = 0
    """Ids that are not in its vocabulary."""
    rows_outside: int = 0
    """Rows with ids past the end of the vocabulary."""
    past_end: set[int] = field(default_factory=set)
    texts: int = 0
    texts_found: int = 0
    decoded: list[str] = field(default_factory=list)
    """The decoded text of each row."""


def select_testable(rollouts: Sequence[Rollout]) -> TestableRows:
    """The rollouts with real ids, and these: the last call's, else the training row's, else the completions'."""
    rows: list[tuple[Rollout, list[Ids]]] = []
    for rollout in rollouts:
        if rollout.turns and (last := rollout.turns[-1].seen_ids) is not None:
            sequences = [last]  # the row of a rollout with calls may hold wrong ids
        elif rollout.training_row is not None:
            sequences = [rollout.training_row.token_ids]
        else:
            sequences = [turn.completion_ids for turn in rollout.turns if turn.completion_ids is not None]
        ids = [sequence[:_DECODED] for sequence in sequences if _are_real(sequence)]
        if ids and not rollout.stated.dummy_tokens:
            rows.append((rollout, ids))
    return rows


def tokenizer_misfit(rows: TestableRows, reference: Reference) -> str | None:
    """Why the tokenizer cannot have written these rows; None if it can."""
    seen = _count_fit(rows, reference.tokenizer)
    words = _describe_counts(seen)
    enough = seen.rows >= _OUTSIDE_ROWS and len(seen.past_end) > 1
    if enough and seen.rows_outside >= _OUTSIDE_SHARE * seen.rows:
        words = words[-1:] if _finds_texts(seen) else words  # texts that are found do not count against it
        return f"{listed(words)}, in {seen.rows_outside:,} of {many(seen.rows, 'row')}"
    same = None if _finds_texts(seen) else _low_roundtrip_share(rows, seen, reference)
    if same is not None:
        return listed([*words, f"encoding that text again gives {percent(same)} of the ids back"])
    # A token of the template that the rows only hold spelled in pieces proves a misfit.
    vocabulary, renderer = reference.vocabulary, reference.renderer
    recorded = {token_id for _, all_ids in rows for ids in all_ids for token_id in ids.tolist()}
    if renderer is None or not recorded & vocabulary.special_ids:  # the rows hold no control tokens at all
        return None
    source = "".join(template.source for template in renderer.templates.values())
    for token in sorted(vocabulary.added_ids - recorded):
        piece = vocabulary.piece(token)
        counts = [text.count(piece) for text in seen.decoded] if len(piece) > 1 and piece in source else []
        if sum(counts) >= _IN_PIECES and sum(map(bool, counts)) > 1:
            return (
                f"'{piece}', which the chat template writes and the tokenizer has as one token, occurs "
                f"{sum(counts):,} times in {many(sum(map(bool, counts)), 'row')}, each time in pieces"
            )
    return None


def find_misfits_by_text(rows: TestableRows, tokenizers: Sequence[Tokenizer]) -> list[str | None]:
    """For each tokenizer why it cannot have written the rows, if one of the others decodes 90 % of their texts.

    This needs vocabularies only: encoders of clear misfits are never loaded.
    """
    fits = [_count_fit(rows, tokenizer) for tokenizer in tokenizers]
    if not any(fit.texts > _IN_PIECES and fit.texts_found >= 0.9 * fit.texts for fit in fits):
        return [None] * len(fits)
    return [listed(_describe_counts(fit)) if fit.texts_found <= _FOUND * fit.texts else None for fit in fits]


def count_unknown_ids(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> int:
    """How many recorded ids are not in the vocabulary."""
    is_known = tokenizer.vocabulary.known
    sequences = (ids for _, all_ids in select_testable(rollouts) for ids in all_ids)
    return sum(int(np.count_nonzero(~is_known(ids))) for ids in sequences)


def _describe_counts(seen: _FitCounts) -> list[str]:
    words = []
    if seen.texts:
        texts = f"{many(seen.texts, 'logged text')} {'is' if seen.texts == 1 else 'are'}"
        words.append(f"{seen.texts_found:,} of {texts} found in what the ids decode to")
    if seen.outside:
        words.append(f"{percent(seen.outside / seen.ids)} of the ids lie outside the vocabulary")
    return words


def _finds_texts(seen: _FitCounts) -> bool:
    """Whether the decoded ids hold the texts of the log."""
    return seen.texts > 1 and seen.texts_found > _FOUND * seen.texts


def _low_roundtrip_share(tested: TestableRows, seen: _FitCounts, reference: Reference) -> float | None:
    """The share of ids that encoding their text reproduces, if too small for the right tokenizer; else None."""
    alone = seen.texts < 2
    ids = [sequence for rollout, all_ids in tested for sequence in (unsampled_ids(rollout) if alone else all_ids)]
    if sum(map(len, ids)) < (_LEAST_ALONE if alone else _LEAST):
        return None
    if alone and reference.renderer is not None:
        # A row that holds the template's generation prompt speaks for the tokenizer.
        question = as_messages([{"role": "user", "content": "?!"}], "messages")
        with suppress(RenderError):
            opener = reference.renderer.render(question, add_generation_prompt=True).rpartition("?!")[2].strip()
            if len(opener) > _TEXT and any(opener in text for text in seen.decoded):
                return None
    same = roundtrip_share(ids, reference)
    # Together with texts that are not found, a smaller loss proves a misfit.
    return same if same <= (0.91 if alone else 0.95) else None


def _count_fit(tested: TestableRows, tokenizer: Tokenizer) -> _FitCounts:
    """What rows show about a tokenizer, by its vocabulary alone."""
    seen, vocabulary = _FitCounts(), tokenizer.vocabulary
    for rollout, all_ids in tested:
        text = "\n".join(vocabulary.text(ids) for ids in all_ids)
        unknown = np.concatenate([ids[~vocabulary.known(ids)] for ids in all_ids])
        past = unknown[unknown >= vocabulary.size]
        seen.rows += 1
        seen.ids += sum(map(len, all_ids))
        seen.outside += len(unknown)
        seen.rows_outside += len(past) > 0
        seen.past_end |= set(past[:_REAL].tolist())
        seen.decoded.append(text)
        plain = _normalize(text)
        stated = [message.text for message in rollout.messages]
        for turn in rollout.turns:
            stated += [words for words in (turn.completion_text, turn.prompt_text) if words]
        for logged in map(_normalize, stated[:64]):
            if len(logged) < _TEXT:
                continue
            seen.texts += 1
            # Its beginning or its middle, as a template may cut or rewrite either.
            start = max((len(logged) - _LOOKED) // 2, 0)
            seen.texts_found += logged[:_LOOKED] in plain or logged[start : start + _LOOKED] in plain
    return seen


def unsampled_ids(rollout: Rollout) -> Iterator[Ids]:
    """The ids that nothing sampled, so a tokenizer wrote them; the whole row if it has no mask."""
    row = rollout.training_row
    prompts = [turn.prompt_ids for turn in rollout.turns[-1:] if turn.prompt_ids is not None]
    if row is None or prompts:
        yield from filter(_are_real, prompts)
    elif row.loss_mask is None:
        yield from filter(_are_real, [row.token_ids])
    else:
        yield from filter(_are_real, (row.token_ids[start:end] for start, end in trained_runs(~row.loss_mask)))


def _are_real(ids: Ids) -> bool:
    """Whether ids are no placeholders: many different ones, which do not just count up."""
    first = ids[:_ENCODED]
    return len(set(first.tolist())) >= _REAL and not (np.diff(first) == 1).all()


def _normalize(text: str) -> str:
    """The text in NFC, with each run of white space as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def roundtrip_share(ids: Sequence[Ids], reference: Reference) -> float:
    """The share of ids that encoding their text again reproduces, in any order; of the first _ENCODED each."""
    same = number = 0
    for sequence in ids:
        recorded = sequence[:_ENCODED]
        again = reference.encode(reference.decode(recorded))
        common = Counter(recorded.tolist()) & Counter(again.tolist())
        same += common.total()
        number += max(len(recorded), len(again))
    return same / max(number, 1)
