"""Masks and logprobs on the page of `inspect`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.text import Text

from tito_audit.cli._inspected_words import short
from tito_audit.inspect import Inspection, LogprobColumn, Sentinel
from tito_audit.terminal.escape import visible
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import many, percent

_WRITTEN = {
    "binary": "0 and 1",
    "bool": "true and false",
    "float": "weights",
    "labels": "ids, or -100 where nothing is trained",
    "none": "no mask",
}


def mask_lines(found: Inspection) -> Iterator[Text]:
    """How masks are written, and what logprobs are where nothing is trained."""
    by_mask: dict[str, list[Sentinel]] = {}
    for sentinel in found.sentinels:
        by_mask.setdefault(sentinel.mask, []).append(sentinel)
    for mask in found.masks:
        written = " or ".join(
            _WRITTEN.get(name, name) + ("" if len(mask.encodings) == 1 else f" ({count:,})")
            for name, count in mask.encodings.items()
        )
        share = f"{mask.trained:,} of {mask.tokens:,} tokens trained" if mask.tokens else "always empty"
        if mask.trained:
            share += f" ({percent(mask.trained / mask.tokens)})"
        yield Text(f"  {short(mask.path)}: {written or 'nothing'}; {share}")
        for sentinel in by_mask.get(mask.path, ()):
            yield Text(f"    {short(sentinel.path)}: {_sentinel_words(sentinel)}")


def _sentinel_words(sentinel: Sentinel) -> str:
    value = "null" if math.isnan(sentinel.value) else f"{sentinel.value:g}"
    if sentinel.share < 0.5:
        return "has values at untrained tokens too"
    where = "every untrained token" if sentinel.share == 1 else f"{percent(sentinel.share)} of untrained tokens"
    return f"{value} at {where}" + (f" and at {many(sentinel.inside, 'trained one')}" if sentinel.inside else "")


def logprob_lines(found: Inspection) -> Iterator[Text]:
    """Which of several columns is read as the sampler's logprobs, why, and the flag for another."""
    known = sorted(str(taken.format) for taken in found.taken if taken.format not in (None, "generic"))
    for choice in found.logprobs:
        taken, *others = choice.columns
        if known and all(other.difference == 0 for other in others):
            continue  # copies that the format keeps
        line = Text(f"  {short(taken.path)}: taken", style="" if choice.sure else "yellow")
        because = visible(choice.because)
        yield line.append(f"; {because}" if choice.sure else f". Unclear: {because}")
        for other in others:
            yield Text(f"  {short(other.path)}: {_author_words(other, taken)}")
        named = [other for other in others if other.author != "reference"] or others
        if choice.scope or known:
            reads = f"{known[0]} reads" if known else "calls are read"
            yield Text(f"  To read another, rename the columns: {reads} by name.", style="dim")
        else:
            yield Text(f"  To read another: {_flag(found, named[0].path)}", style="dim" if choice.sure else "")


def _author_words(column: LogprobColumn, taken: LogprobColumn) -> str:
    words = {
        "sampler": "named like a sampler's",
        "trainer": "a trainer's by its name",
        "reference": "a reference model's by its name",
        "unknown": "unknown by its name",
    }[column.author]
    if column.difference is not None:
        apart = "the same values as" if not column.difference else f"{column.difference:.2g} on average from"
        words += f"; {apart} {short(taken.path)}"
    return words + ("; has values at untrained tokens too" if column.everywhere else "")


def _flag(found: Inspection, path: str) -> str:
    """The flag that reads a column as the sampler's."""
    ours = "completion_logprobs" if "completion_logprobs" in found.mapping or _split(found) else "logprobs"
    return f"--map {shell_word(f'{ours}={path}')}"


def _split(found: Inspection) -> bool:
    """Whether rows hold a call and no training row."""
    return found.trial is not None and not found.trial.training_rows and found.trial.calls > 0
