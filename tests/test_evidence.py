"""What gather says of logs that hold little, and of logs whose calls do not form one chain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from tests import toy
from tests.faults import END, TOOL, Log, clean_logs, encode, found_in, log_of, spelling, text_of
from tito_audit.chains.links import LinkKind
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Against
from tito_audit.evidence.needs import Needs
from tito_audit.record.build import build_training_row
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import IdsFrom, Place, Rollout, TokenText, Turn

few = settings(max_examples=15, deadline=None, derandomize=True)
CHAT = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "Is the dog skinny?"},
    {"role": "assistant", "content": "The dog is Skinny, they say."},
    {"role": "user", "content": "Who told you?"},
    {"role": "assistant", "content": "The baker told me."},
    {"role": "user", "content": "And the bakery?"},
    {"role": "assistant", "content": "It is closed now."},
]


def chat(tools: bool = False) -> Log:
    return log_of([dict(message) for message in CHAT], [TOOL] if tools else [], 7)


def kinds(rollout: Rollout, *, tokenizer: bool = True) -> list[tuple[int, int | None, LinkKind]]:
    evidence = gather(rollout, toy.toy_tokenizer() if tokenizer else None, None)
    return [(link.turn, link.parent, link.kind) for link in evidence.links]


def test_a_chain_is_a_chain_with_a_tokenizer_and_without() -> None:
    rollout = chat().rollout()
    wanted = [(1, 0, LinkKind.CONTINUES), (2, 1, LinkKind.CONTINUES)]
    assert kinds(rollout) == kinds(rollout, tokenizer=False) == wanted


@few
@given(clean_logs())
def test_without_a_tokenizer_a_clean_log_shows_no_difference_and_every_row_token_its_turn(log: Log) -> None:
    evidence = gather(log.rollout(), None, None)
    assert evidence.differences == ()
    assert Needs.TOKENIZER not in evidence.present
    view = evidence.row
    assert view is not None
    assert view.proven
    assert view.sampled.tolist() == [bool(m) for m in log.row_mask]
    for turn, (start, end) in enumerate(log.regions):
        assert view.turn[start:end].tolist() == [turn] * (end - start)
        assert view.turn_offset[start:end].tolist() == list(range(end - start))
        assert view.expected_logprobs is not None
        assert np.allclose(view.expected_logprobs[start:end], log.logprobs[turn])


def test_without_a_tokenizer_other_ids_break_the_prefix() -> None:
    log = chat()
    again = log.forgotten(0, [*log.completions[0][:1], 300, *log.completions[0][2:]])
    evidence = gather(again.rollout(), None, None)
    assert [link.kind for link in evidence.links] == [LinkKind.TEMPLATE, LinkKind.CONTINUES]
    places = {(d.against, d.where, d.turn, d.start, d.end) for d in evidence.differences}
    assert places == {(Against.ROW, Where.COMPLETION, 0, 1, 2)}


@few
@given(clean_logs())
def test_messages_and_a_row_without_calls_tell_who_said_what(log: Log) -> None:
    rollout = replace(log.rollout(), turns=())
    evidence = gather(rollout, toy.toy_tokenizer(), toy.toy_renderer())
    assert evidence.differences == ()
    assert evidence.row is not None
    assert not evidence.row.proven
    assert evidence.row.sampled.tolist() == [bool(m) for m in log.row_mask]
    assert Needs.RENDERING | Needs.SAMPLED & evidence.present
    assert Needs.COMPLETIONS not in evidence.present


@few
@given(clean_logs())
def test_a_row_alone_is_read_by_its_role_markers(log: Log) -> None:
    rollout = Rollout(Place("toy", 0), "toy", training_row=log.row())
    evidence = gather(rollout, toy.toy_tokenizer(), toy.toy_renderer())
    assert evidence.differences == ()
    assert evidence.row is not None
    assert evidence.row.sampled.tolist() == [bool(m) for m in log.row_mask]


def test_a_row_alone_without_a_tokenizer_tells_nothing_of_sampling() -> None:
    rollout = Rollout(Place("toy", 0), "toy", training_row=chat().row())
    evidence = gather(rollout, None, None)
    assert evidence.row is None
    assert Needs.ROW in evidence.present
    assert Needs.SAMPLED not in evidence.present


def test_an_empty_row_is_no_row() -> None:
    empty = build_training_row(np.empty(0, np.int32), mask=("loss_mask", []))
    for rollout in (
        Rollout(Place("toy", 0), "toy", training_row=empty),
        replace(chat().rollout(), training_row=empty),
    ):
        evidence = gather(rollout, toy.toy_tokenizer(), toy.toy_renderer())
        assert Needs.ROW not in evidence.present
        assert evidence.row is None or not len(evidence.row.sampled)


@few
@given(clean_logs())
def test_ids_recovered_from_strings_are_marked_and_change_nothing_else(log: Log) -> None:
    rollout = log.rollout()
    turns = []
    for turn in rollout.turns:
        assert turn.completion_ids is not None
        assert turn.completion_logprobs is not None
        pairs = zip(turn.completion_ids.tolist(), turn.completion_logprobs.tolist(), strict=True)
        texts = tuple(TokenText(text_of([i]), spelling(i), value) for i, value in pairs)
        turns.append(replace(turn, completion_ids=None, completion_logprobs=None, columns=(), token_texts=texts))
    evidence = gather(replace(rollout, turns=tuple(turns)), toy.toy_tokenizer(), toy.toy_renderer())
    assert evidence.recovery_problems == ()
    assert evidence.differences == ()
    for old, new in zip(rollout.turns, evidence.rollout.turns, strict=True):
        assert new.ids_from is IdsFrom.RECOVERED
        assert np.array_equal(new.completion_ids, old.completion_ids)  # type: ignore[arg-type]
        assert np.allclose(new.completion_logprobs, old.completion_logprobs)  # type: ignore[arg-type]


def test_a_string_that_is_no_token_is_a_problem_and_leaves_the_turn_without_ids() -> None:
    rollout = chat().rollout()
    odd = replace(rollout.turns[2], completion_ids=None, token_texts=(TokenText("Skinnydogs", None, np.nan),))
    evidence = gather(replace(rollout, turns=(*rollout.turns[:2], odd)), toy.toy_tokenizer(), None)
    ((turn, problem),) = evidence.recovery_problems
    assert turn == 2
    assert "Skinnydogs" in problem
    assert evidence.rollout.turns[2].completion_ids is None


def test_turns_that_hold_nothing_are_no_evidence_and_no_error() -> None:
    empty = np.empty(0, np.int32)
    for turn in (Turn(None, None), Turn(empty, empty), Turn(None, empty), Turn(empty, None)):
        for count in (1, 3):
            rollout = Rollout(Place("toy", 0), "toy", turns=(turn,) * count)
            for tokenizer in (toy.toy_tokenizer(), None):
                assert gather(rollout, tokenizer, None).differences == ()
    rollout = chat().rollout()
    first, second, third = rollout.turns
    unanswered = replace(second, completion_ids=None, completion_logprobs=None, columns=())
    evidence = gather(replace(rollout, turns=(first, unanswered, third)), toy.toy_tokenizer(), None)
    assert [(link.turn, link.parent) for link in evidence.links] == [(1, 0), (2, 0)]


def test_a_retry_and_a_sibling_are_told_from_a_break() -> None:
    rollout = chat().rollout()
    first, second, third = rollout.turns
    retried = replace(second, completion_ids=np.array(encode("Nobody" + END), np.int32), completion_logprobs=None)
    retried = replace(retried, message_index=None)
    for tokenizer in (True, False):
        retry = replace(rollout, turns=(first, retried, second, third))
        assert kinds(retry, tokenizer=tokenizer) == [
            (1, 0, LinkKind.CONTINUES),
            (2, 1, LinkKind.RETRY),
            (3, 2, LinkKind.CONTINUES),
        ]
        sibling = replace(rollout, turns=(first, second, retried, third))
        assert kinds(sibling, tokenizer=tokenizer)[-1] == (3, 1, LinkKind.SIBLING)


def test_a_foreign_call_is_an_orphan_and_a_changed_history_is_rewritten() -> None:
    log = chat()
    foreign = Turn(
        np.array(encode("<|im_start|>user\nRate it.<|im_end|>\n<|im_start|>assistant\n"), np.int32),
        np.array(encode("Good" + END), np.int32),
    )
    rollout = log.rollout()
    assert kinds(replace(rollout, turns=(*rollout.turns, foreign)))[-1] == (3, None, LinkKind.ORPHAN)
    text = text_of(log.prompts[2]).replace("Is the dog skinny?", "The user asked of a dog.")
    rewritten = replace(rollout.turns[2], prompt_ids=np.array(encode(text), np.int32))
    bare = tuple(replace(turn, message_index=None) for turn in (*rollout.turns[:2], rewritten))
    assert kinds(replace(rollout, turns=bare, messages=()))[-1] == (2, 1, LinkKind.REWRITTEN)


def test_a_row_encoded_again_is_an_error_at_exactly_the_answers_that_changed() -> None:
    log = chat()
    places = []
    for turn, word in ((0, " Skinny"), (2, " closed")):
        at = next(
            i
            for i, token in enumerate(log.completions[turn])
            if spelling(token) == word.encode()[: len(spelling(token))] and len(spelling(token)) > 2
        )
        data = spelling(log.completions[turn][at])
        new = [toy.toy_tokenizer().vocabulary.ids_of_bytes(bytes([byte]))[0] for byte in data]
        log = log.replaced(turn, at, at + 1, new)
        places.append((turn, at, at + len(new)))
    again = chat()
    log.row_ids, log.row_mask, log.row_logprobs = again.row_ids, again.row_mask, []
    log.row_logprobs = [0.0 if not m else -5.0 - i / 64 for i, m in enumerate(again.row_mask)]
    evidence = gather(log.rollout(), toy.toy_tokenizer(), toy.toy_renderer())
    assert [(d.against, d.severity, d.where, d.turn, d.start, d.end) for d in evidence.differences] == [
        (Against.ROW, Severity.ERROR, Where.COMPLETION, turn, start, end) for turn, start, end in places
    ]
    view = evidence.row
    assert view is not None
    wanted = [
        a + start for (turn, start, _), (a, _) in zip(places, (again.regions[0], again.regions[2]), strict=True)
    ]
    assert np.flatnonzero(view.drifted).tolist() == wanted
    tokens = [finding for finding in found_in(log.rollout()) if finding[0] == "TOK101"]
    assert tokens == [("TOK101", "error", "completion", turn, start, end) for turn, start, end in places]


def test_an_answer_that_the_history_dropped_on_purpose_is_no_drift_of_the_row() -> None:
    """Turn 2 was asked without the first exchange, and the row is turn 2's own prompt and completion."""
    system, user = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\n"
    opener = "<|im_end|>\n<|im_start|>assistant\n"
    answer = "Four is what two and two make, as everyone who counts on fingers knows by heart."
    exchange = f"{user}And what do two plus two make, if you count them?{opener}"
    last = f"<|im_end|>\n{user}Thanks.{opener}"
    evidence = toy.evidence_of(
        {
            "turns": [
                {"prompt": [f"= {system}{user}One?{opener}"], "completion": ["= Yes.", "<|im_end|>"]},
                {"prompt": ["@seen", f"= \n{exchange}"], "completion": [f"= {answer}", "<|im_end|>"]},
                {"prompt": [f"= {system}{exchange}{answer}{last}"], "completion": ["= Bye.", "<|im_end|>"]},
            ],
            "row": ["@seen"],
        }
    )
    assert [link.kind for link in evidence.links] == [LinkKind.CONTINUES, LinkKind.REWRITTEN]
    assert [d for d in evidence.differences if d.against is Against.ROW and d.sampled] == []
