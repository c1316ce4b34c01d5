"""Two templates compared on the same conversations: where their prompts differ, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.templates.probes import Probe


class PromptCause(StrEnum):
    """What makes two prompts differ: without it they are equal."""

    REFUSED = "one of them refuses the messages"
    BOTH_REFUSE = "both refuse the messages"
    GENERATION_PROMPT = "the generation prompt"
    BOS = "the BOS token"
    SPACE = "whitespace"
    TOOLS = "the definitions of tools"
    REASONING = "reasoning"
    CALLS = "tool calls"
    RESULTS = "tool results"
    SYSTEM = "the system prompt"
    START = "the text before the first message"
    ANSWERS = "answers in history"
    TAGS = "the text around messages"


@dataclass(frozen=True, slots=True)
class DifferingPrompt:
    """A prompt that the two templates write differently."""

    probe: Probe
    count: int
    """How many of its messages the prompt holds."""
    cause: PromptCause
    first: str
    """What the first template writes, or why it refused."""
    second: str
    at: int
    """How many characters both texts begin with in common."""


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """The prompts of two templates on the same conversations."""

    prompts: int
    equal: int
    differing: tuple[DifferingPrompt, ...]
    texts: tuple[str, ...]
    """The prompts that are equal."""

    def by_cause(self) -> Mapping[PromptCause, tuple[DifferingPrompt, ...]]:
        """The differing prompts by cause, the most frequent cause first."""
        causes = {parting.cause for parting in self.differing}
        groups = {
            cause: tuple(parting for parting in self.differing if parting.cause is cause) for cause in causes
        }
        return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def compare_prompts(first: Renderer, second: Renderer, probes: Sequence[Probe]) -> PromptComparison:
    """Render every prompt of these conversations with both templates."""
    parted: list[DifferingPrompt] = []
    equal: list[str] = []
    for probe in probes:
        # One prompt before each answer, and one at the end unless the last message is an answer
        counts = [count for count, message in enumerate(probe.messages) if message.sampled and count]
        if probe.messages and not probe.messages[-1].sampled:
            counts.append(len(probe.messages))
        for count in counts:
            prompt = replace(probe, messages=probe.messages[:count])
            texts: list[str] = []
            refused: list[bool] = []
            for renderer in (first, second):
                try:
                    texts.append(prompt.render(renderer))
                    refused.append(False)
                except RenderError as error:
                    texts.append(str(error))
                    refused.append(True)
            text, other = texts
            if any(refused):
                cause = PromptCause.BOTH_REFUSE if all(refused) else PromptCause.REFUSED
                parted.append(DifferingPrompt(probe, count, cause, text, other, 0))
            elif text == other:
                equal.append(text)
            else:
                cause = _find_cause(first, second, prompt, texts)
                parted.append(DifferingPrompt(probe, count, cause, text, other, common_start(text, other)))
    return PromptComparison(len(equal) + len(parted), len(equal), tuple(parted), tuple(equal))


def _find_cause(first: Renderer, second: Renderer, prompt: Probe, texts: Sequence[str]) -> PromptCause:
    """The first cause whose removal makes the prompts equal; otherwise by where they first differ."""

    def same(case: Probe, count: int | None = None, *, opens: bool = True) -> bool:
        text = case.try_render(first, count, opens=opens)
        return text is not None and text == case.try_render(second, count, opens=opens)

    bare = {
        text.removeprefix(each.special_tokens.get("bos_token") or "")
        for text, each in zip(texts, (first, second), strict=True)
    }
    if len(bare) == 1:
        return PromptCause.BOS
    if same(prompt, opens=False):
        return PromptCause.GENERATION_PROMPT
    if "".join(texts[0].split()) == "".join(texts[1].split()):
        return PromptCause.SPACE
    # The conversation without each of its parts in turn
    messages = prompt.messages
    without: list[tuple[PromptCause, Probe]] = []
    if prompt.tools:
        without.append((PromptCause.TOOLS, replace(prompt, tools=())))
    if any(message.reasoning or "</think>" in message.text for message in messages):
        keys = ("reasoning_content", "reasoning", "thinking")
        wires = [{key: message.wire[key] for key in message.wire if key not in keys} for message in messages]
        for wire in wires:
            if isinstance(wire.get("content"), str):
                wire["content"] = wire["content"].split("</think>")[-1].lstrip("\n")
        without.append((PromptCause.REASONING, replace(prompt, messages=as_messages(wires, "messages"))))
    no_results = tuple(message for message in messages if message.speaker != "tool")
    if len(no_results) < len(messages):
        without.append((PromptCause.RESULTS, replace(prompt, messages=no_results)))
    if any(message.tool_calls for message in messages):
        no_calls = tuple(message for message in no_results if not message.tool_calls)
        without.append((PromptCause.CALLS, replace(prompt, messages=no_calls, tools=())))
    no_system = tuple(message for message in messages if message.speaker != "system")
    if len(no_system) < len(messages):
        without.append((PromptCause.SYSTEM, replace(prompt, messages=no_system)))
    for cause, less in without:
        if same(less):
            return cause
    at = common_start(*texts)
    if all(text.find(prompt.messages[0].text.strip()) >= at for text in texts):
        return PromptCause.START
    answer = next((i for i, message in enumerate(prompt.messages) if message.sampled), None)
    return PromptCause.ANSWERS if same(prompt, answer) else PromptCause.TAGS
