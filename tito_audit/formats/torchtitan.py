"""Rollouts of torchtitan's RL experiment: turns in messages, and in tokens if the recorder is told to.

pytorch/torchtitan 0.3.0 `torchtitan/experiments/rl/rollout_recorder.py` (`RolloutSampleRecorder`), which writes
ids with `log_tensors` and logprobs with `log_logprobs`, and `rollout/types.py` (`Rollout`, `RolloutTurn`). Each
turn has its whole prompt; the trainer cuts a rollout where one does not start with the turn before
(`components/training_sample_builder.py`). Only its last turn can be cut or aborted (`environment/token.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import TOOLS_MISSING, build_turn, message_place, only_text, stated_facts
from tito_audit.formats._columns import as_objects, has_entries, is_list, other_columns, per_token_column
from tito_audit.formats._update import object_at, sources_at, sources_of_calls
from tito_audit.formats._writer import listed_calls
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import Unread

_PROMPT, _COMPLETION, _LOGPROBS = "prompt_token_ids", "completion_token_ids", "completion_logprobs"
_SENT, _ANSWER = "prompt_messages", "completion_message"
_ENDS = {"truncated_length": "length", "error_abort": "abort"}
"""Statuses that say why the last turn ended."""


def read(row: Row, place: Place) -> Sequence[Rollout]:
    entries = as_objects(row["turns"], "turns is not a list of turns (objects)")
    stated = stated_facts(row)
    conversations: list[tuple[Message, ...]] = []
    for number, entry in enumerate(entries):
        sent, answer = entry.get(_SENT), entry.get(_ANSWER)
        logged = [*(sent if is_list(sent) else ()), answer]
        if any(isinstance(message, Mapping) and has_entries(message.get("tool_calls")) for message in logged):
            # Tools are not logged, and calls that failed to parse have no name.
            stated, conversations = stated.not_read(Unread.MESSAGES, TOOLS_MISSING), [()] * len(entries)
            break
        parts = ((_SENT, sent), (_ANSWER, None if answer is None else [answer]))
        conversations.append(tuple(m for key, part in parts for m in as_messages(part, f"turns[{number}].{key}")))
    messages = conversations[-1] if conversations else ()
    turns: tuple[Turn, ...] = ()
    if any(has_entries(entry.get(name)) for entry in entries for name in (_PROMPT, _COMPLETION)):
        calls: list[Turn] = []
        for entry, conversation in zip(entries, conversations, strict=True):
            answered = entry.get(_ANSWER) is not None and conversation and conversation[-1].role == "assistant"
            sent, answer = (conversation[:-1], conversation[-1]) if answered else (conversation, None)
            versions = [entry.get(name) for name in ("min_policy_version", "max_policy_version")]
            call = build_turn(
                (_PROMPT, entry.get(_PROMPT)),
                (_COMPLETION, entry.get(_COMPLETION)),
                partial(per_token_column, entry, _LOGPROBS),
                other_columns(entry, (_PROMPT, _COMPLETION, _LOGPROBS, _SENT, "env_messages", "metrics")),
                completion_text=None if answer is None else only_text(answer),
                weight_versions=tuple(dict.fromkeys(str(version) for version in versions if version is not None)),
                **message_place(messages, sent, answer),
            )
            calls.append(call)
        turns = (*calls[:-1], replace(calls[-1], finish_reason=_ENDS.get(str(row.get("status")))))
    else:
        stated = stated.without_ids()
    return (Rollout(place, FORMAT.name, messages, turns=turns, stated=stated),)


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    calls = []
    for number, entry in enumerate(row["turns"]):
        columns = {name: sources_at([("turns", number, name)]) for name, value in entry.items() if is_list(value)}
        calls.append(CallSource(columns.get(_PROMPT, ()), columns.get(_LOGPROBS, ()), columns))
    return sources_of_calls([calls])


FORMAT = Format(
    name="torchtitan",
    title="torchtitan rollout samples",
    signature=Signature(
        "{turns} whose entries have {completion_message} and {prompt_messages}; {reward_breakdown}"
    ),
    precedence=145,
    matches=lambda row: (
        isinstance(row.get("turns"), list | tuple)
        and "reward_breakdown" in row
        and (not row["turns"] or {_SENT, _ANSWER} <= object_at(row, "turns", 0).keys())
    ),
    **listed_calls(read, sources),
    shows="Every call of a rollout with its complete prompt, logprobs and weight versions, if the recorder has "
    "`log_tensors` and `log_logprobs`; messages where no tool is called, since tools are not logged. No mask: "
    "what was sampled is trained.",
)
