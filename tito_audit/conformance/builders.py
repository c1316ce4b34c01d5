"""How the prompt of the next call is built from the last one, as frameworks do it.

`splice` and `render` are our own code, and `renderers` is the package of that name, if it is installed. The others
are descriptions: each says of which framework, file and version, and was compared with the released package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import orjson

from tito_audit.conformance.world import MARKER, Drawn, Tokens, World
from tito_audit.errors import RenderError
from tito_audit.provider import GenerationResult
from tito_audit.record.message import Message, as_messages
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, ChatCall
from tito_audit.templates.probes import CORE, Probe


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
    number: int = 0
    """How many answers of the conversation were before this one."""

    @property
    def new(self) -> tuple[Message, ...]:
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
    """Called once a template."""


_BUILDERS: list[PromptBuilder] = []


def _begins(name: str, source: str) -> Callable[[Callable[[World], Next]], None]:
    """Adds a function of a world as a builder."""
    return lambda begin: _BUILDERS.append(PromptBuilder(name, source, begin))


def _builds(name: str, source: str) -> Callable[[Callable[[World, AnsweredTurn], Tokens]], None]:
    """The same of a function that keeps nothing between the turns."""
    return lambda build: _begins(name, source)(lambda world: partial(build, world))


@_builds("render", "every server that takes messages: all of them rendered and encoded again")
def _rendered(world: World, turn: AnsweredTurn) -> Tokens:
    return world.ids(world.text(turn.probe.messages[: turn.until], turn.probe.tools, opens=True))


@_begins("splice", "`tito-audit serve` and `managed_server`")
def _spliced(world: World) -> Next:
    """The sessions of our gateway: stored ids, and what the template adds, proved."""
    conversations = Conversations(world.tokenizer, world.renderer)
    session = conversations.open()

    def following(turn: AnsweredTurn) -> Tokens:
        nonlocal session
        if not turn.number:
            session = conversations.open()
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


@_builds("trl", "TRL 1.16, `trl/trainer/grpo_trainer.py`: `_get_tool_suffix_ids`")
def _tool_suffix(world: World, turn: AnsweredTurn) -> Tokens:
    """A tool's result after a dummy call, cut behind the last end token; other messages it does not take."""
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


@_builds(
    "verl", "verl 0.9, `verl/utils/tokenizer/chat_template.py`: new messages alone, and the separator of turns"
)
def _alone(world: World, turn: AnsweredTurn) -> Tokens:
    """The new messages rendered alone, without what the template writes before a first message."""
    empty = {"role": "user", "content": ""}
    single, double = (world.ids(world.text(_dummies(*[empty] * n), opens=False)) for n in (1, 2))
    system = single[: -(len(double) - len(single))] if len(double) > len(single) else ()
    if not turn.new:
        raise NotTaken("nothing follows the answer")
    try:
        alone = world.ids(world.text(turn.new, opens=True))[len(system) :]
    except RenderError:  # a template that asks for a user's message gets an empty one, and loses it again
        whole = world.ids(world.text((*_dummies(empty), *turn.new), opens=True))
        alone = whole[len(single) :][len(system) :]
    return (*turn.seen, *_separator(world), *alone)


@_builds(
    "miles", "miles 0.0.2, `miles/utils/chat_template_utils/tito_tokenizer.py`: `TITOTokenizer` and its classes"
)
def _text_suffix(world: World, turn: AnsweredTurn) -> Tokens:
    """Each new message after dummies: the text that the template adds for it, encoded alone.

    Of the classes for families, those of Qwen, Nemotron and MiniMax add the line break behind the end token, and
    that of GLM takes away an end token that begins the next turn.
    """
    system = {"role": "system", "content": "dummy system"}
    starts = {ids[0] for ids in map(world.ids, ("<|user|>", "<|observation|>")) if len(ids) == 1}
    breaks_lines = {ids[0] for ids in map(world.ids, ("<|im_end|>", "[e~[")) if len(ids) == 1}
    added: list[int] = []
    messages, tools = list(turn.new), turn.probe.tools
    while messages:
        size = next((at for at, each in enumerate(messages) if each.role != "tool"), len(messages)) or 1
        part, messages = messages[:size], messages[size:]
        base = _dummies(system)
        if part[0].role == "tool":
            calls = [
                {
                    "id": str(each.wire.get("tool_call_id") or f"call0000{number}"),
                    "type": "function",
                    "function": {"name": str(each.wire.get("name") or "dummy_func"), "arguments": {}},
                }
                for number, each in enumerate(part)
            ]
            answer = {"role": "assistant", "content": "", "reasoning_content": " ", "tool_calls": calls}
            base = _dummies(system, answer)
        added += _suffix(world, base, part, tools, opens=False)
    added += _suffix(world, turn.probe.messages[: turn.until], (), tools, opens=True)
    seen, between = turn.seen, _separator(world)
    if len(starts) == 2 and "[gMASK]" in world.source and seen[-1] in starts:  # GLM
        seen = seen[:-1]
    elif between and seen[-1] in breaks_lines:
        seen = (*seen, *between)
    return (*seen, *added)


@_builds("nemo-rl", "NeMo-RL, `openai_server_utils.replace_prefix_tokens`")
def _replaced(world: World, turn: AnsweredTurn) -> Tokens:
    """All messages rendered again, with everything up to the answer's end token replaced by the stored ids."""
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


def _suffix(
    world: World, base: Sequence[Message], part: Sequence[Message], tools: Sequence[object], *, opens: bool
) -> Tokens:
    before = world.text(base, tools, opens=False)  # type: ignore[arg-type]
    whole = world.text((*base, *part), tools, opens=opens)  # type: ignore[arg-type]
    if not whole.startswith(before):
        raise NotBuilt("what the template writes before the new messages changes with them")
    return world.ids(whole[len(before) :])


class _PeersTokenizer:
    """A world's tokenizer as `renderers.base.Tokenizer` asks for it; control tokens that it lacks get ids that no
    text has."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._absent: dict[str, int] = {}
        self.eos_token_id = world.eos_id

    def encode(self, text: str, **_: object) -> list[int]:
        ids = self._world.ids(text)
        if len(ids) > 1 and MARKER.fullmatch(text):
            return [self._absent.setdefault(text, -2 - len(self._absent))]
        return list(ids)

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return self._world.shown([token for token in ids if token >= 0])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        return self.encode(tokens)[0] if isinstance(tokens, str) else [self.encode(token)[0] for token in tokens]


def _bridged(world: World) -> Next:
    """The bridge of the package's renderer that writes what this template writes. Where there is no bridge, its
    callers render all messages again, and start a branch if these do not begin with the tokens before."""
    peer, name = _peer(world)

    def following(turn: AnsweredTurn) -> Tokens:
        messages, tools = turn.probe.messages[: turn.until], turn.probe.tools
        sampled, bridge = [*turn.sample.prefill, *turn.sample.ids], cast("Any", None)
        if peer is None:
            after = world.ids(world.text(messages, tools, opens=True))
        else:
            wires = [as_plain(message) for message in messages]
            how = {"tools": [dict(tool) for tool in tools] or None}
            try:
                bridge = peer.bridge_to_next_turn(list(turn.prompt), sampled, wires[turn.answer + 1 :], **how)
                again = bridge is None and peer.render_ids(wires, add_generation_prompt=True, **how)
            except Exception as error:
                raise NotBuilt(f"{type(error).__name__}: {error}"[:200]) from None
            after = tuple(again or bridge.token_ids)
        if bridge is None and after[: len(turn.seen)] != turn.seen:
            raise Forked(f"{name} renders all messages again, which changes the tokens before")
        return after

    return following


def as_plain(message: Message) -> dict[str, Any]:
    """A message as JSON values."""
    return dict(orjson.loads(orjson.dumps(message.wire, default=dict)))


def _peer(world: World) -> tuple[Any, str]:
    """The renderer of the package that writes the most of our usual conversations as the template does, at least
    half of them, and its name; None for the default one, which renders templates."""
    base, configs = import_module("renderers.base"), import_module("renderers.configs")
    base._populate_registry()
    best, most = (None, "its default renderer"), 0.5
    for name in base.RENDERER_REGISTRY:
        fits: list[bool] = []
        try:
            peer = base.create_renderer(_PeersTokenizer(world), configs._config_class_for(name)())
            for probe in CORE:
                wanted = probe.try_render(world.renderer)
                if wanted is None or not all(fits[:1]):
                    continue
                wires, tools = [as_plain(each) for each in probe.messages], [dict(tool) for tool in probe.tools]
                ids = tuple(peer.render_ids(wires, tools=tools or None, add_generation_prompt=True))
                begins = int(world.stand_in and ids[0] < 0)  # with the model's own token
                fits.append(ids[begins:] == world.ids(wanted)[begins:])
        except Exception:
            continue
        if name != "default" and fits and sum(fits) / len(fits) > most:
            best, most = (peer, f"its {name} renderer"), sum(fits) / len(fits)
    return best


if find_spec("renderers") is not None:
    source = (
        f"renderers {version('renderers')}, the package: `bridge_to_next_turn` of its renderer for the template"
    )
    _begins("renderers", source)(_bridged)

BUILDERS = tuple(_BUILDERS)
"""Every builder, in the order of the columns."""
