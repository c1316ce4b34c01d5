"""Differences explained by writing the messages in another way that gives the recorded tokens there.

Tried only for sequences that differ from what the template writes, and only so often. What is explained
is proven: the recorded tokens come out where the logged messages gave others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tito_audit.evidence.built_history import histories
from tito_audit.evidence.built_systems import systems
from tito_audit.evidence.built_tools import tool_sets
from tito_audit.evidence.model import Against, Built, Difference
from tito_audit.evidence.prompts import prompt_messages
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.scene import SAME_BYTES, Building, Scene
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Rollout

__all__ = ["constructed"]

_PADS = 2
"""A run of one control token is padding from so many on."""
_SEQUENCES = 8
"""Sequences of a rollout that are looked into at most."""


def constructed(rollout: Rollout, differences: Sequence[Difference], reference: Reference) -> list[Difference]:
    """The same differences, those with what explains them for which a construction was found."""
    out = list(differences)
    if reference.renderer is None:
        return out
    sequences: dict[tuple[Where, int | None], list[int]] = {}
    for number, one in enumerate(out):
        if one.against is Against.TEMPLATE and one.where is not Where.COMPLETION and one.kind not in SAME_BYTES:
            sequences.setdefault((one.where, one.turn), []).append(number)
    for (where, turn), numbers in list(sequences.items())[:_SEQUENCES]:
        if all(_harmless(out[number]) for number in numbers):
            continue
        scene = _scene(rollout, where, turn, reference)
        if scene is not None:
            _padding(scene, out, numbers)
            _explain(scene, out, [number for number in numbers if out[number].built is None])
    return out


def _harmless(difference: Difference) -> bool:
    """Whether it is proven to be what a model sampled: how the template came to differ is no question then."""
    return difference.sampled and difference.severity is Severity.NOTE


def _scene(rollout: Rollout, where: Where, turn: int | None, reference: Reference) -> Scene | None:
    """A sequence with what it was written from; None where the log does not say."""
    if where is Where.ROW:
        row = rollout.training_row
        return None if row is None else Scene(rollout, reference, row.token_ids, rollout.messages, opens=False)
    assert turn is not None
    ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
    return None if ids is None or not sent else Scene(rollout, reference, ids, sent, opens=True)


def _padding(scene: Scene, out: list[Difference], numbers: Sequence[int]) -> None:
    """Say what a run of one control token is that stands in front of everything or behind it."""
    ids, control = scene.recorded, scene.held.control
    where = "prompt ids" if scene.opens else "row"
    for number in numbers:
        start, end = out[number].start, out[number].end
        outside = start == 0 or end == len(ids)
        if end - start < _PADS or not outside or len(out[number].canonical.ids):
            continue
        pad = int(ids[start])
        if control[start] and bool((ids[start:end] == pad).all()) and pad != scene.reference.tokenizer.bos_id:
            what = f"{end - start} padding tokens stand in the {where}"
            out[number] = replace(out[number], built=Built("REC004", f"padding in the {where}", what))


def _explain(scene: Scene, out: list[Difference], numbers: Sequence[int]) -> None:
    """Give the differences of one sequence what explains them, first what explains most of them."""
    found: list[tuple[Building, list[int]]] = []
    for building in _buildings(scene) if numbers and scene.marked else ():
        rest = scene.differing(building.text)
        explained = [number for number in numbers if not any(_touch(out[number], one) for one in rest)]
        if not explained or any(_new(one, out, numbers) for one in rest):
            continue
        found.append((building, explained))
        if all(number in explained or _harmless(out[number]) for number in numbers):
            break
    for building, explained in sorted(found, key=lambda one: -len(one[1])):
        for number in explained:
            if out[number].built is None:
                out[number] = replace(out[number], built=building.built)


def _new(stretch: tuple[int, int], out: Sequence[Difference], numbers: Sequence[int]) -> bool:
    """Whether a stretch differs where the logged messages gave the recorded tokens."""
    return not any(_touch(out[number], stretch) for number in numbers)


def _buildings(scene: Scene) -> Iterator[Building]:
    """Every other way to write the messages, the likeliest first."""
    if scene.canonical is None:
        return
    seen = {scene.canonical}
    for ways in (tool_sets, systems, histories):
        for building in ways(scene):
            if building.text not in seen:
                seen.add(building.text)
                yield building


def _touch(difference: Difference, stretch: tuple[int, int]) -> bool:
    """Whether a stretch of recorded tokens is part of a difference, or next to it."""
    return stretch[0] <= difference.end and difference.start <= stretch[1]
