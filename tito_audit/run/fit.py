"""Fit: whether a tokenizer and a chat template are those that a log was written with, by its first rows.

What is asked is coarse, so that no fault of a row is taken for it: whether logged texts are found in what the
ids decode to, whether encoding that text again gives the ids back, whether ids lie in the vocabulary, and whether
the control tokens of the template stand in the rows at all. Measured on real logs of three models and on seven
tokenizers, each against each: the right one finds at least 99 % of the texts and 98 % of the ids again, a wrong
one at most 18 % of the texts and 91 % of the ids. Between the two nothing is said.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tito_audit.errors import RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Rollout, trained_runs
from tito_audit.render.renderer import Renderer
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.tokenizer import Tokenizer

__all__ = ["CODE", "ROWS", "TEMPLATE", "TOKENIZER", "misfit", "names_of_log"]

CODE = "REC007"
TOKENIZER, TEMPLATE = "another tokenizer", "another chat template"
"""The causes: what does not fit."""
ROWS = 16
"""Rows of a log that are asked."""

_TEXT = 8
"""Characters from which on a text says something when it is found, or not."""
_TEXTS = 64
"""Texts of a row that are looked for."""
_LOOKED = 200
"""Characters of a text that are looked for."""
_DECODED = 1 << 16
"""Ids of a row that are decoded."""
_ENCODED = 2_048
"""Ids of a row whose text is encoded again."""
_REAL = 12
"""Different ids from which on a sequence is no placeholder."""
_FOUND = 0.2
"""Share of the texts up to which they are not found."""
_SAME = 0.95
"""Share of the ids that come back, up to which texts that are not found count against the tokenizer."""
_SAME_ALONE = 0.91
"""The same where there is no text to be found."""
_LEAST, _LEAST_ALONE = 24, 512
"""Ids from which on these shares say something, with texts and without."""
_OUTSIDE_ROWS, _OUTSIDE_SHARE = 4, 0.8
"""How many rows, and which share of them, have to hold ids past the end of the vocabulary."""
_IN_PIECES = 4
"""How often a token of the template has to stand there in pieces, in two rows or more."""
_RENDERED = 6
"""Rows that are rendered."""
_NAME = 100


@dataclass(slots=True)
class _Seen:
    """What the rows show of the tokenizer."""

    rows: int = 0
    ids: int = 0
    outside: int = 0
    """Ids that the vocabulary does not have."""
    rows_outside: int = 0
    """Rows with ids past its end."""
    past_end: set[int] = field(default_factory=set)
    texts: int = 0
    found: int = 0
    decoded: list[str] = field(default_factory=list)
    """By row: what its ids decode to."""


def misfit(rollouts: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer | None) -> Finding | None:
    """The finding that the first rollouts of a log were written with other means; None where they may fit."""
    told = [(rollout, ids) for rollout in rollouts if (ids := _ids(rollout))]
    if not told:
        return None
    seen = _look(told, tokenizer)
    reference = Reference(tokenizer, renderer)
    why = _not_the_tokenizer(told, seen, reference)
    cause = TOKENIZER
    if why is None and renderer is not None:
        why, cause = _not_the_template(told, reference), TEMPLATE
    if why is None:
        return None
    message = f"{why}: {_what(cause, tokenizer)}; {_advice(cause, rollouts)}"
    hit = Hit(Where.LOG, 0, 0, message, cause=cause, severity=Severity.ERROR)
    return Finding(CODE, Severity.ERROR, told[0][0].place, hit)


def names_of_log(rollouts: Iterable[Rollout]) -> dict[str, str]:
    """What the log calls its `tokenizer` and its `model`, as far as it does; of several names the first."""
    named: dict[str, str] = {}
    for rollout in rollouts:
        for key, value in (("tokenizer", rollout.stated.tokenizer), ("model", rollout.stated.model)):
            if value is not None and value.strip():
                named.setdefault(key, value.strip()[:_NAME])
    return named


# The tokenizer


def _not_the_tokenizer(told: Sequence[tuple[Rollout, list[Ids]]], seen: _Seen, reference: Reference) -> str | None:
    """Why the tokenizer cannot be the one that wrote these ids; None where it can."""
    words = _counted(seen)
    enough = seen.rows >= _OUTSIDE_ROWS and len(seen.past_end) > 1
    if enough and seen.rows_outside >= _OUTSIDE_SHARE * seen.rows:
        return f"{listed(words)}, in {seen.rows_outside:,} of {many(seen.rows, 'row')}"
    same = None if _reads(seen) else _too_few(told, seen, reference)
    if same is None:
        return _in_pieces(told, seen, reference)
    return listed([*words, f"encoding that text again gives {_percent(same)} of the ids back"])


def _counted(seen: _Seen) -> list[str]:
    words = []
    if seen.texts:
        are = "is" if seen.texts == 1 else "are"
        words.append(f"{seen.found:,} of {many(seen.texts, 'logged text')} {are} found in what the ids decode to")
    if seen.outside:
        words.append(f"{_percent(seen.outside / seen.ids)} of the ids lie outside the vocabulary")
    return words


def _reads(seen: _Seen) -> bool:
    """Whether texts of the log are found in its ids."""
    return seen.texts > 1 and seen.found > _FOUND * seen.texts


def _too_few(told: Sequence[tuple[Rollout, list[Ids]]], seen: _Seen, reference: Reference) -> float | None:
    """The share of the ids that come back, where it is too small for the tokenizer that wrote them; else None."""
    alone = seen.texts < 2
    ids = [one for rollout, all_ids in told for one in (_given(rollout) if alone else all_ids)]
    if sum(map(len, ids)) < (_LEAST_ALONE if alone else _LEAST) or (alone and _opened(seen, reference)):
        return None
    same = _come_back(ids, reference)
    return same if same <= (_SAME_ALONE if alone else _SAME) else None


def _look(told: Sequence[tuple[Rollout, list[Ids]]], tokenizer: Tokenizer) -> _Seen:
    seen, vocabulary = _Seen(), tokenizer.vocabulary
    for rollout, all_ids in told:
        text = "\n".join(vocabulary.text(ids) for ids in all_ids)
        unknown = np.concatenate([ids[~vocabulary.known(ids)] for ids in all_ids])
        past = unknown[unknown >= vocabulary.size]
        seen.rows += 1
        seen.ids += sum(map(len, all_ids))
        seen.outside += len(unknown)
        seen.rows_outside += len(past) > 0
        seen.past_end |= set(past[:_REAL].tolist())
        seen.decoded.append(text)
        plain = _plain(text)
        for one in _texts(rollout):
            seen.texts += 1
            seen.found += _held(one, plain)
    return seen


def _ids(rollout: Rollout) -> list[Ids]:
    """The sequences of a rollout that were written by a tokenizer, as far as can be told: the row, else the last
    call, else what was sampled."""
    if rollout.stated.dummy_tokens:
        return []
    if rollout.training_row is not None:
        found = [rollout.training_row.token_ids]
    elif rollout.turns and (last := rollout.turns[-1].seen_ids) is not None:
        found = [last]
    else:
        found = [turn.completion_ids for turn in rollout.turns if turn.completion_ids is not None]
    return [ids[:_DECODED] for ids in found if _real(ids)]


def _given(rollout: Rollout) -> Iterator[Ids]:
    """What nobody sampled, which is what a tokenizer wrote for certain; all of a row that does not say."""
    row = rollout.training_row
    if row is None:
        prompts = [turn.prompt_ids for turn in rollout.turns[-1:] if turn.prompt_ids is not None]
        yield from filter(_real, prompts)
    elif row.loss_mask is None:
        yield from filter(_real, [row.token_ids])
    else:
        yield from (ids for start, end in trained_runs(~row.loss_mask) if _real(ids := row.token_ids[start:end]))


def _real(ids: Ids) -> bool:
    """Whether ids are no placeholders: enough of them, not one repeated, not counted up."""
    first = ids[:_ENCODED]
    return len(np.unique(first)) >= _REAL and not (np.diff(first) == 1).all()


def _texts(rollout: Rollout) -> list[str]:
    """What the log says that the ids spell: messages and texts of calls."""
    texts = [message.text for message in rollout.messages]
    for turn in rollout.turns:
        texts += [text for text in (turn.completion_text, turn.prompt_text) if text]
    return [plain for text in texts[:_TEXTS] if len(plain := _plain(text)) >= _TEXT]


def _held(text: str, decoded: str) -> bool:
    """Whether the beginning of a text is found, or its middle."""
    start = max((len(text) - _LOOKED) // 2, 0)
    return text[:_LOOKED] in decoded or text[start : start + _LOOKED] in decoded


def _plain(text: str) -> str:
    """The text as it is compared: composed, and all white space alike."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _come_back(ids: Sequence[Ids], reference: Reference) -> float:
    """The share of the ids that encoding their text gives back, wherever it does."""
    same = number = 0
    for one in ids:
        recorded = one[:_ENCODED]
        again = reference.encode(reference.text(recorded))
        common = Counter(recorded.tolist()) & Counter(again.tolist())
        same += common.total()
        number += max(len(recorded), len(again))
    return same / max(number, 1)


def _opened(seen: _Seen, reference: Reference) -> bool:
    """Whether a row holds what the template opens an answer with, behind a question."""
    if reference.renderer is None:
        return False
    asked = as_messages([{"role": "user", "content": "?!"}], "messages")
    try:
        opener = reference.render(asked, (), {}, opens_answer=True).rpartition("?!")[2].strip()
    except RenderError:
        return False
    return len(opener) > _TEXT and any(opener in text for text in seen.decoded)


def _in_pieces(told: Sequence[tuple[Rollout, list[Ids]]], seen: _Seen, reference: Reference) -> str | None:
    """A token that the template writes and that never stands in the rows, which spell it in pieces."""
    vocabulary, renderer = reference.vocabulary, reference.renderer
    if renderer is None:
        return None
    source = "".join(template.source for template in renderer.templates.values())
    held = {one for _, all_ids in told for ids in all_ids for one in np.unique(ids).tolist()}
    if not held & vocabulary.special_ids:
        return None  # whoever wrote them, wrote no control tokens as such
    for token in sorted(vocabulary.added_ids - held):
        piece = vocabulary.piece(token)
        if len(piece) > 1 and piece in source:
            counts = [text.count(piece) for text in seen.decoded]
            if sum(counts) >= _IN_PIECES and sum(map(bool, counts)) > 1:
                return (
                    f"'{piece}', which the chat template writes and the tokenizer has as one token, stands "
                    f"{sum(counts):,} times in {many(sum(map(bool, counts)), 'row')}, each time in pieces"
                )
    return None


# The template


def _not_the_template(told: Sequence[tuple[Rollout, list[Ids]]], reference: Reference) -> str | None:
    """Why the template cannot be the one that wrote these rows; None where it can, or nobody knows."""
    recorded: Counter[str] = Counter()
    rendered: Counter[str] = Counter()
    rows = 0
    for rollout, all_ids in told:
        if rows == _RENDERED:
            break
        text = _rendered(rollout, reference)
        if text is not None:
            rows += 1
            recorded += _control_ids(all_ids, reference)
            rendered += _control_texts(text, reference)
    if recorded.total() < 2 * rows or not rows:
        return None
    # How often is no sign: a log may hold part of a conversation, and templates skip roles that they do not know.
    if recorded.keys() & rendered.keys():
        return None
    writes = listed([f"'{piece}'" for piece, _ in rendered.most_common(3)]) or "no control tokens"
    holds = listed([f"'{piece}'" for piece, _ in recorded.most_common(3)])
    return f"the rows hold {holds} where the template writes {writes}"


def _rendered(rollout: Rollout, reference: Reference) -> str | None:
    if not rollout.messages:
        return None
    kwargs = rollout.template_kwargs
    fast = reference.render_fast(rollout.messages, rollout.tools, kwargs, opens_answer=False)
    if fast is not None:
        return fast
    try:
        return reference.render(rollout.messages, rollout.tools, kwargs, opens_answer=False)
    except RenderError:
        return None


def _control_ids(all_ids: Sequence[Ids], reference: Reference) -> Counter[str]:
    """The control tokens in recorded ids that open something, by how they read."""
    vocabulary, ends = reference.vocabulary, reference.end_ids() | {reference.tokenizer.bos_id}
    found = Counter(one for ids in all_ids for one in ids[vocabulary.control(ids)].tolist() if one not in ends)
    return Counter({vocabulary.piece(one): number for one, number in found.items()})


def _control_texts(text: str, reference: Reference) -> Counter[str]:
    """The same in a rendered text."""
    vocabulary, ends = reference.vocabulary, reference.end_ids() | {reference.tokenizer.bos_id}
    pieces = (vocabulary.piece(one) for one in vocabulary.special_ids - ends)
    return Counter({piece: text.count(piece) for piece in pieces if piece in text})


# Words


def _what(cause: str, tokenizer: Tokenizer) -> str:
    if cause == TOKENIZER:
        return f"this log was not written with the tokenizer {tokenizer.name}"
    return f"this log was not written with the chat template of {tokenizer.name}, or the one that was given"


def _advice(cause: str, rollouts: Sequence[Rollout]) -> str:
    """What the log names, and what to pass."""
    named = names_of_log(rollouts)
    says = listed([f"its {key} '{name}'" for key, name in named.items()])
    said = f"the log names {says}; " if says else ""
    if cause == TOKENIZER:
        return f"{said}pass the tokenizer of the model that sampled it (-t NAME)"
    return f"{said}pass the template that the sampler used (--chat-template FILE), or that tokenizer (-t NAME)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1g}%"
