"""Where a finding is, for people and for tools that show files."""

from __future__ import annotations

from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import Place
from tito_audit.summary import Summary
from tito_audit.terminal.escape import shell_word


def show_command(place: Place, summary: Summary) -> str:
    """The command that shows a rollout with this run's options, ready to paste into a shell."""
    item = f" --item {place.item}" if place.item else ""
    file = shell_word(place.file)
    return f"tito-audit show {file} --row {place.row}{item}{with_options(summary)}"


def with_options(summary: Summary) -> str:
    """` -t DIR --map token_ids=toks --session KEY` as this run had them; without what differs from log to log."""
    return with_tokenizer(summary) + with_reading(summary)


def with_tokenizer(summary: Summary) -> str:
    """` -t DIR` as this run had it."""
    name = one_tokenizer(summary)
    return "" if name is None else f" -t {shell_word(name)}"


def with_reading(summary: Summary) -> str:
    """` --map token_ids=toks --session KEY` or the like as this run had them."""
    return "".join(f" {shell_word(word)}" for word in (*summary.reading, *summary.joining))


def one_tokenizer(summary: Summary) -> str | None:
    """The tokenizer of all logs; None if there is none, or if logs have different ones."""
    name = summary.tokenizer
    return None if name is None or ", " in name else name


def line_of(place: Place) -> int | None:
    """The line of the file, counted from 1; None if rows are not lines of a text file."""
    return place.row + 1 if place.file.lower().endswith((".jsonl", ".ndjson")) else None


def range_of(finding: Finding) -> tuple[int, int] | None:
    """The half-open token range; None for a finding about a whole row of the file or about the log."""
    hit = finding.hit
    if hit.where is Where.LOG:
        return None
    if hit.start == hit.end and hit.where is Where.ROW and finding.code.startswith("REC"):
        return None
    return hit.start, hit.end


def place_words(finding: Finding) -> str:
    """`row 4, item 1, turn 2, tokens 12:14 of the completion`; `the log as a whole, from row 4 on`."""
    place, hit = finding.place, finding.hit
    if hit.where is Where.LOG:
        return f"the log as a whole, from row {place.row} on"
    words = [f"row {place.row}"]
    if place.item:
        words.append(f"item {place.item}")
    if hit.turn is not None:
        words.append(f"turn {hit.turn}")
    tokens = range_of(finding)
    if tokens is not None:
        start, end = tokens
        of = "training row" if hit.where is Where.ROW else str(hit.where)
        words.append(f"tokens {start}:{end} of the {of}" if end > start else f"at token {start} of the {of}")
    return ", ".join(words)
