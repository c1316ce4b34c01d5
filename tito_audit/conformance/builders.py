"""How the prompt of the next call is built from the last one, as frameworks do it.

`splice` and `render` are our own code. The others are descriptions: each says of which framework, file and
version, and was compared with the released package where that can be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.conformance.world import Drawn, Tokens, World
from tito_audit.errors import RenderError
from tito_audit.provider import GenerationResult
from tito_audit.record.message import Message, as_messages
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, ChatCall
from tito_audit.templates.probes import Probe


class NotBuilt(Exception):
    """Why a builder makes no prompt."""


class NotTaken(NotBuilt):
    """Which messages a builder is not made for."""


class Forked(Exception):
    """Why a builder starts another training row: what was sampled stays in the row before."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A call that follows an answer."""

    probe: Probe
    answer: int
    """The index of the answer's message."""
    until: int
    """How many messages the next prompt is of."""
    prompt: Tokens
    """The prompt of the answer."""
    sample: Drawn

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages after the answer."""
        return self.probe.messages[self.answer + 1 : self.until]

    @property
    def seen(self) -> Tokens:
        """The prompt, what was prefilled, and what was sampled."""
        return (*self.prompt, *self.sample.prefill, *self.sample.ids)


Next = Callable[[AnsweredTurn], Tokens]
"""The next prompt of one conversation: NotBuilt, Forked or RenderError if there is none."""


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """One way to build the next prompt."""

    name: str
    source: str
    """Whose way it is: framework, version, file."""
    begin: Callable[[World], Next]
    """Called once a conversation."""


def _spliced(world: World) -> Next:
    """The sessions of our gateway: stored ids, and what the template adds, proved."""
    session = Conversations(world.tokenizer, world.renderer).open()

    def following(turn: AnsweredTurn) -> Tokens:
        probe = turn.probe
        call = ChatCall(probe.messages[: turn.answer], probe.tools)
        prompt = session.prompt(call)
        ids = (*turn.sample.prefill, *turn.sample.ids)
        ended = "stop" if turn.sample.ended else "length"
        result = GenerationResult(tuple(prompt.ids.tolist()), ids, (0.0,) * len(ids), finish_reason=ended)
        session.commit(f"call {turn.answer}", prompt, call, [result], [probe.messages[turn.answer].wire])
        later = session.prompt(ChatCall(probe.messages[: turn.until], probe.tools))
        if later.branch is Branch.FORK and later.fork is not None:
            raise Forked(later.fork.detail)
        return tuple(np.asarray(later.ids).tolist())

    return following


def _dummies(*wires: Mapping[str, object]) -> tuple[Message, ...]:
    return as_messages(list(wires), "a dummy")


def _tool_suffix(world: World) -> Next:
    """A tool's result after a dummy call, cut behind the last end token; other messages it does not take."""

    def following(turn: AnsweredTurn) -> Tokens:
        if not turn.new or any(message.role != "tool" for message in turn.new):
            raise NotTaken("it appends results of tools only")
        name = str(turn.new[0].wire.get("name", "dummy"))
        called = {"type": "function", "function": {"name": name, "arguments": {}}}
        dummy = _dummies(
            {"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [called]}
        )
        before = world.ids(world.text(dummy, opens=False))
        whole = world.ids(world.text((*dummy, *turn.new), opens=True))
        ends = [at for at, token in enumerate(before) if token == world.eos_id]
        before = before[: ends[-1] + 1] if ends else before
        if whole[: len(before)] != before:
            raise NotBuilt("what the template writes before the result changes with the result")
        return (*turn.seen, *whole[len(before) :])

    return following


def _alone(world: World) -> Next:
    """The new messages rendered alone, without what the template writes before a first message."""
    empty = {"role": "user", "content": ""}

    def following(turn: AnsweredTurn) -> Tokens:
        single, double = (world.ids(world.text(_dummies(*[empty] * n), opens=False)) for n in (1, 2))
        system = single[: -(len(double) - len(single))] if len(double) > len(single) else ()
        if not turn.new:
            raise NotTaken("nothing follows the answer")
        try:
            alone = world.ids(world.text(turn.new, opens=True))[len(system) :]
        except RenderError:  # a template that asks for a user's message gets an empty one, and loses it again
            dummy = _dummies(empty)
            whole = world.ids(world.text((*dummy, *turn.new), opens=True))
            alone = whole[len(single) :][len(system) :]
        return (*turn.seen, *_separator(world), *alone)

    return following


def _separator(world: World) -> Tokens:
    """What stands behind the end token of a user's turn."""
    empty, filled = (
        world.ids(world.text(_dummies({"role": "user", "content": text}), opens=False)) for text in ("", "x")
    )
    shared = 0
    while shared < min(len(empty), len(filled)) and empty[-1 - shared] == filled[-1 - shared]:
        shared += 1
    suffix = empty[len(empty) - shared :]
    ends = [at for at, token in enumerate(suffix) if token == world.eos_id]
    return suffix[ends[-1] + 1 :] if ends else suffix[1:]


def _text_suffix(world: World) -> Next:
    """Each new message after dummies: the text that the template adds for it, encoded alone."""
    system = {"role": "system", "content": "dummy system"}

    def following(turn: AnsweredTurn) -> Tokens:
        added: list[int] = []
        messages, tools = list(turn.new), turn.probe.tools
        while messages:
            size = next((at for at, each in enumerate(messages) if each.role != "tool"), len(messages)) or 1
            part, messages = messages[:size], messages[size:]
            base = _dummies(system)
            if part[0].role == "tool":
                calls = [
                    {
                        "id": str(each.wire.get("tool_call_id", "call00001")),
                        "type": "function",
                        "function": {"name": str(each.wire.get("name", "dummy")), "arguments": {}},
                    }
                    for each in part
                ]
                base = _dummies(system, {"role": "assistant", "content": "", "tool_calls": calls})
            added += _suffix(world, base, part, tools, opens=False)
        added += _suffix(world, turn.probe.messages[: turn.until], (), tools, opens=True)
        seen = turn.seen
        between = _separator(world)
        if between and world.eos_id is not None and seen[-1] == world.eos_id:
            seen = (*seen, *between)
        return (*seen, *added)

    return following


def _suffix(
    world: World, base: Sequence[Message], part: Sequence[Message], tools: Sequence[object], *, opens: bool
) -> Tokens:
    before = world.text(base, tools, opens=False)  # type: ignore[arg-type]
    whole = world.text((*base, *part), tools, opens=opens)  # type: ignore[arg-type]
    if not whole.startswith(before):
        raise NotBuilt("what the template writes before the new messages changes with them")
    return world.ids(whole[len(before) :])


def _replaced(world: World) -> Next:
    """All messages rendered again, with everything up to the answer's end token replaced by the stored ids."""

    def following(turn: AnsweredTurn) -> Tokens:
        if world.eos_id is None:
            raise NotBuilt("there is no end token")
        seen, eos = turn.seen, world.eos_id
        whole = world.ids(world.text(turn.probe.messages[: turn.until], turn.probe.tools, opens=True))
        history = world.ids(world.text(turn.probe.messages[: turn.answer + 1], turn.probe.tools, opens=False))
        ends = [at for at, token in enumerate(whole) if token == eos]
        wanted = history.count(eos)
        if wanted > len(ends) or not wanted:
            raise NotBuilt("the end token of the answer is not in the prompt")
        stored = seen[:-1] if seen[-1] == eos else seen
        return (*stored, *whole[ends[wanted - 1] :])

    return following


BUILDERS: tuple[PromptBuilder, ...] = (
    PromptBuilder(
        "render",
        "every server that takes messages: all of them rendered and encoded again",
        lambda world: (
            lambda turn: world.ids(world.text(turn.probe.messages[: turn.until], turn.probe.tools, opens=True))
        ),
    ),
    PromptBuilder("splice", "`tito-audit serve` and `managed_server`", _spliced),
    PromptBuilder("trl", "TRL 1.16, `trl/trainer/grpo_trainer.py`: `_get_tool_suffix_ids`", _tool_suffix),
    PromptBuilder(
        "verl",
        "verl 0.9, `verl/utils/tokenizer/chat_template.py`: new messages alone, and the separator of turns",
        _alone,
    ),
    PromptBuilder(
        "miles",
        "miles, `TITOTokenizer.tokenize_additional_messages` of the base class, with the boundary rule of Qwen's",
        _text_suffix,
    ),
    PromptBuilder("nemo-rl", "NeMo-RL, `openai_server_utils.replace_prefix_tokens`", _replaced),
)
"""Every builder, in the order of the columns."""
