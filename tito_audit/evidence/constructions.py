"""Explains differences by another way to write the messages that gives the recorded tokens there.

Only sequences that differ from what the template writes are tried, a limited number of times. An explanation is a
proof: rendered that way, the messages give the recorded tokens where they gave others as logged.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from tito_audit.align.blocks import SAME_BYTES
from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.model import Against, Construction, Difference
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.row import answer_to, is_as_sent
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Rollout
from tito_audit.ways.observed import Observation, Part, observed, prompt_messages
from tito_audit.ways.row import OtherWays
from tito_audit.ways.writer import Writer


def with_constructions(
    rollout: Rollout, differences: Sequence[Difference], reference: Reference
) -> Sequence[Difference]:
    """The same differences, each with the construction that explains it, if one was found."""
    if reference.renderer is None:
        return differences
    out = [*differences]
    sequences: dict[tuple[Where, int | None], array[int]] = {}
    for number, difference in enumerate(differences):
        if (
            difference.against is Against.TEMPLATE
            and difference.where is not Where.COMPLETION
            and difference.kind not in SAME_BYTES
        ):
            sequences.setdefault((difference.where, difference.turn), array("q")).append(number)
    for (where, turn), numbers in list(sequences.items())[:8]:  # rendering is slow
        if all(_harmless(out[number]) for number in numbers):
            continue
        observation = _observation(rollout, where, turn, reference)
        if observation is None:
            continue
        recorded = reference.pieces(observation.ids)
        # A run of one control token at the very start or end of a sequence is padding.
        ids, bos = observation.ids, reference.tokenizer.bos_id
        place = "prompt ids" if observation.opens else "row"
        for number in numbers:
            start, end = out[number].start, out[number].end
            outside = start == 0 or end == len(ids)
            if end - start < 2 or not outside or len(out[number].canonical.ids):
                continue
            pad = int(ids[start])
            if recorded.control[start] and bool((ids[start:end] == pad).all()) and pad != bos:
                what = f"{end - start} padding tokens are in the {place}"
                padding = Construction("REC004", f"padding in the {place}", what)
                out[number] = replace(out[number], construction=padding)
        unexplained = [number for number in numbers if out[number].construction is None]
        ways = OtherWays(Writer(reference.tokenizer, reference.renderer), observation)
        if unexplained and ways.has_role_markers:
            _explain(ways, recorded, reference, out, unexplained)
    return out


def _observation(rollout: Rollout, where: Where, turn: int | None, reference: Reference) -> Observation | None:
    """A sequence with the messages that it was rendered from; None where the log does not say."""
    if where is not Where.ROW:
        assert turn is not None
        ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
        return None if ids is None or not sent else observed(rollout, turn, sent, ids, Part.LATER)
    row = rollout.training_row
    if row is None:
        return None
    if not is_as_sent(rollout):
        return observed(rollout, None, rollout.messages, row.token_ids, Part.WHOLE)
    answer = answer_to(rollout, reference)
    before = row.token_ids if answer is None else row.token_ids[: answer[0]]
    return observed(rollout, None, rollout.messages, before, Part.LATER)


def _harmless(difference: Difference) -> bool:
    """Whether it is proven to be what a model sampled, which leaves nothing to explain."""
    return difference.sampled and difference.severity is Severity.NOTE


def _explain(
    ways: OtherWays, recorded: Pieces, reference: Reference, out: list[Difference], numbers: Sequence[int]
) -> None:
    """Give the differences of one sequence their constructions, starting with those that explain the most."""
    explaining: list[tuple[Construction, list[int]]] = []
    for text, code, cause, what in ways.texts():
        # The ranges of recorded tokens whose bytes differ from the text's.
        written, opens = reference.pieces(reference.encode_as(text, recorded.ids)), ways.observation.opens
        rest = [
            (start, end)
            for kind, start, end, _, _ in align(recorded, written, open_end=not opens).differing()
            if kind not in SAME_BYTES and (opens or start < len(recorded))
        ]
        explained = [number for number in numbers if not any(_touch(out[number], part) for part in rest)]
        if not explained or not all(any(_touch(out[number], part) for number in numbers) for part in rest):
            continue
        explaining.append((Construction(code, cause, what), explained))
        if all(number in explained or _harmless(out[number]) for number in numbers):
            break
    for construction, explained in sorted(explaining, key=lambda pair: -len(pair[1])):
        for number in explained:
            if out[number].construction is None:
                out[number] = replace(out[number], construction=construction)


def _touch(difference: Difference, stretch: tuple[int, int]) -> bool:
    """Whether a stretch of recorded tokens is part of a difference, or next to it."""
    return stretch[0] <= difference.end and difference.start <= stretch[1]
