"""What is observed of a rollout: its tokens counted, and its sequences as a person looks at them."""

from __future__ import annotations

import gzip
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import Log, clean_logs, spelling
from tests.tables import stored
from tests.test_rules_on_rollouts import SHARED, row_of, turns_of
from tests.tiers import examples, some
from tests.world import FORMATS as LOGS
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.rules import all_rules
from tito_audit.run.auditor import count_rollout
from tito_audit.run.check import check, explain_differences
from tito_audit.run.scan import read_rollouts, scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Entries, Prefix, Vocabulary
from tito_audit.viewer.measures import measure
from tito_audit.viewer.model import (
    LOGPROB_EDGES,
    POSITION_EDGES,
    REPORT_SIZE,
    STATES,
    TURNS,
    Measures,
    Swap,
    View,
    ViewSequence,
)
from tito_audit.viewer.replacements import WAS_SAMPLED, WAS_SEEN
from tito_audit.viewer.sequences import MAX_PIECE, MAX_SWAP, MAX_SWAPPED, choose_excerpts, touches, view_rollout

RULES = all_rules()
CODES = frozenset(rule.code for rule in RULES)
FORMATS = sorted(path for suffix in ("json", "jsonl", "parquet") for path in LOGS.glob(f"*.{suffix}"))
CASES = sorted((toy.ROOT / "fixtures" / "rules").glob("*.toml"))
MODELS = ("smollm2", "gemma-3", "qwen2.5-coder")
few = settings(max_examples=examples(10, 25), deadline=None, derandomize=True)

Audited = tuple[Evidence, tuple[Finding, ...]]


def audited(rollout: Rollout, tokenizer: Tokenizer | None, renderer: Renderer | None) -> Audited:
    evidence = explain_differences(gather(rollout, tokenizer, renderer), RULES)
    return evidence, check(evidence, RULES, CODES)[0]


@cache
def cases() -> list[Audited]:
    """The examples of all rules."""
    every = []
    for path in CASES:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        for case in (*content.get("flag", ()), *content.get("pass", ())):
            evidence = explain_differences(toy.evidence_of(case), RULES)
            every.append((evidence, check(evidence, RULES, CODES)[0]))
    return every


# Counts, token by token.


def tokens_of(evidence: Evidence) -> Iterator[tuple[tuple[Any, ...], int, int, float | None]]:
    """Every generated token: a name, its turn, its position, its logprob."""
    rollout, row_evidence = evidence.rollout, evidence.row
    for number, turn in enumerate(rollout.turns):
        for offset in range(0 if turn.completion_ids is None else len(turn.completion_ids)):
            start = 0 if turn.prompt_ids is None else len(turn.prompt_ids)
            values = turn.completion_logprobs
            yield (number, offset), number, start + offset, None if values is None else float(values[offset])
    row = rollout.training_row
    if rollout.turns or row is None:
        return
    mask = row.loss_mask if row.loss_mask is not None else row_evidence.sampled if row_evidence is not None else ()
    runs, before = -1, False
    sampled = mask if row_evidence is None else row_evidence.sampled
    for at, trained in enumerate(mask):
        runs += bool(sampled[at]) and not before
        before = bool(sampled[at])
        if trained:
            value = None if row.logprobs is None else float(row.logprobs[at])
            yield (at,), max(runs, 0), at, None if value is not None and value == row.sentinel != 0 else value


def named(evidence: Evidence, finding: Finding) -> Iterator[tuple[Any, ...]]:
    """The names of the tokens that a finding covers."""
    hit, row_evidence, turns = finding.hit, evidence.row, evidence.rollout.turns
    for at in range(hit.start, hit.end):
        if hit.where is Where.COMPLETION:
            yield hit.turn, at
        elif hit.where is Where.ROW and not turns:
            yield (at,)
        elif hit.where is Where.ROW and row_evidence is not None:
            yield int(row_evidence.turn[at]), int(row_evidence.turn_offset[at])
        elif hit.where is Where.PROMPT:
            turn: int | None = hit.turn
            while turn is not None:
                link = next((candidate for candidate in evidence.links if candidate.turn == turn), None)
                turn = link.parent if link is not None and at < min(link.at, link.seen_at) else None
                if turn is not None and at >= len(turns[turn].prompt_ids):
                    yield turn, at - len(turns[turn].prompt_ids)
                    break


def slow_measure(evidence: Evidence, findings: Sequence[Finding]) -> Measures:
    """What `measure` returns, one token after the other; without roles."""
    worst: dict[tuple[Any, ...], int] = {}
    for finding in findings:
        if finding.code[:3] in ("TOK", "TPL"):
            for name in named(evidence, finding):
                worst[name] = max(worst.get(name, 0), STATES.index(finding.severity.word))
    out = Measures()
    for name, turn, position, logprob in tokens_of(evidence):
        state = worst.get(name, 0)
        out.by_turn[min(turn, TURNS - 1), state] += 1
        out.by_position[sum(edge <= position for edge in POSITION_EDGES) - 1, state] += 1
        if logprob is None or not np.isfinite(logprob):
            out.without_logprob[state] += 1
        else:
            out.by_logprob[sum(edge <= logprob for edge in LOGPROB_EDGES) - 1, state] += 1
    return out


def same_counts(measures: Measures, other: Measures) -> bool:
    names = ("by_turn", "by_position", "by_logprob", "without_logprob")
    return all(np.array_equal(getattr(measures, name), getattr(other, name)) for name in names)


def hold_together(evidence: Evidence, findings: Sequence[Finding]) -> Measures:
    """The measures of a rollout, which agree with one another, with the slow way and with the summary."""
    measures = measure(evidence, findings)
    assert same_counts(measures, slow_measure(evidence, findings))
    states = measures.by_turn.sum(axis=0)
    assert np.array_equal(states, measures.by_position.sum(axis=0))
    assert np.array_equal(states, measures.by_logprob.sum(axis=0) + measures.without_logprob)
    rollout = evidence.rollout
    row = rollout.training_row
    assert states.sum() == count_rollout(evidence)["generated_tokens"], "rates divide by what the charts count"
    if row is not None and (evidence.row is not None or row.loss_mask is not None):
        assert sum(map(sum, measures.roles.values())) == len(row.token_ids)
    if row is not None and row.loss_mask is not None:
        assert sum(trained for trained, _ in measures.roles.values()) == row.loss_mask.sum()
    if evidence.row is not None and row is not None:
        mask = evidence.row.sampled if row.loss_mask is None else row.loss_mask
        pairs = list(zip(evidence.row.roles, mask.tolist(), strict=True))
        assert measures.roles == {
            role: (pairs.count((role, True)), pairs.count((role, False))) for role in set(evidence.row.roles)
        }
    return measures


# Views, held to the record.


def sequence(rollout: Rollout, where: Where, turn: int | None) -> np.ndarray:
    if where is Where.ROW:
        assert rollout.training_row is not None
        return rollout.training_row.token_ids
    call = rollout.turns[turn if turn is not None else -1]
    ids = call.prompt_ids if where is Where.PROMPT else call.completion_ids
    assert ids is not None
    return ids


def holds(evidence: Evidence, findings: Sequence[Finding]) -> View:
    """The view of a rollout, which is bounded and says nothing but what the record and the evidence hold."""
    seen = view_rollout(evidence, findings)
    rollout, vocabulary = evidence.rollout, evidence.vocabulary
    assert len(seen.messages) == len(rollout.messages)
    assert len(seen.sequences) <= REPORT_SIZE.sequences
    recorded = [turn.prompt_ids for turn in rollout.turns] + [turn.completion_ids for turn in rollout.turns]
    there = sum(ids is not None for ids in recorded) + (rollout.training_row is not None)
    assert len(seen.sequences) + seen.left_out == there
    assert sum(len(part.ids) for shown in seen.sequences for part in shown.stretches) <= REPORT_SIZE.tokens
    assert sum(len(swap.ids) for shown in seen.sequences for swap in shown.swaps) <= MAX_SWAPPED
    for shown in seen.sequences:
        ids = sequence(rollout, shown.where, shown.turn)
        assert shown.length == len(ids)
        columns_of(shown, ids, vocabulary)
        edges = [edge for part in shown.stretches for edge in (part.start, part.start + len(part.ids))]
        assert edges == sorted(set(edges)), "stretches are in order, hold something, and neither meet nor overlap"
        assert not edges or (edges[0] >= 0 and edges[-1] <= len(ids))
        at = 0
        for swap in shown.swaps:
            assert at <= swap.start <= swap.end <= len(ids)
            at = swap.end
            assert len(swap.ids) == min(swap.total, MAX_SWAP)
            assert any(
                part.start <= max(swap.end - 1, swap.start) and swap.start <= part.start + len(part.ids)
                for part in shown.stretches
            ), "a swap stands in or beside what is shown"
            if vocabulary is not None:
                assert swap.pieces == tuple(vocabulary.piece(i) for i in swap.ids)
                assert swap.data == tuple(vocabulary.token_bytes(i).hex() for i in swap.ids)
            assert swap.code in CODES | {""}
            if swap.against not in (WAS_SEEN, WAS_SAMPLED):
                assert any(is_of(swap, difference, shown, rollout) for difference in evidence.differences)
        for difference in evidence.differences:
            if (difference.where, difference.turn) == (shown.where, shown.turn) and whole(shown):
                assert any(in_the_way(swap, difference) for swap in shown.swaps), "it is a swap, or overlaps one"
    return seen


def whole(shown: ViewSequence) -> bool:
    return sum(len(part.ids) for part in shown.stretches) == shown.length > 0


def in_the_way(swap: Swap, difference: Difference) -> bool:
    if (swap.start, swap.end) == (difference.start, difference.end):
        return True
    return swap.start < difference.end and difference.start < swap.end


def columns_of(shown: ViewSequence, ids: np.ndarray, vocabulary: Vocabulary | None) -> None:
    for part in shown.stretches:
        assert part.ids == tuple(ids[part.start : part.start + len(part.ids)].tolist())
        if vocabulary is None:
            assert part.pieces == part.data == ()
        else:
            assert part.pieces == tuple(vocabulary.piece(i) for i in part.ids)
            assert part.data == tuple(vocabulary.token_bytes(i).hex() for i in part.ids)
        for column in (part.logprobs, part.trained, part.roles):
            assert column is None or len(column) == len(part.ids)
        assert all(value is None or np.isfinite(value) for value in part.logprobs or ())


def is_of(swap: Swap, difference: Difference, shown: ViewSequence, rollout: Rollout) -> bool:
    """Whether a swap is a difference: the same place, the same tokens on both sides."""
    if (difference.where, difference.start, difference.end) != (shown.where, swap.start, swap.end):
        return False
    if shown.where is not Where.ROW and difference.turn != shown.turn:
        return False
    assert swap.before + swap.end - swap.start + swap.after == len(difference.recorded.ids)
    if shown.where is Where.COMPLETION:
        here = sequence(rollout, shown.where, shown.turn)[swap.start : swap.end]
        assert np.array_equal(
            here, difference.recorded.ids[swap.before : len(difference.recorded.ids) - swap.after]
        )
        if swap.before:
            tail = sequence(rollout, Where.PROMPT, shown.turn)[-swap.before :]
            assert np.array_equal(tail, difference.recorded.ids[: swap.before])
    whole = tuple(difference.canonical.ids.tolist())
    return swap.total == len(whole) and swap.ids == whole[:MAX_SWAP] and swap.against == difference.against.value


def applied(shown: ViewSequence) -> list[int]:
    """A sequence that is shown whole, with everything swapped."""
    (part,) = shown.stretches
    assert part.start == 0
    assert len(part.ids) == shown.length
    ids, out, at = list(part.ids), [], 0
    for swap in shown.swaps:
        assert swap.total == len(swap.ids)
        out += [*ids[at : swap.start], *swap.ids]
        at = swap.end
    return out + ids[at:]


def of(seen: View, where: Where, turn: int | None = None) -> ViewSequence:
    (wanted,) = (shown for shown in seen.sequences if (shown.where, shown.turn) == (where, turn))
    return wanted


# Everything at hand.


@pytest.mark.parametrize("with_tokenizer", [True, False], ids=["with a tokenizer", "without"])
@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.stem)
def test_rollouts_of_every_format_are_counted_and_shown(path: Path, with_tokenizer: bool) -> None:
    tools = (toy.toy_tokenizer(), toy.toy_renderer()) if with_tokenizer else (None, None)
    for rollout in read_rollouts(path, Settings()):
        evidence, findings = audited(rollout, *tools)
        hold_together(evidence, findings)
        holds(evidence, findings)


def test_the_cases_of_all_rules_are_counted_and_shown() -> None:
    total, parts, names = Measures(), [], set()
    for evidence, findings in cases():
        parts.append(hold_together(evidence, findings))
        total.add(parts[-1])
        names.update(swap.against for shown in holds(evidence, findings).sequences for swap in shown.swaps)
    assert np.array_equal(total.by_turn, sum(part.by_turn for part in parts))
    assert np.array_equal(total.by_logprob, sum(part.by_logprob for part in parts))
    assert (total.by_turn.sum(axis=0)[[0, 1, 3]] > 0).all(), "notes and errors are among the cases"
    assert names == {"next prompt", "training row", "template", "re-encoding", WAS_SEEN, WAS_SAMPLED}
    assert total.roles.keys() >= {"assistant", "user", "template", "turn end", "unknown"}


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="no recorded rollouts beside the checkout")
@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("name", some(MODELS, 1))
def test_recorded_rollouts_are_counted_and_shown(name: str, mode: str) -> None:
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / name))
    renderer = make_renderer(tokenizer)
    with gzip.open(SHARED / "rollouts" / name / f"{mode}.jsonl.gz") as lines:
        for number, line in enumerate(list(map(orjson.loads, lines))[::9]):
            turns = turns_of(line, with_text=False)
            rollout = Rollout(
                Place(line["id"], 0),
                "shared",
                as_messages(line["messages"], "messages"),
                as_tools(line["tools"], "tools"),
                turns=turns if number % 3 else (),
                training_row=row_of(turns) if number % 3 != 1 else None,
            )
            evidence, findings = audited(rollout, tokenizer, renderer)
            measures = hold_together(evidence, findings)
            assert measures.without_logprob.sum() == 0
            holds(evidence, findings)


# Counts by hand.

DRIFTED, AGAIN, ROW, LONG = (stored(__file__, name) for name in ("drifted", "again", "row", "long"))


def observed(case: dict[str, Any]) -> tuple[Evidence, tuple[Finding, ...], Measures]:
    evidence = explain_differences(toy.evidence_of(case), RULES)
    findings = check(evidence, RULES, CODES)[0]
    return evidence, findings, hold_together(evidence, findings)


def test_tokens_that_a_later_prompt_holds_otherwise_are_in_error_where_they_stand() -> None:
    evidence, _, measures = observed(DRIFTED)
    starts = [len(turn.prompt_ids) for turn in evidence.rollout.turns if turn.prompt_ids is not None]
    assert measures.by_turn[:3].tolist() == [[2, 0, 0, 2], [2, 0, 0, 0], [0, 0, 0, 0]]
    bins = [sum(edge <= start for edge in POSITION_EDGES) - 1 for start in starts]
    assert bins == [0, 1], "one prompt is shorter than 32 tokens, the other is not"
    assert measures.by_position[:2].tolist() == [[2, 0, 0, 2], [2, 0, 0, 0]]
    filled = {LOGPROB_EDGES[i]: row.tolist() for i, row in enumerate(measures.by_logprob) if row.any()}
    assert filled == {-8.0: [0, 0, 0, 1], -0.5: [1, 0, 0, 0], -0.01: [1, 0, 0, 0]}
    assert measures.without_logprob.tolist() == [2, 0, 0, 1], "turn 1 has none, and one of turn 0 was not recorded"
    assert measures.roles == {"assistant": (6, 0)}


def test_a_log_that_keeps_its_tokens_has_notes_in_the_same_place() -> None:
    _, findings, measures = observed(AGAIN)
    assert [finding.code for finding in findings if finding.code.startswith("SEQ")] == []
    assert measures.by_turn[0].tolist() == [2, 2, 0, 0]
    assert measures.by_turn[1].tolist() == [2, 0, 0, 0]


def test_a_training_row_alone_counts_what_its_mask_trains_by_runs() -> None:
    size = len(toy.rollout_of(ROW).training_row.token_ids)  # type: ignore[union-attr]
    mask = "0" * (size - 3) + "111"
    evidence, _, measures = observed(ROW | {"mask": mask})
    assert evidence.row is not None
    assert measures.by_turn[0].tolist() == [1, 2, 0, 0]
    assert measures.by_position[0].tolist() == [1, 2, 0, 0]
    assert measures.without_logprob.tolist() == [1, 2, 0, 0]
    assert measures.roles["assistant"] == (3, 0)
    assert sum(trained for trained, _ in measures.roles.values()) == 3
    bare = replace(evidence, row=None)
    assert measure(bare, ()).roles == {"unknown": (3, size - 3)}
    assert measure(bare, ()).by_turn[0, 0] == 3


def finding_at(code: str, severity: Severity, where: Where, turn: int | None, start: int, end: int) -> Finding:
    return Finding(code, severity, Place("toy", 0), Hit(where, start, end, "", turn=turn))


def test_a_token_in_several_findings_counts_once_with_the_worst() -> None:
    evidence = toy.evidence_of(AGAIN)
    where = Where.COMPLETION
    findings = [
        finding_at("TPL299", Severity.ERROR, where, 0, 1, 2),
        finding_at("TOK101", Severity.NOTE, where, 0, 0, 3),
        finding_at("TPL203", Severity.WARNING, where, 0, 1, 3),
        finding_at("MSK401", Severity.ERROR, where, 0, 0, 4),
        finding_at("TOK104", Severity.ERROR, where, 0, 2, 2),
    ]
    for order in (findings, findings[::-1]):
        assert hold_together(evidence, order).by_turn[0].tolist() == [1, 1, 1, 1]


def test_what_a_finding_says_of_a_prompt_or_the_row_counts_for_the_answers_that_sit_there() -> None:
    evidence = toy.evidence_of(AGAIN | {"row": ["@seen 1"]})
    prompt, later = (len(turn.prompt_ids) for turn in evidence.rollout.turns)  # type: ignore[arg-type]
    tokens = later + 2
    assert evidence.row is not None
    in_prompt = finding_at("TPL201", Severity.WARNING, Where.PROMPT, 1, 0, later)
    assert hold_together(evidence, [in_prompt]).by_turn[:2].tolist() == [[0, 0, 4, 0], [2, 0, 0, 0]]
    in_row = finding_at("TPL201", Severity.WARNING, Where.ROW, None, prompt + 1, tokens)
    assert hold_together(evidence, [in_row]).by_turn[:2].tolist() == [[1, 0, 3, 0], [0, 0, 2, 0]]
    in_first_prompt = finding_at("TPL201", Severity.WARNING, Where.PROMPT, 1, 0, prompt)
    assert hold_together(evidence, [in_first_prompt]).by_turn[:2, 2].sum() == 0
    broken = toy.evidence_of(DRIFTED)
    assert hold_together(broken, [in_prompt]).by_turn[0].tolist() == [3, 0, 1, 0], "only up to where they part"


def test_what_is_no_finite_number_is_no_logprob_and_a_filler_is_none() -> None:
    values = [np.nan, -np.inf, np.inf, -9999.0, 0.5, -0.01, -20.0, -20.1]
    ids = np.arange(8, dtype=np.int32)
    turn = Turn(None, ids, np.array(values))
    evidence = gather(Rollout(Place("x", 0), "toy", turns=(turn,)), None, None)
    measures = hold_together(evidence, ())
    assert measures.without_logprob[0] == 3
    assert measures.by_logprob[:2, 0].tolist() == [2, 1]
    assert measures.by_logprob[-1, 0] == 2
    mask = np.ones(8, np.bool_)
    row = TrainingRow(ids, mask, np.array([1.0, 1.0, *[-1.0] * 6]), sentinel=1.0)
    alone = gather(Rollout(Place("x", 0), "toy", training_row=row), None, None)
    assert hold_together(alone, ()).without_logprob[0] == 2
    zeros = replace(row, logprobs=np.zeros(8), sentinel=0.0)
    assert measure(replace(alone, rollout=replace(alone.rollout, training_row=zeros)), ()).without_logprob[0] == 0


def test_turns_past_the_last_bin_are_counted_in_it() -> None:
    turns = tuple(Turn(None, np.arange(2, dtype=np.int32)) for _ in range(TURNS + 6))
    evidence = gather(Rollout(Place("x", 0), "toy", turns=turns), None, None)
    measures = hold_together(evidence, [finding_at("TOK101", Severity.NOTE, Where.COMPLETION, TURNS + 5, 0, 1)])
    assert measures.by_turn[:-1].tolist() == [[2, 0, 0, 0]] * (TURNS - 1)
    assert measures.by_turn[-1].tolist() == [13, 1, 0, 0]


def test_a_rollout_of_nothing_has_counts_of_nothing() -> None:
    empty = np.empty(0, np.int32)
    nothing = TrainingRow(empty, np.empty(0, np.bool_), np.empty(0))
    calls = (Turn(None, None), Turn(empty, empty, np.empty(0)), Turn(np.arange(3, dtype=np.int32), None))
    for rollout in (
        Rollout(Place("x", 0), "toy"),
        Rollout(Place("x", 0), "toy", training_row=nothing),
        Rollout(Place("x", 0), "toy", turns=calls),
        Rollout(Place("x", 0), "toy", turns=calls, training_row=nothing),
        Rollout(Place("x", 0), "toy", training_row=TrainingRow(np.arange(4, dtype=np.int32), None, None)),
    ):
        for tokenizer in (None, toy.toy_tokenizer()):
            evidence, findings = audited(rollout, tokenizer, None)
            assert hold_together(evidence, findings).by_turn.sum() == 0
            holds(evidence, findings)


@few
@given(clean_logs(), st.data())
def test_any_findings_are_counted_as_token_by_token(log: Log, data: st.DataObject) -> None:
    rollout = log.rollout()
    if data.draw(st.booleans(), "without calls"):
        rollout = replace(rollout, turns=())
    evidence = gather(rollout, toy.toy_tokenizer() if data.draw(st.booleans(), "tokenizer") else None, None)
    findings = []
    for _ in range(data.draw(st.integers(0, 6), "findings")):
        where = data.draw(st.sampled_from(list(Where) if rollout.turns else [Where.ROW]))
        turn = data.draw(st.integers(0, len(rollout.turns) - 1)) if where is not Where.ROW else None
        size = len(sequence(rollout, where, turn))
        start = data.draw(st.integers(0, size))
        end = data.draw(st.integers(start, size))
        code = data.draw(st.sampled_from(("TOK101", "TPL299", "SEQ301", "MSK401")))
        findings.append(finding_at(code, data.draw(st.sampled_from(list(Severity))), where, turn, start, end))
    hold_together(evidence, findings)
    holds(evidence, findings)


# Views by hand.


def test_a_swap_stands_where_the_tokens_were_said_and_where_they_came_back() -> None:
    evidence, findings, _ = observed(DRIFTED | {"row": ["@seen 1"]})
    seen = holds(evidence, findings)
    calls = [(where, turn) for turn in (0, 1) for where in (Where.PROMPT, Where.COMPLETION)]
    assert [(shown.where, shown.turn) for shown in seen.sequences] == [*calls, (Where.ROW, None)]
    (own,) = of(seen, Where.COMPLETION, 0).swaps
    assert (own.start, own.end, own.pieces) == (1, 3, (" answer",))
    assert (own.code, own.against) == ("TOK101", "next prompt")
    (back,) = of(seen, Where.PROMPT, 1).swaps
    assert (back.pieces, back.code, back.against) == ((" answ", "er"), "SEQ301", WAS_SEEN)
    (in_row,) = of(seen, Where.ROW).swaps
    assert (in_row.start, in_row.end, in_row.pieces) == (back.start, back.end, back.pieces)
    assert in_row.against == WAS_SAMPLED
    assert seen.messages == ("user", "assistant", "user", "assistant")
    assert of(seen, Where.ROW).note == "no loss mask"


def test_a_prompt_is_shown_from_where_it_adds_to_what_was_seen_before() -> None:
    evidence, findings, _ = observed(AGAIN)
    first, second = (of(holds(evidence, findings), Where.PROMPT, turn) for turn in (0, 1))
    assert (first.stretches[0].start, first.note) == (0, "")
    seen_ids = evidence.rollout.turns[0].seen_ids
    assert seen_ids is not None
    assert second.stretches[0].start == len(seen_ids) - 8
    assert second.note == f"the first {len(seen_ids)} tokens are what turn 0 saw and sampled"
    answer = of(holds(evidence, findings), Where.COMPLETION, 0).stretches[0]
    assert answer.logprobs == (-0.3, -7.0, None, 0.0)
    assert answer.roles == ("assistant", "assistant", "assistant", "turn end")
    assert answer.trained is None
    assert answer.data[:2] == (b"The".hex(), b" answ".hex())


def test_a_difference_across_the_seam_says_what_it_replaces_of_the_prompt() -> None:
    assert any(
        swap.before and swap.code == "TOK104"
        for evidence, findings in cases()
        if any(finding.code == "TOK104" for finding in findings)
        for shown in view_rollout(evidence, findings).sequences
        for swap in shown.swaps
    )


def test_swaps_of_evidence_that_no_rule_has_explained_have_no_code() -> None:
    evidence = toy.evidence_of(DRIFTED)
    assert [swap.code for shown in view_rollout(evidence, ()).sequences for swap in shown.swaps] == [""]


@st.composite
def drifted_logs(draw: st.DrawFn) -> tuple[Log, int]:
    """A log whose later prompts and row lost the spelling of one token of an answer; and its turn."""
    log = draw(clean_logs())
    turn = draw(st.integers(0, len(log) - 2))
    special = toy.toy_tokenizer().vocabulary.special_ids
    answer = log.completions[turn]
    at = draw(
        st.sampled_from([i for i, token in enumerate(answer) if token not in special and len(spelling(token)) > 1])
    )
    cut = draw(st.integers(1, len(spelling(answer[at])) - 1))
    halves = [encode_bytes(spelling(answer[at])[:cut]), encode_bytes(spelling(answer[at])[cut:])]
    return log.replaced(turn, at, at + 1, halves[0] + halves[1]).forgotten(turn, answer), turn


def encode_bytes(data: bytes) -> list[int]:
    """The fewest tokens from the left that spell these bytes."""
    vocabulary, out = toy.toy_tokenizer().vocabulary, []
    while data:
        size = next(n for n in range(len(data), 0, -1) if vocabulary.ids_of_bytes(data[:n]))
        out.append(vocabulary.ids_of_bytes(data[:size])[0])
        data = data[size:]
    return out


@few
@given(drifted_logs())
def test_swapping_leads_from_what_was_said_to_what_was_heard_and_back(drifted: tuple[Log, int]) -> None:
    log, turn = drifted
    evidence, findings = audited(log.rollout(), toy.toy_tokenizer(), None)
    seen = holds(evidence, findings)
    if sum(len(ids) for ids in (*log.prompts, *log.completions, log.row_ids)) > REPORT_SIZE.tokens:
        return
    assert applied(of(seen, Where.COMPLETION, turn)) == log.heard[turn]
    seen_ids = log.prompts[turn] + log.completions[turn]
    prompt = of(seen, Where.PROMPT, turn + 1)
    start = prompt.stretches[0].start
    part = replace(prompt.stretches[0], start=0)
    swaps = tuple(replace(swap, start=swap.start - start, end=swap.end - start) for swap in prompt.swaps)
    back = applied(replace(prompt, stretches=(part,), swaps=swaps, length=prompt.length - start))
    assert (log.prompts[turn + 1][:start] + back)[: len(seen_ids)] == seen_ids
    row: list[int] = []
    for gap, tokens in zip(log.gaps, log.completions, strict=True):
        row += gap + tokens
    assert applied(of(seen, Where.ROW)) == row
    hold_together(evidence, findings)


# Bounds.


def long_rollout(calls: int, size: int) -> Rollout:
    """Calls of one growing conversation, and its row."""
    turns, seen = [], np.empty(0, np.int32)
    for _ in range(calls):
        prompt = np.concatenate([seen, np.full(5, 300, np.int32)])
        answer = np.full(size, 301, np.int32)
        turns.append(Turn(prompt, answer, np.full(size, -1.0)))
        seen = np.concatenate([prompt, answer])
    return Rollout(Place("x", 0), "toy", turns=tuple(turns), training_row=TrainingRow(seen, None, None))


def test_of_many_turns_those_with_findings_are_shown_and_the_rest_is_counted() -> None:
    evidence = gather(long_rollout(100, 10), toy.toy_tokenizer(), None)
    finding = finding_at("TPL201", Severity.ERROR, Where.PROMPT, 90, 0, 4)
    seen = holds(evidence, [finding])
    assert len(seen.sequences) == REPORT_SIZE.sequences
    assert seen.left_out == 201 - REPORT_SIZE.sequences
    assert of(seen, Where.PROMPT, 90).stretches[0].start == 0
    assert of(seen, Where.ROW).length == 1500


def test_of_a_long_rollout_what_is_found_is_shown_first_and_then_how_answers_begin() -> None:
    evidence = gather(long_rollout(4, 40_000), None, None)
    findings = [
        finding_at("LPR502", Severity.WARNING, Where.COMPLETION, 2, 30_000, 30_200),
        finding_at("MSK401", Severity.ERROR, Where.ROW, None, 70_000, 100_000),
    ]
    seen = holds(evidence, findings)
    assert sum(len(part.ids) for shown in seen.sequences for part in shown.stretches) == REPORT_SIZE.tokens
    middle = [(part.start, len(part.ids)) for part in of(seen, Where.COMPLETION, 2).stretches]
    assert (29_980, 240) in middle
    row = [(part.start, len(part.ids)) for part in of(seen, Where.ROW).stretches]
    assert (69_980, 40) in row
    assert (99_980, 40) in row
    for turn in range(4):
        assert of(seen, Where.COMPLETION, turn).stretches[0].start == 0
        assert len(of(seen, Where.COMPLETION, turn).stretches[0].ids) >= 128


def vocabulary_of(*tokens: bytes) -> Vocabulary:
    lengths = np.array([*map(len, tokens), 0], np.int32)
    is_token = np.array([*(True for _ in tokens), False])
    return Vocabulary(Entries(Prefix.NEVER, (), (), np.empty(0, np.int64), b"".join(tokens), lengths, is_token))


def test_long_tokens_are_cut_and_so_are_long_words_of_the_log() -> None:
    vocabulary = vocabulary_of(b" " * 900, b"\xff" * 150, "é".encode() * 200, b"a")
    turn = Turn(None, np.array([0, 1, 2, 3, 9], np.int32), finish_reason="x" * 1000)
    messages = as_messages([{"role": "r" * 1000, "content": ""}], "messages")
    rollout = Rollout(Place("x", 0), "toy", messages, turns=(turn,))
    seen = view_rollout(Evidence(rollout, vocabulary), ())
    (part,) = seen.sequences[0].stretches
    assert [len(piece) for piece in part.pieces] == [MAX_PIECE, MAX_PIECE, MAX_PIECE, 1, len("<unknown id 9>")]
    assert [piece.endswith("…") for piece in part.pieces] == [True, True, False, False, False]
    assert [len(data) for data in part.data] == [2 * MAX_PIECE + 1, 300, 2 * MAX_PIECE + 1, 2, 0]
    assert len(seen.sequences[0].note) == len("ended by ") + MAX_PIECE
    assert len(seen.messages[0]) == MAX_PIECE


def test_a_large_swap_is_cut_and_says_how_many_tokens_there_are() -> None:
    question, said, *rest = LONG["messages"]
    messages = [question, {**said, "content": "Sun " * 2 * MAX_SWAP}, *rest]
    evidence, findings, _ = observed(LONG | {"messages": messages})
    swaps = of(holds(evidence, findings), Where.COMPLETION, 0).swaps
    assert max(len(swap.ids) for swap in swaps) == MAX_SWAP
    assert max(swap.total for swap in swaps) > MAX_SWAP


# Excerpts.


@settings(max_examples=examples(25, 100), deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(0, 80), st.integers(0, 2)), max_size=8),
    st.integers(1, 600),
)
def test_what_is_chosen_fits_the_room_and_uses_it(
    lengths: list[int], places: list[tuple[int, int, int, int]], room: int
) -> None:
    spots = [
        (severity, number, start, start + size)
        for number, start, size, severity in places
        if number < len(lengths) and start + size <= lengths[number]
    ]
    excerpts = choose_excerpts(lengths, spots, [(number, 0) for number in range(len(lengths))], room)
    assert [len(excerpt) for excerpt in excerpts] == lengths
    assert sum(int(excerpt.sum()) for excerpt in excerpts) == min(room, sum(lengths))
    if spots and room >= 40:
        _, number, start, _ = max(spots, key=lambda spot: (spot[0], -spot[1], -spot[2]))
        assert start == lengths[number] or (excerpts[number][start] and touches(excerpts[number], start, start))


def test_rates_divide_by_the_tokens_that_charts_count_where_neither_mask_nor_calls_say(tmp_path: Path) -> None:
    """Of a row alone the messages say what was sampled; the summary, its gate and the charts count the same."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    text = toy.toy_renderer().render(as_messages(messages, "messages"), (), add_generation_prompt=False)
    ids = toy.toy_tokenizer().encode(text).tolist()
    log = tmp_path / "rows.jsonl"
    log.write_bytes(orjson.dumps({"messages": messages, "token_ids": ids}) + b"\n")
    folder = str(toy.ROOT / "fixtures" / "tokenizers" / "toy_bpe")
    for tokenizer, few_of in ((folder, True), (None, False)):
        scan = scan_rollouts(log, Settings(tokenizer=tokenizer), observe=True)
        (result,) = scan
        assert result.observed is not None
        generated = int(result.observed.measures.by_turn.sum())
        assert scan.summary.generated_tokens == result.counts["generated_tokens"] == generated
        assert (0 < generated < len(ids)) if few_of else generated == 0
