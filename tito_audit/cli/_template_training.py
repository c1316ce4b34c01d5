"""What `template --training` found: a page, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tito_audit.storage.atomic import new_file
from tito_audit.templates.training import Judged, Variant
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import listed, many

_LOST = 6
_WHAT = 100
_COLORS = {"+": "green", "-": "red", "@": "cyan"}


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


def write_variant(trained: Trained, *, force: bool) -> None:
    """Write the variant to its file; StorageError if that exists and is not to be replaced."""
    with new_file(trained.file, overwrite=force) as out:
        out.write(trained.variant.text.encode())


def page_lines(trained: Trained) -> Iterator[RenderableType]:
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
    yield Text()
    yield Text("Proved by rendering", style="bold")
    for said in proved(variant):
        yield Text(f"  {visible(said)}")
    if variant.after.lost:
        yield Text()
        yield Text("Obstacles", style="bold")
        for said in obstacles(variant):
            yield Text(f"  {visible(said)}")


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
        one = variant.of_log
        yield f"the log's first prompts: {one.firsts} of {one.firsts} are byte for byte unchanged"
        yield f"the log's answers that come back: {_counts(one.before)} before, {_counts(one.after)} now"


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
    variant = trained.variant
    return {
        "schema_version": 1,
        "template": trained.name,
        "file": str(trained.file) if trained.writes else None,
        "keeps_history": trained.writes,
        "verdict": verdict(trained),
        "edits": [{"line": one.line, "was": one.was, "new": one.new, "does": one.does} for one in variant.edits],
        "diff": trained.diff,
        "first_prompts": variant.firsts,
        "arguments": list(variant.arguments),
        "before": _judged(variant.before),
        "after": _judged(variant.after),
        "log": None
        if variant.of_log is None
        else {
            "first_prompts": variant.of_log.firsts,
            "before": _judged(variant.of_log.before),
            "after": _judged(variant.of_log.after),
        },
        "in_the_way": [{"line": edit.line, "was": edit.was, "why": why} for edit, why in variant.rejected]
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
