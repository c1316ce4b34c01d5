"""Whether a prompt differs from the rendered one only in its earlier answers, which were sampled."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tito_audit.evidence.reference import Reference
from tito_audit.identify.observe import Observation
from tito_audit.identify.ways import Way, Writer
from tito_audit.record.arrays import Ids

_CORE = re.compile(r"[^\n]*?(?=\n|<think|\Z)")
"""The common part of all generation prompts."""
_ROLE = re.compile(r"(?i)\W(user|system|observation|developer|human|assistant)\W")
"""Part of control tokens that begin a message with its role."""
_Spans = list[tuple[int, int]]


def differs_in_answers(writer: Writer, way: Way, observation: Observation) -> bool:
    """Whether a prompt holds the rendered tokens, except in its answers."""
    text = writer.text(way, observation)
    if text is None:
        return False
    text, recorded = writer.cut(text, observation), writer.recorded(observation)
    if observation.begun and _goes_on(writer, text, observation):
        return True
    answers = _answers(writer, way, observation)
    if answers is None:
        return text == recorded
    rendered_spans, recorded_spans = answers.spans(text), answers.spans(recorded)
    if _outside(text, rendered_spans) != _outside(recorded, recorded_spans):
        return False
    ids = writer.ids(text)
    if ids is None:
        return False
    canonical = _ids_outside(writer, ids, text, rendered_spans)
    logged = _ids_outside(writer, observation.ids, recorded, recorded_spans)
    return canonical is None or logged is None or np.array_equal(canonical, logged)


def _goes_on(writer: Writer, text: str, observation: Observation) -> bool:
    """Whether a prompt that begins with what was sampled continues as rendered."""
    new = observation.ids[observation.begun :]
    added = writer.tokenizer.vocabulary.text(new)
    return text.endswith(added) and writer.encodes(added, new)


def _answers(writer: Writer, way: Way, observation: Observation) -> _Answers | None:
    """What finds answers, from after the name of their role up to their end token; None without a role."""
    stated = observation.stated if way.uses_stated else {}
    opener = writer.renderer.opener({**dict(way.args), **stated})
    core = _CORE.match(opener)
    if core is None or not core[0]:
        return None
    vocabulary = writer.tokenizer.vocabulary
    ends = tuple(sorted(vocabulary.piece(token) for token in Reference(writer.tokenizer, None).end_ids()))
    roles = tuple(sorted(token for token in writer.renderer.control_texts if _ROLE.search(token)))
    return _Answers(core[0], _ends(ends, roles)) if ends or roles else None


class _Answers(NamedTuple):
    """Finds answers in a text."""

    core: str
    ends: re.Pattern[str]

    def spans(self, text: str) -> _Spans:
        """Where answers are, from after the core to their end; each text is read once."""
        spans: _Spans = []
        at = text.find(self.core)
        while at >= 0:
            start = at + len(self.core)
            end = self.ends.search(text, start)
            if end is None:
                break
            spans.append((start, end.end()))
            at = text.find(self.core, end.end())
        return spans


@lru_cache(maxsize=64)
def _ends(ends: tuple[str, ...], roles: tuple[str, ...]) -> re.Pattern[str]:
    """What ends an answer: one of `ends`, or the next message where answers end without a token."""
    return re.compile("|".join([*map(re.escape, ends), *(f"(?={re.escape(token)})" for token in roles)]))


def _outside(text: str, spans: _Spans) -> list[str]:
    """The text between the answers."""
    at, pieces = 0, []
    for start, end in spans:
        pieces.append(text[at:start])
        at = end
    return [*pieces, text[at:]]


def _ids_outside(writer: Writer, ids: Ids, text: str, spans: _Spans) -> Ids | None:
    """The ids outside answers; None if the ids have other bytes than the text."""
    ends = np.cumsum(writer.tokenizer.vocabulary.byte_lengths(ids))
    sizes = [len(piece.encode("utf-8", "surrogatepass")) for piece in _outside(text, spans)]
    answers = [len(text[start:end].encode("utf-8", "surrogatepass")) for start, end in spans]
    if not len(ends) or sum(sizes) + sum(answers) != ends[-1]:
        return None
    inside = np.zeros(len(ids), np.bool_)
    at = 0
    for size, answer in zip(sizes, answers, strict=False):
        start, at = at + size, at + size + answer
        first = int(np.searchsorted(ends, start, side="right"))
        inside[first : int(np.searchsorted(ends, at, side="left")) + 1] = True
    outside: Ids = ids[~inside]
    return outside
