"""Stored turns joined with what the chat template writes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.errors import SpliceError
from tito_audit.record.arrays import Ids, as_ids, empty_ids
from tito_audit.sessions.delimiters import ASSISTANT, Delimiters

_PROMPT, _START, _TOOL = "prompt", "start", "tool"


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One message to join: the ids that were sampled, or a content to encode."""

    role: str
    """`system`, `user`, `tool`, `assistant`; or `prompt` for a whole first prompt with its generation prompt."""
    content: str | Sequence[int] | Ids
    """Ids are kept; a text is written as the template writes it, and encoded with its surroundings."""
    ended: bool | None = None
    """Whether a sampled answer holds its end token; None: as its last id says."""


def build_multi_turn_ids(
    turns: Iterable[StoredTurn], written: Delimiters, *, generation_prompt: bool = True
) -> Ids:
    """Stored turns joined with what the template writes between them, `[T]` int32.

    Sampled ids do not change; an answer that was cut gets its end token before the next turn. Everything between
    two answers is encoded as one text, so every token is the template's. `generation_prompt` opens the next answer
    if the last turn is not one. A conversation with tools begins with the stored `prompt`, which holds their
    definitions. SpliceError if a pair has no delimiter, or if it is unknown how the template writes a content.
    """
    listed = list(turns)
    runs = list(_runs(listed, written, generation_prompt))
    return np.concatenate([empty_ids(), *(ids for run in runs for ids in _encoded(written, run))])


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything before one sampled answer, and the answer."""

    parts: tuple[str | Ids, ...]
    sampled: Ids


def _runs(turns: Sequence[StoredTurn], written: Delimiters, opens: bool) -> Iterator[_Run]:
    _check_prompts(turns)
    left = _START
    parts: list[str | Ids] = []
    for number, turn in enumerate(turns):
        if turn.role == _PROMPT:
            yield _Run((), as_ids(_as_given(turn), f"turn {number}"))
            left = _PROMPT
            continue
        if left == _START and any(each.role == _TOOL for each in turns):
            raise SpliceError(
                f"{written.tokenizer.name}: a conversation with tools begins with their definitions, and no turn "
                f"has them.\nPass the ids of the first prompt as a turn with the role {_PROMPT!r}."
            )
        if left == _PROMPT:
            if turn.role != ASSISTANT:
                raise SpliceError(f"turn {number} is from {turn.role}, but the prompt before it opens an answer.")
        else:
            parts.append(_text(written, left, turn.role))
        if turn.role == ASSISTANT:
            answer = _answer(written, turn, number, last=number == len(turns) - 1)
            if isinstance(answer, str):
                parts.append(answer)
            else:
                yield _Run(tuple(parts), answer)
                parts = []
        else:
            parts.append(_content(written, turn, number))
        left = turn.role
    if opens and turns and left not in (ASSISTANT, _PROMPT):
        parts.append(_text(written, left, ASSISTANT))
    yield _Run(tuple(parts), empty_ids())


def _check_prompts(turns: Sequence[StoredTurn]) -> None:
    for number, turn in enumerate(turns):
        if turn.role != _PROMPT:
            continue
        if number:
            raise SpliceError(f"turn {number} is a {_PROMPT}, which only the first turn can be.")
        if isinstance(turn.content, str):
            raise SpliceError(f"turn {number} is a {_PROMPT} as text.\nPass the ids that the sampler was given.")


def _as_given(turn: StoredTurn) -> list[int]:
    assert not isinstance(turn.content, str)
    return [int(token_id) for token_id in turn.content]


def _text(written: Delimiters, left: str, right: str) -> str:
    text = written.between(left, right).text
    assert text is not None, "between raises for a pair without one"
    return text


def _content(written: Delimiters, turn: StoredTurn, number: int) -> str | Ids:
    """The content of a message as the template writes it; ids as they are."""
    if not isinstance(turn.content, str):
        return as_ids(_as_given(turn), f"turn {number}")
    how = written.contents.get(turn.role)
    text = how.written(turn.content) if how is not None else None
    if text is None:
        example = f", such as {how.unlike!r}" if how is not None else ""
        raise SpliceError(
            f"{written.tokenizer.name}: turn {number}: how the template writes contents of {turn.role} is not "
            f"known{example}.\nPass ids, or render this conversation with the template instead."
        )
    return text


def _answer(written: Delimiters, turn: StoredTurn, number: int, *, last: bool) -> str | Ids:
    """An answer; one that was cut has its end token, unless it is the last turn."""
    ids = _content(written, turn, number)
    if isinstance(ids, str):
        if written.answer.opens is None:
            raise SpliceError(
                f"{written.tokenizer.name}: turn {number}: the template writes an answer differently once "
                "something follows.\nPass the ids that were sampled."
            )
        text = written.answer.opens + ids
        return text if last and turn.ended is False else text + written.answer.end
    if last or not _is_cut(written, turn, ids):
        return ids
    if written.answer.end_ids is None:
        raise SpliceError(
            f"{written.tokenizer.name}: turn {number} has no end token, and the ids of the template's are unknown."
        )
    return np.concatenate([ids, np.array(written.answer.end_ids, np.int32)])


def _is_cut(written: Delimiters, turn: StoredTurn, ids: Ids) -> bool:
    """Whether an answer lacks its end token."""
    if turn.ended is not None:
        return not turn.ended
    ends = {*written.tokenizer.eos_ids, *(written.answer.end_ids or ())[-1:]}
    return not len(ids) or int(ids[-1]) not in ends


def _encoded(written: Delimiters, run: _Run) -> Iterator[Ids]:
    """The ids before an answer, then the answer's. Stored ids among them are kept if no token of the surrounding
    text would reach into them.
    """
    tokenizer = written.tokenizer
    texts = [part if isinstance(part, str) else tokenizer.vocabulary.text(part) for part in run.parts]
    whole = tokenizer.encode("".join(texts))
    if any(not isinstance(part, str) for part in run.parts):
        pieces = [tokenizer.encode(part) if isinstance(part, str) else part for part in run.parts]
        if not np.array_equal(whole, np.concatenate(pieces)):
            raise SpliceError(
                f"{tokenizer.name}: the ids of a stored message are not what the template's text has there.\n"
                "A token reaches across its end, or the ids are not how the tokenizer writes their text.\n"
                "Pass the text of the message instead."
            )
    yield whole
    yield run.sampled
