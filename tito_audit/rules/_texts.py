"""Compares the logged text of a completion with the text that its ids decode to."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from operator import attrgetter, itemgetter

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.prompts import PREFILL
from tito_audit.record.arrays import Offsets
from tito_audit.record.memo import memoized
from tito_audit.record.message import Message, sampled_indices
from tito_audit.record.rollout import Turn
from tito_audit.tokens.vocab import Prefix

_BROKEN = "\ufffd"
_BROKEN_RUN = re.compile(f"{_BROKEN}+")
_MARKUP_END = re.compile(r"<[^<>\s]+>\s*$")
_NAME = attrgetter("name")
_SPACES_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What `clean_up_tokenization_spaces` replaces."""


class TextAgreement(StrEnum):
    """How the logged text and the decoded ids agree."""

    SAME = "same"
    TRIMMED = "white space trimmed"
    STOP_STRING = "stop string left out"
    PAST_STOP = "ids behind the stop string"
    CLEANED = "spaces cleaned up"
    DIFFERENT = "text and ids disagree"


@dataclass(frozen=True)
class Decoding:
    """One way in which servers decode a completion."""

    decode: Callable[[], str]
    kept_at: Offsets
    """`[K]` positions of the tokens that the text was decoded from."""

    @cached_property
    def text(self) -> str:
        """The text, decoded when it is first needed: the first way is most often the right one."""
        return self.decode()

    @cached_property
    def normalized(self) -> str:
        """The text in the form in which texts are compared."""
        return _normalize(self.text)


def answer_of(evidence: Evidence, turn: Turn) -> Message | None:
    """The assistant message that a turn produced; None if the log does not say which."""
    index, messages = turn.message_index, evidence.rollout.messages
    if index is None or not 0 <= index < len(messages):
        return turn.answer
    message = messages[index]
    return message if message.sampled else turn.answer


@memoized
def spelled_calls(evidence: Evidence) -> frozenset[int]:
    """The calls whose ids plainly spell their text, else their message, and the names of the tools they call.

    All calls are decoded together, which costs little; `decodings` has the other ways to decode the rest.
    """
    vocabulary, spelled = evidence.vocabulary, set()
    turns, messages = enumerate(evidence.rollout.turns), evidence.rollout.messages
    calls = [(k, turn, ids) for k, turn in turns if (ids := turn.completion_ids) is not None and len(ids)]
    if vocabulary is None or vocabulary.prefix is not Prefix.NEVER or not calls:
        return frozenset()
    ends, data, _ = vocabulary.spell(np.concatenate([ids for _, _, ids in calls]))
    answers, at, start = frozenset(sampled_indices(messages)), 0, 0
    for number, turn, ids in calls:
        at += len(ids)
        text = data[start : (start := int(ends[at - 1]))].decode("utf-8", "replace")
        index, logged = turn.message_index, turn.completion_text
        answer = messages[index] if index is not None and index in answers else turn.answer  # as `answer_of`
        parts = [] if answer is None else [*map(_NAME, answer.tool_calls)]
        if logged is not None:
            end = vocabulary.piece(int(ids[-1])) if int(ids[-1]) in evidence.end_ids else ""
            if text not in (logged, logged + end):
                continue
        elif answer is not None:
            content = answer.content
            parts += [content if type(content) is str else answer.text, answer.reasoning or ""]
        if not parts or (text.isascii() and all(map(text.__contains__, map(str.strip, parts)))):
            spelled.add(number)
    return frozenset(spelled)


def decodings(evidence: Evidence, number: int, text: str) -> list[Decoding]:
    """The ways to decode the completion of a turn that may have produced `text`.

    Special tokens are kept, dropped, or only the last one dropped if it ends a turn. If there are broken
    characters, also as decoders write them that skip them or see only some of the ids at a time.
    """
    vocabulary, ids = evidence.vocabulary, evidence.rollout.turns[number].completion_ids
    if vocabulary is None or ids is None:
        return []
    whole = _whole_decodings(evidence, number)
    if _BROKEN not in text and _BROKEN not in whole[0].text:
        return whole
    return whole + _broken_decodings(evidence, number)


@memoized
def _whole_decodings(evidence: Evidence, number: int) -> list[Decoding]:
    """The ways to decode the completion of a turn that decode all tokens they keep at once."""
    vocabulary, ids = evidence.vocabulary, evidence.rollout.turns[number].completion_ids
    assert vocabulary is not None
    assert ids is not None
    every = np.arange(len(ids))
    special = vocabulary.control(ids)
    ends = len(ids) > 0 and (int(ids[-1]) in evidence.end_ids or bool(special[-1]))
    if np.count_nonzero(special) > int(ends) or (len(ids) and ends != special[-1]):
        parts = [every, every[:-1] if ends else every, every[~special]]
        distinct = list({part.tobytes(): part for part in parts}.values())
    else:
        distinct = [every, every[:-1]] if ends else [every]
    return [Decoding(partial(vocabulary.text, ids[part]), part) for part in distinct]


def without_prefill(evidence: Evidence, number: int, text: str) -> str:
    """The text of an answer without the prefill that its prompt ends with, which was not sampled."""
    return text.lstrip().removeprefix(_prefills(evidence).get(number, ""))


@memoized
def _prefills(evidence: Evidence) -> dict[int | None, str]:
    """The prefill of each turn that has one."""
    prefills: dict[int | None, str] = {}
    for each in evidence.differences:
        if each.known_cause is PREFILL:
            prefills[each.turn] = each.recorded.data.decode("utf-8", "replace").strip()
    return prefills


@memoized
def agreement(evidence: Evidence, number: int) -> TextAgreement:
    """How the text of a turn agrees with its ids in the best decoding. The turn must have ids and text."""
    turn, vocabulary = evidence.rollout.turns[number], evidence.vocabulary
    text, finish_reason = turn.completion_text, turn.finish_reason
    assert vocabulary is not None
    assert text is not None
    ways, want = decodings(evidence, number, text), _normalize(text)
    # Whether a decoder writes the space that the tokenizer prepends depends on what it decoded before.
    spaced = vocabulary.prefix is not Prefix.NEVER
    for way in ways:
        if way.normalized == want or (spaced and way.normalized.removeprefix(" ") == want.removeprefix(" ")):
            return TextAgreement.SAME
    decoded, bare = [way.normalized for way in ways], want.strip()
    for written in map(str.rstrip, decoded):
        # The text may be only what follows a tag, such as the one that closes the reasoning.
        if bare and written.endswith(bare) and _MARKUP_END.search(written[: -len(bare)]):
            return TextAgreement.SAME
    if any(written.strip() == bare for written in decoded):
        return TextAgreement.TRIMMED
    behind = first_token_past_stop(evidence, number, text)
    if behind is not None:
        return TextAgreement.PAST_STOP if behind >= 0 else TextAgreement.STOP_STRING
    more = [len(written) - len(want) for written in decoded if written.startswith(want)]
    if finish_reason == "stop" and want and min(more, default=33) <= 32:
        return TextAgreement.STOP_STRING
    for cleaned in decoded:
        for loose, tight in _SPACES_CLEANED:
            cleaned = cleaned.replace(loose, tight)
        if cleaned.strip() == bare:
            return TextAgreement.CLEANED
    return TextAgreement.DIFFERENT


def prompt_in_answer(evidence: Evidence) -> str:
    """The end of the prompt inside the first token of an answer in a preference pair; "" if there is none."""
    if evidence.rollout.stated.side is None or evidence.vocabulary is None:
        return ""
    turn = evidence.rollout.turns[0]
    if not turn.prompt_text or not turn.completion_text or turn.completion_ids is None:
        return ""
    decoded = evidence.vocabulary.text(turn.completion_ids)
    more = decoded[: max(decoded.find(turn.completion_text), 0)]
    return more if turn.prompt_text.endswith(more) else ""


def first_token_past_stop(evidence: Evidence, number: int, text: str) -> int | None:
    """The first token after the text and the stop string of a turn; -1 if there is none.

    None unless the log names a stop string and the ids hold it after the text, or the text ends with it.
    """
    turn, vocabulary = evidence.rollout.turns[number], evidence.vocabulary
    ids, stop = turn.completion_ids, turn.stop_string
    if vocabulary is None or ids is None or not stop:
        return None
    whole = text if text.endswith(stop) else text + stop
    for way in decodings(evidence, number, text):
        if way.text.startswith(whole):
            ends = vocabulary.byte_lengths(ids[way.kept_at]).cumsum()
            beyond = len(way.text.encode("utf-8", "surrogatepass")) - len(whole.encode("utf-8", "surrogatepass"))
            last = int(ends.searchsorted(int(ends[-1]) - beyond))
            rest = [int(place) for place in way.kept_at[last + 1 :] if int(ids[place]) not in evidence.end_ids]
            return rest[0] if rest else -1
    return None


def ids_contain(evidence: Evidence, number: int, part: str) -> bool:
    """Whether the decoded completion contains a text, apart from white space around it and a prefill."""
    want = _normalize(without_prefill(evidence, number, part)).strip()
    return any(want in way.normalized for way in decodings(evidence, number, part))


def missing_part(evidence: Evidence, number: int, text: str) -> str | None:
    """The part of a text that the ids lack, if they hold all the rest of it; else None."""
    want = _normalize(without_prefill(evidence, number, text)).strip()
    for decoding in decodings(evidence, number, text):
        have = decoding.normalized.strip()
        prefix = _common_prefix(have, want)
        suffix = _common_prefix(have[prefix:][::-1], want[prefix:][::-1])
        missed = want[prefix : len(want) - suffix]
        if prefix + suffix >= len(have) and (len(missed.strip()) >= 4 or not have):
            return missed or None
    return None


def first_difference(evidence: Evidence, number: int, text: str) -> tuple[int, str, str]:
    """The token at which the ids depart from a text in the best decoding, and how each of the two continues."""
    ids = evidence.rollout.turns[number].completion_ids
    assert evidence.vocabulary is not None
    assert ids is not None
    ways = decodings(evidence, number, text)
    prefix, best = max(((_common_prefix(way.text, text), way) for way in ways), key=itemgetter(0))
    ends = evidence.vocabulary.byte_lengths(ids[best.kept_at]).cumsum()
    tokens_kept = int(ends.searchsorted(len(text[:prefix].encode("utf-8", "surrogatepass")), side="right"))
    position = int(best.kept_at[tokens_kept]) if tokens_kept < len(best.kept_at) else len(ids)
    return position, best.text[prefix:], text[prefix:]


def _normalize(text: str) -> str:
    """A text in NFC, with each run of replacement characters as one: decoders differ in how many they write."""
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFC", text)
    return _BROKEN_RUN.sub(_BROKEN, composed) if _BROKEN in composed else composed


@memoized
def _broken_decodings(evidence: Evidence, number: int) -> list[Decoding]:
    """The ways to decode the completion of a turn that treat broken characters otherwise.

    Each token on its own; each run of partial or byte tokens together; without broken characters; and without the
    last tokens, which streams hold back while they end in a broken character.
    """
    vocabulary, ids = evidence.vocabulary, evidence.rollout.turns[number].completion_ids
    assert vocabulary is not None
    assert ids is not None
    ways: list[Decoding] = []
    for kept_at in [whole.kept_at for whole in _whole_decodings(evidence, number)]:
        alone: list[str] = []
        together: list[str] = []
        run, byte_ids = b"", vocabulary.byte_ids
        for token, data in ((int(i), vocabulary.token_bytes(int(i))) for i in ids[kept_at]):
            alone.append(data.decode("utf-8", "replace"))
            if token in byte_ids if byte_ids else alone[-1].encode() != data:
                run += data
            else:
                together += (_decode_strictly(run), alone[-1])
                run = b""
        texts = "".join(alone), "".join((*together, _decode_strictly(run)))
        ways += [Decoding(partial(str, text), kept_at) for text in texts]
        ways.append(Decoding(partial(vocabulary.bytes_of(ids[kept_at]).decode, "utf-8", "ignore"), kept_at))
        for size in range(len(kept_at) - 1, -1, -1):
            if not alone[size].endswith(_BROKEN):
                break
            ways.append(Decoding(partial(vocabulary.text, ids[kept_at[:size]]), kept_at[:size]))
    return ways


def _decode_strictly(run: bytes) -> str:
    """A run of partial tokens as byte-fallback decoders write it: one U+FFFD if any byte of it is broken."""
    text = run.decode("utf-8", "replace")
    return _BROKEN if _BROKEN in text else text


def _common_prefix(text: str, other: str) -> int:
    """How many characters two texts share at the start."""
    short = min(len(text), len(other))
    if text[:short] == other[:short]:
        return short
    low, high = 0, short
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    return low
