"""What a chat template does with conversations, decided by rendering them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tests.template_oracle.chat import Refusal, Template
from tests.template_oracle.conversations import STEPS, TOOL, Chat, answer, asking, forms, result, system, user

Outcome = Literal["kept", "spaced", "ended", "rewritten", "refused"]
"""What comes of text that was there: still there; but for whitespace at its end; but for what stands after the
last words of the answer; not; it cannot be rendered."""


@dataclass(frozen=True)
class Step:
    """From one call to the next: the conversation with its answer, and the next prompt."""

    outcome: Outcome
    before: str = ""
    after: str = ""
    why: str = ""
    opened: bool = True
    """Whether the next prompt starts with the prompt that the answer was sampled from."""

    def difference(self) -> tuple[str, str]:
        """Where the two texts part: what stood there, and what stands there now."""
        at = len(self.shared())
        return self.before[at : at + 60], self.after[at : at + 60]

    def shared(self) -> str:
        """The text that both begin with."""
        pairs = enumerate(zip(self.before, self.after, strict=False))
        return self.before[: next((i for i, (a, b) in pairs if a != b), min(len(self.before), len(self.after)))]


def tools_for(chat: Chat) -> list[Mapping[str, Any]] | None:
    """The tools that a conversation needs."""
    return [TOOL] if any(message["role"] == "tool" or "tool_calls" in message for message in chat) else None


def step(template: Template, before: Chat, after: Sequence[Any], *, opened: bool = True, **arguments: Any) -> Step:
    """Whether what was rendered up to an answer is still there in the next prompt; `opened`: which ends with a
    generation prompt."""
    results = outcomes(template, before, after, opened=opened, **arguments)
    return next((result for result in results if result.outcome != "refused"), results[0])


def outcomes(
    template: Template, before: Chat, after: Sequence[Any], *, opened: bool = True, **arguments: Any
) -> list[Step]:
    """The same for each form of the conversation."""
    whole = [*before, *after]
    tools = tools_for(whole)
    results = []
    for form in forms(whole):
        try:
            prompt = template.text(form[: len(before) - 1], tools, opened=True, **arguments)
            first = template.text(form[: len(before)], tools, **arguments)
            then = template.text(form, tools, opened=opened, **arguments)
        except Refusal as error:
            results.append(Step("refused", why=str(error)))
            continue
        outcome = outcome_of(first, then, last_words(form[len(before) - 1]))
        results.append(Step(outcome, first, then, opened=then.startswith(prompt)))
    return results


def last_words(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Everything that an answer says, each as a text that is in no other place."""
    calls = message.get("tool_calls", ())
    named = (word for call in calls for word in re.findall(r"word-\d-\d", str(call["function"]["arguments"])))
    texts = (piece.strip() for piece in re.split(r"</?think>", message.get("content") or ""))
    return tuple(filter(None, (*texts, message.get("reasoning_content"), *named)))


def outcome_of(first: str, then: str, words: Sequence[str]) -> Outcome:
    """What came of a text in a later one; `words` are those of its last message."""
    if then.startswith(first):
        return "kept"
    if then.startswith(first.rstrip()):
        return "spaced"
    ends = [first.rfind(word) + len(word) for word in words if word in first]
    return "ended" if then.startswith(first[: max(ends, default=0)]) else "rewritten"


def steps(template: Template, **arguments: Any) -> dict[str, Step]:
    """Every step of the conversations, by name."""
    return {name: step(template, before, after, **arguments) for name, (before, after) in STEPS.items()}


def append_only(results: Mapping[str, Step], role: str, *, reasoning: bool | None = None) -> bool | None:
    """Whether all steps to a message of this role keep what was there; None if it renders none of them."""
    outcomes = [
        result.outcome
        for name, result in results.items()
        if name.split()[0] == role and (reasoning is None or ("reasoning" in name) == reasoning)
    ]
    rendered = [outcome for outcome in outcomes if outcome != "refused"]
    return all(outcome == "kept" for outcome in rendered) if rendered else None


def writes_reasoning(template: Template, **arguments: Any) -> bool:
    """Whether it writes the field `reasoning_content` of an answer that nothing follows."""
    return "Thought 1" in written(template, [user(), answer(reasoning=True)], **arguments)


def keeps_reasoning(template: Template, **arguments: Any) -> bool:
    """Whether that reasoning is still there when a user has said more."""
    return "Thought 1" in written(template, [user(), answer(reasoning=True), user(2)], **arguments)


def written(template: Template, chat: Chat, *, opened: bool = False, **arguments: Any) -> str:
    """What it writes for the first form of the conversation that it accepts; "" if it refuses them all."""
    for form in forms(chat):
        try:
            return template.text(form, tools_for(chat), opened=opened, **arguments)
        except Refusal:
            continue
    return ""


ANSWERS: dict[str, tuple[Chat, Any]] = {
    "an answer": ([user()], answer()),
    "an answer with reasoning": ([user()], answer(reasoning=True)),
    "a call": ([user()], asking()),
    "an answer to a tool": ([user(), asking(), result()], answer()),
}


def opens_answers(template: Template, **arguments: Any) -> dict[str, bool | None]:
    """Whether each answer is rendered as what follows the prompt that it was sampled from; None if refused."""
    verdicts: dict[str, bool | None] = {}
    for name, (prompt, message) in ANSWERS.items():
        verdicts[name] = None
        for form in forms([*prompt, message]):
            tools = tools_for(form)
            try:
                opened = template.text(form[:-1], tools, opened=True, **arguments)
                whole = template.text(form, tools, **arguments)
            except Refusal:
                continue
            verdicts[name] = whole.startswith(opened)
            break
    return verdicts


def has_generation_prompt(template: Template, **arguments: Any) -> bool:
    """Whether asking for one adds anything after a user's message."""
    return written(template, [user()], **arguments) != written(template, [user()], opened=True, **arguments)


def between(template: Template, **arguments: Any) -> dict[str, str | None]:
    """The text between the contents of two messages, by their roles; None if either content is not to be found."""
    pairs = {
        "system to user": [system(), user()],
        "user to assistant": [user(), answer()],
        "assistant to user": [user(), answer(), user(2)],
        "tool to assistant": [user(), asking(), result(), answer()],
    }
    gaps: dict[str, str | None] = {}
    for name, chat in pairs.items():
        text = written(template, chat, **arguments)
        left, right = chat[-2]["content"], chat[-1]["content"]
        start, end = text.rfind(left), text.rfind(right)
        gaps[name] = text[start + len(left) : end] if 0 <= start < end else None
    return gaps


SHAPES: dict[str, Chat] = {
    "a system prompt": [system(), user()],
    "a system prompt in the middle": [user(), answer(), system(), user(2)],
    "two user messages in a row": [user(), user(2)],
    "two answers in a row": [user(), answer(), answer(2), user(2)],
    "an answer first": [answer(), user()],
    "no user message": [system()],
    "a tool's result": [user(), asking(), result()],
    "a tool's result without a call": [user(), result()],
    "an empty user message": [{"role": "user", "content": ""}],
    "an unknown role": [user(), {"role": "narrator", "content": "Once upon a time."}],
}


def refuses(template: Template, **arguments: Any) -> set[str]:
    """The conversations that it raises for, in every form."""
    return {name for name, chat in SHAPES.items() if _refused(template, chat, **arguments)}


def _refused(template: Template, chat: Chat, **arguments: Any) -> bool:
    for form in forms(chat):
        try:
            template.text(form, tools_for(chat), opened=True, **arguments)
        except Refusal:
            continue
        return False
    return True


def reads_clock(template: Template, **arguments: Any) -> bool:
    """Whether it writes something else at another time."""
    days = [datetime(2024, 2, 29, 3, 4, 5), datetime(2033, 11, 8, 21, 22, 23)]
    chats: Iterable[Chat] = ([user()], [system(), user()], [user(), asking(), result()])
    for chat in chats:
        texts = set()
        for day in days:
            with template.at(day):
                texts.add(written(template, chat, opened=True, **arguments))
        if len(texts) > 1:
            return True
    return False


def writes_bos(template: Template, **arguments: Any) -> bool:
    """Whether its text starts with the token that a tokenizer may add as well."""
    return written(template, [user()], **arguments).startswith(template.tokens.get("bos_token") or "\0")


def trims(template: Template, **arguments: Any) -> bool | None:
    """Whether it drops whitespace at the ends of an answer; None if the answer is not there at all."""
    message = {"role": "assistant", "content": "  \nspaced\n  "}
    text = written(template, [user(), message, user(2)], **arguments)
    return None if "spaced" not in text else message["content"] not in text
