"""The verdict on a template in words: one line, and what a splice or a gateway may rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tito_audit.templates.appends import AppendOnly, Fate
from tito_audit.templates.breaks import Altered, Break
from tito_audit.templates.facts import TemplateFacts

_NAMES = {
    "user": "user messages",
    "tool": "tool results",
    "system": "later system messages",
    "assistant": "another answer",
}
_NEXT = {
    "user": "a user message",
    "tool": "a tool result",
    "system": "a system message",
    "assistant": "another answer",
}
_ORDER = ("user", "tool", "system", "assistant")


@dataclass(frozen=True, slots=True)
class Claim:
    """A property that code which serves or splices may rely on."""

    what: str
    holds: bool | None
    """None: not tested."""
    because: str = ""
    """Why not, or a remark."""


def verdict(facts: TemplateFacts) -> str:
    """One line: what the template appends to, what it changes, and what helps."""
    append, by_next = facts.append, _in_order(facts.append.by_next())
    always = [_NAMES.get(name, name) for name, steps in by_next.items() if steps.holds and name != "assistant"]
    head = title(append)
    if always:
        head += f"{'' if append.holds else ', except'} for {_listed(always)}"
    rest: list[str] = []
    # What it changes, each with what follows and the lines of the template that decide it
    nexts: dict[Altered, dict[str, None]] = {}
    lines: dict[Altered, dict[int, None]] = {}
    for broken in facts.breaks:
        nexts.setdefault(broken.change, {}).setdefault(broken.step.next)
        line = line_of(broken)
        if line is not None:
            lines.setdefault(broken.change, {}).setdefault(line)
    for change, names in sorted(nexts.items(), key=lambda broken: tuple(Altered).index(broken[0])):
        follows = _listed([_NEXT.get(name, name) for name in _ORDER if name in names] or list(names), "or")
        at = list(lines.get(change, ()))
        lines_of = f"line{'s' if len(at) > 1 else ''} {', '.join(map(str, at[:3]))}"
        place = f" ({lines_of})" if at else ""
        rest.append(
            change + ("" if change in (Altered.MOVED, Altered.TOOLS) else f" when {follows} follows") + place
        )
    if append.broken and (helped := helping(facts)):
        rest.append(f"append-only for usual conversations with {helped}")
    parts = dict.fromkeys(part for step in append.left_out for part in step.left_out)
    if parts:
        some = "some answers" if append.holds or append.broken else "them"
        rest.append(f"leaves out {_listed(list(parts))} of {some}")
    refused = [_NAMES.get(name, name) for name, steps in by_next.items() if len(steps.refused) == len(steps.steps)]
    if refused and len(refused) == len(by_next):
        rest.append((append.refused[0].refusal or "").rstrip("."))
    elif refused:
        rest.append(f"refuses {_listed(refused)}")
    return f"{head}: {words}." if (words := "; ".join(rest)) else f"{head}."


def title(append: AppendOnly) -> str:
    """The shortest verdict: `append-only`, `not append-only`, or why there is nothing to judge."""
    if append.holds:
        return "append-only"
    if all(step.outcome is Fate.REFUSED for step in append.steps):
        return "refuses every conversation"
    return "not append-only" if append.broken else "leaves out a part of every answer"


def advice(facts: TemplateFacts) -> dict[str, str]:
    """What to do about a template: whether it is safe, what to change, and what a gateway does with it."""
    append = facts.append
    by_next = {name: steps for name, steps in _in_order(append.by_next()).items() if name != "assistant"}
    follows = _listed([_NEXT.get(name, name) for name, steps in by_next.items() if steps.broken], "or")
    holding = _listed([_NAMES.get(name, name) for name, steps in by_next.items() if steps.holds])
    parts = _listed(list(dict.fromkeys(part for step in append.left_out for part in step.left_out)))
    if append.holds or append.broken:
        safe = (
            f"no: once {follows or 'another answer'} follows an answer, the prompt does not hold what was sampled"
            if append.broken
            else f"yes: before {holding or 'another answer'}, prompts hold what was sampled"
        )
        safe += f"; before {holding} it does" if append.broken and holding else ""
        safe += f"; {parts} of some answers it leaves out" if parts else ""
    else:
        safe = f"no: it {title(append)}"
    if append.broken and (helped := helping(facts)):
        change = f"pass {helped} to the server, the trainer and every scan: usual conversations are then kept"
    elif append.broken:
        change = "no argument keeps history; `tito-audit template … --training FILE` seeks edits that do"
    elif append.holds and not parts:
        change = "nothing: sample and train with this template"
    elif append.holds:
        change = f"nothing, unless the model samples {parts}: then choose a template that writes that"
    else:
        change = "choose another template: --chat-template FILE"
    if append.broken:
        serve = "`tito-audit serve` forks there: what was sampled is logged, in more training rows"
    elif append.holds:
        serve = "`tito-audit serve` never forks a growing conversation: prompts begin with the sampled ids"
    else:
        serve = "`tito-audit serve` can continue nothing"
    return {"safe": safe, "change": change, "gateway": serve}


def line_of(broken: Break) -> int | None:
    """The template's line that leads to a break: its condition, or else the tag that wrote the other text."""
    if broken.conditions:
        return broken.conditions[0].tag.line
    return broken.rendered.tag.line if broken.rendered.tag is not None else None


def helping(facts: TemplateFacts) -> str:
    """The flags that make a template append-only for usual conversations; "" if none were found."""
    best = next((setting for setting in facts.settings if not setting.append.broken), None)
    return flags_of(best.arguments) if best is not None else ""


def flags_of(arguments: Mapping[str, object]) -> str:
    """Arguments of a template as flags to paste."""
    import json
    import shlex

    return " ".join(
        f"--template-arg {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in arguments.items()
    )


def claims(facts: TemplateFacts) -> tuple[Claim, ...]:
    """What may be relied on, and what may not."""
    by_next = facts.append.by_next()
    stays: list[Claim] = []
    for name in ("tool", "user"):
        steps, claim = by_next.get(name), f"Sampled tokens stay where they are before {_NAMES[name]}"
        if steps is None or not any(step.outcome in (Fate.KEPT, Fate.BROKEN) for step in steps.steps):
            because = "the template refuses every such conversation or leaves the answer out"
            stays.append(Claim(claim, None, because))
        else:
            because = "" if steps.holds else f"not in {len(steps.broken)} of {len(steps.steps)} answers"
            stays.append(Claim(claim, steps.holds, because))
    after = [seam for seam in facts.seams if seam.left in ("assistant", "tool call")]
    loose = [f"{seam.left} → {seam.right}" for seam in after if not seam.fixed]
    openers = len(facts.generation_prompt.texts)
    encoded = [seam for seam in after if seam.ids is not None]
    merging = dict.fromkeys(repr(text) for seam in encoded for text in seam.merges_after)
    apart = f"encode it with the new message: a token reaches into one that begins with {_listed(list(merging))}"
    if not encoded:
        apart = "no tokenizer was given" if facts.bos.added is None else "there is no such text"
    elif not merging:
        apart = ""
    written = [stop for stop in facts.stops if stop.written]
    other = [stop.text for stop in written if not stop.of_tokenizer]
    ends: bool | None = not other
    ending = f"it also ends them with {_listed(other)}" if other else ""
    if not any(stop.of_tokenizer for stop in facts.stops):
        ends, ending = None, "no end tokens are known"
    elif not written:
        ends, ending = False, "the template ends answers without one"
    return (
        *stays,
        Claim(
            "The text between an answer and the next message is always the same",
            not loose if after else None,
            f"not for {_listed(loose)}" if loose else "",
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


def _in_order(steps: Mapping[str, AppendOnly]) -> dict[str, AppendOnly]:
    names = [*(name for name in _ORDER if name in steps), *(name for name in steps if name not in _ORDER)]
    return {name: steps[name] for name in names}


def _listed(words: Sequence[str], joint: str = "and") -> str:
    return f" {joint} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
