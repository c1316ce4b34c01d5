"""REC005: a completion whose ids are missing, empty or incomplete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import Turn
from tito_audit.rule import rule
from tito_audit.rules._texts import TextAgreement, agreement, answer_of, ids_contain, missing_part, spelled_calls
from tito_audit.rules._words import counted, head, quoted

_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
"""Templates put it before an answer: it was not sampled, so its ids are not missing."""


@rule("REC005", Severity.ERROR, headline="{n} with missing completion ids")
def missing_completion_ids(evidence: Evidence) -> Iterator[Hit]:
    """Completion ids are missing, empty or incomplete.

    ## What it finds
    A call without completion ids although the log holds its text, its tool calls or its logprobs; ids that decode
    to only a part of that text; a message with a tool call that its ids do not contain; fewer ids than the tokens
    that the server counted (`usage.completion_tokens`); token strings for which no ids can be found. The end token
    may be counted or not. A gap as large as the counted reasoning is a warning, as is a count that may include
    choices in other rows, as long as the ids could spell the message. Formats that never hold ids are left alone.
    Several calls of a rollout without ids are one finding, which counts them.

    ## Why it matters
    Missing ids cannot be trained as they were sampled: code either skips the turn silently or encodes the text
    again, which drifts. Streaming servers are known to drop the tokens of tool calls.

    ## Example
    A call with text but no ids:

    ```text
    error REC005 turn 0 completion at 0
      the call has no completion ids although its text has 2 characters ('4!'); it can only be
      trained on tokens that were never recorded
    ```

    ## Repair
    None: the ids were not recorded. Ask the server for them (vLLM: `return_token_ids`). `mask` takes the turn out
    of the loss, `drop` removes the rollout.
    """
    if not evidence.rollout.stated.ids_wanted:
        return
    for number, problem in evidence.recovery_problems:
        message = f"the ids of this completion could not be recovered: {problem}"
        yield Hit(Where.COMPLETION, 0, 0, message, turn=number, cause="not recoverable", severity=Severity.WARNING)
    unrecovered = dict(evidence.recovery_problems)
    without: list[Hit] = []
    spelled = spelled_calls(evidence) if evidence.rollout.turns else ()
    for number, turn in enumerate(evidence.rollout.turns):
        if number in unrecovered:
            continue
        if turn.completion_ids is not None and len(turn.completion_ids):
            if turn.usage is not None or number not in spelled:
                yield from _check_complete(evidence, number, turn)
            continue
        if turn.completion_ids is None and turn.token_texts is not None:
            continue  # ids can be looked up from the token strings once there is a tokenizer
        answer = answer_of(evidence, turn)
        text = turn.completion_text or (answer.text if answer is not None else "")
        columns = [c for c in turn.columns if c.role is ColumnRole.LOGPROBS and len(c.values)]
        if text:
            there = f"its text has {counted(len(text), 'character')} ({quoted(text)})"
        elif answer is not None and answer.tool_calls:
            there = f"its message calls `{answer.tool_calls[0].name}`"
        elif answer is not None and answer.reasoning:
            there = f"its reasoning has {counted(len(answer.reasoning), 'character')}"
        elif columns:
            there = f"{counted(len(columns[0].values), 'logprob')} were recorded"
        else:
            continue  # nothing shows that the call generated anything
        cause, has = "no ids", "has no completion ids"
        if turn.completion_ids is not None:
            cause, has = "empty ids", "has an empty list of completion ids"
        message = f"the call {has} although {there}; it can only be trained on tokens that were never recorded"
        without.append(Hit(Where.COMPLETION, 0, 0, message, turn=number, cause=cause))
    # Calls without ids are one hit for each cause, at the first of them.
    for cause in dict.fromkeys(map(attrgetter("cause"), without)):
        first, *more = (hit for hit in without if hit.cause == cause)
        calls = f"{1 + len(more)} of {len(evidence.rollout.turns)} calls, this one first: "
        yield replace(first, message=calls + first.message) if more else first
    row = evidence.rollout.training_row
    if row is not None and not len(row.token_ids) and any(m.sampled for m in evidence.rollout.messages):
        message = "the training row holds no tokens although the conversation has an answer"
        yield Hit(Where.ROW, 0, 0, message, cause="empty row")


def _check_complete(evidence: Evidence, number: int, turn: Turn) -> Iterator[Hit]:
    """A hit on ids that spell only part of what was generated, or are fewer than the server counted."""
    ids = turn.completion_ids
    assert ids is not None
    answer, usage, severity = answer_of(evidence, turn), turn.usage, Severity.ERROR
    # The end token is counted by some servers and left out by others.
    uncounted = 0 if usage is None else usage.counted - usage.recorded
    complete = usage is not None and abs(uncounted) <= usage.choices
    problem, cause = "", "part of the text"
    missed = None
    if evidence.vocabulary is not None:
        # The part of the logged text that the ids lack, if they hold all the rest.
        text, whole = turn.completion_text, True
        if text is not None:
            whole = agreement(evidence, number) is not TextAgreement.DIFFERENT
        elif answer is not None:
            text, whole = answer.text, ids_contain(evidence, number, answer.text)
        missed = None if text is None or whole else missing_part(evidence, number, text)
    if missed is not None and not _EMPTY_THOUGHT.fullmatch(missed):
        problem = f"lack {counted(len(missed), 'character')} of its text: {quoted(missed)}"
    elif answer is not None and evidence.vocabulary is not None and not complete:
        for call in answer.tool_calls:
            # The name, or only the arguments if the request named the tool.
            arguments = call.arguments if isinstance(call.arguments, str) else ""
            parts = [call.name, *([arguments] if len(arguments.strip()) > len("{}") else [])]
            if call.name and not any(ids_contain(evidence, number, part) for part in parts):
                problem, cause = f"hold no call of `{call.name}`, which its message makes", "tool call"
                break
    if not problem and usage is not None and uncounted > usage.choices:
        length = len(turn.completion_text or "")
        if answer is not None:  # every tool call has about 20 characters besides its name and arguments
            length = len(answer.text) + len(answer.reasoning or "")
            length += sum(len(call.name) + len(str(call.arguments or "")) + 20 for call in answer.tool_calls)
        of = "" if usage.choices == 1 else f" in {usage.choices} choices, which hold {usage.recorded}"
        problem, cause = f"are fewer than the {usage.counted:,} tokens that the server counted{of}", "usage"
        if usage.reasoning and abs(uncounted - usage.reasoning) <= usage.choices:
            problem, cause = f"{problem}, {usage.reasoning:,} of them reasoning", "reasoning"
            severity = Severity.WARNING
        elif not usage.alone and length < 5 * len(ids):  # no answer has more characters a token
            severity = Severity.WARNING  # the count may be of other choices too, which other rows hold
    if problem:
        message = f"the {counted(len(ids), 'completion id')} {problem}; the rest was not recorded"
        side = head(evidence, ids[np.maximum(len(ids) - 16, 0) :])
        yield Hit(Where.COMPLETION, 0, len(ids), message, number, f"incomplete: {cause}", severity, side)
