"""Explains differences by another way to write the messages that gives the recorded tokens there.

Only sequences that differ from what the template writes are tried, a limited number of times. An explanation is a
proof: rendered that way, the messages give the recorded tokens where they gave others as logged.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tito_audit.evidence.built_dates import dates
from tito_audit.evidence.built_history import histories
from tito_audit.evidence.built_systems import systems
from tito_audit.evidence.built_tools import tool_sets
from tito_audit.evidence.many import ManyDifferences
from tito_audit.evidence.model import Against, Construction, Difference
from tito_audit.evidence.prompts import prompt_messages
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.row_as_sent import answer_to, is_as_sent
from tito_audit.evidence.unmatched import SAME_BYTES, Candidate, UnmatchedSequence
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Rollout

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
    for number, one in enumerate(differences):
        if one.against is Against.TEMPLATE and one.where is not Where.COMPLETION and one.kind not in SAME_BYTES:
            sequences.setdefault((one.where, one.turn), array("q")).append(number)
    for (where, turn), numbers in list(sequences.items())[:_SEQUENCES]:
        if all(_harmless(out[number]) for number in numbers):
            continue
        sequence = _unmatched(rollout, where, turn, reference)
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

    def __setitem__(self, number: int, one: Difference) -> None:
        self._changed[number] = one

    def done(self) -> Sequence[Difference]:
        """All of them."""
        if isinstance(self._differences, ManyDifferences):
            return self._differences.with_shared(self._changed) if self._changed else self._differences
        return [self[number] for number in range(len(self._differences))]


def _harmless(difference: Difference) -> bool:
    """Whether it is proven to be what a model sampled, which leaves nothing to explain."""
    return difference.sampled and difference.severity is Severity.NOTE


def _unmatched(rollout: Rollout, where: Where, turn: int | None, reference: Reference) -> UnmatchedSequence | None:
    """A sequence with the messages that it was rendered from; None where the log does not say."""
    row = rollout.training_row
    if where is Where.ROW and row is None:
        return None
    if where is Where.ROW and row is not None and is_as_sent(rollout):
        answer = answer_to(rollout, reference)
        before = row.token_ids if answer is None else row.token_ids[: answer[0]]
        return UnmatchedSequence(rollout, reference, before, rollout.messages, opens=True)
    if where is Where.ROW and row is not None:
        return UnmatchedSequence(rollout, reference, row.token_ids, rollout.messages, opens=False)
    assert turn is not None
    ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
    return None if ids is None or not sent else UnmatchedSequence(rollout, reference, ids, sent, opens=True)


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
        explained = [number for number in numbers if not any(_touch(out[number], one) for one in rest)]
        if not explained or any(_new(one, out, numbers) for one in rest):
            continue
        found.append((candidate, explained))
        if all(number in explained or _harmless(out[number]) for number in numbers):
            break
    for candidate, explained in sorted(found, key=lambda one: -len(one[1])):
        for number in explained:
            if out[number].construction is None:
                out[number] = replace(out[number], construction=candidate.construction)


def _new(stretch: tuple[int, int], out: _Changed, numbers: Sequence[int]) -> bool:
    """Whether a stretch differs where the messages, as logged, gave the recorded tokens."""
    return not any(_touch(out[number], stretch) for number in numbers)


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
