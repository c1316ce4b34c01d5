"""Messages, tools and calls from other files, joined to rollouts by id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import calls_unknown_tools, chat_tools, format_named, pick_format, with_trainer_updates
from tito_audit.join._call_rows import (
    BatchAnswers,
    CallRows,
    Captures,
    Gathering,
    JoinedCalls,
    MapBatches,
    ReadBatch,
    count_joined,
    joined_notices,
    key_of_format,
    map_in_process,
)
from tito_audit.join._calls import CallsOfRollout, gathered_format
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
    choose_keys,
    first_row,
    readable_id,
    value_at,
)
from tito_audit.join._reader import (
    NAMES,
    SEEN,
    CallReader,
    conversation_name,
    find_conversation_key,
    is_joinable,
    possible_key_paths,
)
from tito_audit.join.history import JoinedBy
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
    "BatchAnswers",
    "CallsInspected",
    "CallsJoined",
    "CallsOfRollout",
    "Decode",
    "Join",
    "PossibleKey",
    "ReadBatch",
    "RowBatch",
    "format_of_row",
    "gathered_calls",
    "inspect_calls",
    "joined_counts",
    "rows_behind",
    "shown_format_and_row",
]


def format_of_row(row: Row, named: Format | None) -> Format:
    """The format of a row: the named one, else the first that matches; RecordError if none does."""
    if isinstance(row, CallsOfRollout):
        return gathered_format(row.form)
    return named or pick_format(row)


def shown_format_and_row(form: Format, row: Row) -> tuple[Format, Row]:
    """The format and row by whose keys a report shows what a log was read as: of joined calls, the first one's."""
    if isinstance(row, CallsOfRollout) and row.by_key:
        return row.format, row.raws[0].value or row
    return form, row


def rows_behind(raw: RawRow) -> Sequence[RawRow]:
    """The rows of the log that this row is made of: itself, or the calls gathered in it."""
    return raw.value.raws if isinstance(raw.value, CallsOfRollout) else (raw,)


def gathered_calls(raw: RawRow) -> CallsOfRollout | None:
    """The calls gathered in this row, each a row of the log; None for a row that is in the log itself."""
    return raw.value if isinstance(raw.value, CallsOfRollout) else None


def joined_counts(rollout: Rollout) -> dict[str, int]:
    """What `Join.apply` found for a rollout, and the rows it was joined from; {} where nothing was joined."""
    rows = len(rollout.stated.calls_at)
    return {**rollout.stated.joined, **({"rows": rows} if rows > 1 else {})}


class Annotations:
    """Updates of traces by trace id, as the file monitor of prime-rl writes them.

    PrimeIntellect-ai/prime-rl `src/prime_rl/monitors/file/monitor.py` (`log_annotations`): episodes in
    `traces/stream/`; rows with `trace_id` and `branches` in `traces/annotations/PRODUCER/`, several for a trace.
    Updates stay in their files; the place of each takes some 200 bytes.
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
    def find_beside(cls, files: Iterable[Path], max_row_bytes: int) -> dict[str, Annotations]:
        """By log in a folder `stream`, the annotations beside that folder."""
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

    def apply_to(self, form: Format, row: Row) -> Row:
        """The row with the updates of its traces applied."""
        return with_trainer_updates(row, self.updates_of) if form.name == "verifiers_v1" and self._at else row

    def notices(self) -> Iterator[str]:
        """How many there are, for the summary."""
        updates = sum(map(len, self._at.values()))
        if updates:
            yield f"{self.folder}: {updates:,} annotations of {len(self._at):,} traces, joined on the trace's id."

    def updates_of(self, trace: str) -> Iterator[Row]:
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
        """The row found last, as (option, number), and its conversations; None if they cannot be read."""
        self._messages = self._load_partners("--messages", settings.messages, logs)
        self._list: tuple[ToolSpec, ...] | None = None
        self._tools: Partners | None = None
        if settings.tools_file is not None:
            self._list = read_shared_tools(settings.tools_file, settings)
            if self._list is None:
                self._tools = self._load_partners("--tools", settings.tools_file, logs)
        self._tallies: list[PartnerTally] = []
        for word, partners in (("messages", self._messages), ("tools", self._tools)):
            if partners is not None:
                # The id of the log's first row, as readers see it.
                row = first_row(logs, settings.max_row_bytes, settings.rows_at)
                key = partners.keys.id_in_log(row, str(logs[0]), 0) if row is not None else None
                self._tallies.append(PartnerTally(word, partners, readable_id(key) if key is not None else None))
        self._with_own_tools = 0
        self._rollouts = 0

    @classmethod
    def for_run(
        cls,
        settings: Settings,
        logs: Sequence[Path],
        decode: Decode | None = None,
        mapped: MapBatches = map_in_process,
        *,
        written: bool = False,
        gathers: bool = True,
    ) -> Join | None:
        """The join of a run; None if nothing is joined. SetupError or StorageError if it is impossible.

        decode     gives the bytes of ids; None without a tokenizer
        mapped     runs the first pass over calls
        written    whether a repair wrote the logs: all rows with the session key may have been removed
        gathers    False if rows come from a join that has gathered the calls already
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
            refuse_unknown_key(settings.session, [] if written else logs, settings.max_row_bytes)
        calls = None
        if gathers and settings.join and not settings.rows_at and not settings.columns:
            calls = JoinedCalls(settings, logs, decode, mapped)
            calls = calls if calls.heads else None
        return cls(settings, logs, calls) if others or calls is not None else None

    def rows(self, log: Log) -> Iterator[RawRow]:
        """The rows of a log; gathered calls are one row per rollout, in place of its first call."""
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
        """Whether rows of a log are joined, or counted, together with those of other logs."""
        calls = self._calls is not None and log in self._calls.heads and len(self._calls.heads) > 1
        return calls or any(
            tally.partners.keys.occurrences is not None for tally in self._tallies if len(tally.partners)
        )

    def key_columns(self) -> list[str]:
        """The columns that other files are joined by, in words."""
        return [f"{tally.partners.option} {tally.partners.keys}" for tally in self._tallies]

    def apply(self, rollouts: Sequence[Rollout], row: Row) -> Sequence[Rollout]:
        """The rollouts of a row with the messages and tools found for them; their own are kept.

        Each has in `joined`, for messages and for tools, the number of the row found (`_row`), and again if they
        are taken from it (`_from`); a negative number says why there is none.
        """
        if self._messages is None and self._tools is None and self._list is None:
            return rollouts
        row = row.raws[0].value or {} if isinstance(row, CallsOfRollout) else row
        several, applied = len(rollouts), []
        for k, rollout in enumerate(rollouts):
            where = rollout.place, k, several, row
            joined: dict[str, int] = {}
            tools, conversation = rollout.tools, None
            if self._messages is not None:
                joined["messages_row"], code, conversation = self._find_partner(self._messages, *where)
                joined["messages_from"] = code
                tools = tools or (conversation.tools if conversation is not None else ())
            if self._list is not None:
                joined["tools_from"] = OWN if tools else 0
                tools = tools or self._list
            elif self._tools is not None:
                joined["tools_row"], code, other = self._find_partner(self._tools, *where)
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
                if rollout.turns or not all(message.known_unsampled for message in conversation.messages):
                    rollout = add_conversation(rollout, conversation)
                else:
                    joined["messages_from"] = NO_ANSWER
            applied.append(replace(rollout, stated=replace(rollout.stated, joined=joined)))
        return tuple(applied)

    def count_results(self, results: Iterable[Result]) -> Iterator[Result]:
        """Pass results through in the order of the rows, and count them for `notices`."""
        for result in results:
            if result.rollout is not None:
                self._rollouts += 1
                self._with_own_tools += result.counts.get("tools_from") == OWN
                for tally in self._tallies:
                    tally.add(result.place, result.counts)
            yield result

    def joined_notices(self) -> Iterator[str]:
        """How rows that are single calls became conversations, for the summary."""
        for calls in (self._captures, self._calls):
            if calls is not None:
                yield from calls.notices()

    def notices(self) -> Iterator[str]:
        """What other files held for the rollouts, for the summary, once all results are counted."""
        cut = (self._settings.limit, self._settings.row, self._settings.sample)
        whole = all(limit is None for limit in cut)
        for tally in self._tallies:
            yield from tally.notices(whole=whole)
        if self._list is not None:
            count = self._with_own_tools
            own = f"; {count} had tools of their own, which were kept" if count else ""
            count, tools = self._rollouts - self._with_own_tools, len(self._list)
            yield f"--tools {self._settings.tools}: {tools} tool{'s' * (tools != 1)} for {count} rollouts{own}."

    def _load_partners(self, option: str, named: str | None, logs: Sequence[Path]) -> Partners | None:
        if named is None:
            return None
        files = find_logs([named])
        limit = self._settings.max_row_bytes
        keys = choose_keys(option, self._settings.on, logs, files, limit, self._settings.rows_at)
        if keys is None:
            if first_row(files, limit) is None:
                raise SetupError(f"{option} {named}: none of its rows can be read, so nothing can be joined.")
            return None
        return Partners(option, named, files, keys, limit)

    def _gathering(self, log: Log) -> Gathering | None:
        """The gathered rows of a log whose rows are single calls; None for any other log."""
        for calls in (self._captures, self._calls):
            if calls is not None and (rows := calls.rows(log)) is not None:
                return Gathering(rows, log)
        return None

    def _find_partner(
        self, partners: Partners, place: Place, number: int, count: int, row: Row
    ) -> tuple[int, int, Rollout | None]:
        """The row found for a rollout, the row its conversation is taken from, and the conversation.

        A negative number is the code that says why there is none.
        """
        key = partners.keys.id_in_log(row, place.file, place.row)
        if key is None:
            return NO_ID, NO_ID, None
        partner = partners.find(key)
        if partner is None:
            return NO_ROW, NO_ROW, None
        at, where, other = partner
        cached = (partners.option, at)
        if self._latest is None or self._latest[0] != cached:
            try:
                self._latest = cached, read_conversations(other, where)
            except RecordError:
                self._latest = cached, None
        conversations_of_row = self._latest[1]
        if conversations_of_row is None:
            return at, UNREADABLE, None
        if not conversations_of_row:
            return at, EMPTY, None
        # One conversation serves several rollouts only if all of them were sent it: it has no answer.
        answered = bool(conversations_of_row[0].messages) and conversations_of_row[0].messages[-1].sampled
        if len(conversations_of_row) != count and (len(conversations_of_row) != 1 or answered):
            return at, MISFIT, None
        return at, at, conversations_of_row[number if len(conversations_of_row) == count else 0]


_PLAIN = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")


def read_conversations(row: Row, place: Place) -> tuple[Rollout, ...]:
    """The conversations of a row of any format, or of its columns `messages` and `tools`; () if it has none.

    RecordError if it has messages that cannot be read.
    """
    plain = {name: row[name] for name in _PLAIN if row.get(name) is not None}
    try:
        form = pick_format(row)
    except RecordError:
        return _read_plain_columns(plain, place) if plain else ()
    try:
        return tuple(form.read(row, place))
    except RecordError:
        # A row with bad ids may have good messages.
        if not plain:
            raise
        return _read_plain_columns(plain, place)


def add_conversation(rollout: Rollout, conversation: Rollout) -> Rollout:
    """The rollout with these messages, and each call with those it was sent if calls and answers can be paired."""
    members = rollout.stated.chain
    chain = list(range(len(rollout.turns)) if members is None else members)
    calls = [rollout.turns[number] for number in chain]
    paired = _pair_calls(calls, conversation)
    if members is not None and paired is not None:
        texts = _known_texts(calls, conversation.messages, [index for index, _ in paired])
        if texts and not any(own.strip() == theirs.strip() for own, theirs in texts):
            paired = None  # another agent's messages
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


def _read_plain_columns(columns: Row, place: Place) -> tuple[Rollout, ...]:
    """The conversations in plain columns; several where `messages` is a list of lists."""
    form, messages = format_named("generic"), columns.get("messages")
    each = [columns]
    if isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages):
        each = [{**columns, "messages": message_list} for message_list in messages]
    return tuple(rollout for row in each for rollout in form.read(row, place))


def _pair_calls(
    turns: Sequence[Turn], conversation: Rollout
) -> Sequence[tuple[int | None, tuple[Message, ...] | None]] | None:
    """(message index, messages sent) of each call; None if calls and answers cannot be paired."""
    if not turns:
        return None
    calls = [(turn.message_index, turn.prompt_messages) for turn in conversation.turns]
    if len(calls) == len(turns) and any(index is not None or sent for index, sent in calls):
        return calls
    messages = conversation.messages
    answers = [i for i, message in enumerate(messages) if message.sampled]
    last = answers[-len(turns) :]
    if len(turns) == 1 and messages and not messages[-1].sampled:
        if last and _texts_match(turns, messages, last):
            return [(last[0], None)]
        # The messages are what the only call was sent; after a tool message only if the call wrote other text.
        sure = messages[-1].speaker != "tool" or turns[0].completion_text is not None
        return [(None, messages)] if sure else None
    # More answers than calls: the first ones are examples, not sampled, or the log holds only some of the calls.
    if len(answers) < len(turns) or (len(answers) > len(turns) and not _texts_match(turns, messages, last)):
        return None
    return [(index, None) for index in last]


def _texts_match(turns: Sequence[Turn], messages: Sequence[Message], indices: Sequence[int]) -> bool:
    """Whether some calls' texts are known, and all of these are those of their messages."""
    texts = _known_texts(turns, messages, indices)
    return bool(texts) and all(own == theirs for own, theirs in texts)


def _known_texts(
    turns: Sequence[Turn], messages: Sequence[Message], indices: Sequence[int | None]
) -> list[tuple[str, str]]:
    """The texts that calls are known to have written, each with the text of its message."""
    return [
        (turn.completion_text, messages[index].text)
        for turn, index in zip(turns, indices, strict=True)
        if turn.completion_text is not None and index is not None
    ]


# Files of tools: one list for all rollouts, or rows with an id and tools


_SHAPES = ("parameters", "input_schema", "description")
"""Keys that show that an object with a name describes a tool."""


def read_shared_tools(named: str, settings: Settings) -> tuple[ToolSpec, ...] | None:
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
        return _as_tool_list(rows, file.name)
    if "tools" not in rows[-1]:
        raise SetupError(
            f"--tools {file}: row {len(rows) - 1} is neither a tool (an object with `function`) nor a "
            f"row with `tools`; it has {', '.join(map(str, list(rows[-1])[:12]))}."
        )
    if rows[-1].keys() <= {"tools", "tool_choice", "parallel_tool_calls"} and not more:
        return _as_tool_list(rows[-1]["tools"], file.name)
    return None


def _as_tool_list(tools: object, where: str) -> tuple[ToolSpec, ...]:
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


_LISTED = 16


def refuse_unknown_key(path: str, logs: Sequence[Path], max_row_bytes: int) -> None:
    """Raises SetupError, with similar keys, if no row of the logs names a conversation at this path."""
    seen: list[Row] = []
    for log in logs:
        for raw in open_log(log, max_row_bytes=max_row_bytes):
            if raw.value is None:
                continue
            if conversation_name(value_at(raw.value, path)) is not None:
                return
            if len(seen) < SEEN:
                seen.append(raw.value)
    if not seen:
        return
    keys = list(dict.fromkeys(key for row in seen for key in possible_key_paths(row)))
    last = path.rpartition(".")[2]
    ends = {key: key.rpartition(".")[2] for key in keys}
    like = difflib.get_close_matches(last, list(dict.fromkeys(ends.values())), n=3)
    own = [key for end in like for key in keys if ends[key] == end]
    close = list(dict.fromkeys([*difflib.get_close_matches(path, keys, n=2), *own]))[:3]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    where = str(logs[0]) if len(logs) == 1 else f"the {len(logs)} logs"
    listed = ", ".join(keys[:_LISTED]) + (", …" if len(keys) > _LISTED else "")
    has = f"\nText and whole numbers are in {listed}." if keys else ""
    raise SetupError(f"--session {path}: no row of {where} names a conversation there.{hint}{has}")


_LIKE_A_KEY = re.compile(
    r"(?:^|[^a-z])(?:ids?|uuid|uid|guid|session|conversation|traj|trajectory|rollout|episode|thread|trace|chat|run)"
    r"(?:$|[^a-z])"
)
_BEFORE_A_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class PossibleKey:
    """A column or path that could name the conversations of a log."""

    path: str
    rows: int
    """Calls with a name there."""
    values: int
    """Different names."""
    used: bool
    """Whether calls are joined by it."""


@dataclass(frozen=True, slots=True)
class CallsJoined:
    """The result of joining calls."""

    rows: int
    """Calls joined to others."""
    conversations: int
    """The conversations that these are."""
    alone: int
    """Calls joined to no other."""
    said: tuple[str, ...]
    """The same in words, with what joined them."""


@dataclass(frozen=True, slots=True)
class CallsInspected:
    """The single calls among the rows of a log that were read."""

    rows: int
    """Rows that are one call each."""
    keys: tuple[PossibleKey, ...]
    joined: CallsJoined | None
    """None where nothing is joined."""


def inspect_calls(
    path: Path, rows: Sequence[Row], count: int, settings: Settings, decode: Decode | None = None
) -> CallsInspected | None:
    """The calls among the first `count` rows of a log, of which `rows` can be read; None if fewer than two.

    StorageError if the log cannot be read a second time.
    """
    stated = settings.session
    calls = [row for row in rows if is_joinable(row, settings.format, stated=stated is not None)]
    if len(calls) < 2 or settings.columns or settings.rows_at or not path.is_file():
        return None
    if not settings.join:
        return CallsInspected(len(calls), tuple(_possible_keys(calls, None)), None)
    reader = CallReader(settings.format, stated, find_conversation_key(calls[:SEEN]) if stated is None else None)
    log = open_log(path, max_row_bytes=settings.max_row_bytes)
    joined = CallRows([log], reader, decode, count, calls[:SEEN])
    history = joined.joined
    by_key = history is not None and (history.keys_believed or JoinedBy.KEY in history.by)
    used = stated or key_of_format(joined) or (reader.found_key if by_key else None)
    several, conversations = count_joined(joined.root)
    alone = joined.named + len(joined.traced) - several
    result = CallsJoined(several, conversations, alone, tuple(joined_notices(joined, reader)))
    return CallsInspected(len(calls), tuple(_possible_keys(calls, used)), result)


def _possible_keys(calls: Sequence[Row], used: str | None) -> Iterator[PossibleKey]:
    """The paths that could name the conversations of calls: the used one first, then the usual ones."""
    paths = dict.fromkeys(path for row in calls for path in possible_key_paths(row))
    usual = [path for path in paths if path.rpartition(".")[2] in NAMES]
    own_names = {path: _BEFORE_A_CAPITAL.sub("_", path.rpartition(".")[2]).lower() for path in paths}
    alike = [path for path, name in own_names.items() if _LIKE_A_KEY.search(name)]
    for path in dict.fromkeys([*([used] if used else []), *usual, *alike]):
        names = [name for row in calls if (name := conversation_name(value_at(row, path))) is not None]
        values = len(set(names))
        # A value that no two calls share joins nothing.
        if path == used or path in usual or 1 < values < len(names):
            yield PossibleKey(path, len(names), values, path == used and values > 0)
