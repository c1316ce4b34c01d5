"""Where a finding is: words for people, lines for editors, the command and flags that show it again."""

from __future__ import annotations

from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import Place
from tito_audit.summary import Summary
from tito_audit.terminal.escape import shell_word


def show_command(place: Place, summary: Summary) -> str:
    """The `tito-audit show` command for a rollout, with this run's options, ready to paste into a shell."""
    item = f" --item {place.item}" if place.item else ""
    file = shell_word(place.file)
    return f"tito-audit show {file} --row {place.row}{item}{option_flags(summary)}"


def option_flags(summary: Summary) -> str:
    """The run's ` -t DIR --map token_ids=toks --session KEY`, without flags that differ from log to log."""
    return tokenizer_flag(summary) + reading_flags(summary)


def tokenizer_flag(summary: Summary) -> str:
    """The run's ` -t DIR`; "" if it had no tokenizer, or several."""
    name = single_tokenizer(summary)
    return "" if name is None else f" -t {shell_word(name)}"


def reading_flags(summary: Summary) -> str:
    """The run's flags for reading and joining rows: ` --map token_ids=toks --session KEY`."""
    return "".join(f" {shell_word(word)}" for word in (*summary.reading, *summary.joining))


def single_tokenizer(summary: Summary) -> str | None:
    """The one tokenizer of all logs; None without one, or if logs have different ones."""
    name = summary.tokenizer
    return None if name is None or ", " in name else name


def line_number(place: Place) -> int | None:
    """The row's line, counted from 1; None unless the file is JSON lines."""
    return place.row + 1 if place.file.lower().endswith((".jsonl", ".ndjson")) else None


def token_range(finding: Finding) -> tuple[int, int] | None:
    """The half-open token range of a finding; None if it is about a whole row of the file or about the log."""
    hit = finding.hit
    if hit.where is Where.LOG:
        return None
    if hit.start == hit.end and hit.where is Where.ROW and finding.code.startswith("REC"):
        return None
    return hit.start, hit.end


def place_words(finding: Finding) -> str:
    """`row 4, item 1, turn 2, tokens 12:14 of the completion`, or `the log as a whole, from row 4 on`."""
    place, hit = finding.place, finding.hit
    if hit.where is Where.LOG:
        return f"the log as a whole, from row {place.row} on"
    words = [f"row {place.row}"]
    if place.item:
        words.append(f"item {place.item}")
    if hit.turn is not None:
        words.append(f"turn {hit.turn}")
    tokens = token_range(finding)
    if tokens is not None:
        start, end = tokens
        of = "training row" if hit.where is Where.ROW else str(hit.where)
        words.append(f"tokens {start}:{end} of the {of}" if end > start else f"at token {start} of the {of}")
    return ", ".join(words)
