"""Other texts that the messages of a row may have been rendered to, where the template does not write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tito_audit.record.message import ToolSpec
from tito_audit.record.rollout import Rollout
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.ways.observations import Observation
from tito_audit.ways.recorded_values import (
    MARK,
    PROBE,
    find_tools,
    has_clock,
    holds_marker,
    read_at_mark,
    read_date,
    unwrap_tool,
)
from tito_audit.ways.way import SYSTEM_ROLES, Way
from tito_audit.ways.writer import Writer


class OtherText(NamedTuple):
    """A text that the messages may have been rendered to, and the finding if they were."""

    text: str
    code: str
    cause: str
    what: str
    """The cause, as a clause of the message."""


@dataclass
class OtherWays:
    """Writes one observation in other ways than as logged, within a budget of renderings."""

    writer: Writer
    observation: Observation
    renderings_left: int = 16

    @cached_property
    def recorded(self) -> str:
        """The text of the recorded ids."""
        return self.writer.recorded_text(self.observation)

    @cached_property
    def canonical(self) -> str | None:
        """The text that the template writes for the messages as logged; None if it refuses."""
        return self.write(self.logged_way)

    @property
    def has_role_markers(self) -> bool:
        """Whether the recorded text holds a marker of messages; without one, no template wrote it."""
        return holds_marker(self.recorded.removeprefix(self.bos))

    @property
    def question(self) -> str:
        """The text of the first message that is no system message."""
        messages = self.observation.messages
        return next((message.text.strip() for message in messages if message.role not in SYSTEM_ROLES), "")

    @property
    def bos(self) -> str:
        """The BOS text that the template begins with; "" if it writes none."""
        literal = self.writer.renderer.special_tokens.get("bos_token", "")
        return literal if literal and (self.canonical or "").startswith(literal) else ""

    @cached_property
    def logged_way(self) -> Way:
        """The way in which the renderer is set to write."""
        return Way.from_renderer(self.writer.renderer)

    def write(self, way: Way) -> str | None:
        """The text in a way; None if the template refuses or no renderings are left."""
        if self.renderings_left <= 0:
            return None
        self.renderings_left -= 1
        return self.writer.render(way, self.observation)

    def texts(self) -> Iterator[OtherText]:
        """Other texts than the canonical one, the likeliest first, each once."""
        if self.canonical is None:
            return
        seen = {self.canonical}
        for other in self._candidates(self.canonical):
            if other.text not in seen:
                seen.add(other.text)
                yield other

    def _write_changed(self, code: str, cause: str, what: str, **changes: Any) -> Iterator[OtherText]:
        """The text with some changes to the logged way, unless the template refuses it."""
        text = self.write(replace(self.logged_way, **changes))
        if text is not None:
            yield OtherText(text, code, cause, what)

    def _candidates(self, canonical: str) -> Iterator[OtherText]:
        """The texts with another date, other tools, another system prompt, or without older messages."""
        # Another date
        if has_clock(self.writer.renderer):
            probed = self.write(replace(self.logged_way, clock=PROBE.at))
            moment = read_date(probed, self.recorded) if probed is not None else None
            if moment is not None:
                what = f"the prompt was written on {moment:%Y-%m-%d}"
                yield from self._write_changed("TPL210", "another date", what, clock=moment)
        # Other tools, or none
        logged, head = self.observation.tools, self.recorded[:_LONGEST_TEXT]
        at = head.find(self.question) if self.question else -1
        recorded = find_tools(head[:at] if at > 0 else head)  # most templates write them before the first question
        if recorded:
            cause, what = _describe_tool_difference(logged, recorded)
            for tools in (recorded, [_wrap_tool(tool) for tool in recorded]):
                yield from self._write_changed("TPL212", cause, what, tools=tuple(tools))
        elif logged:
            what = "the tools are missing from the prompt"
            yield from self._write_changed("TPL212", "all tools missing", what, tools=())
        yield from self._system_candidates(canonical)
        # Without older messages, the longest history first
        messages = self.observation.messages
        system_messages = 1 if messages[0].role in SYSTEM_ROLES else 0
        later = [i for i in range(system_messages + 1, len(messages)) if messages[i].role == "user"]
        in_text = [i for i in later if messages[i].text.strip() and messages[i].text.strip() in self.recorded]
        for first in in_text[:4]:
            for start in range(system_messages, min(system_messages + 2, first)):
                what = "an older message is" if first - start == 1 else f"{first - start} older messages are"
                cause = "older messages dropped"
                yield from self._write_changed("SEQ303", cause, f"{what} left out", left_out=(start, first))

    def _system_candidates(self, canonical: str) -> Iterator[OtherText]:
        """With another system prompt, with none, or with it elsewhere."""
        system, *rest = self.observation.messages
        if system.role in SYSTEM_ROLES:
            text = self.write(replace(self.logged_way, drops_system=True))
            bare = self._without_default_system(text) if text is not None else None
            if text is not None and bare is not None:
                cause = "default system prompt in place of the log's"
                yield OtherText(text, "TPL206", cause, "the template's default replaces the system prompt")
            without = bare or text
            if without is not None:
                yield OtherText(without, "TPL206", "system prompt missing", "a system prompt is missing")
                own_turn = self._system_as_own_turn(canonical, without, system.text)
                if own_turn is not None:
                    what = "the system prompt has a turn of its own"
                    yield OtherText(own_turn, "TPL206", "system prompt as a turn of its own", what)
            can_fold = rest and rest[0].role == "user" and isinstance(rest[0].content, str)
            for between in ("\n\n", "\n", " ") if can_fold else ():
                text = self.write(replace(self.logged_way, fold_separator=between))
                if text is None:
                    break
                for folded in (self._without_default_system(text), text):
                    if folded is not None:
                        cause = "system prompt folded into the first user message"
                        yield OtherText(folded, "TPL206", cause, "the system prompt is in the first user message")
            cause, what = "another system prompt", "the system prompt is not the one in the messages"
        else:
            bare = self._without_default_system(canonical)
            if bare is not None:
                what = "the default system prompt is missing"
                yield OtherText(bare, "TPL206", "default system prompt missing", what)
            cause, what = "system prompt not in the messages", "the system prompt is not in the messages"
        marked = self.write(replace(self.logged_way, system=MARK, drops_system=True))
        read = read_at_mark(marked, self.recorded, lambda after: after[:48]) if marked is not None else None
        if read is not None and not self.writer.holds_control(read):
            yield from self._write_changed("TPL206", cause, what, system=read, drops_system=True)

    def _system_as_own_turn(self, canonical: str, without: str, system: str) -> str | None:
        """The text with the system prompt as a turn, where the template folds it into the first user turn."""
        start, at = self._find_user_header(without)
        if start is None or _has_system_header(canonical[: max(canonical.find(self.question), 0)]):
            return None
        header, close = without[start:at], without[at + len(self.question) :]
        again = close.find(header[: max(header.lower().find("user"), 1)])
        if again < 0 or "user" not in header:
            return None
        turn = header.replace("user", "system") + system.strip() + close[:again]
        return without[:start] + turn + without[start:]

    def _without_default_system(self, text: str) -> str | None:
        """The text without the template's default system prompt; None if it has none."""
        if self.observation.tools:
            return None  # the tools are written there
        start, _ = self._find_user_header(text)
        if start is None or not _has_system_header(text[:start]):
            return None
        return self.bos + text[start:].removeprefix(self.bos)

    def _find_user_header(self, text: str) -> tuple[int | None, int]:
        """Where the header of the first question begins (None: not found), and where its text begins (or -1)."""
        at = text.find(self.question) if self.question else -1
        word = text.lower().rfind("user", 0, max(at, 0))
        if at < 0 or word < 0:
            return None, at
        tokens = filter(None, self.writer.renderer.control_texts)
        start = max((text.rfind(token, 0, word + len(token)) for token in tokens), default=-1)
        return (start if start >= 0 else None), at


def _has_system_header(text: str) -> bool:
    return re.search(r"(^|[>\n|])\s*(system|developer)\b", text) is not None or "<<SYS>>" in text


_STRICT = "strict"
"""A key of OpenAI's tools that converters keep or drop."""
_LONGEST_TEXT = 400_000
"""Characters searched for tools."""


def tools_as_sent(rollout: Rollout, vocabulary: Vocabulary) -> tuple[ToolSpec, ...]:
    """The tools of a rollout, with `strict` as in its first prompt if they differ in nothing else."""
    prompt = next((turn.prompt_ids for turn in rollout.turns if turn.prompt_ids is not None), None)
    if prompt is None or not rollout.tools:
        return rollout.tools
    recorded = find_tools(vocabulary.text(prompt)[:_LONGEST_TEXT])[: len(rollout.tools)]
    ours, theirs = [[dict(unwrap_tool(tool)) for tool in tools] for tools in (rollout.tools, recorded)]
    strict = [[tool.pop(_STRICT, _STRICT) for tool in tools] for tools in (ours, theirs)]
    return rollout.tools if ours != theirs or strict[0] == strict[1] else tuple(map(_wrap_tool, recorded))


def _wrap_tool(tool: ToolSpec) -> ToolSpec:
    return tool if unwrap_tool(tool) is not tool else {"type": "function", "function": tool}


def _describe_tool_difference(logged: Sequence[ToolSpec], recorded: Sequence[ToolSpec]) -> tuple[str, str]:
    """How recorded tools differ from the log's: the cause, and a clause for the message."""
    if not logged:
        return "tools not in the log", "the prompt holds tools that the log does not name"
    old = {str(unwrap_tool(tool).get("name")): unwrap_tool(tool) for tool in logged}
    new = {str(unwrap_tool(tool).get("name")): unwrap_tool(tool) for tool in recorded}
    missing, more = [*old.keys() - new.keys()], [*new.keys() - old.keys()]
    if missing and more:
        return "other tools", "the prompt holds tools other than the log's"
    if missing:
        return "tool missing", f"the prompt lacks {_quote_names(missing)}, which the log has"
    if more:
        return "tool not in the log", f"the prompt holds {_quote_names(more)}, which the log lacks"
    dropped = {key for name in old for key in _nested_keys(old[name]) - _nested_keys(new[name])}
    added = {key for name in old for key in _nested_keys(new[name]) - _nested_keys(old[name])}
    if dropped and not added:
        keys = ", ".join(f"`{key}`" for key in sorted(dropped)[:3])
        return f"{keys} dropped from the tools", f"the prompt holds the tools without {keys}"
    if list(old) != list(new) and all(old[name] == new[name] for name in old):
        return "tools in another order", "the tools are in a different order"
    return "tools written differently", "the prompt writes the tools differently"


def _quote_names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _nested_keys(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return {str(key) for key in value} | {key for each in value.values() for key in _nested_keys(each)}
    if isinstance(value, list | tuple):
        return {key for each in value for key in _nested_keys(each)}
    return set()
