"""What frameworks say of chat templates, and why the oracle says something else where it does.

TRL: a template is prefix-preserving if one conversation, a user message and a call that says nothing else, is
rendered as the beginning of the same conversation with the tool's result and a generation prompt.

miles: the first so many messages, up to any answer or tool result of its own conversations, are rendered as the
beginning of all of them with a generation prompt; with thinking on and off. A refusal fails.

renderers: a family is prefix-stable if text up to an answer is never changed by what is appended, both rendered
without a generation prompt. Each of its renderers declares that of itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.frameworks.ask import asked
from tests.template_oracle.chat import Template
from tests.template_oracle.conversations import STEPS
from tests.template_oracle.facts import Step, append_only, step, steps
from tests.template_oracle.sources import needed, published

FAMILIES = {
    "deepseek_r1_distill": "deepseek-r1",
    "deepseekv3": "deepseek-v3",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm-4.5",
    "gptoss": "gpt-oss",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "nemotron_3_5_lightning": "nemotron-3.5",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3-vl",
}
"""The renderer of the models that come with a template."""
_CALL = {"type": "function", "function": {"name": "dummy", "arguments": {}}}
_ASKED = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
_ANSWERED = [{"role": "tool", "name": "dummy", "content": "dummy"}]


def as_trl_says(template: Template) -> bool | None:
    """TRL's definition; None where the template refuses the conversation."""
    # No tools are given here, though the conversation has a call.
    for arguments in ({}, "{}"):
        call = {**_CALL, "function": {**_CALL["function"], "arguments": arguments}}  # type: ignore[dict-item]
        chat = [_ASKED[0], {**_ASKED[1], "tool_calls": [call]}]
        try:
            return template.text([*chat, *_ANSWERED], opened=True).startswith(template.text(chat))
        except Exception as error:
            if not isinstance(error.__cause__, TypeError):
                return None
    return None


def as_renderers_say(template: Template) -> bool:
    """Renderers' definition, for the conversations of the oracle that the template accepts."""
    results = [step(template, before, after, opened=False) for before, after in STEPS.values()]
    return all(result.outcome in ("kept", "refused") for result in results)


@cache
def said() -> Mapping[str, Any]:
    """What the packages themselves say of the templates that are published; see `templates_writer.py`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "asked.json"
        file.write_text(json.dumps([published(name).source for name in needed()]), encoding="utf-8")
        return dict(json.loads(asked("templates", file)))


@dataclass(frozen=True)
class Verdicts:
    """What everyone says of one template."""

    name: str
    steps: Mapping[str, Step]
    stable: bool
    trl: bool | None
    miles: Mapping[str, Mapping[str, str | None]]
    renderers: bool | None

    def keeps_before(self, role: str, *, reasoning: bool | None = None) -> bool | None:
        """The oracle's verdict on what comes before messages of a role."""
        return append_only(self.steps, role, reasoning=reasoning)

    def failed(self, roles: str) -> list[str]:
        """Why checks of miles failed."""
        return [failure for failure in self.miles[roles].values() if failure is not None]


@cache
def verdicts() -> Sequence[Verdicts]:
    """What everyone says of each published template."""
    rows = []
    for name, trl, miles in zip(needed(), said()["trl"], said()["miles"], strict=True):
        template = published(name)
        declared = said()["renderers"].get(FAMILIES.get(name, ""))
        rows.append(Verdicts(name, steps(template), as_renderers_say(template), trl, miles, declared))
    return rows


NOTES = {
    "a": "TRL tries one step, a call that says nothing else and its result. The template rewrites other steps.",
    "b": "The template refuses the conversation that TRL tries, so TRL has no verdict.",
    "c": "Only the end of the last answer changes when a message follows, as `<|return|>` becomes `<|end|>`; what "
    "was sampled up to there stays. TRL and miles compare the end too.",
    "d": "miles fails a template that refuses one of its conversations.",
    "e": "miles also asks what becomes of the text after a tool's result if a user speaks instead of the model. "
    "Between two calls of a model there is always its answer.",
    "f": "Renderers declares one thing for a family, and this template is one of several: it never writes the "
    "reasoning that others of the family drop.",
    "g": "Renderers says what its own code for the family does, which need not be what the template does.",
    "h": "Text next to a call is written before or after it, depending on what follows. TRL's call has no text.",
    "i": "miles tries no answer with text next to `<think>`, which the template drops from history.",
}
"""Why one verdict is not another."""


def notes(verdict: Verdicts) -> Iterable[str]:
    """The explanations of the differences between the oracle's verdict on a template and what others say of it."""
    tool, user = verdict.keeps_before("tool"), verdict.keeps_before("user")
    if verdict.trl is True and (tool is False or user is False):
        yield "h" if tool is False and _only(verdict, "tool", "tool after a call with text") else "a"
    if verdict.trl is None:
        yield "b"
    if any(step.outcome == "ended" for step in verdict.steps.values()):
        yield "c"
    failed = verdict.failed("tool and user")
    if any("Prefix mismatch" not in why for why in failed):
        yield "d"
    if tool is not False and user is not False and any("Prefix mismatch" in why for why in failed):
        yield "e"
    if not failed and user is False:
        yield "i"
    if verdict.renderers is not None and verdict.renderers != verdict.stable:
        yield "f" if not verdict.renderers else "g"


def _only(verdict: Verdicts, role: str, name: str) -> bool:
    changed = [key for key, step in verdict.steps.items() if key.startswith(role) and step.outcome == "rewritten"]
    return changed == [name]


def page(templates: Sequence[Verdicts]) -> str:
    """The table of the documentation: for how many templates verdicts differ, and why."""
    differing = [set(notes(verdict)) for verdict in templates]
    agreed = f"| {differing.count(set())} | nothing differs |\n"
    counts = Counter(note for each in differing for note in each)
    rows = "".join(f"| {counts[note]} | {text} |\n" for note, text in NOTES.items() if counts[note])
    return f"| of {len(templates)} templates | |\n| ---: | --- |\n{agreed}{rows}"
