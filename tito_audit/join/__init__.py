"""Messages, tools and calls from other files, joined to rollouts by id."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.format import Format, Row
from tito_audit.formats import calls_unknown_tools, chat_tools, format_named, pick_format
from tito_audit.join._call_rows import Decode
from tito_audit.join._calls import CallsOfRollout, gathered
from tito_audit.join._conversations import (
    Conversation,
    conversations,
    has_messages,
    shared_tools,
    with_conversation,
)
from tito_audit.join._first_pass import Answers, Batch, Mapped, Work, one_by_one
from tito_audit.join._gathering import Captures, Gathering, JoinedCalls
from tito_audit.join._keys import Keys, first_row, keys_for
from tito_audit.join._sessions import CallsJoined, CallsSeen, KeySeen, calls_seen, refuse_unknown
from tito_audit.join.history import hash_of
from tito_audit.record.finding import Result
from tito_audit.record.message import ToolSpec
from tito_audit.record.rollout import Place, Rollout
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, find_logs
from tito_audit.storage.chunks import Chunk, chunks_of
from tito_audit.storage.random_access import RandomAccess
from tito_audit.storage.spool import Spool
from tito_audit.terminal.cut import elided

# Partners: the rows of other files, found by id.


class Partners:
    """Rows of some files by their ids; StorageError or SetupError when they cannot be used.

    For each row its place and 64 bits of its id are kept, some 30 bytes; rows of files that are not plain JSONL go
    into a temporary file. Processes forked afterwards share it.
    """

    def __init__(self, option: str, name: str, files: Sequence[Path], keys: Keys, max_row_bytes: int) -> None:
        self.option = option
        self.name = name
        self.files = files
        self.keys = keys
        self.rows = 0
        self.without_id = 0
        self.unreadable = 0
        self.first_bad: Place | None = None
        """The first row that has no id or cannot be read."""
        self.first_id: str | None = None
        spool = Spool()
        self._readers = [RandomAccess(file, max_row_bytes=max_row_bytes, spool=spool) for file in files]
        hashes, file_of, index_of, at = array("Q"), array("I"), array("Q"), array("Q")
        for number, reader in enumerate(self._readers):
            for ticket, raw in reader:
                self.rows += 1
                key = keys.of_other(raw.value, reader.path) if raw.value is not None else None
                if key is None:
                    self.unreadable += raw.value is None
                    self.without_id += raw.value is not None
                    self.first_bad = self.first_bad or Place(str(reader.path), raw.index)
                    continue
                self.first_id = self.first_id or readable_id(key)
                hashes.append(_hash(key))
                file_of.append(number)
                index_of.append(ticket[0])
                at.append(ticket[1])
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        self._hashes = np.frombuffer(hashes, np.uint64)[order]
        self._file_of = np.frombuffer(file_of, np.uint32)[order]
        self._index_of = np.frombuffer(index_of, np.uint64)[order]
        self._at = np.frombuffer(at, np.uint64)[order]
        self._refuse_doubles()

    def __len__(self) -> int:
        """How many rows have an id."""
        return len(self._hashes)

    def find(self, key: str) -> tuple[int, Place, Row] | None:
        """The row with this id: its number here, its place and its value; None when there is none."""
        wanted = np.uint64(_hash(key))
        number = int(np.searchsorted(self._hashes, wanted))
        while number < len(self._hashes) and self._hashes[number] == wanted:
            place, row, own_key = self._row(number)
            if own_key == key:
                return number, place, row
            number += 1
        return None

    def _row(self, number: int) -> tuple[Place, Row, str]:
        """A row with its place and id; StorageError when the file has changed."""
        reader = self._readers[int(self._file_of[number])]
        index = int(self._index_of[number])
        raw = reader.row((index, int(self._at[number])))
        key = self.keys.of_other(raw.value, reader.path) if raw.value is not None else None
        if raw.value is None or key is None or _hash(key) != int(self._hashes[number]):
            raise StorageError(f"{self.option} {reader.path}: row {index} has changed since the run started.")
        return Place(str(reader.path), index), raw.value, key

    def _refuse_doubles(self) -> None:
        alike = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        for number in alike.tolist():
            (place, _, key), (other, _, again) = self._row(number), self._row(number + 1)
            if key != again:
                continue
            columns = ", ".join(self.keys.theirs)
            raise SetupError(
                f"{self.option}: {place} and {other} have the same id ({columns}: {readable_id(key)}), so which "
                "one belongs to a rollout is unknown.\n"
                "Name columns that tell them apart with --on LOG_COLUMN=FILE_COLUMN, several if need be."
            )


def readable_id(key: str) -> str:
    """An id for people, short enough for a line."""
    return elided(" + ".join(key.split("\x1f")), 60)


def _hash(key: str) -> int:
    return hash_of(key.encode("utf-8", "surrogatepass"))


# Counts of what a join found, and the notices about them


NO_ROW, NO_ID, OWN, EMPTY, MISFIT, UNREADABLE, NO_TOOLS, NO_ANSWER = -1, -2, -3, -4, -5, -6, -7, -8

_WHY = {
    NO_ROW: "found no row with their id",
    NO_ID: "without an id",
    OWN: "with {word} of their own, which were kept",
    EMPTY: "found a row without {word}",
    MISFIT: "share a row of the log, and the row found for it has another number of conversations",
    UNREADABLE: "found a row that cannot be read",
    NO_ANSWER: "found {word} without the answer that is trained",
    NO_TOOLS: "found {word} that call tools listed nowhere, so no template was applied; pass --tools FILE",
}


class Tally:
    """Counts rollouts by what was found for them in one file."""

    def __init__(self, word: str, partners: Partners, first_id: str | None) -> None:
        self.word = word
        self._partners = partners
        self._first_id = first_id
        self._found = 0
        self._missed: dict[int, tuple[int, Place]] = {}
        self._user = np.zeros(len(partners), np.int64)
        """For each row, the number (from 1) of the log's row that used it; 0 if none did."""
        self._row: tuple[str, int] | None = None
        self._rows = 0
        self._twice = 0
        self._first_twice: Place | None = None

    def add(self, place: Place, counts: Mapping[str, int]) -> None:
        """Count a rollout by what its counts say about the join."""
        code, row = counts.get(f"{self.word}_from"), counts.get(f"{self.word}_row", NO_ROW)
        if code is None:
            return
        if code < 0:
            count, first = self._missed.get(code, (0, place))
            self._missed[code] = count + 1, first
        else:
            self._found += 1
        if row < 0:
            return
        if self._row != (place.file, place.row):
            self._row = (place.file, place.row)
            self._rows += 1
        if self._user[row] not in (0, self._rows):
            self._twice += 1
            self._first_twice = self._first_twice or place
        self._user[row] = self._user[row] or self._rows

    def notices(self, *, whole: bool) -> Iterator[str]:
        """The notices, most important first; `whole` if the whole log was read."""
        partners = self._partners
        everything = self._found + sum(count for count, _ in self._missed.values())
        parts = [
            f"{count} {_WHY[code].format(word=self.word)} (first {first})"
            for code, (count, first) in sorted(self._missed.items(), reverse=True)
        ]
        missed = f"; {'; '.join(parts)}" if parts else ""
        yield (
            f"{partners.option} {partners.name}, joined on {partners.keys}: {self._found} of {everything} "
            f"rollouts found their {self.word}{missed}."
        )
        if not self._found and NO_ROW in self._missed and self._first_id and partners.first_id:
            yield (
                f"{partners.option}: no id of the log is in {partners.name}: the log's first is {self._first_id}, "
                f"the file's {partners.first_id}. Name other columns with --on."
            )
        if self._twice:
            yield (
                f"{partners.option}: rows of {partners.name} found for more than one row of the log: "
                f"{self._twice} times (first {self._first_twice}). If they are not one conversation, name "
                "columns that tell them apart with --on."
            )
        unused = len(partners) - int(np.count_nonzero(self._user))
        bad = [
            f"{count} {what}"
            for count, what in (
                (unused if whole else 0, "that match no rollout of the log"),
                (partners.without_id, "without an id"),
                (partners.unreadable, "that cannot be read"),
            )
            if count
        ]
        if bad:
            first = f" (first {partners.first_bad})" if partners.first_bad is not None else ""
            yield f"{partners.option} {partners.name}: {'; '.join(bad)}, of its {partners.rows} rows{first}."


__all__ = [
    "Answers",
    "Batch",
    "CallsJoined",
    "CallsSeen",
    "Decode",
    "Join",
    "KeySeen",
    "Work",
    "calls_seen",
    "contains_row",
    "form_of",
    "form_of_calls",
    "is_conversation",
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
        return format_named(row.form), row.raws[0].value or row
    return form, row


def lines_of(raw: RawRow) -> Sequence[RawRow]:
    """The rows of the file behind this one: itself, or the lines gathered in it."""
    return raw.value.raws if isinstance(raw.value, CallsOfRollout) else (raw,)


def is_conversation(raw: RawRow) -> bool:
    """Whether this row is several rows of the log, each a single call."""
    return isinstance(raw.value, CallsOfRollout)


def form_of_calls(raw: RawRow) -> Format:
    """The format of each call of a conversation."""
    assert isinstance(raw.value, CallsOfRollout)
    return format_named(raw.value.form)


def contains_row(raw: RawRow, index: int) -> bool:
    """Whether this row is the file's row `index`, or has it among its gathered lines."""
    return any(line.index == index for line in lines_of(raw))


def joined_counts(rollout: Rollout) -> dict[str, int]:
    """What `Join.apply` found for a rollout, and how many rows it has; {} where nothing was joined."""
    rows = len(rollout.stated.calls_at)
    return {**rollout.stated.joined, **({"rows": rows} if rows > 1 else {})}


class Join:
    """Joins rows that are single calls into conversations, and finds messages and tools in other files by id.

    The index is built before processes are forked, so they share it. Where messages are joined, the lines of a
    NeMo-Gym token capture become one rollout for each rollout id.
    """

    def __init__(self, settings: Settings, logs: Sequence[Path], calls: JoinedCalls | None = None) -> None:
        self._settings = settings
        self._captures = Captures(settings) if settings.messages is not None else None
        self._calls = calls
        self._held: tuple[tuple[str, int], tuple[Conversation, ...] | str] | None = None
        self._messages = self._partners("--messages", settings.messages, logs)
        self._list: tuple[ToolSpec, ...] | None = None
        self._tools: Partners | None = None
        if settings.tools_file is not None:
            self._list = shared_tools(settings.tools_file, settings)
            if self._list is None:
                self._tools = self._partners("--tools", settings.tools_file, logs)
        self._tallies = [
            Tally(word, partners, first_id)
            for word, partners, first_id in (
                ("messages", self._messages, self._first_id(self._messages, logs)),
                ("tools", self._tools, self._first_id(self._tools, logs)),
            )
            if partners is not None
        ]
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
            _refuse_session(settings, settings.session, [] if written else logs)
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
        for calls in (self._captures, self._calls):
            if calls is not None and calls.gathering(log) is not None:
                return calls.output(out, log)
        return out

    def joins_logs(self, log: Path) -> bool:
        """Whether rows of a log are joined, or numbered, with those of other logs."""
        calls = self._calls is not None and log in self._calls.heads and len(self._calls.heads) > 1
        return calls or any(
            partners.keys.occurrences is not None for partners in (self._messages, self._tools) if partners
        )

    def keys(self) -> list[str]:
        """The columns by which other files are joined."""
        return [
            f"{partners.option} {partners.keys}"
            for partners in (self._messages, self._tools)
            if partners is not None
        ]

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
            own = (
                f"; {self._with_own_tools} had tools of their own, which were kept" if self._with_own_tools else ""
            )
            count = self._rollouts - self._with_own_tools
            yield f"--tools {self._settings.tools}: {_tools(len(self._list))} for {count} rollouts{own}."

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

    def _first_id(self, partners: Partners | None, logs: Sequence[Path]) -> str | None:
        """The id of the log's first row, as readers see it."""
        settings = self._settings
        row = first_row(logs, settings.max_row_bytes, settings.rows_at) if partners is not None else None
        key = partners.keys.of_log(row, str(logs[0]), 0) if row is not None and partners is not None else None
        return readable_id(key) if key is not None else None

    def _gathering(self, log: Log) -> Gathering | None:
        """The conversations of a log whose rows are single calls; None for any other log."""
        for calls in (self._captures, self._calls):
            if calls is not None and (gathering := calls.gathering(log)) is not None:
                return gathering
        return None

    def _apply(self, rollout: Rollout, number: int, of: int, row: Row) -> Rollout:
        place = rollout.place
        joined: dict[str, int] = {}
        tools, conversation = rollout.tools, None
        if self._messages is not None:
            joined["messages_row"], code, conversation = self._found(self._messages, place, number, of, row)
            joined["messages_from"] = code
            tools = tools or (conversation.tools if conversation is not None else ())
        if self._list is not None:
            joined["tools_from"] = OWN if tools else 0
            tools = tools or self._list
        elif self._tools is not None:
            joined["tools_row"], code, other = self._found(self._tools, place, number, of, row)
            joined["tools_from"] = OWN if tools else EMPTY if other is not None and not other.tools else code
            tools = tools or (chat_tools(other.tools, "tools") if other is not None else ())
        rollout = replace(rollout, tools=tools)
        if has_messages(rollout):
            joined["messages_from"] = OWN
        elif conversation is not None and not conversation.messages:
            joined["messages_from"] = EMPTY
        elif conversation is not None and calls_unknown_tools(conversation.messages, tools):
            joined["messages_from"] = NO_TOOLS
        elif (
            conversation is not None
            and not rollout.turns
            and all(message.given for message in conversation.messages)
        ):
            joined["messages_from"] = NO_ANSWER
        elif conversation is not None:
            rollout = with_conversation(rollout, conversation)
        return replace(rollout, stated=replace(rollout.stated, joined=joined))

    def _found(
        self, partners: Partners, place: Place, number: int, of: int, row: Row
    ) -> tuple[int, int, Conversation | None]:
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
        if self._held is None or self._held[0] != cached:
            self._held = cached, _conversations(other, where)
        conversations_of_row = self._held[1]
        if isinstance(conversations_of_row, str):
            return at, UNREADABLE, None
        if not conversations_of_row:
            return at, EMPTY, None
        # One conversation can serve several rollouts only if all of them were sent it.
        answered = bool(conversations_of_row[0].messages) and conversations_of_row[0].messages[-1].sampled
        if len(conversations_of_row) != of and (len(conversations_of_row) != 1 or answered):
            return at, MISFIT, None
        return at, at, conversations_of_row[number if len(conversations_of_row) == of else 0]


def _refuse_session(settings: Settings, session: str, logs: Sequence[Path]) -> None:
    """SetupError if rows cannot be joined by session, or no row names one."""
    if not settings.join:
        raise SetupError(f"--session {session}: nothing is joined with --no-join; leave one of the two out.")
    for flag, given in (("--rows-at", settings.rows_at), ("--map", settings.columns)):
        if given:
            raise SetupError(
                f"--session {session}: it cannot be combined with {flag}.\n"
                "Only whole rows with known column names are joined; leave one of the two out."
            )
    refuse_unknown(session, logs, settings.max_row_bytes)


def _tools(count: int) -> str:
    return "1 tool" if count == 1 else f"{count} tools"


def _conversations(row: Row, place: Place) -> tuple[Conversation, ...] | str:
    try:
        return conversations(row, place)
    except RecordError as error:
        return str(error)
