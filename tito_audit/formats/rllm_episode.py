"""rLLM episodes: trajectories of steps, each step one model call with its conversation.

rllm-org/rllm `rllm/eval/episode_store.py` (`EvalEpisodeStore`), one indented JSON document per episode, and its
compact form, `rllm/eval/episode_compact.py`, which keeps each message once. The training-time episode logger,
`rllm/utils/episode_logger.py`, writes the same shape and drops the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import (
    TOOLS_MISSING,
    build_turn,
    calls_unknown_tools,
    errors_at,
    finish_reason,
    message_place,
    only_text,
    stated_model,
)
from tito_audit.formats._columns import as_objects, has_entries, is_list, logprob_column, other_columns
from tito_audit.formats._extras import read_extras
from tito_audit.formats._update import find_copies, object_at, sources_at, sources_of_calls
from tito_audit.formats._writer import listed_calls
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import Unread

_PROMPT, _RESPONSE = "prompt_ids", "response_ids"
_ROUTING = "routing_matrices"
_TAKEN = (_PROMPT, _RESPONSE, "logprobs", "chat_completions", "chat_completions_ref")
_PICTURED = "they hold parts that are not tokens, such as images"
"""Why such prompts are not read."""


def matches(row: Row) -> bool:
    trajectories = row.get("trajectories")
    if not isinstance(trajectories, list | tuple):
        return False
    if not len(trajectories):
        return "eval_idx" in row or {"is_correct", "termination_reason"} <= row.keys()
    return isinstance(trajectories[0], Mapping) and "steps" in trajectories[0]


def read(row: Row, place: Place) -> Sequence[Rollout]:
    row_stated = stated_model(row)
    if isinstance(row.get("id"), str):
        row_stated = replace(row_stated, group=row["id"].rpartition(":")[0] or row["id"]).with_facts(id=row["id"])
    if not row["trajectories"]:
        return (Rollout(place, FORMAT.name, stated=row_stated.without_ids()),)
    rollouts = []
    for item, trajectory in enumerate(row["trajectories"]):
        where, stated = f"trajectories[{item}]", row_stated
        steps = _steps_of(trajectory, where)
        conversations = [
            _read_conversation(trajectory, step, f"{where}.steps[{i}]") for i, step in enumerate(steps)
        ]
        complete = not any(calls_unknown_tools(conversation, ()) for conversation in conversations)
        if not complete:
            # The tools are only in the gateway's traces, so these prompts cannot be rendered again.
            stated = stated.not_read(Unread.MESSAGES, TOOLS_MISSING)
        messages = conversations[-1] if conversations and complete else ()
        turns: tuple[Turn, ...] = ()
        if any(has_entries(step.get(name)) for step in steps for name in (_PROMPT, _RESPONSE)):
            turns = tuple(
                _read_step(step, conversation, messages if complete else None, f"{where}.steps[{i}]")
                for i, (step, conversation) in enumerate(zip(steps, conversations, strict=True))
            )
        else:
            # Without ids an evaluation writes empty lists, the training logger none.
            stated = stated.without_ids()
        pictured = [_is_multimodal(step.get(_PROMPT)) for step in steps]
        if any(pictured):
            stated = stated.not_read(Unread.PROMPTS, _PICTURED)
        if any(turn.prompt_ids is not None for turn in turns) and any(pictured):
            # No rule is skipped for it, so none would say so.
            stated = replace(stated, notice=f"Some prompts were not read: {_PICTURED}.")
        # Of a retried call only the last attempt's message was kept, so a message belongs to one call.
        indices = [turn.message_index for turn in turns]
        retried = {
            number
            for number, index in enumerate(indices)
            if index is not None and any(later is not None and later <= index for later in indices[number + 1 :])
        }
        turns = tuple(replace(turn, message_index=None) if n in retried else turn for n, turn in enumerate(turns))
        own = replace(place, item=item)
        rollouts.append(Rollout(own, FORMAT.name, messages, turns=turns, stated=stated))
    return tuple(rollouts)


def _steps_of(trajectory: object, where: str) -> Sequence[Mapping[str, Any]]:
    steps = trajectory.get("steps") if isinstance(trajectory, Mapping) else None
    if steps is None:
        if isinstance(trajectory, Mapping) and "steps" in trajectory:
            return ()
        raise RecordError(f"{where} is not a trajectory with a list of steps")
    return as_objects(steps, f"{where}.steps is not a list of steps (objects)")


def _read_conversation(trajectory: object, step: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """The conversation of a step, including its answer."""
    chat = step.get("chat_completions")
    leaf = chat.get("messages_ref") if isinstance(chat, Mapping) else step.get("chat_completions_ref")
    if leaf is None:
        return as_messages(chat, f"{where}.chat_completions")
    if not is_list(leaf) or len(leaf) != 2:
        raise RecordError(f"{where}.chat_completions is not a message and the number of messages up to it")
    nodes = object_at(trajectory, "message_nodes")
    messages: list[Any] = []
    key = leaf[0]
    while key is not None and len(messages) <= len(nodes):
        node = nodes.get(key) if isinstance(key, str) else None
        if not isinstance(node, Mapping):
            raise RecordError(f"{where}.chat_completions leads to message {key!r}, which is not in message_nodes")
        messages.append(node.get("m"))
        key = node.get("p")
    if not isinstance(leaf[1], int | float) or len(messages) != leaf[1]:
        raise RecordError(f"{where}.chat_completions counts {leaf[1]} messages, but there are {len(messages)}")
    return as_messages(messages[::-1], f"{where}.chat_completions")


def _read_step(
    step: Mapping[str, Any], conversation: tuple[Message, ...], messages: Sequence[Message] | None, where: str
) -> Turn:
    """The call of a step; if `messages` is None, its messages are left out and its text stays."""
    answer = conversation[-1] if conversation and conversation[-1].role == "assistant" else None
    sent = conversation if answer is None else conversation[:-1]
    with errors_at(where):
        scored = step.get("logprobs")
        turn = build_turn(
            (_PROMPT, None if _is_multimodal(step.get(_PROMPT)) else step.get(_PROMPT)),
            (_RESPONSE, step.get(_RESPONSE)),
            # An empty list is the default, and means null.
            lambda: logprob_column(step, "logprobs") if has_entries(scored) else None,
            other_columns(step, _TAKEN),
            step,
            completion_text=None if answer is None else only_text(answer),
            finish_reason=finish_reason(object_at(step, "model_output")) or finish_reason(step),
            extras=read_extras(step),
            **({} if messages is None else message_place(messages, sent, answer)),
        )
        if scored is not None and not is_list(scored):
            raise RecordError("column 'logprobs' is not a list of numbers")
    return turn


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    calls: list[list[CallSource]] = []
    for item, trajectory in enumerate(row["trajectories"]):
        calls.append([])
        for number, step in enumerate(_steps_of(trajectory, f"trajectories[{item}]")):
            path: Path = ("trajectories", item, "steps", number)
            inside, output, places = (*path, "model_output"), object_at(step, "model_output"), []
            for name, names in ((_PROMPT, ("prompt_ids", "prompt_token_ids")), ("logprobs", ("logprobs",))):
                value: Any = step.get(name)
                logged = has_entries(value) and not _is_multimodal(value)
                copies = find_copies(output, names, value, inside) if logged else ()
                places.append(sources_at([(*path, name), *copies] if logged else []))
            columns = {name: sources_at([(*path, name)]) for name, value in step.items() if is_list(value)}
            source = CallSource(
                prompts=places[0],
                logprobs=places[1],
                columns={**columns, "logprobs": places[1]},
                routing=tuple(
                    (*at, _ROUTING) for at, holder in ((path, step), (inside, output)) if _ROUTING in holder
                ),
            )
            calls[-1].append(source)
    return sources_of_calls(calls)


def _is_multimodal(value: object) -> bool:
    """Whether a prompt holds other parts, such as images, between its ids."""
    return isinstance(value, list | tuple) and dict in set(map(type, value))


FORMAT = Format(
    name="rllm_episode",
    title="rLLM episodes",
    signature=Signature("{trajectories} whose entries have {steps}, with {prompt_ids} and {response_ids}"),
    precedence=130,
    matches=matches,
    **listed_calls(read, sources),
    shows="Messages and every call of each trajectory, with its complete prompt, logprobs and advantages. Tools "
    "are in the gateway's traces only; evaluations and the training-time logger keep no ids.",
)
