"""How frameworks build the prompt of the next call from the last one.

`splice` and `render` run our own code, `renderers` the package of that name, if it is installed. The others are
written after the framework, file and version that each names, and were compared with the released package.
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

from tito_audit.conformance.world import MARKER, SampledAnswer, Tokens, World
from tito_audit.errors import RenderError
from tito_audit.provider import GenerationResult
from tito_audit.record.message import Message, as_messages
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, ChatCall
from tito_audit.templates.probes import CORE, Probe


class NotBuilt(Exception):
    """A builder makes no prompt, for this reason."""


class NotFit(NotBuilt):
    """A builder is not made for these messages, for this reason."""


class NewRow(Exception):
    """A builder begins another training row, for this reason; what was sampled stays in the row before."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A sampled answer, and the call that follows it."""

    probe: Probe
    answer: int
    """The index of the answer among the messages."""
    until: int
    """How many messages the next prompt has."""
    prompt: Tokens
    """The prompt of the answer."""
    sample: SampledAnswer
    number: int = 0
    """Of the answer, from 0."""

    @property
    def new_messages(self) -> tuple[Message, ...]:
        return self.probe.messages[self.answer + 1 : self.until]

    @property
    def seen_ids(self) -> Tokens:
        """The prompt, what was prefilled, and what was sampled."""
        return (*self.prompt, *self.sample.prefill, *self.sample.ids)


Build = Callable[[AnsweredTurn], Tokens]
"""The next prompt of one conversation: NotBuilt, Forked or RenderError if there is none."""


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """One way to build the next prompt."""

    name: str
    source: str
    """Who builds prompts so: framework, version, file."""
    begin: Callable[[World], Build]
    """Called once for each template."""


_BUILDERS: list[PromptBuilder] = []


def _stateful_builder(name: str, source: str) -> Callable[[Callable[[World], Build]], None]:
    """Register a function that returns the builder for a template."""
    return lambda begin: _BUILDERS.append(PromptBuilder(name, source, begin))


def _builder(name: str, source: str) -> Callable[[Callable[[World, AnsweredTurn], Tokens]], None]:
    """Register a builder that keeps no state between turns."""
    return lambda build: _stateful_builder(name, source)(lambda world: partial(build, world))


@_builder("render", "every server that takes messages: all of them rendered and encoded again")
def _render_all(world: World, turn: AnsweredTurn) -> Tokens:
    return world.ids(world.text(turn.probe.messages[: turn.until], turn.probe.tools, opens=True))


@_stateful_builder("splice", "`tito-audit serve` and `managed_server`")
def _splice(world: World) -> Build:
    """As our gateway: stored ids, then what the template adds, proved."""
    conversations = Conversations(world.tokenizer, world.renderer)
    session = conversations.open()

    def build(turn: AnsweredTurn) -> Tokens:
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
            raise NewRow(later.fork.detail)
        return tuple(np.asarray(later.ids).tolist())

    return build


def _dummies(*wires: Mapping[str, object]) -> tuple[Message, ...]:
    return as_messages(list(wires), "a dummy")


@_builder("trl", "TRL 1.16, `trl/trainer/grpo_trainer.py`: `_get_tool_suffix_ids`")
def _append_results(world: World, turn: AnsweredTurn) -> Tokens:
    """Render the results of tools after a dummy call, and append what follows its end token."""
    if not turn.new_messages or any(message.role != "tool" for message in turn.new_messages):
        raise NotFit("it appends results of tools only")
    name = str(turn.new_messages[0].wire.get("name", "dummy"))
    called = {"type": "function", "function": {"name": name, "arguments": {}}}
    dummy = _dummies(
        {"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [called]}
    )
    before = world.ids(world.text(dummy, opens=False))
    whole = world.ids(world.text((*dummy, *turn.new_messages), opens=True))
    ends = [at for at, token in enumerate(before) if token == world.eos_id]
    before = before[: ends[-1] + 1] if ends else before
    if whole[: len(before)] != before:
        raise NotBuilt("what the template writes before the result changes with the result")
    return (*turn.seen_ids, *whole[len(before) :])


@_builder(
    "verl", "verl 0.9, `verl/utils/tokenizer/chat_template.py`: new messages alone, and the separator of turns"
)
def _render_new_alone(world: World, turn: AnsweredTurn) -> Tokens:
    """Append the new messages rendered alone, without what the template writes before a first message."""
    empty = {"role": "user", "content": ""}
    single, double = (world.ids(world.text(_dummies(*[empty] * n), opens=False)) for n in (1, 2))
    system = single[: -(len(double) - len(single))] if len(double) > len(single) else ()
    if not turn.new_messages:
        raise NotFit("nothing follows the answer")
    try:
        alone = world.ids(world.text(turn.new_messages, opens=True))[len(system) :]
    except RenderError:  # a template that requires a user's message gets an empty one, which is then cut off
        whole = world.ids(world.text((*_dummies(empty), *turn.new_messages), opens=True))
        alone = whole[len(single) :][len(system) :]
    return (*turn.seen_ids, *_turn_separator(world), *alone)


@_builder(
    "miles", "miles 0.0.2, `miles/utils/chat_template_utils/tito_tokenizer.py`: `TITOTokenizer` and its classes"
)
def _append_each(world: World, turn: AnsweredTurn) -> Tokens:
    """Append the text that the template adds for each new message after dummies, encoded alone.

    The classes for Qwen, Nemotron and MiniMax also add the line break after the end token; that for GLM removes an
    end token that begins the next turn.
    """
    system = {"role": "system", "content": "dummy system"}
    starts = {ids[0] for ids in map(world.ids, ("<|user|>", "<|observation|>")) if len(ids) == 1}
    breaks_lines = {ids[0] for ids in map(world.ids, ("<|im_end|>", "[e~[")) if len(ids) == 1}
    added: list[int] = []
    messages, tools = list(turn.new_messages), turn.probe.tools
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
        added += _added_ids(world, base, part, tools, opens=False)
    added += _added_ids(world, turn.probe.messages[: turn.until], (), tools, opens=True)
    seen, between = turn.seen_ids, _turn_separator(world)
    if len(starts) == 2 and "[gMASK]" in world.source and seen[-1] in starts:  # GLM
        seen = seen[:-1]
    elif between and seen[-1] in breaks_lines:
        seen = (*seen, *between)
    return (*seen, *added)


@_builder("nemo-rl", "NeMo-RL, `openai_server_utils.replace_prefix_tokens`")
def _replace_prefix(world: World, turn: AnsweredTurn) -> Tokens:
    """Render all messages again, and replace everything up to the end token of the answer by the stored ids."""
    if world.eos_id is None:
        raise NotBuilt("there is no end token")
    seen, eos = turn.seen_ids, world.eos_id
    whole = world.ids(world.text(turn.probe.messages[: turn.until], turn.probe.tools, opens=True))
    history = world.ids(world.text(turn.probe.messages[: turn.answer + 1], turn.probe.tools, opens=False))
    ends = [at for at, token in enumerate(whole) if token == eos]
    wanted = history.count(eos)
    if wanted > len(ends) or not wanted:
        raise NotBuilt("the end token of the answer is not in the prompt")
    stored = seen[:-1] if seen[-1] == eos else seen
    return (*stored, *whole[ends[wanted - 1] :])


def _turn_separator(world: World) -> Tokens:
    """What the template writes after the end token of a user's turn."""
    empty, filled = (
        world.ids(world.text(_dummies({"role": "user", "content": text}), opens=False)) for text in ("", "x")
    )
    shared = 0
    while shared < min(len(empty), len(filled)) and empty[-1 - shared] == filled[-1 - shared]:
        shared += 1
    suffix = empty[len(empty) - shared :]
    ends = [at for at, token in enumerate(suffix) if token == world.eos_id]
    return suffix[ends[-1] + 1 :] if ends else suffix[1:]


def _added_ids(
    world: World, base: Sequence[Message], part: Sequence[Message], tools: Sequence[object], *, opens: bool
) -> Tokens:
    before = world.text(base, tools, opens=False)  # type: ignore[arg-type]
    whole = world.text((*base, *part), tools, opens=opens)  # type: ignore[arg-type]
    if not whole.startswith(before):
        raise NotBuilt("what the template writes before the new messages changes with them")
    return world.ids(whole[len(before) :])


class _TokenizerForRenderers:
    """A tokenizer as `renderers.base.Tokenizer` asks for it; control tokens that it lacks get negative ids."""

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
        return self._world.decode([token for token in ids if token >= 0])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        return self.encode(tokens)[0] if isinstance(tokens, str) else [self.encode(token)[0] for token in tokens]


def _bridge(world: World) -> Build:
    """As callers of `renderers` do: the bridge of the renderer for this template. Without a bridge they render all
    messages again, and begin a branch if that does not start with the tokens before."""
    base, configs = import_module("renderers.base"), import_module("renderers.configs")
    base._populate_registry()
    # The renderer that agrees with the template on most of the usual conversations; None: the default one, which
    # renders templates.
    renderer, described, most = cast("Any", None), "its default renderer", 0.5
    for name in base.RENDERER_REGISTRY:
        fits: list[bool] = []
        try:
            candidate = base.create_renderer(_TokenizerForRenderers(world), configs._config_class_for(name)())
            for probe in CORE:
                wanted = probe.try_render(world.renderer)
                if wanted is None or not all(fits[:1]):
                    continue
                wires, tools = [as_plain(each) for each in probe.messages], [dict(tool) for tool in probe.tools]
                ids = tuple(candidate.render_ids(wires, tools=tools or None, add_generation_prompt=True))
                begins = int(world.stand_in and ids[0] < 0)  # with the model's own token
                fits.append(ids[begins:] == world.ids(wanted)[begins:])
        except Exception:
            continue
        if name != "default" and fits and sum(fits) / len(fits) > most:
            renderer, described, most = candidate, f"its {name} renderer", sum(fits) / len(fits)

    def build(turn: AnsweredTurn) -> Tokens:
        messages, tools = turn.probe.messages[: turn.until], turn.probe.tools
        sampled, bridge = [*turn.sample.prefill, *turn.sample.ids], cast("Any", None)
        if renderer is None:
            after = world.ids(world.text(messages, tools, opens=True))
        else:
            wires = [as_plain(message) for message in messages]
            args = {"tools": [dict(tool) for tool in tools] or None}
            try:
                bridge = renderer.bridge_to_next_turn(list(turn.prompt), sampled, wires[turn.answer + 1 :], **args)
                again = bridge is None and renderer.render_ids(wires, add_generation_prompt=True, **args)
            except Exception as error:
                raise NotBuilt(f"{type(error).__name__}: {error}"[:200]) from None
            after = tuple(again or bridge.token_ids)
        if bridge is None and after[: len(turn.seen_ids)] != turn.seen_ids:
            raise NewRow(f"{described} renders all messages again, which changes the tokens before")
        return after

    return build


def as_plain(message: Message) -> dict[str, Any]:
    """A message as JSON values."""
    return dict(orjson.loads(orjson.dumps(message.wire, default=dict)))


if find_spec("renderers") is not None:
    source = (
        f"renderers {version('renderers')}, the package: `bridge_to_next_turn` of its renderer for the template"
    )
    _stateful_builder("renderers", source)(_bridge)

BUILDERS = tuple(_BUILDERS)
"""All builders, in the order of the columns."""
