"""The page of `template`: the verdict, a table of facts, and both texts of each break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.cli._template_facts import fact_rows
from tito_audit.templates import AppendOnly, Break, Outcome, Return, Returned, Seam, TemplateFacts, grouped
from tito_audit.templates.verdict import claims, flags_of, title, verdict
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import listed, many

if TYPE_CHECKING:
    from tito_audit.render.traced import Decision, Tag
    from tito_audit.sessions.delimiters import Delimiters

_BEFORE, _AFTER = 40, 60
"""How many characters are shown before and after a difference."""
_BREAKS = 8
_SHOWN = 3
_TAG = 120
_SEAM = 60
_IDS = 12
_MARKS = {
    Outcome.KEPT: ("kept", "green"),
    Outcome.BROKEN: ("changed", "bold red"),
    Outcome.UNKNOWN: ("unknown", "yellow"),
    Outcome.LEFT_OUT: ("left out", "yellow"),
    Outcome.REFUSED: ("refused", "dim"),
}


@dataclass(frozen=True, slots=True)
class OfLog:
    """What a template does with the conversations of a log."""

    append: AppendOnly
    breaks: tuple[Break, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """Everything to show of one template."""

    name: str
    facts: TemplateFacts
    has_ids: bool
    """Whether there was a tokenizer."""
    log: OfLog | None = None
    """None: no log was given."""
    delimiters: Delimiters | None = None
    """None: there was no tokenizer."""


def page_lines(looked: Looked) -> Iterator[RenderableType]:
    """The verdict, then its evidence."""
    facts = looked.facts
    yield Text("tito-audit template ", style="bold").append(visible(looked.name))
    style = "bold green" if facts.append.holds else "bold red"
    said = verdict(facts)
    short = title(facts.append)
    yield Text(visible(short), style=style).append(visible(said.removeprefix(short)), style="")
    if looked.log is not None:
        yield _of_log(looked.log)
    yield from _title("What becomes of a sampled answer, by what it is and what follows")
    yield _outcomes(facts.append)
    yield from _title("Facts")
    yield _two_columns(fact_rows(facts, looked.has_ids))
    for words, breaks in (
        ("Where earlier text changes", facts.breaks),
        ("Where earlier text changes in the log", looked.log.breaks if looked.log is not None else ()),
    ):
        if breaks:
            yield from _title(words)
            yield from _breaks(breaks)
    if facts.returned:
        yield from _title("Sampled answers, parsed by a server and rendered again")
        yield from _returned(facts.returned)
    if facts.seams:
        yield from _title("Between messages")
        yield _seams(facts.seams, looked.has_ids)
        yield from _no_delimiters(looked)
    yield from _settings(facts)
    yield from _title("What a splice or a gateway may rely on")
    yield from _claims(facts)
    yield from _refusals(facts)


def _title(words: str) -> Iterator[Text]:
    yield Text()
    yield Text(words, style="bold")


def _of_log(log: OfLog) -> Text:
    """For the log's own conversations: in how many everything is kept, and what is wrong with the others."""
    rollouts: dict[str, set[Outcome]] = {}
    for step in log.append.steps:
        rollouts.setdefault(step.probe.name, set()).add(step.outcome)
    if not rollouts:
        return Text("No answer in the log is followed by anything, so the log shows nothing.", style="yellow")
    kept = sum(outcomes == {Outcome.KEPT} for outcomes in rollouts.values())
    line = Text(f"For the log's messages it is append-only in {kept:,} of {many(len(rollouts), 'rollout')}")
    line.stylize("green" if kept == len(rollouts) else "red")
    counts = Counter(outcome for outcomes in rollouts.values() for outcome in outcomes - {Outcome.KEPT})
    said = [f"{_MARKS[outcome][0]} in {counts[outcome]:,}" for outcome in _MARKS if counts[outcome]]
    return line.append(f"; answers are {listed(said)}." if said else ".")


def _outcomes(append: AppendOnly) -> Table:
    """One row for each kind of answer, one column for each kind of message after it."""
    nexts = [name for name in ("user", "tool", "system", "assistant") if name in append.by_next()]
    nexts += [name for name in append.by_next() if name not in nexts]
    by_kind = append.by_kind()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("  answer", no_wrap=True)
    for name in nexts:
        table.add_column(f"then {visible(name)}")
    for kind in dict.fromkeys(kind for kind, _ in by_kind):
        cells = [by_kind.get((kind, name)) for name in nexts]
        table.add_row(Text(f"  {visible(kind)}"), *(_cell(one) for one in cells))
    return table


def _cell(append: AppendOnly | None) -> Text:
    if append is None:
        return Text("")
    counts = Counter(step.outcome for step in append.steps)
    line = Text()
    for outcome, (words, style) in _MARKS.items():
        if counts[outcome]:
            said = words if counts[outcome] == len(append.steps) else f"{words} {counts[outcome]:,}"
            line.append(", " if line.plain else "").append(said, style=style)
    return line


def _two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, said in rows:
        table.add_row(Text(f"  {name}"), Text(said))
    return table


def _breaks(breaks: Sequence[Break]) -> Iterator[Text]:
    groups = list(grouped(breaks).values())
    for group in groups[:_BREAKS]:
        first = group[0]
        yield Text(f"  {first.change}", style="bold red").append(f" · {many(len(group), 'answer')}", style="")
        names = list(dict.fromkeys(one.step.probe.name for one in group))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield Text(f"    in: {visible('; '.join(names[:_SHOWN]))}{more}", style="dim")
        for words, decision in zip(
            ("decided by", *["and"] * len(first.conditions)), first.conditions, strict=False
        ):
            yield Text(f"    {words} {_decision(decision)}")
        for words, side, style in (("sampled", first.sampled, "red"), ("rendered", first.rendered, "green")):
            line = Text(f"    {words:<9}", style="dim")
            before = ("…" if len(side.before) > _BEFORE else "") + side.before[-_BEFORE:]
            line.append(visible(before)).append("│").append(visible(elided(side.text, _AFTER)) or "∅", style=style)
            yield line
            if side.tag is not None:
                yield Text(f"             by {_tag(side.tag)}", style="dim")
    if len(groups) > _BREAKS:
        yield Text(f"  … and {len(groups) - _BREAKS} more places; --output-format json has them all")


def _decision(decision: Decision) -> str:
    then, now = ("true", "false") if decision.held else ("false", "true")
    return f"{_tag(decision.tag)}: {then} when it was sampled, {now} in the next prompt"


def _tag(tag: Tag) -> str:
    return f"line {tag.line}:{tag.column} {visible(elided(' '.join(tag.source.split()), _TAG))}"


def _returned(returned: Sequence[Returned]) -> Iterator[Text]:
    forms = dict.fromkeys((one.part, one.form) for one in returned)
    for part, form in forms:
        mine = [one for one in returned if (one.part, one.form) == (part, form)]
        rewritten = [one.case for one in mine if one.outcome is Return.REWRITTEN]
        refused = [one.case for one in mine if one.outcome is Return.REFUSED]
        line = Text(f"  {part}, {form}: ")
        if not rewritten and not refused:
            line.append(f"all {len(mine)} forms come back as sampled", style="green")
        else:
            line.append(f"{len(mine) - len(rewritten) - len(refused)} of {len(mine)} forms come back")
        yield line
        if rewritten:
            yield Text("    rewritten: ", style="red").append("; ".join(rewritten), style="")
        if refused:
            yield Text("    refused: ", style="dim").append("; ".join(refused))


def _seams(found: Sequence[Seam], has_ids: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("  between", no_wrap=True)
    table.add_column("text", overflow="fold", ratio=2)
    table.add_column("ids", overflow="fold", ratio=1)
    table.add_column("tokens merge with", overflow="fold", ratio=1)
    for seam in found:
        text = visible(elided(seam.texts[0], _SEAM)) if seam.fixed else f"{len(seam.texts)} different texts"
        ids = [] if seam.ids is None else [str(one) for one in seam.ids[:_IDS]]
        ids += ["…"] if seam.ids is not None and len(seam.ids) > _IDS else []
        said = " ".join(ids) or ("" if has_ids else "unknown")
        table.add_row(Text(f"  {seam.left} → {seam.right}"), Text(text or "∅"), Text(said), Text(_merges(seam)))
    return table


def _no_delimiters(looked: Looked) -> Iterator[Text]:
    """The pairs without a reliable text between them."""
    for one in looked.delimiters.pairs.values() if looked.delimiters is not None else ():
        if one.reason is not None:
            yield Text(f"  no delimiter between {one.left} and {one.right}: ").append(visible(one.reason))


def _merges(seam: Seam) -> str:
    parts = []
    if seam.merges_before:
        parts.append(f"before: {' '.join(map(_edge, seam.merges_before))}")
    if seam.merges_after:
        parts.append(f"after: {' '.join(map(_edge, seam.merges_after))}")
    return "; ".join(parts)


def _edge(text: str) -> str:
    return visible(text, edges=True)


def _settings(facts: TemplateFacts) -> Iterator[RenderableType]:
    if not facts.effects:
        return
    yield from _title("Arguments")
    rows = [
        (
            visible(f"{one.name}={one.value!r}"),
            f"changes {listed(one.changes)}" if one.changes else "changes nothing",
        )
        for one in facts.effects
    ]
    yield _two_columns(rows)
    for one in facts.settings[:_SHOWN]:
        left = len(one.append.broken)
        said = (
            "append-only for usual conversations" if not left else f"{many(left, 'answer')} of usual ones change"
        )
        yield Text(f"  {visible(flags_of(one.arguments))}: {said}")


def _claims(facts: TemplateFacts) -> Iterator[Text]:
    marks = {True: ("yes", "green"), False: ("no", "bold red"), None: ("–", "dim")}
    for claim in claims(facts):
        word, style = marks[claim.holds]
        line = Text("  ").append(f"{word:<4}", style=style).append(claim.what)
        yield line.append(f": {visible(claim.because)}" if claim.because else ".")


def _refusals(facts: TemplateFacts) -> Iterator[Text]:
    reasons = Counter(step.refusal or "" for step in facts.append.refused)
    if reasons:
        yield from _title("Refused")
    for reason, count in reasons.most_common(_BREAKS):
        yield Text(f"  {many(count, 'answer')}: {visible(reason)}")
