"""The verdict on a template in words: one line, and what splices and gateways may rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tito_audit.templates.append_only import AppendCheck, StepOutcome
from tito_audit.templates.breaks import Break, HistoryChange
from tito_audit.templates.facts import TemplateFacts

_MESSAGES = {
    "user": "user messages",
    "tool": "tool results",
    "system": "later system messages",
    "assistant": "another answer",
}
_NEXT = {**_MESSAGES, "user": "a user message", "tool": "a tool result", "system": "a system message"}
"""How a verdict names messages after an answer, by role and in this order: several, and a single one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A property that splices and gateways may rely on."""

    what: str
    holds: bool | None
    """None: not tested."""
    because: str = ""
    """Why it does not hold or was not tested."""


def verdict(facts: TemplateFacts) -> str:
    """One line: what the template appends to, what it changes, and which arguments help."""
    append, by_next = facts.append, facts.append.by_speaker()
    appended = [name for name, steps in by_next.items() if steps.is_append_only and name != "assistant"]
    always = [_MESSAGES.get(name, name) for name in appended]
    head = short_verdict(append)
    if always:
        head += f"{'' if append.is_append_only else ', except'} for {_join_words(always)}"
    rest: list[str] = []
    # By change: who spoke next, and the lines of the template that decide it
    nexts: dict[HistoryChange, dict[str, None]] = {}
    lines: dict[HistoryChange, dict[int, None]] = {}
    for broken in facts.breaks:
        nexts.setdefault(broken.change, {}).setdefault(broken.step.next_speaker)
        line = break_line(broken)
        if line is not None:
            lines.setdefault(broken.change, {}).setdefault(line)
    for change, names in sorted(nexts.items(), key=lambda broken: tuple(HistoryChange).index(broken[0])):
        follows = _join_words([_NEXT.get(name, name) for name in _NEXT if name in names] or list(names), "or")
        at = list(lines.get(change, ()))
        lines_of = f"line{'s' if len(at) > 1 else ''} {', '.join(map(str, at[:3]))}"
        place = f" ({lines_of})" if at else ""
        rest.append(
            change
            + ("" if change in (HistoryChange.MOVED, HistoryChange.TOOLS) else f" when {follows} follows")
            + place
        )
    if append.broken and (helped := helpful_flags(facts)):
        rest.append(f"append-only for usual conversations with {helped}")
    parts = dict.fromkeys(part for step in append.left_out for part in step.left_out)
    if parts:
        some = "some answers" if append.is_append_only or append.broken else "them"
        rest.append(f"leaves out {_join_words(list(parts))} of {some}")
    refusing = [name for name, steps in by_next.items() if len(steps.refused) == len(steps.steps)]
    refused = [_MESSAGES.get(name, name) for name in refusing]
    if refused and len(refused) == len(by_next):
        rest.append((append.refused[0].refusal or "").rstrip("."))
    elif refused:
        rest.append(f"refuses {_join_words(refused)}")
    return f"{head}: {words}." if (words := "; ".join(rest)) else f"{head}."


def short_verdict(append: AppendCheck) -> str:
    """`append-only`, `not append-only`, or why there is nothing to judge."""
    if append.is_append_only:
        return "append-only"
    if all(step.outcome is StepOutcome.REFUSED for step in append.steps):
        return "refuses every conversation"
    return "not append-only" if append.broken else "leaves out a part of every answer"


def advice(facts: TemplateFacts) -> dict[str, str]:
    """What to do about a template: whether it is `safe`, what to `change`, what the `gateway` does with it."""
    append = facts.append
    by_next = {name: steps for name, steps in append.by_speaker().items() if name != "assistant"}
    follows = _join_words([_NEXT.get(name, name) for name, steps in by_next.items() if steps.broken], "or")
    holding = _join_words([_MESSAGES.get(name, name) for name, steps in by_next.items() if steps.is_append_only])
    parts = _join_words(list(dict.fromkeys(part for step in append.left_out for part in step.left_out)))
    if append.is_append_only or append.broken:
        safe = (
            f"no: once {follows or 'another answer'} follows an answer, the prompt does not hold what was sampled"
            if append.broken
            else f"yes: before {holding or 'another answer'}, prompts hold what was sampled"
        )
        safe += f"; before {holding} it does" if append.broken and holding else ""
        safe += f"; {parts} of some answers it leaves out" if parts else ""
    else:
        safe = f"no: it {short_verdict(append)}"
    if append.broken and (helped := helpful_flags(facts)):
        change = f"pass {helped} to the server, the trainer and every scan: usual conversations are then kept"
    elif append.broken:
        change = "no argument keeps history; `tito-audit template … --training FILE` seeks edits that do"
    elif append.is_append_only and not parts:
        change = "nothing: sample and train with this template"
    elif append.is_append_only:
        change = f"nothing, unless the model samples {parts}: then choose a template that writes that"
    else:
        change = "choose another template: --chat-template FILE"
    if append.broken:
        serve = "`tito-audit serve` forks there: what was sampled is logged, in more training rows"
    elif append.is_append_only:
        serve = "`tito-audit serve` never forks a growing conversation: prompts begin with the sampled ids"
    else:
        serve = "`tito-audit serve` can continue nothing"
    return {"safe": safe, "change": change, "gateway": serve}


def break_line(broken: Break) -> int | None:
    """The template line behind a break: of its first condition, else of the tag that wrote the other text."""
    if broken.conditions:
        return broken.conditions[0].tag.line
    return broken.rendered.tag.line if broken.rendered.tag is not None else None


def helpful_flags(facts: TemplateFacts) -> str:
    """The flags that make a template append-only for usual conversations; "" if none were found."""
    best = next((setting for setting in facts.settings if not setting.append.broken), None)
    return format_flags(best.arguments) if best is not None else ""


def format_flags(arguments: Mapping[str, object]) -> str:
    """Template arguments as command-line flags."""
    import json
    import shlex

    return " ".join(
        f"--template-arg {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in arguments.items()
    )


def claims(facts: TemplateFacts) -> tuple[Claim, ...]:
    """What splices and gateways may rely on, and what not."""
    by_next = facts.append.by_speaker()
    stays: list[Claim] = []
    for name in ("tool", "user"):
        steps, claim = by_next.get(name), f"Sampled tokens stay where they are before {_MESSAGES[name]}"
        outcomes = {step.outcome for step in steps.steps} if steps is not None else set()
        if steps is None or outcomes.isdisjoint((StepOutcome.KEPT, StepOutcome.BROKEN)):
            because = "the template refuses every such conversation or leaves the answer out"
            stays.append(Claim(claim, None, because))
        else:
            because = "" if steps.is_append_only else f"not in {len(steps.broken)} of {len(steps.steps)} answers"
            stays.append(Claim(claim, steps.is_append_only, because))
    after = [seam for seam in facts.seams if seam.left in ("assistant", "tool call")]
    loose = [f"{seam.left} → {seam.right}" for seam in after if not seam.is_fixed]
    openers = len(facts.generation_prompt.texts)
    encoded = [seam for seam in after if seam.ids is not None]
    merging = dict.fromkeys(repr(text) for seam in encoded for text in seam.merges_after)
    merged = _join_words(list(merging))
    apart = f"encode it with the new message: a token reaches into one that begins with {merged}"
    if not encoded:
        apart = "no tokenizer was given" if facts.bos.added is None else "there is no such text"
    elif not merging:
        apart = ""
    written = [stop for stop in facts.stops if stop.written]
    other = [stop.text for stop in written if not stop.of_tokenizer]
    ends: bool | None = not other
    ending = f"it also ends them with {_join_words(other)}" if other else ""
    if not any(stop.of_tokenizer for stop in facts.stops):
        ends, ending = None, "no end tokens are known"
    elif not written:
        ends, ending = False, "the template ends answers without one"
    return (
        *stays,
        Claim(
            "The text between an answer and the next message is always the same",
            not loose if after else None,
            f"not for {_join_words(loose)}" if loose else "",
        ),
        Claim("That text may be encoded by itself", not merging if encoded else None, apart),
        Claim(
            "The generation prompt is the same after any message",
            openers == 1 if openers else None,
            "" if openers == 1 else f"{openers} were found",
        ),
        Claim(
            "An answer begins with the generation prompt that it was sampled after",
            facts.generation_prompt.continued,
            "" if facts.generation_prompt.continued else "rendered answers begin differently",
        ),
        Claim("An answer ends with an end token of the tokenizer", ends, ending),
    )


def _join_words(words: Sequence[str], joint: str = "and") -> str:
    return f" {joint} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
