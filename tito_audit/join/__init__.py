"""Messages, tools and calls from other files, joined to rollouts by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import calls_unknown_tools, chat_tools, format_named, pick_format, with_trainer_updates
from tito_audit.join._call_rows import Answers, Mapped, Work, one_by_one
from tito_audit.join._calls import CallsOfRollout, gathered
from tito_audit.join._gathering import Captures, Gathering, JoinedCalls
from tito_audit.join._keys import (
    EMPTY,
    MISFIT,
    NO_ANSWER,
    NO_ID,
    NO_ROW,
    NO_TOOLS,
    OWN,
    UNREADABLE,
    Partners,
    PartnerTally,
    first_row,
    keys_for,
    readable_id,
)
from tito_audit.join._sessions import CallsJoined, CallsSeen, KeySeen, calls_seen, refuse_unknown
from tito_audit.join.traces import Decode
from tito_audit.record.finding import Result
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, RemoteFile, find_logs, open_log
from tito_audit.storage.chunks import Chunk, RandomAccess, RowBatch, Ticket, chunks_of
from tito_audit.storage.spool import Spool

__all__ = [
    "Annotations",
    "Answers",
    "CallsJoined",
    "CallsOfRollout",
    "CallsSeen",
    "Decode",
    "Join",
    "KeySeen",
    "RowBatch",
    "Work",
    "calls_of",
    "calls_seen",
    "form_of",
    "joined_counts",
    "lines_of",
    "shown_by",
]


def form_of(row: Row, named: Format | None) -> Format:
    """The format of a row: the named one, else the first that matches; RecordError when none does."""
    if isinstance(row, CallsOfRollout):
        return gathered(row.form)
    return named or pick_format(row)


def shown_by(form: Format, row: Row) -> tuple[Format, Row]:
    """The format and the row whose keys show what a log was read as; of calls with a stated key, the first."""
    if isinstance(row, CallsOfRollout) and row.by_key:
        return row.format, row.raws[0].value or row
    return form, row


def lines_of(raw: RawRow) -> Sequence[RawRow]:
    """The rows of the file behind this one: itself, or the lines gathered in it."""
    return raw.value.raws if isinstance(raw.value, CallsOfRollout) else (raw,)


def calls_of(raw: RawRow) -> CallsOfRollout | None:
    """The calls that this row is made of, each a row of the log; None for a row that the log itself has."""
    return raw.value if isinstance(raw.value, CallsOfRollout) else None


def joined_counts(rollout: Rollout) -> dict[str, int]:
    """What `Join.apply` found for a rollout, and how many rows it has; {} where nothing was joined."""
    rows = len(rollout.stated.calls_at)
    return {**rollout.stated.joined, **({"rows": rows} if rows > 1 else {})}


class Annotations:
    """Updates of traces by trace id, as the file monitor of prime-rl writes them.

    PrimeIntellect-ai/prime-rl `src/prime_rl/monitors/file/monitor.py` (`log_annotations`): episodes in
    `traces/stream/`; rows with `trace_id` and `branches` in `traces/annotations/PRODUCER/`, several for a trace.
    The updates stay in their files; where each is takes some 200 bytes.
    """

    def __init__(self, folder: Path, max_row_bytes: int) -> None:
        self.folder = folder
        spool = Spool()
        self._at: dict[str, list[tuple[RandomAccess, Ticket]]] = {}
        for file in find_logs([folder]):
            reader = RandomAccess(file, max_row_bytes=max_row_bytes, spool=spool)
            for ticket, raw in reader:
                trace = (raw.value or {}).get("trace_id")
                if raw.value is not None and isinstance(trace, str) and raw.value.get("branches"):
                    self._at.setdefault(trace, []).append((reader, ticket))

    @classmethod
    def beside(cls, files: Iterable[Path], max_row_bytes: int) -> dict[str, Annotations]:
        """By log, the annotations beside the folder `stream` that it is in."""
        of_folder: dict[Path, Annotations] = {}
        of_log: dict[str, Annotations] = {}
        for file in files:
            folder = file.parent.parent / "annotations"
            if file.parent.name != "stream" or isinstance(file, RemoteFile) or not folder.is_dir():
                continue
            if folder not in of_folder:
                of_folder[folder] = cls(folder, max_row_bytes)
            of_log[str(file)] = of_folder[folder]
        return of_log

    def onto(self, form: Format, row: Row) -> Row:
        """The row with the updates of its traces."""
        return with_trainer_updates(row, self.of) if form.name == "verifiers_v1" and self._at else row

    def notices(self) -> Iterator[str]:
        """What there is, for the summary."""
        updates = sum(map(len, self._at.values()))
        if updates:
            yield f"{self.folder}: {updates:,} annotations of {len(self._at):,} traces, joined on the trace's id."

    def of(self, trace: str) -> Iterator[Row]:
        """The updates of a trace, in the order in which they were written."""
        for reader, ticket in self._at.get(trace, ()):
            yield reader.row(ticket).value or {}


class Join:
    """Joins rows that are single calls into conversations, and finds messages and tools in other files by id.

    The index is built before processes are forked, so they share it. Where messages are joined, the lines of a
    NeMo-Gym token capture become one rollout for each rollout id.
    """

    def __init__(self, settings: Settings, logs: Sequence[Path], calls: JoinedCalls | None = None) -> None:
        self._settings = settings
        self._captures = Captures(settings) if settings.messages is not None else None
        self._calls = calls
        self._latest: tuple[tuple[str, int], tuple[Rollout, ...] | None] | None = None
        """The row found last, and its conversations; None if they cannot be read."""
        self._messages = self._partners("--messages", settings.messages, logs)
        self._list: tuple[ToolSpec, ...] | None = None
        self._tools: Partners | None = None
        if settings.tools_file is not None:
            self._list = shared_tools(settings.tools_file, settings)
            if self._list is None:
                self._tools = self._partners("--tools", settings.tools_file, logs)
        self._tallies: list[PartnerTally] = []
        for word, partners in (("messages", self._messages), ("tools", self._tools)):
            if partners is not None:
                # The id of the log's first row, as readers see it.
                row = first_row(logs, settings.max_row_bytes, settings.rows_at)
                key = partners.keys.of_log(row, str(logs[0]), 0) if row is not None else None
                self._tallies.append(PartnerTally(word, partners, readable_id(key) if key is not None else None))
        self._with_own_tools = 0
        self._rollouts = 0

    @classmethod
    def of(
        cls,
        settings: Settings,
        logs: Sequence[Path],
        decode: Decode | None = None,
        mapped: Mapped = one_by_one,
        *,
        written: bool = False,
        gathers: bool = True,
    ) -> Join | None:
        """The join of a run; None when nothing is joined. SetupError or StorageError when it is impossible.
        `decode` gives the bytes of ids, if there is a tokenizer; `mapped` runs the first pass over calls.

        Logs `written` by a repair may have lost all rows with a session key. Without `gathers`, rows come as those
        of a join that gathers calls, so no log is searched for them.
        """
        others = settings.messages is not None or settings.tools_file is not None
        if not others and settings.on:
            raise SetupError(
                f"--on {next(iter(settings.on))}: nothing is joined. Pass --messages FILE or --tools FILE."
            )
        pipe = next((log for log in logs if not log.is_file()), None)
        if pipe is not None and (others or settings.session is not None):
            raise SetupError(
                f"{pipe}: a pipe cannot be joined, as it cannot be read twice; save it to a file first."
            )
        if settings.session is not None and gathers:
            named = f"--session {settings.session}"
            if not settings.join:
                raise SetupError(f"{named}: nothing is joined with --no-join; leave one of the two out.")
            for flag, value in (("--rows-at", settings.rows_at), ("--map", settings.columns)):
                if value:
                    raise SetupError(
                        f"{named}: it cannot be combined with {flag}.\n"
                        "Only whole rows with known column names are joined; leave one of the two out."
                    )
            refuse_unknown(settings.session, [] if written else logs, settings.max_row_bytes)
        calls = None
        if gathers and settings.join and not settings.rows_at and not settings.columns:
            calls = JoinedCalls(settings, logs, decode, mapped)
            calls = calls if calls.heads else None
        return cls(settings, logs, calls) if others or calls is not None else None

    def rows(self, log: Log) -> Iterator[RawRow]:
        """The rows of a log; where calls are gathered, one row for each rollout, at its first call."""
        return iter(self._gathering(log) or log)

    def chunks(self, log: Log, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes."""
        calls = self._gathering(log)
        return chunks_of(log, size) if calls is None else calls.chunks(size)

    def output(self, out: Output, log: Log) -> Output:
        """An output for the rows that `rows` yields."""
        gathering = self._gathering(log)
        return out if gathering is None else gathering.output(out)

    def joins_logs(self, log: Path) -> bool:
        """Whether rows of a log are joined, or numbered, with those of other logs."""
        calls = self._calls is not None and log in self._calls.heads and len(self._calls.heads) > 1
        return calls or any(
            tally.partners.keys.occurrences is not None for tally in self._tallies if len(tally.partners)
        )

    def keys(self) -> list[str]:
        """The columns by which other files are joined."""
        return [f"{tally.partners.option} {tally.partners.keys}" for tally in self._tallies]

    def apply(self, rollouts: Sequence[Rollout], row: Row) -> Sequence[Rollout]:
        """The rollouts of a row with the messages and tools found for them; their own are kept.

        Each has in `joined`, for messages and for tools, the number of the row found (`_row`), and again if they
        are taken from it (`_from`); a negative number says why there is none.
        """
        if self._messages is None and self._tools is None and self._list is None:
            return rollouts
        row = row.raws[0].value or {} if isinstance(row, CallsOfRollout) else row
        return tuple(self._apply(rollout, number, len(rollouts), row) for number, rollout in enumerate(rollouts))

    def counted(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results, in the order of the rows, counted as they pass."""
        for result in results:
            if result.rollout is not None:
                self._rollouts += 1
                self._with_own_tools += result.counts.get("tools_from") == OWN
                for tally in self._tallies:
                    tally.add(result.place, result.counts)
            yield result

    def joined(self) -> Iterator[str]:
        """How rows that are single calls became conversations, for the summary."""
        for calls in (self._captures, self._calls):
            if calls is not None:
                yield from calls.notices()

    def notices(self) -> Iterator[str]:
        """What other files had for the rollouts, for the summary, after all results were counted."""
        cut = (self._settings.limit, self._settings.row, self._settings.sample)
        whole = all(limit is None for limit in cut)
        for tally in self._tallies:
            yield from tally.notices(whole=whole)
        if self._list is not None:
            count = self._with_own_tools
            own = f"; {count} had tools of their own, which were kept" if count else ""
            count, tools = self._rollouts - self._with_own_tools, len(self._list)
            yield f"--tools {self._settings.tools}: {tools} tool{'s' * (tools != 1)} for {count} rollouts{own}."

    def _partners(self, option: str, named: str | None, logs: Sequence[Path]) -> Partners | None:
        if named is None:
            return None
        files = find_logs([named])
        limit = self._settings.max_row_bytes
        keys = keys_for(option, self._settings.on, logs, files, limit, self._settings.rows_at)
        if keys is None:
            if first_row(files, limit) is None:
                raise SetupError(f"{option} {named}: none of its rows can be read, so nothing can be joined.")
            return None
        return Partners(option, named, files, keys, limit)

    def _gathering(self, log: Log) -> Gathering | None:
        """The conversations of a log whose rows are single calls; None for any other log."""
        for calls in (self._captures, self._calls):
            if calls is not None and (rows := calls.rows(log)) is not None:
                return Gathering(rows, log)
        return None

    def _apply(self, rollout: Rollout, number: int, of: int, row: Row) -> Rollout:
        place = rollout.place
        joined: dict[str, int] = {}
        tools, conversation = rollout.tools, None
        if self._messages is not None:
            joined["messages_row"], code, conversation = self._partner(self._messages, place, number, of, row)
            joined["messages_from"] = code
            tools = tools or (conversation.tools if conversation is not None else ())
        if self._list is not None:
            joined["tools_from"] = OWN if tools else 0
            tools = tools or self._list
        elif self._tools is not None:
            joined["tools_row"], code, other = self._partner(self._tools, place, number, of, row)
            joined["tools_from"] = OWN if tools else EMPTY if other is not None and not other.tools else code
            tools = tools or (chat_tools(other.tools, "tools") if other is not None else ())
        rollout = replace(rollout, tools=tools)
        if rollout.messages or any(turn.prompt_messages is not None for turn in rollout.turns):
            joined["messages_from"] = OWN
        elif conversation is not None and not conversation.messages:
            joined["messages_from"] = EMPTY
        elif conversation is not None and calls_unknown_tools(conversation.messages, tools):
            joined["messages_from"] = NO_TOOLS
        elif conversation is not None:
            if rollout.turns or not all(message.given for message in conversation.messages):
                rollout = with_conversation(rollout, conversation)
            else:
                joined["messages_from"] = NO_ANSWER
        return replace(rollout, stated=replace(rollout.stated, joined=joined))

    def _partner(
        self, partners: Partners, place: Place, number: int, of: int, row: Row
    ) -> tuple[int, int, Rollout | None]:
        """For a rollout: the row found, the row its conversation is taken from, and the conversation.

        A negative code says why there is no row.
        """
        key = partners.keys.of_log(row, place.file, place.row)
        if key is None:
            return NO_ID, NO_ID, None
        partner = partners.find(key)
        if partner is None:
            return NO_ROW, NO_ROW, None
        at, where, other = partner
        cached = (partners.option, at)
        if self._latest is None or self._latest[0] != cached:
            try:
                self._latest = cached, conversations(other, where)
            except RecordError:
                self._latest = cached, None
        conversations_of_row = self._latest[1]
        if conversations_of_row is None:
            return at, UNREADABLE, None
        if not conversations_of_row:
            return at, EMPTY, None
        # One conversation can serve several rollouts only if all of them were sent it.
        answered = bool(conversations_of_row[0].messages) and conversations_of_row[0].messages[-1].sampled
        if len(conversations_of_row) != of and (len(conversations_of_row) != 1 or answered):
            return at, MISFIT, None
        return at, at, conversations_of_row[number if len(conversations_of_row) == of else 0]


_PLAIN = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")


def conversations(row: Row, place: Place) -> tuple[Rollout, ...]:
    """The conversations of a row of any format, or of its columns `messages` and `tools`; () when it has none.

    RecordError when it has messages that cannot be read.
    """
    plain = {name: row[name] for name in _PLAIN if row.get(name) is not None}
    try:
        form = pick_format(row)
    except RecordError:
        return _plain(plain, place) if plain else ()
    try:
        return tuple(form.read(row, place))
    except RecordError:
        # A row with bad ids may have good messages.
        if not plain:
            raise
        return _plain(plain, place)


def with_conversation(rollout: Rollout, conversation: Rollout) -> Rollout:
    """The rollout with these messages, and each call with its own if calls and answers can be paired."""
    members = rollout.stated.chain
    chain = list(range(len(rollout.turns)) if members is None else members)
    calls = [rollout.turns[number] for number in chain]
    paired = _paired(calls, conversation)
    if members is not None and paired is not None:
        texts = _wrote(calls, conversation.messages, [index for index, _ in paired])
        if texts and not any(own.strip() == theirs.strip() for own, theirs in texts):
            paired = None  # The messages are another agent's.
    turns = list(rollout.turns)
    if paired is not None:
        for number, (index, sent) in zip(chain, paired, strict=True):
            turns[number] = replace(turns[number], message_index=index, prompt_messages=sent)
        # A retry, a call outside the chain with the prompt of a call in it, was sent the same.
        for number, turn in enumerate(turns):
            prompt = None if number in chain else turn.prompt_ids
            for again in (turns[k] for k in chain) if prompt is not None else ():
                if prompt is not None and again.prompt_ids is not None and same_ids(again.prompt_ids, prompt):
                    index, sent = again.message_index, again.prompt_messages
                    sent = sent if index is None else conversation.messages[:index]
                    turns[number] = replace(turn, prompt_messages=sent)
                    break
    arguments = rollout.template_kwargs or conversation.template_kwargs
    return replace(rollout, messages=conversation.messages, turns=tuple(turns), template_kwargs=arguments)


def _plain(columns: Row, place: Place) -> tuple[Rollout, ...]:
    """The conversations in these columns; several where `messages` is a list of lists."""
    form, messages = format_named("generic"), columns.get("messages")
    each = [columns]
    if isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages):
        each = [{**columns, "messages": message_list} for message_list in messages]
    return tuple(rollout for row in each for rollout in form.read(row, place))


def _paired(
    turns: Sequence[Turn], conversation: Rollout
) -> Sequence[tuple[int | None, tuple[Message, ...] | None]] | None:
    """Each call's message index and what it was sent; None if calls and answers cannot be paired."""
    if not turns:
        return None
    calls = [(turn.message_index, turn.prompt_messages) for turn in conversation.turns]
    if len(calls) == len(turns) and any(index is not None or sent for index, sent in calls):
        return calls
    messages = conversation.messages
    answers = [i for i, message in enumerate(messages) if message.sampled]
    last = answers[-len(turns) :]
    if len(turns) == 1 and messages and not messages[-1].sampled:
        if last and _wrote_all(turns, messages, last):
            return [(last[0], None)]
        # What the only call was sent; after a tool message, this is certain only if the call wrote other text.
        sure = messages[-1].speaker != "tool" or turns[0].completion_text is not None
        return [(None, messages)] if sure else None
    # More answers than calls: the first ones are examples, not sampled, or the log holds only some of the calls.
    if len(answers) < len(turns) or (len(answers) > len(turns) and not _wrote_all(turns, messages, last)):
        return None
    return [(index, None) for index in last]


def _wrote_all(turns: Sequence[Turn], messages: Sequence[Message], indices: Sequence[int]) -> bool:
    """Whether these messages have the texts that the calls are known to have written."""
    texts = _wrote(turns, messages, indices)
    return bool(texts) and all(own == theirs for own, theirs in texts)


def _wrote(
    turns: Sequence[Turn], messages: Sequence[Message], indices: Sequence[int | None]
) -> list[tuple[str, str]]:
    """The texts that calls are known to have written, each with that of its message."""
    return [
        (turn.completion_text, messages[index].text)
        for turn, index in zip(turns, indices, strict=True)
        if turn.completion_text is not None and index is not None
    ]


# Files of tools: one list for all rollouts, or rows with an id and tools


_SHAPES = ("parameters", "input_schema", "description")
"""Keys that show that an object with a name describes a tool."""


def shared_tools(named: str, settings: Settings) -> tuple[ToolSpec, ...] | None:
    """The list of tools in a file; None if the file has rows with tools instead. SetupError if it has neither."""
    (file, *more) = find_logs([named])
    rows: list[Row] = []
    for raw in open_log(file, max_row_bytes=settings.max_row_bytes):
        if raw.value is None:
            raise SetupError(f"--tools {file}: row {raw.index} cannot be read: {raw.error}")
        rows.append(raw.value)
        if not _is_tool(raw.value):
            break
    if not rows:
        raise SetupError(
            f"--tools {file}: it holds no tools. Write a JSON array of them, or rows with an id and `tools`."
        )
    if all(map(_is_tool, rows)) and not more:
        return _listed(rows, file.name)
    if "tools" not in rows[-1]:
        raise SetupError(
            f"--tools {file}: row {len(rows) - 1} is neither a tool (an object with `function`) nor a "
            f"row with `tools`; it has {', '.join(map(str, list(rows[-1])[:12]))}."
        )
    if rows[-1].keys() <= {"tools", "tool_choice", "parallel_tool_calls"} and not more:
        return _listed(rows[-1]["tools"], file.name)
    return None


def _listed(tools: object, where: str) -> tuple[ToolSpec, ...]:
    try:
        specs = chat_tools(tools, f"--tools {where}")
    except RecordError as error:
        raise SetupError(f"{error}.") from None
    if not specs:
        raise SetupError(f"--tools {where}: the list of tools is empty.")
    return specs


def _is_tool(row: Row) -> bool:
    if isinstance(row.get("function"), Mapping):
        return True
    return isinstance(row.get("name"), str) and "tools" not in row and any(name in row for name in _SHAPES)
