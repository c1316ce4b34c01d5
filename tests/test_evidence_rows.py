"""What rows are told by spans and arrays of tokens is what they are told byte by byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.test_render_fast import RENDERERS, RENDERS, cases
from tests.tiers import examples
from tests.world import ROOT
from tito_audit.align.alignment import align
from tito_audit.align.pieces import Pieces
from tito_audit.errors import RenderError
from tito_audit.evidence import row as rows
from tito_audit.evidence.differences import difference, stretches
from tito_audit.evidence.gather import gather
from tito_audit.evidence.judgement import judge_view
from tito_audit.evidence.model import Against, Difference, RowView
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.rendered import _byte_roles
from tito_audit.evidence.roles import (
    COMMON_ROLES,
    GENERATION_PROMPT,
    TEMPLATE,
    TURN_END,
    UNKNOWN,
    Roles,
    token_roles,
)
from tito_audit.evidence.row import answer_at, has_template_markers, logprobs_prove_sampled, with_answer_starts
from tito_audit.record.build import build_training_row
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, unknown_role_name
from tito_audit.render.marks import SpanKind
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import Rendering, Span, render_spans
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

LOADS_ANEW = True

FOLDERS = [
    *sorted((ROOT / "fixtures" / "tokenizers").glob("toy_*/")),
    *sorted(ROOT.parent.glob("shared/tokenizers/*/")),
]
USED = [folder for folder in FOLDERS if folder.name in RENDERERS]


# Byte by byte


def byte_offsets(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))


def byte_by_byte(rollout: Rollout, rendering: Rendering) -> tuple[list[str], list[bool]] | None:
    """The role of each byte of a rendering and whether the model would generate it."""
    answers = [i for i, message in enumerate(rollout.messages) if message.role == ASSISTANT]
    ranges = [rendering.sampled.get(i) for i in answers]
    if not answers or any(answer is None for answer in ranges):
        return None
    offset = byte_offsets(rendering.text)
    roles, sampled = [""] * int(offset[-1]), [False] * int(offset[-1])
    for span in rendering.spans:
        for byte in range(offset[span.start], offset[span.end]):
            roles[byte] = role_name(span, rollout)
    for answer in ranges:
        assert answer is not None
        for byte in range(offset[answer[0]], offset[answer[1]]):
            sampled[byte] = True
    return roles, sampled


def role_name(span: Span, rollout: Rollout) -> str:
    """The role of the bytes of a span."""
    if span.kind in (SpanKind.GENERATION_PROMPT, SpanKind.SCAFFOLD):
        return GENERATION_PROMPT if span.kind is SpanKind.GENERATION_PROMPT else TEMPLATE
    speaker = UNKNOWN if span.message_index is None else rollout.messages[span.message_index].speaker
    if span.kind is SpanKind.TURN_END:
        return TURN_END if speaker == ASSISTANT else TEMPLATE
    return speaker


def slow_row(
    rollout: Rollout, renderer: Renderer, tokenizer: Tokenizer
) -> tuple[RowView | None, list[Difference], str]:
    """What `gather` tells of a row with messages, by the reference alone."""
    row, reference = rollout.training_row, Reference(tokenizer, renderer)
    assert row is not None
    try:
        rendering = render_spans(renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    except RenderError as error:
        itself = rows.compare_row_to_itself(rollout, reference)
        return itself.view, list(itself.differences), str(error)
    row_pieces, canonical = reference.pieces(row.token_ids), reference.pieces(tokenizer.encode(rendering.text))
    blocks = align(row_pieces, canonical, open_end=True)
    owned = byte_by_byte(rollout, rendering)
    written = None
    headed = slow_headed(row_pieces, rollout, reference)
    if canonical.data != rendering.text.encode("utf-8", "surrogatepass") or owned is None:
        view = headed
    elif (
        not canonical.data.startswith(row_pieces.data)
        and headed is not None
        and (answers_match(headed, rollout) or knows_everyone(headed, row))
    ):
        view = headed
        starts = [0, *canonical.end.tolist()][: len(canonical)]
        written = np.array([owned[1][min(byte, len(owned[1]) - 1)] for byte in starts], np.bool_)
    else:
        at = canonical_bytes(row_pieces, canonical, blocks.recorded_end.tolist(), blocks.canonical_end.tolist())
        view = slow_view([owned[0][byte] for byte in at], [owned[1][byte] for byte in at])
        starts = [0, *canonical.end.tolist()][: len(canonical)]
        written = np.array([owned[1][min(byte, len(owned[1]) - 1)] for byte in starts], np.bool_)
    if not has_template_markers(row_pieces, canonical, reference):
        view = None  # type: ignore[assignment]
    if view is not None:
        view = with_answer_starts(view, rollout, row_pieces, blocks)
        for _, start, end, _, _ in blocks.differing_blocks():
            view.drifted[start:end] = True
    out = []
    for stretch in stretches(row_pieces, canonical, blocks):
        recorded, written_here = (
            side.data.decode("utf-8", "replace").strip() for side in (stretch.recorded, stretch.canonical)
        )
        logged = {message.role for message in rollout.messages}
        if stretch.start >= len(row_pieces) or (
            written_here in COMMON_ROLES and recorded in logged - COMMON_ROLES
        ):
            continue
        own = answer_at(view, written, stretch)
        sampled = own is not None
        proven = own is not None and view is not None and logprobs_prove_sampled(row, view, own)
        trained = row.loss_mask is None or bool(row.loss_mask[stretch.start : stretch.end].any())
        harmless = sampled and (stretch.recorded.data == stretch.canonical.data or not trained or proven)
        severity = Severity.NOTE if harmless else Severity.WARNING
        effect = effect_of(sampled, proven, lacking=stretch.start == stretch.end)
        template_difference = difference(stretch, Against.TEMPLATE, severity, effect)
        out.append(replace(template_difference, sampled=sampled))
    return view, out, ""


def effect_of(in_answer: bool, proven: bool, lacking: bool) -> str:
    if lacking and in_answer:
        return "the row cannot show whether the model sampled it; only a log with the calls could"
    if lacking:
        return "the row lacks what the template writes for these messages"
    if proven:
        return (
            "its logprobs show that it was sampled this way, but it would drift if the messages were re-rendered"
        )
    if in_answer:
        return "it may be what was sampled; only a log with the calls could prove it"
    return "the row holds tokens that the template does not write for these messages"


def answers_match(headed: RowView, rollout: Rollout) -> bool:
    return len(trained_runs(headed.sampled)) == sum(message.sampled for message in rollout.messages)


def knows_everyone(headed: RowView, row: TrainingRow) -> bool:
    names = {role for role in headed.roles if unknown_role_name(role) is not None or role == UNKNOWN}
    beside = row.loss_mask is not None and bool((row.loss_mask & ~headed.sampled).any())
    return bool(headed.sampled.any()) and not names and not beside


def slow_headed(row_pieces: Pieces, rollout: Rollout, reference: Reference) -> RowView | None:
    """What the row's own role markers tell."""
    roles = token_roles(row_pieces, reference.end_ids(), reference.headers(rollout.template_kwargs))
    view = slow_view(roles, [role in (ASSISTANT, TURN_END) for role in roles])
    nameless = any(unknown_role_name(message.speaker) for message in rollout.messages)
    return view if view.sampled.any() or nameless or roles.unclear().any() else None


def slow_view(roles: list[str], sampled: list[bool]) -> RowView:
    nobody = np.full(len(roles), -1, np.int32)
    names = tuple(dict.fromkeys(roles)) or (UNKNOWN,)
    row_roles = Roles(names, np.array([names.index(role) for role in roles], np.int16))
    drifted = np.zeros(len(roles), np.bool_)
    return RowView(np.array(sampled, np.bool_), False, row_roles, nobody, nobody, None, drifted)


def canonical_bytes(
    row_pieces: Pieces, canonical: Pieces, ends: list[int], canonical_ends: list[int]
) -> list[int]:
    """For each row token the byte of the canonical text that it stands at, token by token."""
    row_end, canonical_end = [0, *row_pieces.end.tolist()], [0, *canonical.end.tolist()]
    out = []
    blocks = list(zip(pairwise([0, *ends]), pairwise([0, *canonical_ends]), strict=True))
    for (start, end), (first, last) in blocks:
        for token in range(start, end):
            at = canonical_end[first] + row_end[token] - row_end[start]
            out.append(min(at, max(canonical_end[last] - 1, 0)))
    return [min(max(at, 0), max(len(canonical.data) - 1, 0)) for at in out]


# The comparisons


@pytest.mark.parametrize("name", RENDERERS)
def test_a_token_has_the_role_of_the_byte_at_which_it_begins(name: str) -> None:
    renderer, dice, renders = RENDERERS[name], random.Random(f"{name} roles"), 0
    for _ in range(RENDERS // len(RENDERERS) // 2):
        messages, tools, kwargs, _ = cases(dice)
        rollout = Rollout(Place("x", 0), "x", messages=messages, tools=tuple(tools))
        try:
            rendering = render_spans(renderer, messages, tools, kwargs)
        except RenderError:
            continue
        size = len(rendering.text.encode("utf-8", "surrogatepass"))
        owned, byte_roles = byte_by_byte(rollout, rendering), _byte_roles(rollout, rendering, size)
        assert (byte_roles is None) == (owned is None)
        if byte_roles is None or owned is None:
            continue
        renders += 1
        for many in (0, 1, 7, size, 3 * size):  # tokens of no bytes too, at the very end as well
            at = sorted(dice.choices(range(size + 1), k=many))
            roles, sampled = byte_roles.of_tokens(np.array(at, np.int64))
            assert list(roles) == [owned[0][min(byte, size - 1)] for byte in at]
            assert sampled.tolist() == [owned[1][min(byte, size - 1)] for byte in at]
    assert renders > 3 or name in ("jumps", "values", "macros")


def rows_of(tokenizer: Tokenizer, renderer: Renderer, dice: random.Random) -> Iterator[Rollout]:
    """Rows as the template writes them, and with faults of any kind."""
    size = tokenizer.vocabulary.size
    while True:
        messages, tools, kwargs, _ = cases(dice)
        try:
            ids = tokenizer.encode(
                renderer.render(messages, tools, add_generation_prompt=False, template_kwargs=kwargs)
            )
        except RenderError:
            ids = tokenizer.encode("x")
        ids = ids.copy()
        for _ in range(dice.choice((0, 0, 1, 2, 5))):
            at = dice.randrange(len(ids) + 1)
            new = [dice.randrange(size) for _ in range(dice.choice((0, 1, 1, 2)))]
            if dice.random() < 0.4 and at < len(ids):
                new = tokenizer.encode(tokenizer.vocabulary.text(ids[at : at + 1])[:1]).tolist() + new[:1]
            ids = np.array([*ids[:at], *new, *ids[at + dice.choice((0, 1, 1, 3)) :]], np.int32)
        if dice.random() < 0.1:
            ids = ids[: dice.randrange(len(ids) + 1)]
        mask = ("loss_mask", [dice.random() < 0.5 for _ in ids])
        row = build_training_row(ids, mask=mask) if dice.random() < 0.7 else build_training_row(ids)
        yield Rollout(
            Place("x", 0),
            "x",
            messages=messages,
            tools=tuple(tools),
            template_kwargs=kwargs or {},
            training_row=row,
        )


@pytest.mark.parametrize("folder", USED, ids=lambda folder: folder.name)
def test_a_row_with_messages_is_told_what_it_is_told_byte_by_byte(folder: Path) -> None:
    tokenizer, renderer = load_tokenizer(str(folder)), RENDERERS[folder.name]
    dice = random.Random(f"{folder.name} rows")
    clean = views = 0
    rollouts = rows_of(tokenizer, renderer, dice)
    for _ in range(examples(40, 150)):
        rollout = next(rollouts)
        if rollout.training_row is None or not len(rollout.training_row.token_ids) or not rollout.messages:
            continue
        evidence = gather(rollout, tokenizer, renderer)
        if evidence.unrelated or rollout.messages[-1].known_unsampled:
            continue  # of another conversation, or without their last answer
        view, differences, error = slow_row(rollout, renderer, tokenizer)
        assert same_views(evidence.row, settled(view, rollout, tokenizer, renderer))
        assert sorted(map(shown, evidence.differences)) == sorted(map(shown, unique(differences)))
        assert [text for _, text in evidence.render_errors] == ([error] if error else [])
        clean += not differences
        views += view is not None
    assert clean > examples(5, 20)
    assert (
        views > examples(5, 20) or folder.name == "toy_metaspace"
    )  # its template has no role markers that are tokens


def test_a_row_of_a_text_that_is_normalised_is_read_by_its_role_markers() -> None:
    """The composed letter has another length in bytes, so spans would point beside the tokens."""
    from tokenizers import normalizers

    tokenizer = load_tokenizer(str(toy.TOKENIZERS / "toy_bpe"))
    tokenizer.backend.normalizer = normalizers.NFC()
    from tito_audit.record.message import as_messages

    for content in ("cafe\u0301 is open", "café is open", "q\u0307\u0323 is open"):
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        messages = as_messages(chat, "m")
        text = toy.toy_renderer().render(messages, add_generation_prompt=False)
        row = build_training_row(np.array(tokenizer.backend.encode(text, add_special_tokens=False).ids, np.int32))
        rollout = Rollout(Place("x", 0), "x", messages=messages, training_row=row)
        view, differences, _ = slow_row(rollout, toy.toy_renderer(), tokenizer)
        evidence = gather(rollout, tokenizer, toy.toy_renderer())
        assert same_views(evidence.row, settled(view, rollout, tokenizer, toy.toy_renderer()))
        assert list(evidence.differences) == differences == []


def settled(view: RowView | None, rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> RowView | None:
    """The view with its turn ends as mask and logprobs show them, which is judged elsewhere."""
    row = rollout.training_row
    reference = Reference(tokenizer, renderer)
    return None if view is None or row is None else judge_view(view, row, reference.end_ids(), reference.decode)[0]


def unique(differences: list[Difference]) -> list[Difference]:
    by_place = {(d.where, d.turn, d.start, d.end, d.canonical.ids.tobytes()): d for d in reversed(differences)}
    return list(by_place.values())


def shown(difference: Difference) -> str:
    both = difference.recorded, difference.canonical
    sides = [(side.ids.tolist(), side.data, side.before, side.after) for side in both]
    names = [f.name for f in fields(difference) if f.name not in ("recorded", "canonical", "known_cause")]
    return repr([sides, *(getattr(difference, name) for name in names)])


def same_views(view: RowView | None, other: RowView | None) -> bool:
    if view is None or other is None:
        return view is other
    columns = ("sampled", "turn", "turn_offset", "drifted")
    return (
        all(np.array_equal(getattr(view, name), getattr(other, name)) for name in columns)
        and list(view.roles) == list(other.roles)
        and view.proven == other.proven
        and view.expected_logprobs is other.expected_logprobs is None
    )
