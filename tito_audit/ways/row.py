"""Other ways to write the messages of one recorded sequence that the template does not write as logged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tito_audit.record.message import ToolSpec
from tito_audit.record.rollout import Rollout
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.ways.observed import Observation
from tito_audit.ways.reading import MARK, PROBE, at_mark, date_in, has_clock, holds_marker, inner_tool, tools_in
from tito_audit.ways.way import SYSTEM_ROLES, Way
from tito_audit.ways.writer import Writer


class OtherText(NamedTuple):
    """A text that the messages may have been rendered to, and what it would explain."""

    text: str
    code: str
    """The rule that owns it."""
    cause: str
    what: str
    """The cause as a clause for a message."""


@dataclass
class OtherWays:
    """The ways to write one sequence other than as it is logged, and how many renderings are left."""

    writer: Writer
    observation: Observation
    left: int = 16
    """How many more renderings may be tried."""

    @cached_property
    def recorded(self) -> str:
        """The text of the recorded tokens."""
        return self.writer.recorded(self.observation)

    @cached_property
    def canonical(self) -> str | None:
        """What the template writes for the messages as they are logged."""
        return self.write(self.logged)

    @property
    def has_role_markers(self) -> bool:
        """Whether the recorded text has any role marker; without one, no template wrote it."""
        return holds_marker(self.recorded.removeprefix(self.bos))

    @property
    def question(self) -> str:
        """The text of the first message that is not a system message."""
        messages = self.observation.messages
        return next((message.text.strip() for message in messages if message.role not in SYSTEM_ROLES), "")

    @property
    def bos(self) -> str:
        """The BOS text that the template begins with; empty if it writes none."""
        literal = self.writer.renderer.special_tokens.get("bos_token", "")
        return literal if literal and (self.canonical or "").startswith(literal) else ""

    @cached_property
    def logged(self) -> Way:
        """The way in which the messages are written as they are logged."""
        return Way.of(self.writer.renderer)

    def write(self, way: Way) -> str | None:
        """What the template writes in a way; None if it refuses, or no renderings are left."""
        if self.left <= 0:
            return None
        self.left -= 1
        return self.writer.write(way, self.observation)

    def texts(self) -> Iterator[OtherText]:
        """Every other way to write the messages, most likely first, each text once."""
        if self.canonical is None:
            return
        seen = {self.canonical}
        for other in self._others(self.canonical):
            if other.text not in seen:
                seen.add(other.text)
                yield other

    def _written(self, code: str, cause: str, what: str, **changes: Any) -> Iterator[OtherText]:
        """The messages as logged but for some changes, unless the template refuses them."""
        text = self.write(replace(self.logged, **changes))
        if text is not None:
            yield OtherText(text, code, cause, what)

    def _others(self, canonical: str) -> Iterator[OtherText]:
        # On the date that the recorded text holds where the template writes one
        if has_clock(self.writer.renderer):
            probed = self.write(replace(self.logged, clock=PROBE.at))
            moment = date_in(probed, self.recorded) if probed is not None else None
            if moment is not None:
                what = f"the prompt was written on {moment:%Y-%m-%d}"
                yield from self._written("TPL210", "another date", what, clock=moment)
        # With the tools that the recorded text holds, or with none
        logged, head = self.observation.tools, self.recorded[:_LONGEST_TEXT]
        at = head.find(self.question) if self.question else -1
        recorded = tools_in(head[:at] if at > 0 else head)  # most templates write them before the first question
        if recorded:
            cause, what = _difference(logged, recorded)
            for tools in (recorded, [_wrapped(tool) for tool in recorded]):
                yield from self._written("TPL212", cause, what, tools=tuple(tools))
        elif logged:
            what = "the tools are missing from the prompt"
            yield from self._written("TPL212", "all tools missing", what, tools=())
        yield from self._systems(canonical)
        # From a later question on, the longest history first
        messages = self.observation.messages
        system_messages = 1 if messages[0].role in SYSTEM_ROLES else 0
        later = [i for i in range(system_messages + 1, len(messages)) if messages[i].role == "user"]
        in_text = [i for i in later if messages[i].text.strip() and messages[i].text.strip() in self.recorded]
        for first in in_text[:4]:
            for start in range(system_messages, min(system_messages + 2, first)):
                what = "an older message is" if first - start == 1 else f"{first - start} older messages are"
                cause = "older messages dropped"
                yield from self._written("SEQ303", cause, f"{what} left out", left_out=(start, first))

    def _systems(self, canonical: str) -> Iterator[OtherText]:
        """With another system prompt, with none, or with it in another place."""
        system, *rest = self.observation.messages
        if system.role in SYSTEM_ROLES:
            text = self.write(replace(self.logged, drops_system=True))
            bare = self._without_default(text) if text is not None else None
            if text is not None and bare is not None:
                cause = "default system prompt in place of the log's"
                yield OtherText(text, "TPL206", cause, "the template's default replaces the system prompt")
            without = bare or text
            if without is not None:
                yield OtherText(without, "TPL206", "system prompt missing", "a system prompt is missing")
                own_turn = self._own_turn(canonical, without, system.text)
                if own_turn is not None:
                    what = "the system prompt has a turn of its own"
                    yield OtherText(own_turn, "TPL206", "system prompt as a turn of its own", what)
            can_fold = rest and rest[0].role == "user" and isinstance(rest[0].content, str)
            for between in ("\n\n", "\n", " ") if can_fold else ():
                text = self.write(replace(self.logged, folds=between))
                if text is None:
                    break
                for folded in (self._without_default(text), text):
                    if folded is not None:
                        cause = "system prompt folded into the first user message"
                        yield OtherText(folded, "TPL206", cause, "the system prompt is in the first user message")
            cause, what = "another system prompt", "the system prompt is not the one in the messages"
        else:
            bare = self._without_default(canonical)
            if bare is not None:
                what = "the default system prompt is missing"
                yield OtherText(bare, "TPL206", "default system prompt missing", what)
            cause, what = "system prompt not in the messages", "the system prompt is not in the messages"
        # The system prompt that the recorded text holds where the template writes one; it has no control tokens.
        marked = self.write(replace(self.logged, system=MARK, drops_system=True))
        read = at_mark(marked, self.recorded, lambda after: after[:48]) if marked is not None else None
        if read is not None and not self.writer.holds_control(read):
            yield from self._written("TPL206", cause, what, system=read, drops_system=True)

    def _own_turn(self, canonical: str, without: str, system: str) -> str | None:
        """The system prompt as a turn of its own, where the template folds it into the first user turn."""
        start, at = self._user_header(without)
        if start is None or _holds_system(canonical[: max(canonical.find(self.question), 0)]):
            return None
        header, close = without[start:at], without[at + len(self.question) :]
        again = close.find(header[: max(header.lower().find("user"), 1)])
        if again < 0 or "user" not in header:
            return None
        turn = header.replace("user", "system") + system.strip() + close[:again]
        return without[:start] + turn + without[start:]

    def _without_default(self, text: str) -> str | None:
        """A text rendered without a system message, with the template's default system prompt cut out too."""
        if self.observation.tools:
            return None  # the tools are written there
        start, _ = self._user_header(text)
        if start is None or not _holds_system(text[:start]):
            return None
        return self.bos + text[start:].removeprefix(self.bos)

    def _user_header(self, text: str) -> tuple[int | None, int]:
        """Where the header of the first user message begins, and where its text begins."""
        at = text.find(self.question) if self.question else -1
        word = text.lower().rfind("user", 0, max(at, 0))
        if at < 0 or word < 0:
            return None, at
        tokens = filter(None, self.writer.renderer.control_texts)
        start = max((text.rfind(token, 0, word + len(token)) for token in tokens), default=-1)
        return (start if start >= 0 else None), at


def _holds_system(text: str) -> bool:
    """Whether a text contains a system or developer header."""
    return re.search(r"(^|[>\n|])\s*(system|developer)\b", text) is not None or "<<SYS>>" in text


# Tools other than the log's


_STRICT = "strict"
"""An instruction to a hosted service, which converters of tools keep or drop."""
_LONGEST_TEXT = 400_000
"""Characters searched for tools."""


def tools_as_sent(rollout: Rollout, vocabulary: Vocabulary) -> tuple[ToolSpec, ...]:
    """The tools of a rollout, with `strict` where its first prompt has it, if they differ in nothing else."""
    prompt = next((turn.prompt_ids for turn in rollout.turns if turn.prompt_ids is not None), None)
    if prompt is None or not rollout.tools:
        return rollout.tools
    recorded = tools_in(vocabulary.text(prompt)[:_LONGEST_TEXT])[: len(rollout.tools)]
    ours, theirs = [[dict(inner_tool(tool)) for tool in tools] for tools in (rollout.tools, recorded)]
    strict = [[tool.pop(_STRICT, _STRICT) for tool in tools] for tools in (ours, theirs)]
    return rollout.tools if ours != theirs or strict[0] == strict[1] else tuple(map(_wrapped, recorded))


def _wrapped(tool: ToolSpec) -> ToolSpec:
    return tool if inner_tool(tool) is not tool else {"type": "function", "function": tool}


def _difference(logged: Sequence[ToolSpec], recorded: Sequence[ToolSpec]) -> tuple[str, str]:
    """How the tools in the recorded text differ from the log's: the cause, and as a clause."""
    if not logged:
        return "tools not in the log", "the prompt holds tools that the log does not name"
    old = {str(inner_tool(tool).get("name")): inner_tool(tool) for tool in logged}
    new = {str(inner_tool(tool).get("name")): inner_tool(tool) for tool in recorded}
    missing, more = [*old.keys() - new.keys()], [*new.keys() - old.keys()]
    if missing and more:
        return "other tools", "the prompt holds tools other than the log's"
    if missing:
        return "tool missing", f"the prompt lacks {_listed(missing)}, which the log has"
    if more:
        return "tool not in the log", f"the prompt holds {_listed(more)}, which the log lacks"
    dropped = {key for name in old for key in _keys(old[name]) - _keys(new[name])}
    added = {key for name in old for key in _keys(new[name]) - _keys(old[name])}
    if dropped and not added:
        keys = ", ".join(f"`{key}`" for key in sorted(dropped)[:3])
        return f"{keys} dropped from the tools", f"the prompt holds the tools without {keys}"
    if list(old) != list(new) and all(old[name] == new[name] for name in old):
        return "tools in another order", "the tools are in a different order"
    return "tools written differently", "the prompt writes the tools differently"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _keys(value: Any) -> set[str]:
    """Every key of a definition, at any depth."""
    if isinstance(value, Mapping):
        return {str(key) for key in value} | {key for each in value.values() for key in _keys(each)}
    if isinstance(value, list | tuple):
        return {key for each in value for key in _keys(each)}
    return set()
