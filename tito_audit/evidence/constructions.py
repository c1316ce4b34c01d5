"""Explains differences by another way to write the messages that gives the recorded tokens there.

Only sequences that differ from what the template writes are tried, a limited number of times. An explanation is a
proof: rendered that way, the messages give the recorded tokens where they gave others as logged.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tito_audit.evidence.built_tools import tool_sets
from tito_audit.evidence.first_prompt import at, has_clock
from tito_audit.evidence.model import Against, Construction, Difference
from tito_audit.evidence.prompts import prompt_messages
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.row_as_sent import answer_to, is_as_sent
from tito_audit.evidence.unmatched import SAME_BYTES, Candidate, UnmatchedSequence
from tito_audit.record.finding import Severity, Where
from tito_audit.record.message import Message, as_message
from tito_audit.record.rollout import Rollout
from tito_audit.render.dates import ClockProbe, date_in
from tito_audit.render.renderer import Renderer

_PADS = 2
"""A run of at least this many of one control token is padding."""
_SEQUENCES = 8
"""How many sequences of a rollout are tried."""


def with_constructions(
    rollout: Rollout, differences: Sequence[Difference], reference: Reference
) -> Sequence[Difference]:
    """The same differences, each with the construction that explains it, if one was found."""
    if reference.renderer is None:
        return differences
    out = _Changed(differences)
    sequences: dict[tuple[Where, int | None], array[int]] = {}
    for number, difference in enumerate(differences):
        if (
            difference.against is Against.TEMPLATE
            and difference.where is not Where.COMPLETION
            and difference.kind not in SAME_BYTES
        ):
            sequences.setdefault((difference.where, difference.turn), array("q")).append(number)
    for (where, turn), numbers in list(sequences.items())[:_SEQUENCES]:
        if all(_harmless(out[number]) for number in numbers):
            continue
        # A sequence with the messages that it was rendered from; None where the log does not say.
        row = rollout.training_row
        if where is Where.ROW and row is None:
            sequence = None
        elif where is Where.ROW and row is not None and is_as_sent(rollout):
            answer = answer_to(rollout, reference)
            before = row.token_ids if answer is None else row.token_ids[: answer[0]]
            sequence = UnmatchedSequence(rollout, reference, before, rollout.messages, opens=True)
        elif where is Where.ROW and row is not None:
            sequence = UnmatchedSequence(rollout, reference, row.token_ids, rollout.messages, opens=False)
        else:
            assert turn is not None
            ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
            sequence = (
                None if ids is None or not sent else UnmatchedSequence(rollout, reference, ids, sent, opens=True)
            )
        if sequence is not None:
            _padding(sequence, out, numbers)
            _explain(sequence, out, [number for number in numbers if out[number].construction is None])
    return out.done()


class _Changed:
    """Differences of which some are replaced."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self._differences = differences
        self._changed: dict[int, Difference] = {}

    def __getitem__(self, number: int) -> Difference:
        changed = self._changed.get(number)
        return self._differences[number] if changed is None else changed

    def __setitem__(self, number: int, difference: Difference) -> None:
        self._changed[number] = difference

    def done(self) -> Sequence[Difference]:
        """All of them."""
        return [self[number] for number in range(len(self._differences))]


def _harmless(difference: Difference) -> bool:
    """Whether it is proven to be what a model sampled, which leaves nothing to explain."""
    return difference.sampled and difference.severity is Severity.NOTE


def _padding(sequence: UnmatchedSequence, out: _Changed, numbers: Sequence[int]) -> None:
    """Explain a run of one control token at the very start or end of a sequence as padding."""
    ids, control = sequence.recorded, sequence.held.control
    where = "prompt ids" if sequence.opens else "row"
    for number in numbers:
        start, end = out[number].start, out[number].end
        outside = start == 0 or end == len(ids)
        if end - start < _PADS or not outside or len(out[number].canonical.ids):
            continue
        pad = int(ids[start])
        if control[start] and bool((ids[start:end] == pad).all()) and pad != sequence.reference.tokenizer.bos_id:
            what = f"{end - start} padding tokens are in the {where}"
            padding = Construction("REC004", f"padding in the {where}", what)
            out[number] = replace(out[number], construction=padding)


def _explain(sequence: UnmatchedSequence, out: _Changed, numbers: Sequence[int]) -> None:
    """Give the differences of one sequence their constructions, starting with those that explain the most."""
    found: list[tuple[Candidate, list[int]]] = []
    for candidate in _candidates(sequence) if numbers and sequence.has_role_markers else ():
        rest = sequence.differing(candidate.text)
        explained = [number for number in numbers if not any(_touch(out[number], part) for part in rest)]
        if not explained or not all(any(_touch(out[number], part) for number in numbers) for part in rest):
            continue
        found.append((candidate, explained))
        if all(number in explained or _harmless(out[number]) for number in numbers):
            break
    for candidate, explained in sorted(found, key=lambda one: -len(one[1])):
        for number in explained:
            if out[number].construction is None:
                out[number] = replace(out[number], construction=candidate.construction)


def _candidates(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """Every other way to write the messages, most likely first."""
    if sequence.canonical is None:
        return
    seen = {sequence.canonical}
    for ways in (dates, tool_sets, systems, histories):
        for candidate in ways(sequence):
            if candidate.text not in seen:
                seen.add(candidate.text)
                yield candidate


def _touch(difference: Difference, stretch: tuple[int, int]) -> bool:
    """Whether a stretch of recorded tokens is part of a difference, or next to it."""
    return stretch[0] <= difference.end and difference.start <= stretch[1]


# Prompts rendered on the date that they hold


def dates(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered on the date that the recorded text holds where the template writes one."""
    renderer = sequence.reference.renderer
    if renderer is None or not has_clock(renderer):
        return
    probed = _written(sequence, replace(renderer, clock=ClockProbe()))
    moment = date_in(probed, sequence.text) if probed is not None else None
    text = _written(sequence, at(renderer, moment)) if moment is not None else None
    if moment is not None and text is not None:
        yield Candidate(
            text, Construction("TPL210", "another date", f"the prompt was written on {moment:%Y-%m-%d}")
        )


def _written(sequence: UnmatchedSequence, renderer: Renderer) -> str | None:
    """What another renderer writes for the sequence."""
    sequence.left -= 1
    other = replace(sequence, reference=replace(sequence.reference, renderer=renderer), left=1)
    return other.write(sequence.messages, sequence.rollout.tools)


# Prompts and rows rendered without the older messages


_TRIED = 4
"""How many later questions are tried as the start of the history."""


def histories(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages from a later question on, the longest history first."""
    messages = sequence.messages
    system_messages = 1 if messages[0].role in ("system", "developer") else 0
    later = [i for i in range(system_messages + 1, len(messages)) if messages[i].role == "user"]
    recorded = [i for i in later if messages[i].text.strip() and messages[i].text.strip() in sequence.text]
    for first in recorded[:_TRIED]:
        for head in (messages[:system_messages], messages[: system_messages + 1]):
            if len(head) >= first:
                continue
            text = sequence.write((*head, *messages[first:]), sequence.rollout.tools)
            if text is not None:
                dropped = first - len(head)
                what = "an older message is" if dropped == 1 else f"{dropped} older messages are"
                yield Candidate(text, Construction("SEQ303", "older messages dropped", f"{what} left out"))


# Prompts rendered with a system prompt other than the messages', or with theirs in another place


_PROBE = "titoauditprobe"
_ANCHOR = 48
"""How many characters after a system prompt are used to find its end in recorded text."""


def holds_system(text: str) -> bool:
    """Whether a text contains a system or developer header."""
    return re.search(r"(^|[>\n|])\s*(system|developer)\b", text) is not None or "<<SYS>>" in text


def systems(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered with another system prompt, with none, or with it in another place."""
    first = sequence.messages[0]
    if first.role in ("system", "developer"):
        yield from _other_than(first.text, sequence)
        return
    assert sequence.canonical is not None
    bare = _without_default(sequence, sequence.canonical)
    if bare is not None:
        yield _candidate(bare, "default system prompt missing", "the default system prompt is missing")
    yield from _found(sequence, sequence.messages, "system prompt not in the messages", "is not in the messages")


def _other_than(system: str, sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered with something other than their own system prompt."""
    rest = sequence.messages[1:]
    text = sequence.write(rest, sequence.rollout.tools)
    bare = _without_default(sequence, text) if text is not None else None
    if text is not None and bare is not None:
        cause = "default system prompt in place of the log's"
        yield _candidate(text, cause, "the template's default replaces the system prompt")
    without = bare or text
    if without is not None:
        yield _candidate(without, "system prompt missing", "a system prompt is missing")
        yield from _own_turn(sequence, without, system)
    yield from _folded(sequence, rest, system)
    yield from _found(sequence, rest, "another system prompt", "is not the one in the messages")


def _folded(sequence: UnmatchedSequence, rest: tuple[Message, ...], system: str) -> Iterator[Candidate]:
    """The system prompt at the start of the first user message."""
    if not rest or rest[0].role != "user" or not isinstance(rest[0].content, str):
        return
    for between in ("\n\n", "\n", " "):
        content = f"{system}{between}{rest[0].content}"
        folded = replace(rest[0], content=content, wire={**rest[0].wire, "content": content})
        text = sequence.write((folded, *rest[1:]), sequence.rollout.tools)
        if text is None:
            return
        cause = "system prompt folded into the first user message"
        for candidate_text in (_without_default(sequence, text), text):
            if candidate_text is not None:
                yield _candidate(candidate_text, cause, "the system prompt is in the first user message")


def _own_turn(sequence: UnmatchedSequence, without: str, system: str) -> Iterator[Candidate]:
    """The system prompt as a turn of its own, where the template folds it into the first user turn."""
    assert sequence.canonical is not None
    start, at = _user_header(sequence, without)
    if start is None or holds_system(sequence.canonical[: max(sequence.canonical.find(sequence.question), 0)]):
        return
    header = without[start:at]
    close = without[at + len(sequence.question) :]
    again = close.find(header[: max(header.lower().find("user"), 1)])
    if again < 0 or "user" not in header:
        return
    turn = header.replace("user", "system") + system.strip() + close[:again]
    cause = "system prompt as a turn of its own"
    yield _candidate(without[:start] + turn + without[start:], cause, "the system prompt has a turn of its own")


def _found(sequence: UnmatchedSequence, rest: tuple[Message, ...], cause: str, what: str) -> Iterator[Candidate]:
    """The messages with the system prompt that the recorded text holds where the template writes one."""
    probe = sequence.write((_system(_PROBE), *rest), sequence.rollout.tools)
    if probe is None or probe.count(_PROBE) != 1:
        return
    before, after = probe.split(_PROBE)
    end = sequence.text.find(after[:_ANCHOR], len(before))
    if not sequence.text.startswith(before) or end <= len(before):
        return
    system = sequence.text[len(before) : end]
    assert sequence.reference.renderer is not None
    if any(token in system for token in sequence.reference.renderer.control_texts if token):
        return  # control tokens: not the text of a message
    text = sequence.write((_system(system), *rest), sequence.rollout.tools)
    if text is not None:
        yield _candidate(text, cause, f"the system prompt {what}")


def _without_default(sequence: UnmatchedSequence, text: str) -> str | None:
    """A text rendered without a system message, with the template's default system prompt cut out too."""
    if sequence.rollout.tools:
        return None  # the tools are written there
    start, _ = _user_header(sequence, text)
    if start is None or not holds_system(text[:start]):
        return None
    shortened = text[start:]
    return shortened if sequence.bos and shortened.startswith(sequence.bos) else sequence.bos + shortened


def _user_header(sequence: UnmatchedSequence, text: str) -> tuple[int | None, int]:
    """Where the header of the first user message begins, and where its text begins."""
    at = text.find(sequence.question) if sequence.question else -1
    word = text.lower().rfind("user", 0, max(at, 0))
    assert sequence.reference.renderer is not None
    if at < 0 or word < 0:
        return None, at
    starts = (
        text.rfind(token, 0, word + len(token)) for token in sequence.reference.renderer.control_texts if token
    )
    start = max(starts, default=-1)
    return (start if start >= 0 else None), at


def _system(text: str) -> Message:
    return as_message({"role": "system", "content": text}, "system")


def _candidate(text: str, cause: str, what: str) -> Candidate:
    return Candidate(text, Construction("TPL206", cause, what))
