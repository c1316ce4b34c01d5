"""Atropos groups: several completions of one prompt in parallel lists.

NousResearch/atropos `atroposlib/envs/base.py` (`ScoredDataGroup`). Nothing in a group proves that its ids
were sampled: `tokenize_for_trainer` writes the same columns from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._atropos import read_sample_row, sample_columns, sample_messages
from tito_audit.formats._calls import stated_facts, with_finish_reasons
from tito_audit.formats._columns import Raw, is_given, is_list
from tito_audit.formats._kit import Samples, sample_sources, with_changed_samples
from tito_audit.formats._update import one_repaired_each, updated_row
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Source


def read(row: Row, place: Place) -> Sequence[Rollout]:
    tokens = row["tokens"]
    if tokens is None or not len(tokens):
        raise RecordError("the group is empty: `tokens` holds no sample")
    masks = _list_per_sample(row, "masks", len(tokens))
    logprobs = _list_per_sample(row, "inference_logprobs", len(tokens))
    messages = row.get("messages")
    # One conversation for all samples, or a list of another length, cannot be matched to samples.
    paired = is_list(messages) and len(messages) == len(tokens)
    return tuple(
        Rollout(
            replace(place, item=index),
            FORMAT.name,
            messages=sample_messages(messages[index], f"messages[{index}]") if paired else (),  # type: ignore[index]
            training_row=with_finish_reasons(
                read_sample_row(
                    tokens[index],
                    ("masks", masks[index]),
                    ("inference_logprobs", logprobs[index]),
                    sample_columns(row, index),
                    f"tokens[{index}]",
                ),
                {
                    name: value[index]
                    for name, value in row.items()
                    if isinstance(value, list | tuple)
                    and len(value) == len(tokens)
                    and isinstance(value[index], str | Mapping)
                },
            ),
            stated=stated_facts(row),
        )
        for index in range(len(tokens))
    )


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not repaired:
        return ()
    before = read(row, repaired[0].rollout.place)
    old = [
        {name: value[index] for name, value in row.items() if is_list(value) and index < len(value)}
        for index in range(len(before))
    ]
    new = [
        updated_row(sample, was.training_row, part.rollout.training_row, "tokens")
        for sample, was, part in zip(old, before, one_repaired_each(before, repaired), strict=True)
    ]
    return (with_changed_samples(row, Samples(tuple(old), _sample_source, "tokens"), new),)


def _sample_source(number: int, name: str) -> Source:
    return Source((name, number))


def _list_per_sample(row: Row, name: str, count: int) -> list[Raw | None]:
    """A column's list for each sample, None if a sample has none. A lone `[[1]]` means no mask at all."""
    value = row.get(name)
    if value is None:
        return [None] * count
    if not is_list(value) or not all(entry is None or is_list(entry) for entry in value):
        raise RecordError(f"column {name!r} is not a list with one list per sample")
    if len(value) == 1 and count > 1 and is_list(value[0]) and list(value[0]) == [1]:
        return [None] * count
    if len(value) != count:
        raise RecordError(
            f"column {name!r} holds {len(value)} lists for {count} samples, so they cannot be matched"
        )
    return list(value)


FORMAT = Format(
    name="atropos_group",
    title="Atropos groups (ScoredDataGroup)",
    signature=Signature("{tokens}, {masks}, {scores}, each one list per sample"),
    precedence=100,
    matches=lambda row: (
        {"tokens", "masks", "scores"} <= row.keys()
        and (
            is_list(row["tokens"]) and is_list(row["tokens"][0])
            if is_given(row["tokens"])
            else is_list(row["scores"])
        )
    ),
    read=read,
    sources=lambda row, rollouts: sample_sources(Samples((), _sample_source), rollouts),
    update=update,
    shows="Each sample's training row, its mask (labels or 0/1) and logprobs; messages when the run included "
    "them. No calls, so nothing proves what was sampled; no tools, no model name.",
)
