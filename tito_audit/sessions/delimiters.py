"""What a chat template writes between messages, as text and as ids.

    system → user           <|im_end|>\\n<|im_start|>user\\n
    user → assistant        <|im_end|>\\n<|im_start|>assistant\\n      the generation prompt
    assistant → user        \\n<|im_start|>user\\n                     after the sampled end token

A delimiter is proved by rendering: conversations of several lengths, with contents of several shapes, all have the
same text there. If they do not, the delimiter has a reason instead of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tito_audit.errors import SpliceError
from tito_audit.record.arrays import Ids, as_ids, empty_ids
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.sessions.fit import as_tokenizer
from tito_audit.templates import seams
from tito_audit.templates.append_only import sampled_text, turn_ends
from tito_audit.templates.probes import ANSWER, USER, assistant, make_probe
from tito_audit.tokens.tokenizer import Tokenizer

ASSISTANT = "assistant"
_NAMES = {"answer": ASSISTANT, "tool call": ASSISTANT}
"""Speakers at a seam that are the assistant."""
_LONGER: tuple[tuple[str, ...], ...] = (
    ("user", "assistant", "user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
    ("system", "user", "call", "tool", "assistant", "user", "call", "tool", "assistant", "user"),
    ("user", "assistant", "user", "call", "tool", "call", "tool", "assistant"),
    ("user", "calls", "tool", "tool", "calls", "tool", "tool", "assistant", "user"),
)
"""Conversations beyond those that `template` shows."""
_MORE_CONTENTS = ("Été {}, no more?", "- a\n- b{}\n- c)")

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Delimiter:
    """What the template writes between two messages; after an answer, from its sampled end token on."""

    left: str
    """A role, or `start`."""
    right: str
    """A role; `assistant`: up to and with the generation prompt."""
    text: str | None
    """None if there is no fixed text; `reason` says why."""
    ids: tuple[int, ...] | None
    """The text encoded by itself."""
    seen: int
    """How often the template wrote it in the conversations tried."""
    reason: str | None = None
    merges_before: tuple[str, ...] = ()
    """Ends of the content before it that share a token with it; such a content is encoded together with it."""
    merges_after: tuple[str, ...] = ()
    """Beginnings of the content after it that share a token with it."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the template writes around the content of an answer."""

    opens: str | None
    """Between generation prompt and content; None if it depends on what follows: then only ids can be joined."""
    end: str
    """The end token; "" if there is none."""
    end_ids: tuple[int, ...] | None
    """Its ids; None if there is no end token, or if its ids depend on the content."""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """What one template writes around messages."""

    tokenizer: Tokenizer = field(repr=False)
    pairs: Mapping[Pair, Delimiter]
    """By (left, right). The beginning of a conversation with tools, which holds their definitions, is not here."""
    contents: Mapping[str, seams.RoleContent]
    """How contents are written, by role."""
    answer: AnswerForm

    def between(self, left: str, right: str) -> Delimiter:
        """The delimiter of a pair; SpliceError with the reason if there is none."""
        delimiter = self.pairs.get((left, right))
        if delimiter is None:
            raise SpliceError(
                f"{self.tokenizer.name}: the text between {left} and {right} is unknown.\n"
                "The template refused every conversation with them in this order, or moved one of them.\n"
                "Render this conversation with the template instead."
            )
        if delimiter.text is None:
            raise SpliceError(
                f"{self.tokenizer.name}: the text between {left} and {right} is not fixed: {delimiter.reason}.\n"
                "Turns that are joined with one of its forms would not be what the template writes.\n"
                "Render this conversation with the template instead."
            )
        return delimiter


def delimiters(tokenizer: Tokenizer | str | Path, renderer: Renderer | None = None) -> Delimiters:
    """What a tokenizer's chat template writes between each pair of roles, each proved on several probes.

    `tokenizer` is a loaded one, a folder or a hub name; `renderer` replaces its own template. SetupError if it has
    none.
    """
    own = as_tokenizer(tokenizer)
    renderer = renderer or make_renderer(own)
    answer = answer_form(own, renderer)
    between = seams.find_seams(renderer, own, (*seams.PATTERNS, *_LONGER), (*seams.CONTENTS, *_MORE_CONTENTS))
    groups: dict[Pair, list[seams.Seam]] = {}
    for seam in between:
        if not seam.left.endswith("with tools"):
            pair = _NAMES.get(seam.left, seam.left), _NAMES.get(seam.right, seam.right)
            groups.setdefault(pair, []).append(seam)
    pairs: dict[Pair, Delimiter] = {}
    for pair, group in groups.items():
        texts = list(dict.fromkeys(text for seam in group for text in seam.texts))
        text, end = texts[0], answer.end if pair[0] == ASSISTANT else ""
        pairs[pair] = Delimiter(*pair, None, None, sum(seam.seen for seam in group))
        if len(texts) > 1:
            shown = " and ".join(repr(text[-40:]) for text in texts[:2])
            reason = f"it depends on the messages ({len(texts)} texts were found, among them {shown})"
        elif _encode(own, end + text) != (*_encode(own, end), *_encode(own, text)):
            reason = f"a token reaches into it from the end token {end!r}"
        else:
            before = tuple(dict.fromkeys(edge for seam in group for edge in seam.merges_before))
            after = tuple(dict.fromkeys(edge for seam in group for edge in seam.merges_after))
            pairs[pair] = replace(
                pairs[pair], text=text, ids=_encode(own, text), merges_before=before, merges_after=after
            )
            continue
        pairs[pair] = replace(pairs[pair], reason=reason)
    refuted: dict[Pair, str] = {}  # pairs that have another text in longer conversations
    for pattern, form in product(_LONGER, _MORE_CONTENTS):
        texts = [form.format(number) for number in range(len(pattern))]
        whole = replace(seams.pattern_probe(pattern, texts), tools=()).try_render(renderer)
        if whole is None:
            continue
        unlike, reason = _find_refuted_pair(pattern, texts, whole, pairs, answer)
        if unlike is not None:
            refuted.setdefault(unlike, reason)
    for pair, reason in refuted.items():
        pairs[pair] = replace(pairs[pair], text=None, ids=None, reason=reason)
    return Delimiters(own, pairs, {content.role: content for content in seams.find_contents(renderer)}, answer)


def answer_form(tokenizer: Tokenizer, renderer: Renderer) -> AnswerForm:
    """How the template writes an answer that has only content."""
    question = {"role": "user", "content": USER}
    conversation = make_probe("", [question, assistant(ANSWER), question])
    prompt, history = (conversation.try_render(renderer, count) for count in (1, 3))
    last = conversation.try_render(renderer, 2, opens=False)
    if prompt is None or last is None or history is None:
        return AnswerForm(None, "", None)
    ends = turn_ends(renderer)
    sampled, ended = sampled_text(last, prompt, ends)
    if ended and last.startswith(prompt) and history.startswith(prompt + sampled):
        opens, _, end = sampled.partition(ANSWER)
        return AnswerForm(opens, end, _end_token_ids(tokenizer, end))
    # The end token that follows in the history, with white space before it; "" if there is none.
    text = history.partition(ANSWER)[2]
    bare = text.lstrip()
    end_found = max((end for end in ends if end and bare.startswith(end)), key=len, default="")
    end = text[: len(text) - len(bare) + len(end_found)] if end_found else ""
    return AnswerForm(None, end, _end_token_ids(tokenizer, end))


def _find_refuted_pair(
    roles: Sequence[str], texts: Sequence[str], whole: str, pairs: Mapping[Pair, Delimiter], answer: AnswerForm
) -> tuple[Pair | None, str]:
    """The first pair of roles in a conversation with another text than its delimiter, and why; None if none."""
    at = 0
    for pair, content in zip(pairwise(("start", *roles, ASSISTANT)), (*texts, ""), strict=True):
        text = pairs[pair].text if pair in pairs else None
        if text is None:
            break
        if not whole.startswith(text, at):
            return pair, f"a longer conversation has {whole[at : at + len(text)]!r} where others have {text!r}"
        expected = (answer.opens or "") + content + answer.end if pair[1] == ASSISTANT else content
        at += len(text)
        if not whole.startswith(expected, at):
            break  # the content is written differently, which says nothing about the text around it
        at += len(expected)
    return None, ""


def _end_token_ids(tokenizer: Tokenizer, end: str) -> tuple[int, ...] | None:
    """The ids of the end token; None if they depend on the content before it."""
    ids = set()
    for edge in seams.EDGES if end else ():
        before, whole = _encode(tokenizer, ANSWER + edge), _encode(tokenizer, ANSWER + edge + end)
        ids.add(whole[len(before) :] if whole[: len(before)] == before else None)
    return ids.pop() if len(ids) == 1 else None


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text).tolist())


_PROMPT = "prompt"


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
    listed, tokenizer = list(turns), written.tokenizer
    # Everything before each sampled answer, and the answer
    runs: list[tuple[Sequence[str | Ids], Ids]] = []
    parts: list[str | Ids] = []
    left = "start"
    for number, turn in enumerate(listed):
        if turn.role == _PROMPT and number:
            raise SpliceError(f"turn {number} is a {_PROMPT}, which only the first turn can be.")
        if turn.role == _PROMPT and isinstance(turn.content, str):
            raise SpliceError(f"turn {number} is a {_PROMPT} as text.\nPass the ids that the sampler was given.")
    for number, turn in enumerate(listed):
        if not number and turn.role != _PROMPT and any(each.role == "tool" for each in listed):
            raise SpliceError(
                f"{tokenizer.name}: a conversation with tools begins with their definitions, and no turn "
                f"has them.\nPass the ids of the first prompt as a turn with the role {_PROMPT!r}."
            )
        if left == _PROMPT and turn.role != ASSISTANT:
            raise SpliceError(f"turn {number} is from {turn.role}, but the prompt before it opens an answer.")
        if _PROMPT not in (left, turn.role):
            parts.append(written.between(left, turn.role).text or "")
        content = _written_content(written, turn, number, last=number == len(listed) - 1)
        if isinstance(content, str) or turn.role not in (ASSISTANT, _PROMPT):
            parts.append(content)
        else:
            runs.append((parts, content))
            parts = []
        left = turn.role
    if generation_prompt and listed and left not in (ASSISTANT, _PROMPT):
        parts.append(written.between(left, ASSISTANT).text or "")
    runs.append((parts, empty_ids()))
    whole = [empty_ids()]
    for before, sampled in runs:
        texts = [part if isinstance(part, str) else tokenizer.vocabulary.text(part) for part in before]
        ids = tokenizer.encode("".join(texts))
        if any(not isinstance(part, str) for part in before):
            # Stored ids are kept if no token of the surrounding text would reach into them.
            pieces = [tokenizer.encode(part) if isinstance(part, str) else part for part in before]
            if not np.array_equal(ids, np.concatenate(pieces)):
                raise SpliceError(
                    f"{tokenizer.name}: the ids of a stored message are not what the template's text has there.\n"
                    "A token reaches across its end, or the ids are not how the tokenizer writes their text.\n"
                    "Pass the text of the message instead."
                )
        whole += (ids, sampled)
    return np.concatenate(whole)


def _written_content(written: Delimiters, turn: StoredTurn, number: int, *, last: bool) -> str | Ids:
    """The content of a turn as the template writes it, or its ids; a cut answer gets its end token if not last."""
    where, answer = f"{written.tokenizer.name}: turn {number}", written.answer
    if isinstance(turn.content, str):
        how = written.contents.get(turn.role)
        text = how.write(turn.content) if how is not None else None
        if text is None:
            example = f", such as {how.unlike!r}" if how is not None else ""
            raise SpliceError(
                f"{where}: how the template writes contents of {turn.role} is not known{example}.\n"
                "Pass ids, or render this conversation with the template instead."
            )
        if turn.role != ASSISTANT:
            return text
        if answer.opens is None:
            raise SpliceError(
                f"{where}: the template writes an answer differently once something follows.\n"
                "Pass the ids that were sampled."
            )
        return answer.opens + text + ("" if last and turn.ended is False else answer.end)
    ids = as_ids([int(token_id) for token_id in turn.content], f"turn {number}")
    if turn.role != ASSISTANT or last:
        return ids
    ends = {*written.tokenizer.eos_ids, *(answer.end_ids or ())[-1:]}
    if turn.ended if turn.ended is not None else len(ids) > 0 and int(ids[-1]) in ends:
        return ids
    if answer.end_ids is None:
        raise SpliceError(f"{where} has no end token, and the ids of the template's are unknown.")
    return np.concatenate([ids, np.array(answer.end_ids, np.int32)])
