"""`tito-audit show`: shows one rollout as tokens, with the findings below each sequence."""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tito_audit.cli._options import Options, find_one_log
from tito_audit.cli._outputs import print_object
from tito_audit.errors import SetupError
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Result, Severity, Where
from tito_audit.record.prefix import common_prefix
from tito_audit.record.rollout import IdsFrom, Rollout
from tito_audit.repairs import all_repairs
from tito_audit.report import ReportOptions
from tito_audit.report_objects import finding_object, pick
from tito_audit.rules import all_rules
from tito_audit.run.rewriting import REWRITING_CODE
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.settings.values import expand_user
from tito_audit.storage import RemoteFile, open_log
from tito_audit.terminal.escape import visible
from tito_audit.terminal.page import STYLES, console_for, finding_lines, heading, range_words, render_line, wrap
from tito_audit.terminal.pager import show_page
from tito_audit.terminal.sequence import ASKED, BOTH, FINDING, TRAINED, DrawOptions, TokenLine, draw_tokens
from tito_audit.terminal.terminal import colors, page_width
from tito_audit.terminal.words import code_ranges, many


def show(options: Options, log: str) -> None:
    """Show one rollout as tokens, with both sides of each difference and its findings below."""
    settings = replace(options.settings(), encoder="tokenizers")  # for one row the fast encoder would not pay off
    wanted = parse_place(log, row=options.row, item=options.item, turn=options.turn)
    file = find_one_log(wanted.log)
    if wanted.row is None:
        # Counting the rows of a large remote log would fetch all of it.
        far = isinstance(file, RemoteFile) and file.stat().st_size > (8 << 20)
        rows = _count_rows(file, settings) if file.is_file() and not far else None
        if rows != 1:
            size = f"; it holds {rows:,} rows, counted from 0" if rows is not None else ""
            raise SetupError(f"{file}: no row was named{size}.\nPass --row N, or write {file}:N.")
        wanted = replace(wanted, row=0)
    run = scan_rollouts([str(file)], replace(settings, row=wanted.row))
    of_row = [result for result in run if not result.of_log]
    result = next((each for each in of_row if each.place.item == wanted.item), None)
    if result is None:
        rows = 0 if of_row or not file.is_file() else _count_rows(file, settings)
        why = f"there is no row {wanted.row}; it holds {rows:,} rows, counted from 0"
        if of_row:
            counted = f"holds {len(of_row)} rollouts, counted from 0"
            why = f"row {wanted.row} {counted}; --item {wanted.item} is past the end"
        elif wanted.row is not None and wanted.row < rows:
            why = f"row {wanted.row} is a blank line or holds no rollout"
        raise SetupError(f"{file}: {why}.")
    selection = parse_around(options.around, wanted, result.findings)
    piece = run.vocabulary.piece if run.vocabulary is not None else None
    if options.as_json or options.shape == "json":
        if selection is not None:
            raise SetupError("-f json writes whole sequences; leave out --around, and the tokens of the place.")
        print_object(rollout_object(result, piece, wanted.turn, row=wanted.row))
        return
    look = DrawOptions(
        width=page_width(),
        encoding=sys.stdout.encoding or "utf-8",
        piece=piece,
        control=run.vocabulary.special_ids if run.vocabulary is not None else frozenset(),
        context=options.nearby,
        full=options.full,
        ids=options.ids,
        logprobs=options.logprobs,
    )
    console = console_for(sys.stdout, ReportOptions(color=colors(sys.stdout), width=look.width))
    call = turn_of_row(result, result.place.file, wanted.row)
    lines = page_lines(result, look, console, wanted.turn, selection, marked=call)
    remarks = [notice for notice in run.summary.notices if notice.startswith(("--messages", "--tools"))]
    if len(of_row) > 1:
        remarks.append(f"The row holds {len(of_row)} rollouts: --item 0 to --item {len(of_row) - 1}.")
    for finding in result.told:
        # That the template rewrites history does not change how a row is audited.
        if finding.code != REWRITING_CODE or finding.place.row == result.place.row:
            remarks.append(f"{finding.severity.word} {finding.code}: {finding.hit.message}")
    below = ("\n" + render_line(Text(visible(remark)), console) for remark in remarks)
    page = chain((render_line(line, console) for line in lines), below)
    show_page(page, sys.stdout, paged=not options.no_pager)


def _count_rows(file: Path, settings: Settings) -> int:
    return open_log(file, rows_at=settings.at(file).rows_at).count()


_POSITION = r"(?:(?P<where>prompt|completion|row)(?::|[ ]at[ ]|[ ]))?(?P<start>\d{1,10})(?:[-:](?P<end>\d{1,10}))?"
_PLACE = re.compile(
    r"(?P<row>\d{1,15})(?:\[(?P<item>\d{1,9})\])?"
    r"(?:(?::|[ ]turn[ ])(?P<turn>\d{1,9}|-|))?"
    rf"(?:(?::|[ ](?:at[ ])?)(?:{_POSITION}|-))?:?"
)
_SPAN = re.compile(_POSITION)
_CODE = re.compile(r"[A-Z]{1,3}\d{0,3}")
_FINGERPRINT = re.compile(r"[0-9a-f]{4,16}")


@dataclass(frozen=True, slots=True)
class ShowSpan:
    """A span of tokens to show."""

    start: int
    end: int
    """Exclusive."""
    where: Where | None = None
    """None: every sequence that is long enough."""
    turn: int | None = None

    def __str__(self) -> str:
        tokens = str(self.start) if self.end <= self.start + 1 else f"{self.start}-{self.end}"
        turn = f"turn {self.turn} " if self.turn is not None else ""
        return f"{turn}{f'{self.where}:' if self.where else ''}{tokens}"


@dataclass(frozen=True, slots=True)
class ShowPlace:
    """A place in a log, as named on the command line."""

    log: str
    row: int | None
    """None: not named."""
    item: int = 0
    turn: int | None = None
    span: ShowSpan | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a rollout to show: spans of tokens and findings, with the tokens around them."""

    spans: tuple[ShowSpan, ...]
    findings: tuple[Finding, ...]


def parse_place(
    log: str, *, row: int | None = None, item: int | None = None, turn: int | None = None
) -> ShowPlace:
    """The place that `LOG[:ROW[:TURN]]`, a place copied from a report, or the options name.

    The name of an existing file is never split at its colons. SetupError if place and options disagree.
    """
    colons = [] if _exists(log) else re.finditer(":", log)
    splits = [(log[: colon.start()], _PLACE.fullmatch(log[colon.end() :])) for colon in colons]
    cuts = [(file, rest) for file, rest in splits if rest is not None and file]
    if not cuts:
        return ShowPlace(log, row, item or 0, turn)
    # If several splits are possible, the longest file name that exists.
    file, rest = ([(file, rest) for file, rest in cuts if _exists(file)] or cuts[:1])[-1]
    placed = rest["turn"] not in (None, "", "-")
    place = {"row": int(rest["row"]), "turn": int(rest["turn"]) if placed else None}
    place["item"] = int(rest["item"]) if rest["item"] else None
    for name, number in (("row", row), ("turn", turn), ("item", item)):
        if number is not None and place[name] is not None and number != place[name]:
            raise SetupError(
                f"{log}: the place names {name} {place[name]}, but --{name} is {number}.\nLeave one out."
            )
        place[name] = number if place[name] is None else place[name]
    span = _parse_span(rest, log, place["turn"]) if rest["start"] else None
    if span is not None and rest["turn"] == "-":
        span = replace(span, where=Where.ROW)
    return ShowPlace(file, place["row"], place["item"] or 0, place["turn"], span)


def parse_around(around: Sequence[str], wanted: ShowPlace, findings: Sequence[Finding]) -> Selection | None:
    """What `--around` and the place select: positions, or findings by code or fingerprint; None for everything.

    SetupError for a text that is neither, or that no finding matches.
    """
    if not around and wanted.span is None:
        return None
    here = [finding for finding in findings if wanted.turn in (None, finding.hit.turn)]
    spans: list[ShowSpan] = []
    chosen: list[Finding] = []
    for text in around:
        match = _SPAN.fullmatch(text.strip())
        if match is not None:
            spans.append(_parse_span(match, f"--around {text}", wanted.turn))
            continue
        code, mark = text.strip().upper(), text.strip().lower()
        is_code, is_mark = _CODE.fullmatch(code) is not None, _FINGERPRINT.fullmatch(mark) is not None
        if not is_code and not is_mark:
            raise SetupError(
                f"--around {text}: not a position, a code or a fingerprint of a finding.\n"
                "Write 120, completion:12, prompt:5-9, TOK101, or 16 hexadecimal digits from a report."
            )
        fitting = [
            finding
            for finding in here
            if (is_code and finding.code.startswith(code)) or (is_mark and finding.fingerprint.startswith(mark))
        ]
        if not fitting:
            kind = "code" if is_code else "fingerprint"
            whose = "this rollout" if wanted.turn is None else f"turn {wanted.turn}"
            codes = sorted(Counter(finding.code for finding in here).items())
            there = ", ".join(f"{code} ({number})" for code, number in codes) or "no findings"
            raise SetupError(f"--around {text}: no finding of {whose} has this {kind}.\nIt has {there}.")
        chosen += fitting
    if (span := wanted.span) is not None:
        # A report names only turn and tokens: the finding at these says which sequence of the turn is meant.
        hits = [(finding, finding.hit) for finding in here]
        at = [each for each, hit in hits if (hit.start, hit.end) == (span.start, span.end)]
        at = [finding for finding in at if span.where in (None, finding.hit.where)]
        chosen, spans = chosen + at, spans if at else [*spans, span]
    return Selection(tuple(spans), tuple({id(finding): finding for finding in chosen}.values()))


def _exists(name: str) -> bool:
    try:
        return expand_user(name).exists()
    except (OSError, ValueError):  # the name is too long
        return False


def _parse_span(match: re.Match[str], text: str, turn: int | None) -> ShowSpan:
    start = int(match["start"])
    end = int(match["end"]) if match["end"] else start + 1
    if end < start:
        raise SetupError(f"{text}: the range {start}-{end} ends before it begins.")
    where = Where(match["where"]) if match["where"] else None
    return ShowSpan(start, end, where, None if where is Where.ROW else turn)


_MOST_ROLES = 12
"""How many messages' roles are listed."""
_NAME_WIDTH = max(len("TOK101"), len("normalize"))
_ASKED_TURN = "▸"
_BLANKS = {"⏎": "newline", "⇥": "tab", "∅": "no text"}


@dataclass(frozen=True, slots=True)
class ShowPart:
    """One recorded sequence of a rollout."""

    where: Where
    turn: int | None
    title: str
    tokens: TokenLine
    start: int = 0
    """The first token that the call before had not seen."""

    def matches(self, where: Where | None, turn: int | None) -> bool:
        """Whether it is a sequence of this kind and turn; None is any."""
        return where in (None, self.where) and (turn is None or turn == self.turn)


def rollout_parts(rollout: Rollout) -> list[ShowPart]:
    """The recorded prompt and completion of every call, then the training row."""
    parts: list[ShowPart] = []
    seen: Ids | None = None
    own = rollout.place.file
    rows = [f" · {'row ' if file == own else f'{file}:'}{row}" for file, row in rollout.stated.calls_at]
    rows = rows or [""] * len(rollout.turns)
    for index, (turn, where) in enumerate(zip(rollout.turns, rows, strict=True)):
        if turn.prompt_ids is not None:
            title = f"turn {index} prompt{where} · {many(len(turn.prompt_ids), 'token')}"
            start = 0 if seen is None else common_prefix(seen, turn.prompt_ids)
            parts.append(ShowPart(Where.PROMPT, index, title, TokenLine(turn.prompt_ids), start))
        if turn.completion_ids is not None:
            title = f"turn {index} completion{where} · {many(len(turn.completion_ids), 'token')}"
            title += f", ended by {turn.finish_reason}" if turn.finish_reason else ""
            title += ", ids recovered from token texts" if turn.ids_from is IdsFrom.RECOVERED else ""
            tokens = TokenLine(turn.completion_ids, logprobs=turn.completion_logprobs)
            parts.append(ShowPart(Where.COMPLETION, index, title, tokens))
        seen = turn.seen_ids
    row = rollout.training_row
    if row is not None:
        trained = "no loss mask" if row.loss_mask is None else f"{int(row.loss_mask.sum()):,} trained"
        title = f"training row · {many(len(row.token_ids), 'token')}, {trained}"
        parts.append(ShowPart(Where.ROW, None, title, TokenLine(row.token_ids, row.loss_mask, row.logprobs)))
    return parts


def wanted_parts(result: Result, turn: int | None) -> list[ShowPart]:
    """The sequences of a rollout, or of one of its turns; SetupError if it has no such turn."""
    rollout = result.rollout
    if rollout is None:
        return []
    if turn is not None and turn >= len(rollout.turns):
        rest = " Only calls of this file are joined." if rollout.stated.calls_at else ""
        raise SetupError(f"{result.place}: there is no turn {turn}; it holds {_turns_words(rollout)}.{rest}")
    return [part for part in rollout_parts(rollout) if turn is None or part.turn == turn]


def turn_of_row(result: Result, file: str, row: int | None) -> int | None:
    """The turn that a row logged, if the rollout was joined from single calls; else None."""
    if result.rollout is None or (file, row) not in (calls := result.rollout.stated.calls_at):
        return None
    return calls.index((file, row))


def page_lines(
    result: Result,
    look: DrawOptions,
    console: Console,
    turn: int | None = None,
    selection: Selection | None = None,
    *,
    marked: int | None = None,
) -> Iterator[Text]:
    """The lines of a rollout, of one turn, or around a selection; SetupError if it has no such turn or tokens.

    `marked` is a turn to mark: that of the row which was asked for.
    """
    parts = wanted_parts(result, turn)
    for span in selection.spans if selection is not None else ():
        fitting = [part for part in parts if part.matches(span.where, span.turn)]
        if not any(span.start <= len(part.tokens.ids) for part in fitting):
            there = "\n".join(part.title for part in parts) or "nothing"
            raise SetupError(f"{result.place}: there are no tokens at {span}.\nIt holds, counted from 0:\n{there}")
    left = [finding for finding in result.findings if turn in (None, finding.hit.turn)]
    page = _Page(result, parts, look, console, selection, marked, left)
    return page.lines("the row" if turn is None else f"turn {turn}")


@dataclass(slots=True)
class _Page:
    """Draws the sequences of one rollout, each with its findings."""

    result: Result
    parts: Sequence[ShowPart]
    look: DrawOptions
    console: Console
    selection: Selection | None
    """What to show; None: everything."""
    marked: int | None
    """The turn to mark; None: none."""
    left: list[Finding]
    """The findings not drawn yet."""

    def lines(self, whose: str) -> Iterator[Text]:
        """The whole page; findings without tokens are under the heading `WHOSE as a whole`."""
        findings = self.result.findings
        yield Text(visible(str(self.result.place)), style="bold")
        if self.result.rollout is None:
            yield Text("This row could not be read as a rollout.")
        else:
            yield from self._head_lines(self.result.rollout)
        for part in self.parts:
            yield from self._part_lines(part)
        # Findings without tokens, or about a sequence that was not recorded.
        left = [finding for finding in self.left if self._is_selected(finding)]
        if left:
            yield from heading(f"{whose} as a whole")
            left.sort(key=lambda finding: (-finding.severity, finding.hit.start))
            yield from self._finding_lines(deque(left))
        if self.selection is not None:
            return
        # `no loss mask: MSK401-MSK404`: the skipped rules, by what is missing.
        codes: dict[str, list[str]] = {}
        for skip in sorted(self.result.skips, key=lambda skip: skip.code):
            codes.setdefault(skip.because, []).append(skip.code)
        skipped = [f"{because}: {code_ranges(those)}" for because, those in codes.items()]
        # `tito-audit explain TOK101   what it finds`, for the rules and the repairs of the findings.
        titles = {rule.code: rule.title for rule in all_rules()}
        if findings:
            titles |= {repair.name: f"{repair.title} ({repair.safety})" for repair in all_repairs()}
        ranked = sorted(findings, key=lambda finding: (-finding.severity, finding.code))
        names = [*(finding.code for finding in ranked), *(each.repair for each in findings if each.repair)]
        more = [
            f"tito-audit explain {name:<{_NAME_WIDTH}}  {titles.get(name, '')}" for name in dict.fromkeys(names)
        ]
        for title, lines in (("not read", skipped), ("more", more)):
            if lines:
                yield from heading(title)
                yield from (part for line in lines for part in self._wrapped(visible(line), "  "))

    def _head_lines(self, rollout: Rollout) -> Iterator[Text]:
        """What the rollout holds, what was found, and what the marks mean."""
        roles, look = [message.role for message in rollout.messages], self.look
        more = f" and {len(roles) - _MOST_ROLES:,} more" if len(roles) > _MOST_ROLES else ""
        words = f"messages: {' '.join(roles[:_MOST_ROLES]) or 'none'}{more}"
        yield from self._wrapped(visible(f"format {rollout.format} · {_turns_words(rollout)} · {words}"))
        if self.marked is not None:
            calls = rollout.stated.calls_at
            words = f"row {calls[self.marked][1]} is turn {self.marked} of {len(calls):,} calls that were joined"
            yield from self._wrapped(f"{words}, marked {_ASKED_TURN}; --no-join shows it by itself")
        line, counts = Text(), self.result.counts
        for severity in sorted(Severity, reverse=True):
            codes = [finding.code for finding in self.result.findings if finding.severity is severity]
            if codes:
                line.append("; " if line else "").append(many(len(codes), severity.word), style=STYLES[severity])
                line.append(f" {', '.join(sorted(set(codes)))}")
        if not line:
            nothing = "audited: no token ids" if not counts.get("tokens") else "found"
            nothing = "compared" if counts.get("tokens") and counts.get("uncompared") else nothing
            line = Text(f"nothing {nothing}", style="green" if nothing == "found" else "yellow")
        yield line
        marks = {FINDING: "a finding"}
        if any(part.tokens.trained is not None for part in self.parts):
            marks |= {TRAINED: "a trained token", BOTH: "both"}
        if self.selection is not None and self.selection.spans:
            marks[ASKED] = "asked for"
        words = "marks: " + ", ".join(f"{mark} {word}" for mark, word in marks.items())
        if look.piece is None:
            words += "; pass -t to see the text of the ids"
        else:
            words += "; · a space at an end, " + ", ".join(f"{mark} {word}" for mark, word in _BLANKS.items())
        if look.logprobs:
            words += "; ? not recorded, ! under 1 in 1,000"
        yield from self._wrapped(words, style="dim")

    def _wrapped(self, words: str, indent: str = "", style: str = "") -> Iterator[Text]:
        """The words wrapped to the page; further lines are indented twice."""
        width = self.look.width
        return wrap(Text(words, style=style), Console(width=width), width - 2 * len(indent), indent, 2 * indent)

    def _is_selected(self, finding: Finding) -> bool:
        return self.selection is None or any(finding is each for each in self.selection.findings)

    def _part_lines(self, part: ShowPart) -> Iterator[Text]:
        """A title, then the tokens, with each finding below the lines in which it ends."""
        inside = [
            finding
            for finding in self.left
            if range_words(finding) and finding.hit.where is part.where and part.turn in (None, finding.hit.turn)
        ]
        chosen: list[tuple[int, int]] | None = None
        if self.selection is not None:
            context = self.look.context
            spans = [span for span in self.selection.spans if part.matches(span.where, span.turn)]
            chosen = [(span.start, span.end) for span in spans if span.start <= len(part.tokens.ids)]
            chosen += [(each.hit.start, each.hit.end) for each in inside if self._is_selected(each)]
            if not chosen:
                return
            inside = [
                each
                for each in inside
                if any(
                    each.hit.start < max(end, start + 1) + context and each.hit.end > start - context
                    for start, end in chosen
                )
            ]
        drawn = {id(finding) for finding in inside}
        self.left = [finding for finding in self.left if id(finding) not in drawn]
        inside.sort(key=lambda finding: (finding.hit.end, finding.hit.start, -finding.severity))
        waiting = deque(inside)
        ranges = [(finding.hit.start, finding.hit.end) for finding in inside]
        start = 0 if self.look.full or chosen is not None else min([part.start, *(begin for begin, _ in ranges)])
        title = part.title
        if part.turn is not None and part.turn == self.marked:
            title = f"{_ASKED_TURN} {title}"
        if start:
            title += f", the first {start:,} as seen before"
        if self.look.logprobs and part.where is not Where.PROMPT and part.tokens.logprobs is None:
            title += ", no logprobs"
        yield from heading(visible(title))
        before = 0
        for some in draw_tokens(part.tokens, self.look, findings=ranges, wanted=chosen, start=start):
            if some.gap or self.look.full:
                yield from self._finding_lines(waiting, before if some.gap else before - self.look.context)
            yield from some.lines
            before = some.end
        yield from self._finding_lines(waiting)

    def _finding_lines(self, waiting: deque[Finding], until: int | None = None) -> Iterator[Text]:
        """The waiting findings that end at or before a position (None: all)."""
        while waiting and (until is None or waiting[0].hit.end <= until):
            yield from finding_lines(waiting.popleft(), self.console, with_place=False, with_repair=True)


def _turns_words(rollout: Rollout) -> str:
    count = len(rollout.turns)
    return f"{count:,} turns, 0 to {count - 1:,}" if count > 1 else ("no turns", "1 turn, turn 0")[count]


def rollout_object(
    result: Result, piece: Callable[[int], str] | None, turn: int | None = None, *, row: int | None = None
) -> dict[str, Any]:
    """`{"file", "row", "item", "format", "sequences", "findings", "skipped"}` of a rollout, or of one turn of it.

    A sequence is `{"where", "turn", "ids", "pieces", "trained", "logprobs"}` with one entry a token; null for a
    column that was not recorded, for a logprob that was not recorded or is not finite, and for pieces without a
    tokenizer. Joined calls add `"calls"`, the file and row of each turn, and `"asked_turn"`, the turn of `row`.
    """
    rollout = result.rollout
    calls = rollout.stated.calls_at if rollout is not None else ()
    joined: dict[str, Any] = {}
    if calls:
        joined["calls"] = [{"file": file, "row": at} for file, at in calls]
        joined["asked_turn"] = turn_of_row(result, result.place.file, row)
    findings = [finding for finding in result.findings if turn in (None, finding.hit.turn)]
    return {
        **pick(result.place, "file row item"),
        "format": rollout.format if rollout is not None else None,
        **joined,
        "sequences": [
            {
                **pick(part, "where turn"),
                "ids": (ids := part.tokens.ids.tolist()),
                "pieces": [piece(token_id) for token_id in ids] if piece is not None else None,
                "trained": part.tokens.trained.tolist() if part.tokens.trained is not None else None,
                "logprobs": part.tokens.logprobs.tolist() if part.tokens.logprobs is not None else None,
            }
            for part in wanted_parts(result, turn)
        ],
        "findings": [finding_object(finding) for finding in findings],
        "skipped": [pick(skip, "code because") for skip in result.skips],
    }
