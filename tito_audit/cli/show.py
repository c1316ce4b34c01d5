"""`tito-audit show`: one rollout as tokens, with its findings beneath each sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from tito_audit.cli import _options as options
from tito_audit.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from tito_audit.pipeline import Scan
    from tito_audit.record.arrays import Ids, Mask
    from tito_audit.record.finding import Finding, Result, Where
    from tito_audit.record.rollout import Turn

__all__ = ["show"]

_Piece = Callable[[int], str]


def show(
    log: Annotated[str, typer.Argument(metavar="LOG", help="One file.")],
    row: Annotated[int, typer.Option("--row", min=0, help="Row of the file, counted from 0.")],
    item: Annotated[int, typer.Option("--item", min=0, help="Rollout of a row that holds several.")] = 0,
    turn: Annotated[int | None, typer.Option("--turn", min=0, help="Show this turn only.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Leave no tokens out.")] = False,
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    template_name: options.TemplateName = None,
    template_arg: options.TemplateArgs = None,
    template_seconds: options.TemplateSeconds = options.TEMPLATE_SECONDS,
    tool_arguments: options.ToolArgumentsOption = options.ToolArgumentsWord.AUTO,
    format: options.FormatName = None,
    columns: options.Map = None,
    messages: options.Messages = None,
    tools: options.Tools = None,
    on: options.On = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_config: options.NoConfig = False,
    config: options.ConfigFile = None,
) -> None:
    """Show one rollout as tokens: recorded over canonical where they differ, findings underneath."""
    from tito_audit.cli._terminal import colors, page_width
    from tito_audit.pipeline import scan_rollouts
    from tito_audit.report import ReportOptions
    from tito_audit.reports._page import console_for

    settings = options.settings_of(
        tokenizer=tokenizer,
        chat_template=chat_template,
        template_name=template_name,
        template_args=template_arg,
        template_seconds=template_seconds,
        tool_arguments=tool_arguments,
        format=format,
        columns=columns,
        messages=messages,
        tools=tools,
        on=on,
        select=select,
        ignore=ignore,
        row=row,
        trust_remote_code=trust_remote_code,
    )
    run = scan_rollouts([log], settings)
    result, items = _result(run, log, row, item)
    vocabulary = run.vocabulary
    console = console_for(sys.stdout, ReportOptions(color=colors(sys.stdout), width=page_width()))
    piece = vocabulary.piece if vocabulary is not None else None
    for line in _lines(result, piece, console, turn, full):
        console.print(line, soft_wrap=True)
    for notice in run.summary.notices:
        if notice.startswith(("--messages", "--tools")):
            console.print(f"\n{notice}", markup=False, highlight=False, soft_wrap=True)
    if items > 1:
        console.print(f"\nThe row holds {items} rollouts: --item 0 to --item {items - 1}.")


def _result(run: Scan, log: str, row: int, item: int) -> tuple[Result, int]:
    """The one result wanted and how many its row holds."""
    from tito_audit.cli._terminal import watched
    from tito_audit.storage import find_logs, open_log

    files = find_logs([log])
    if len(files) > 1:
        raise SetupError(f"{log}: there are {len(files)} logs here; name one of them, such as {files[0]}.")
    with closing(watched(run, silent=True)) as results:
        held = list(results)
    for result in held:
        if result.place.item == item:
            return result, len(held)
    if held:
        raise SetupError(
            f"{log}: row {row} holds {len(held)} rollouts, counted from 0; --item {item} is past the end."
        )
    rows = max((raw.index + 1 for raw in open_log(files[0])), default=0)
    if row < rows:
        raise SetupError(f"{log}: row {row} is a blank line or holds no rollout.")
    raise SetupError(f"{log}: there is no row {row}; it holds {rows} rows, counted from 0.")


def _lines(result: Result, piece: _Piece | None, console: Console, turn: int | None, full: bool) -> Iterator[Text]:
    from rich.text import Text

    from tito_audit.record.finding import Where
    from tito_audit.reports._visible import visible

    rollout = result.rollout
    yield Text(visible(str(result.place)), style="bold")
    page = _Page(result, piece, console, full)
    if rollout is None:
        yield Text("This row could not be read as a rollout.")
        yield from page.rest()
        return
    roles = " ".join(message.role for message in rollout.messages)
    yield Text(visible(f"format {rollout.format} · messages: {roles or 'none'}"))
    yield Text(
        "marks: ^ a finding, = a trained token, # both" + ("" if piece else "; without -t the ids stand alone")
    )
    seen: Ids | None = None
    for index, one in enumerate(rollout.turns):
        if turn is None or index == turn:
            yield from page.turn(index, one, seen)
        seen = one.seen_ids
    if turn is not None and turn >= len(rollout.turns):
        raise SetupError(f"{result.place}: --turn {turn}; it holds {len(rollout.turns)} turns, from 0.")
    row = rollout.training_row
    if row is not None and turn is None:
        trained = "no loss mask" if row.loss_mask is None else f"{int(row.loss_mask.sum()):,} trained"
        title = f"training row · {len(row.token_ids):,} tokens, {trained}"
        yield from page.sequence(title, row.token_ids, Where.ROW, None, trained=row.loss_mask)
    if turn is None:
        yield from page.rest()


class _Page:
    """Sequences of one rollout, each with the findings that point into it."""

    def __init__(self, result: Result, piece: _Piece | None, console: Console, full: bool) -> None:
        self._left = list(result.findings)
        self._piece = piece
        self._console = console
        self._full = full

    def turn(self, index: int, turn: Turn, seen: Ids | None) -> Iterator[Text]:
        """The prompt from where it adds to what was seen before, and the completion."""
        from tito_audit.record.finding import Where

        if turn.prompt_ids is not None:
            start = 0 if seen is None or self._full else _shared(seen, turn.prompt_ids)
            title = f"turn {index} prompt · {len(turn.prompt_ids):,} tokens"
            if start:
                title += f", the first {start:,} as seen before"
            yield from self.sequence(title, turn.prompt_ids, Where.PROMPT, index, start=start)
        if turn.completion_ids is not None:
            reason = f", ended by {turn.finish_reason}" if turn.finish_reason else ""
            title = f"turn {index} completion · {len(turn.completion_ids):,} tokens{reason}"
            yield from self.sequence(title, turn.completion_ids, Where.COMPLETION, index)

    def sequence(
        self,
        title: str,
        ids: Ids,
        where: Where,
        turn: int | None,
        *,
        trained: Mask | None = None,
        start: int = 0,
    ) -> Iterator[Text]:
        """A title, the tokens, and the findings in them."""
        from rich.text import Text

        from tito_audit.cli._sequence import sequence_lines
        from tito_audit.reports._visible import visible

        mine = [
            finding
            for finding in self._left
            if finding.hit.where is where and (turn is None or finding.hit.turn == turn)
        ]
        mine = [finding for finding in mine if not _whole_row(finding)]
        self._left = [finding for finding in self._left if finding not in mine]
        ranges = [(finding.hit.start, finding.hit.end) for finding in mine]
        start = min([start, *(begin for begin, _ in ranges)])
        yield Text()
        yield Text(visible(title), style="bold")
        yield from sequence_lines(
            ids,
            self._piece,
            ranges,
            width=self._console.width,
            trained=trained,
            start=start,
            full=self._full,
        )
        yield from self._findings(mine)

    def rest(self) -> Iterator[Text]:
        """Findings about the row as a whole, or about a sequence that the log does not hold."""
        from rich.text import Text

        if self._left:
            yield Text()
            yield Text("the row as a whole", style="bold")
            yield from self._findings(self._left)

    def _findings(self, findings: list[Finding]) -> Iterator[Text]:
        from tito_audit.reports._page import finding_lines

        for finding in sorted(findings, key=lambda one: (-one.severity, one.hit.start)):
            yield from finding_lines(finding, self._console, placed=False)


def _whole_row(finding: Finding) -> bool:
    from tito_audit.reports._page import range_words

    return not range_words(finding)


def _shared(seen: Ids, prompt: Ids) -> int:
    """How many leading tokens of a prompt are what the call before it saw and said."""
    import numpy as np

    length = min(len(seen), len(prompt))
    other = np.flatnonzero(seen[:length] != prompt[:length])
    return int(other[0]) if len(other) else length
