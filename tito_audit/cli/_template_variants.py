"""What `template` does with --training and --against: a page, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tito_audit.errors import SetupError
from tito_audit.report_objects import as_json, fields
from tito_audit.run.against import Compared, compared
from tito_audit.run.template import log_probes, open_template
from tito_audit.settings.model import Settings
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.templates.against import Cause, Parted
from tito_audit.templates.training import Judged, Variant, find_variant
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.page import heading, print_page
from tito_audit.terminal.words import listed, many

_LOST = 6
_WHAT = 100
_COLORS = {"+": "green", "-": "red", "@": "cyan"}
_BEFORE, _AFTER = 30, 70


def train(settings: Settings, logs: Sequence[str], file: str, shape: str, *, force: bool) -> bool:
    """Search a training variant, write it if it is proved, and print the result; whether it was written."""
    refuse_target(Path(file), overwrite=force)  # before the search, which takes seconds
    opened = open_template(settings)
    if opened.renderer.name is None and len(opened.renderer.templates) > 1:
        raise SetupError(
            f"{opened.name}: there is a template for conversations with tools, and one for those without.\n"
            "A variant is one template for both, so prompts would change.\n"
            f"Name the one to edit: --template-name {' or '.join(sorted(opened.renderer.templates))}."
        )
    log = tuple(log_probes(logs, settings)) if logs else ()
    trained = Trained(opened.name, find_variant(opened.renderer, log), Path(file))
    if trained.writes:
        with new_file(trained.file, overwrite=force) as out:
            out.write(trained.variant.text.encode())
    if shape == "json":
        print(as_json(training_object(trained)))
    else:
        print_page((), _training_page(trained))
    return trained.writes


def compare(settings: Settings, logs: Sequence[str], other: str, shape: str) -> bool:
    """Compare two templates on a log's conversations, or the built-in ones; whether they write the same."""
    both = compared(settings, logs, other)
    if shape == "json":
        print(as_json(against_object(both)))
    else:
        print_page((), _against_page(both))
    return both.same


@dataclass(frozen=True, slots=True)
class Trained:
    """A variant, and the file that it is for."""

    name: str
    """The template that it is a variant of."""
    variant: Variant
    file: Path

    @property
    def writes(self) -> bool:
        """Whether the variant is worth a file: it keeps history."""
        return self.variant.keeps_history

    @property
    def diff(self) -> list[str]:
        """The edits as a unified diff, line by line."""
        before, after = (text.splitlines() for text in (self.variant.source, self.variant.text))
        return [line.rstrip("\n") for line in unified_diff(before, after, self.name, str(self.file), lineterm="")]


def _training_page(trained: Trained) -> Iterator[RenderableType]:
    """The verdict, the edits, what was proved, and the obstacles."""
    variant = trained.variant
    yield Text("tito-audit template ", style="bold").append(visible(trained.name))
    yield Text(visible(verdict(trained)), style="bold green" if trained.writes else "bold red")
    for edit in variant.edits:
        yield Text(f"  line {edit.line}: {visible(elided(edit.does, _WHAT))}")
    if variant.edits:
        yield Text()
        for line in trained.diff:
            yield Text(visible(line), style=_COLORS.get(line[:1], ""))
    yield from heading("Proved by rendering")
    yield from (Text(f"  {visible(line)}") for line in proved(variant))
    if variant.after.lost:
        yield from heading("Obstacles")
        yield from (Text(f"  {visible(line)}") for line in obstacles(variant))


def verdict(trained: Trained) -> str:
    """The verdict, in a sentence."""
    variant = trained.variant
    edits = many(len(variant.edits), "edit")
    still = f"{many(len(variant.after.lost), 'answer')} still change once something follows"
    if not variant.after.kept:
        return "No answer comes back with this template, so nothing can be proved; no file is written."
    if not trained.writes:
        done = (
            f"{edits.capitalize()} would keep more of history, but not all" if variant.edits else "No edit found"
        )
        return f"{done}: {still}; no file is written."
    but = f" With tools {still}." if variant.after.lost else ""
    if not variant.edits:
        return f"It keeps history already; {trained.file} is the same template.{but}"
    return f"{edits.capitalize()}, and history stays as it was sampled: {trained.file}.{but}"


def proved(variant: Variant) -> Iterator[str]:
    """What was rendered with both templates and is as required."""
    with_ = f", with {listed(list(variant.arguments))}" if variant.arguments else ""
    yield f"first prompts: {variant.firsts} of {variant.firsts} are byte for byte unchanged{with_}"
    yield f"answers that come back as sampled: {_counts(variant.before)} before, {_counts(variant.after)} now"
    if variant.after.unsampled:
        yield (
            f"{many(len(variant.after.unsampled), 'answer')} not counted: before a system message, or without "
            "reasoning after a prompt that begins it"
        )
    if variant.after.trimmed:
        yield "whitespace at the ends of an answer is still removed"
    if variant.of_log is not None:
        log = variant.of_log
        yield f"the log's first prompts: {log.firsts} of {log.firsts} are byte for byte unchanged"
        yield f"the log's answers that come back: {_counts(log.before)} before, {_counts(log.after)} now"


def _counts(judged: Judged) -> str:
    return f"{len(judged.kept):,} of {len(judged.kept) + judged.faults:,}"


def obstacles(variant: Variant) -> Iterator[str]:
    """The answers that still change, and the constructs that cause it."""
    lost = sorted(variant.after.lost)
    more = f", and {len(lost) - _LOST} more" if len(lost) > _LOST else ""
    yield f"these change: {'; '.join(lost[:_LOST])}{more}"
    for edit, why in variant.rejected:
        yield f"line {edit.line}: a template that {elided(edit.does, _WHAT)} keeps more, but {why}"
    if not variant.rejected:
        yield "no condition and no cut of the template alone decides about them"


def training_object(trained: Trained) -> dict[str, Any]:
    """The same as one JSON object."""
    variant, log = trained.variant, trained.variant.of_log
    return {
        "schema_version": 1,
        "template": trained.name,
        "file": str(trained.file) if trained.writes else None,
        "keeps_history": trained.writes,
        "verdict": verdict(trained),
        "edits": [fields(edit, "line was new does") for edit in variant.edits],
        "diff": trained.diff,
        "first_prompts": variant.firsts,
        "arguments": list(variant.arguments),
        "before": _judged(variant.before),
        "after": _judged(variant.after),
        "log": None
        if log is None
        else {"first_prompts": log.firsts, "before": _judged(log.before), "after": _judged(log.after)},
        "in_the_way": [{**fields(edit, "line was"), "why": why} for edit, why in variant.rejected]
        if variant.after.lost
        else [],
    }


def _judged(judged: Judged) -> dict[str, Any]:
    return {
        "kept": len(judged.kept),
        "changed": sorted(judged.lost),
        "trimmed": sorted(judged.trimmed),
        "not_counted": len(judged.unsampled),
    }


def _against_page(both: Compared) -> Iterator[RenderableType]:
    """How many prompts are equal, and the first one of each kind that is not."""
    prompts = both.found
    line = Text("tito-audit template ", style="bold").append(visible(both.names[0]))
    yield line.append(" against ", style="bold").append(visible(both.names[1]))
    of = "the log's" if both.of_log else "the built-in conversations'"
    style = "bold green" if both.same else "bold red"
    yield Text(f"{prompts.equal:,} of {prompts.prompts:,} of {of} prompts are equal.", style=style)
    if both.equal_ids is not None and prompts.equal:
        yield Text(f"{both.equal_ids:,} of them have the same ids with both tokenizers.")
    for cause, group in prompts.by_cause().items():
        yield Text()
        yield Text(f"{cause}", style="bold red").append(f" · {many(len(group), 'prompt')}", style="")
        yield from _sides(group[0], both.names)


def _sides(prompt: Parted, names: tuple[str, str]) -> Iterator[Text]:
    yield Text(f"  {visible(prompt.probe.name)}, the prompt of message {prompt.count}", style="dim")
    width = max(map(len, names))
    for name, text, style in zip(names, (prompt.first, prompt.second), ("red", "green"), strict=True):
        line = Text(f"  {visible(name):<{width}} ", style="dim")
        if prompt.cause in (Cause.REFUSED, Cause.BOTH_REFUSE):
            yield line.append(visible(elided(text, _AFTER)))
            continue
        before = ("…" if prompt.at > _BEFORE else "") + text[max(prompt.at - _BEFORE, 0) : prompt.at]
        line.append(visible(before)).append("│").append(
            visible(elided(text[prompt.at :], _AFTER)) or "∅", style=style
        )
        yield line


def against_object(both: Compared) -> dict[str, Any]:
    """The same as one JSON object."""
    return {
        "schema_version": 1,
        "template": both.names[0],
        "against": both.names[1],
        "of_log": both.of_log,
        **fields(both.found, "prompts equal"),
        "equal_ids": both.equal_ids,
        "differences": [
            {"cause": cause, "prompts": len(group), "first": _difference(group[0])}
            for cause, group in both.found.by_cause().items()
        ],
    }


def _difference(prompt: Parted) -> dict[str, Any]:
    begin = max(prompt.at - _BEFORE, 0)
    return {
        "conversation": prompt.probe.name,
        "message": prompt.count,
        "at": prompt.at,
        "texts": [text[begin : prompt.at + 200] for text in (prompt.first, prompt.second)],
    }
