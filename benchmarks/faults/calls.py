"""Faults between calls, and in their columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.faults.draft import Draft, fault
from benchmarks.faults.tokens import one_token_as_two


@fault("SEQ301", rows=False)
def answer_spelled_anew(draft: Draft) -> bool:
    """Later prompts hold the re-encoded text of an answer."""
    runs = draft.runs()
    if len(runs) < 2:
        return False
    heard = draft.ids, draft.mask
    kept = draft.mask.copy()
    draft.mask[runs[-1][0] :] = 0  # only tokens that a later prompt holds
    done = one_token_as_two(draft)
    if done:
        grown = len(draft.ids) - len(kept)
        draft.mask[runs[-1][0] + grown :] = kept[runs[-1][0] :]
        draft.heard = heard[0], kept
    else:
        draft.mask = kept
    return done


@fault("SEQ302", "SEQ303", rows=False)
def answer_trimmed(draft: Draft) -> bool:
    """Later prompts lack the white space that ended an answer."""
    heard = draft.ids.copy(), draft.mask.copy()
    before = draft.logprobs.copy()
    if not draft.append(" \n", draft.kit.ids(" \n"), last=False):
        draft.logprobs = before
        return False
    draft.heard = heard
    return True


@fault("SEQ303", "SEQ302", rows=False, made=True)
def history_rewritten(draft: Draft) -> bool:
    """From some call on, the first message is different."""
    calls = draft.calls or []
    if len(calls) < 2:
        return False
    other = np.asarray(draft.kit.ids(" forgotten long ago"), np.int32)
    at = int(draft.draw.integers(1, len(calls)))
    cut = draft.runs()[0][0] - 30
    for call in calls[at:]:
        prompt = call["prompt_token_ids"]
        call["prompt_token_ids"] = np.concatenate([prompt[: cut - 6], other, prompt[cut:]])
    return cut > 40


@fault("SEQ304", rows=False, made=True)
def call_retried(draft: Draft) -> bool:
    """The same prompt twice, with two answers."""
    calls = draft.calls or []
    at = int(draft.draw.integers(len(calls)))
    again = dict(calls[at])
    for name in ("generation_token_ids", "generation_log_probs"):
        again[name] = again[name][: max(1, len(again[name]) // 2)]
    calls.insert(at, {**again, "finish_reason": "length"})
    return True


@fault("SEQ305", rows=False, made=True)
def call_of_another_conversation(draft: Draft) -> bool:
    """A call to a judge in between."""
    calls, kit = draft.calls or [], draft.kit
    asked = kit.template([{"role": "user", "content": "Was that right, in a word?"}], True)
    said = np.asarray([*kit.ids("Yes"), draft.end], np.int32)
    judge = {
        "prompt_token_ids": np.asarray(kit.ids(asked), np.int32),
        "generation_token_ids": said,
        "generation_log_probs": np.full(len(said), -0.25) - np.arange(len(said)) / 8,
        "finish_reason": "stop",
    }
    if len(calls) < 2:
        return False
    calls.insert(1, judge)
    return True


@fault("REC005", rows=False, made=True)
def answer_without_ids(draft: Draft) -> bool:
    """A call with a finish reason but no completion."""
    _one_call(draft).update(generation_token_ids=[], generation_log_probs=[])
    return True


@fault("REC006", rows=False, made=True)
def text_of_another_answer(draft: Draft) -> bool:
    """A text that the ids do not spell."""
    _one_call(draft)["text"] = "No such answer was ever sampled."
    return True


@fault("LPR501", rows=False, made=True)
def call_lacks_a_logprob(draft: Draft) -> bool:
    """One logprob fewer than tokens."""
    call = _one_call(draft)
    call["generation_log_probs"] = call["generation_log_probs"][:-1]
    return True


@fault("LPR503", rows=False, made=True)
def call_holds_no_number(draft: Draft) -> bool:
    """A sampled token without a logprob."""
    call = _one_call(draft)
    call["generation_log_probs"] = [None, *call["generation_log_probs"][1:].tolist()]
    return True


@fault("LPR504", rows=False, made=True)
def call_more_than_certain(draft: Draft) -> bool:
    """A logprob above zero."""
    call = _one_call(draft)
    call["generation_log_probs"] = (
        call["generation_log_probs"] + np.eye(1, len(call["generation_log_probs"]))[0] * 9
    )
    return True


@fault("LPR506", rows=False, made=True)
def call_all_alike(draft: Draft) -> bool:
    """The same logprob for every token of a call."""
    call = max(draft.calls or [], key=lambda one: len(one["generation_token_ids"]))
    call["generation_log_probs"] = np.full(len(call["generation_log_probs"]), -0.5)
    return len(call["generation_token_ids"]) > 14


def _one_call(draft: Draft) -> dict[str, Any]:
    calls = draft.calls or []
    return calls[int(draft.draw.integers(len(calls)))]
