"""Calls as training rows, training rows as calls, with the same tokens trained; and what a conversion loses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.fork import ForkedRow, SampledCall, fork_rows
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError
from tito_audit.join import CallsOfRollout
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, MovePolicy, expand
from tito_audit.record.message import Message
from tito_audit.record.policy_columns import WEIGHTS, versions_to_column, versions_to_spans
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn, with_speakers
from tito_audit.record.runs import Run, trained_runs
from tito_audit.record.speakers import Speakers
from tito_audit.storage.nested_rows import wrapper_keys
from tito_audit.storage.row import dump_row

REWARDS = ("reward", "rewards", "score", "scores", "episode_reward", "final_reward")
"""What frameworks call a rollout's reward; the first name that is present counts."""
_FINISH, _EACH_FINISH = "finish_reason", "finish_reasons"


@dataclass(frozen=True, slots=True)
class ConvertedPart:
    """One rollout of a conversion; a rollout becomes several where its calls do not continue each other."""

    rollout: Rollout
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its calls say of the training row, which has no columns for it."""
    used_facts: frozenset[str] = frozenset()
    """Names of facts of the log that its calls now hold."""
    calls: tuple[int, ...] = ()
    """The numbers of the calls that its training row trains, if it was made of calls."""
    of_calls: tuple[Mapping[str, Any], ...] = ()
    """What the log says about each single call."""


Converted = tuple[tuple[ConvertedPart, ...], tuple[str, ...]]
"""The parts of a rollout in another form, and the names of what has no place in that form."""


def as_rows(rollout: Rollout) -> Converted:
    """The rollout as training rows: its own unchanged, else one for each chain of calls (`fork_rows`).

    RecordError when ids are missing or nothing was sampled.
    """
    row, alone = rollout.training_row, replace(rollout, turns=())
    if row is not None and not rollout.turns:
        return (ConvertedPart(alone),), ()
    if row is not None and not _calls_make_row(rollout, row):
        return (ConvertedPart(alone),), (_OTHER_CALLS,)
    forked = fork_rows(sampled_calls(rollout))
    if not forked:
        raise RecordError("no call sampled a token, so there is nothing to train")
    parts = tuple(_part_of_chain(rollout, chain, alone=len(forked) == 1) for chain in forked)
    if row is not None:
        parts = (ConvertedPart(alone, parts[0].facts),)
    turns = rollout.turns
    chained = {k for chain in forked for k in chain.calls}
    lost = ["calls that sampled nothing"] if len(chained) < len(turns) else []
    for chain in forked:
        if any(len(turns[k].weight_versions) > 1 and not turns[k].weight_spans for k in chain.trained):
            lost.append(WEIGHTS)
        ends = [_count(turns[k].prompt_ids) + _count(turns[k].completion_ids) for k in chain.calls]
        if any(_count(turns[k].prompt_ids) == end for k, end in zip(chain.calls[1:], ends, strict=False)):
            lost.append("where one call ends and the next begins")
        messages = rollout.messages if len(forked) == 1 else _messages_up_to(rollout, turns[chain.calls[-1]])
        sent = [turns[k].prompt_messages for k in chain.calls]
        if any(own is not None and own != messages[: len(own)] for own in sent):
            lost.append(MESSAGES_LOST)
    texts = {message.text for message in rollout.messages}
    for turn in turns:
        if turn.completion_text is not None and turn.completion_text not in texts:
            lost.append(TEXTS_LOST)
        if turn.prompt_text is not None:
            lost.append("text of prompts")
        lost += [column.name for column in turn.columns if column.alignment is None]
    return parts, tuple(dict.fromkeys(lost))


def as_calls(rollout: Rollout, facts: Mapping[str, Any]) -> Converted:
    """The rollout as calls: its own, or one for each trained run of its training row.

    RecordError where that would lose a token, a logprob or a loss weight. The calls get what the row says about
    them (`finish_reason`, `finish_reasons` in their order, `weight_versions`).
    """
    row = rollout.training_row
    if rollout.turns:
        sampled_calls(rollout)
        lost = (_OTHER_ROW,) if row is not None and not _calls_make_row(rollout, row) else ()
        return (ConvertedPart(replace(rollout, training_row=None)),), lost
    if row is None:
        raise RecordError(_NO_IDS)
    runs, columns, lost_columns = _runs_and_columns(row)
    versions, _ = columns.pop(WEIGHTS, (None, None))
    logprobs = known_logprobs(row)
    answers: list[int | None] = [i for i, message in enumerate(rollout.messages) if message.sampled]
    # With as many answers as trained runs, each run is an answer.
    wrote = answers if len(answers) == len(runs) else [None] * len(runs)
    used = set() if versions is None else {WEIGHTS}
    finish = _FINISH if len(runs) == 1 and _FINISH in facts else _EACH_FINISH
    reasons = [facts[_FINISH]] if finish == _FINISH else facts.get(_EACH_FINISH)
    are_texts = isinstance(reasons, list) and all(isinstance(entry, str | None) for entry in reasons)
    if isinstance(reasons, list) and are_texts and len(reasons) == len(runs):
        used.add(finish)
    else:
        reasons = [None] * len(runs)
    stated, names = facts.get(WEIGHTS), tuple[str, ...]()
    are_texts = isinstance(stated, list) and all(isinstance(entry, str) for entry in stated)
    # With several versions it is unknown which one sampled which call.
    if isinstance(stated, list) and are_texts and (len(runs) == 1 or len(stated) == 1):
        names = tuple(stated)
        used.add(WEIGHTS)
    turns = []
    for (start, end), index, reason in zip(runs, wrote, reasons, strict=True):
        spans: tuple[tuple[str, int, int], ...] = ()
        if versions is not None:
            spans = versions_to_spans(versions[start:end])
            names = tuple(dict.fromkeys(version for version, _, _ in spans))
        by_one_version = len(spans) == 1 and spans[0][1:] == (0, end - start)
        own_columns = (
            Column(name, ColumnRole.OTHER, whole[start:end], Alignment.CALL, policy)
            for name, (whole, policy) in columns.items()
        )
        turns.append(
            Turn(
                row.token_ids[:start],
                row.token_ids[start:end],
                None if logprobs is None else logprobs[start:end],
                index,
                finish_reason=reason,
                weight_versions=names,
                weight_spans=() if by_one_version else spans,
                columns=tuple(own_columns),
            )
        )
    part = ConvertedPart(replace(rollout, turns=tuple(turns), training_row=None), used_facts=frozenset(used))
    return (part,), tuple(lost_columns)


def sampled_calls(rollout: Rollout) -> list[SampledCall]:
    """The ids and logprobs of every call; RecordError naming the first that lacks ids."""
    if not rollout.turns:
        raise RecordError(_NO_IDS)
    calls: list[SampledCall] = []
    for number, turn in enumerate(rollout.turns):
        for ids, what in ((turn.prompt_ids, "prompt"), (turn.completion_ids, "completion")):
            if ids is None:
                raise RecordError(f"call {number} has no {what} ids, and none are made up")
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        calls.append((turn.prompt_ids, turn.completion_ids, turn.completion_logprobs))
    return calls


def known_logprobs(row: TrainingRow) -> Logprobs | None:
    """The logprobs `[T]`, with NaN where untrained tokens hold the sentinel; None without a column."""
    if row.logprobs is None:
        return None
    if row.sentinel is None or row.loss_mask is None:
        return row.logprobs
    return np.where(~row.loss_mask & (row.logprobs == row.sentinel), np.nan, row.logprobs)


def loss_weights(row: TrainingRow) -> NDArray[np.float64] | None:
    """The weight of each token in the loss, `[T]` float64; 0 or 1 unless the mask has weights. None: no mask."""
    if row.loss_mask is None:
        return None
    for column in row.columns:
        if column.role is ColumnRole.LOSS_MASK and column.encoding is MaskEncoding.FLOAT:
            whole = column_over_tokens(row, column)
            if whole is not None:
                return np.nan_to_num(whole.astype(np.float64))
    return row.loss_mask.astype(np.float64)


def column_over_tokens(row: TrainingRow, column: Column) -> NDArray[Any] | None:
    """A column over all tokens `[T]`, NaN or None where it has no entry; None when it does not fit."""
    full = len(row.token_ids)
    if column.alignment is Alignment.FULL and len(column.values) == full:
        return column.values
    if column.alignment not in (Alignment.RESPONSE, Alignment.SAMPLED, Alignment.SHIFTED):
        return None
    values = column.values if column.values.dtype.kind == "f" else column.values.astype(object)
    fill = np.nan if values.dtype.kind == "f" else None
    try:
        return expand(
            values, column.alignment, full=full, prompt_length=row.prompt_length, trained=row.loss_mask, fill=fill
        )
    except ValueError:
        return None


MESSAGES_LOST = "messages of single calls"
TEXTS_LOST = "text of completions"
_OTHER_CALLS = "calls that differ from their training row"
_OTHER_ROW = "a training row that differs from its calls"
_NO_IDS = "it holds no token ids, and none are made up"


def _part_of_chain(rollout: Rollout, forked: ForkedRow, *, alone: bool) -> ConvertedPart:
    """A chain of calls as a training row, with their other per-token columns over all tokens."""
    turns, size = rollout.turns, len(forked.token_ids)
    policies: dict[str, MovePolicy] = {}
    for k in forked.calls:
        policies |= {c.name: c.policy for c in turns[k].columns if c.role is ColumnRole.OTHER and c.alignment}
    columns: list[Column] = []
    for name, policy in policies.items():
        parts = [(k, c) for k in forked.calls for c in turns[k].columns if c.name == name and c.alignment]
        floats = all(column.values.dtype.kind == "f" for _, column in parts)
        whole = np.full(size, np.nan) if floats else np.full(size, None, object)
        for k, column in parts:
            start = _count(turns[k].prompt_ids)
            whole[start : start + len(column.values)] = column.values
        columns.append(Column(name, ColumnRole.OTHER, whole, Alignment.FULL, policy))
    if len({version for k in forked.calls for version in turns[k].weight_versions}) > 1:
        spans: list[tuple[str, int, int]] = []
        for k in forked.calls:  # no call that names several versions without spans
            turn, start = turns[k], _count(turns[k].prompt_ids)
            own = turn.weight_spans
            if not own and len(turn.weight_versions) == 1:
                own = ((turn.weight_versions[0], 0, _count(turn.completion_ids)),)
            spans += [(version, start + at, start + end) for version, at, end in own]
        columns.append(versions_to_column(spans, size))
    scored = any(turns[k].completion_logprobs is not None for k in forked.calls)
    row = TrainingRow(
        np.array(forked.token_ids, np.int32),
        np.array(forked.loss_mask, np.bool_),
        np.array(forked.logprobs, np.float64) if scored else None,
        prompt_length=_count(turns[forked.calls[0]].prompt_ids),
        columns=tuple(columns),
    )
    messages = rollout.messages if alone else _messages_up_to(rollout, turns[forked.calls[-1]])
    trained = [turns[k] for k in forked.trained]
    reasons = [turn.finish_reason for turn in trained]
    facts: dict[str, Any] = {}
    if any(reason is not None for reason in reasons):
        facts |= {_FINISH: reasons[0]} if len(reasons) == 1 else {_EACH_FINISH: reasons}
    versions = {turn.weight_versions for turn in trained}
    if len(versions) == 1 and (version := versions.pop()) and len(version) == 1:
        facts[WEIGHTS] = list(version)
    row_rollout = replace(rollout, messages=messages, turns=(), training_row=row)
    return ConvertedPart(row_rollout, facts, calls=forked.trained)


def _count(ids: Ids | None) -> int:
    return 0 if ids is None else len(ids)


def _messages_up_to(rollout: Rollout, turn: Turn) -> tuple[Message, ...]:
    """The messages of a chain that ends with `turn`, its answer included; () when the log does not say."""
    if turn.message_index is None:
        return turn.prompt_messages or ()
    if turn.prompt_messages is None:
        return rollout.messages[: turn.message_index + 1]
    return (*turn.prompt_messages, rollout.messages[turn.message_index])


def _calls_make_row(rollout: Rollout, row: TrainingRow) -> bool:
    """Whether the calls make exactly this row."""
    try:
        rows = fork_rows(sampled_calls(rollout))
    except RecordError:
        return False
    if len(rows) != 1 or row.loss_mask is None or rows[0].token_ids != row.token_ids.tolist():
        return False
    logprobs = known_logprobs(row)
    weights = loss_weights(row)
    assert weights is not None
    plain = bool(np.array_equal(weights, np.array(rows[0].loss_mask, np.float64)))
    if logprobs is None or not plain:
        return plain
    return bool(np.array_equal(logprobs, np.array(rows[0].logprobs), equal_nan=True))


def _runs_and_columns(
    row: TrainingRow,
) -> tuple[Sequence[Run], dict[str, tuple[NDArray[Any], MovePolicy]], list[str]]:
    """The trained runs of a row, the columns that calls can hold, and the names of the other columns.

    Columns are over all tokens, with their policy. RecordError if calls could not hold all of the tokens.
    """
    weights = loss_weights(row)
    if row.loss_mask is None or weights is None:
        raise RecordError("it has no loss mask, so what a call sampled is unknown")
    runs = trained_runs(row.loss_mask)
    if not runs:
        raise RecordError("nothing in it is trained, so what a call sampled is unknown")
    if not ((weights == 0) | (weights == 1)).all():
        raise RecordError("its loss mask holds weights, and calls have no place for them")
    if runs[0][0] == 0:
        raise RecordError("its first token is trained, but a call needs a prompt")
    after = len(row.token_ids) - runs[-1][1]
    if after:
        raise RecordError(f"{after} tokens follow the last trained one, and no call would hold them")
    logprobs = known_logprobs(row)
    if logprobs is not None and not np.isnan(logprobs[~row.loss_mask]).all():
        raise RecordError("untrained tokens have logprobs, and calls have no place for them")
    columns: dict[str, tuple[NDArray[Any], MovePolicy]] = {}
    lost: list[str] = []
    for column in row.columns:
        if column.role is not ColumnRole.OTHER:
            lost += [column.name] if column.alignment is None else []
            continue
        whole = column_over_tokens(row, column)
        # Calls have no place for what untrained tokens hold, unless that is null or zero.
        outside = np.empty(0) if whole is None else whole[~row.loss_mask]
        if outside.dtype.kind in "iufb":
            filled = bool(np.nan_to_num(outside).any())
        else:
            filled = any(
                value is not None and not (isinstance(value, float) and value != value)
                for value in outside.tolist()
            )
        if whole is None or filled:
            lost.append(column.name)
        else:
            columns[column.name] = whole, column.policy
    return runs, columns, lost


def find_difference(before: Rollout, after: Rollout) -> str | None:
    """How tokens, mask or logprobs differ after a conversion, in words; None when they are equal."""
    if before.training_row is not None:
        if after.training_row is None:
            return "no training row"
        if not np.array_equal(before.training_row.token_ids, after.training_row.token_ids):
            return "other token ids"
        if not _same_arrays(loss_weights(before.training_row), loss_weights(after.training_row)):
            return "another loss mask"
        # Equal as recorded, or both unknown where nothing was sampled.
        rows = before.training_row, after.training_row
        blank = np.full(len(before.training_row.token_ids), np.nan)
        same = _equal_or_unknown(*(blank if values is None else values for values in map(known_logprobs, rows)))
        if rows[0].logprobs is not None and rows[1].logprobs is not None:
            same |= _equal_or_unknown(rows[0].logprobs, rows[1].logprobs)
        return None if same.all() else "other logprobs"
    if len(before.turns) != len(after.turns):
        return f"{len(after.turns)} calls instead of {len(before.turns)}"
    for number, (old, new) in enumerate(zip(before.turns, after.turns, strict=True)):
        if not _same_arrays(old.prompt_ids, new.prompt_ids):
            return f"other prompt ids in call {number}"
        if not _same_arrays(old.completion_ids, new.completion_ids):
            return f"other completion ids in call {number}"
        blank = np.full(0 if old.completion_ids is None else len(old.completion_ids), np.nan)
        values = [blank if turn.completion_logprobs is None else turn.completion_logprobs for turn in (old, new)]
        if not _equal_or_unknown(*values).all():
            return f"other logprobs in call {number}"
    return None


def lost_names(before: Rollout, after: Rollout) -> Iterator[str]:
    """The names of what else differs after a conversion."""
    if not same_wires(before.messages, after.messages):
        yield "messages"
    if before.tools and before.tools != after.tools:
        yield "tools"
    if before.template_kwargs and before.template_kwargs != after.template_kwargs:
        yield "template arguments"
    row, row_after = before.training_row, after.training_row
    if row is not None and row_after is not None:
        if (row.padding.left, row.padding.right) != (row_after.padding.left, row_after.padding.right):
            yield "padding"
        read_back = {column.name: column for column in row_after.columns}
        for column in row.columns:
            again = read_back.get(column.name)
            if column.role is not ColumnRole.OTHER:
                differs = column.alignment is None
            else:
                whole = column_over_tokens(row, column)
                whole_after = None if again is None else column_over_tokens(row_after, again)
                differs = whole is None or whole_after is None or not _same_entries(whole, whole_after)
            if differs:
                yield column.name
    for old, new in zip(before.turns, after.turns, strict=False):
        messages = before.messages
        if old.finish_reason is not None and old.finish_reason != new.finish_reason:
            yield "finish_reason"
        if old.weight_versions and old.weight_versions != new.weight_versions:
            yield "weight_versions"
        if old.completion_text not in (None, new.completion_text) and all(
            message.text != old.completion_text for message in messages
        ):
            yield "text of completions"
        if old.prompt_text not in (None, new.prompt_text):
            yield "text of prompts"
        if old.message_index is not None and new.message_index != old.message_index:
            yield "which message each call wrote"
        sent = old.prompt_messages
        if sent is not None and not same_wires(sent, new.prompt_messages or messages[: len(sent)]):
            yield "messages of single calls"
        read_back = {column.name: column for column in new.columns}
        for column in old.columns:
            again = read_back.get(column.name)
            # Logprobs that fit are compared elsewhere.
            same = column.role is not ColumnRole.OTHER or (
                again is not None and _same_entries(column.values, again.values)
            )
            if column.alignment is None or not same:
                yield column.name


def content_digest(rollouts: Sequence[Rollout]) -> int:
    """A 64-bit digest of the tokens, loss masks and logprobs of rollouts."""
    state = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        row = rollout.training_row
        arrays: list[NDArray[Any] | None] = []
        if row is not None:
            arrays += [row.token_ids, loss_weights(row), _canonical_floats(row.logprobs)]
        for turn in rollout.turns:
            arrays += [turn.prompt_ids, turn.completion_ids, _canonical_floats(turn.completion_logprobs)]
        for array in arrays:
            state.update(b"-" if array is None else b"%d:" % len(array) + np.ascontiguousarray(array).tobytes())
    return int.from_bytes(state.digest(), "little")


def _canonical_floats(values: Logprobs | None) -> Logprobs | None:
    """Logprobs with one bit pattern for NaN, and without negative zeros."""
    return None if values is None else np.where(np.isnan(values), np.nan, values) + 0.0


def _equal_or_unknown(old: Logprobs, new: Logprobs) -> NDArray[np.bool_]:
    return np.asarray((old == new) | (np.isnan(old) & np.isnan(new)))


def _same_arrays(old: NDArray[Any] | None, new: NDArray[Any] | None) -> bool:
    if old is None or new is None:
        return old is new
    return np.array_equal(old, new)


def same_wires(before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Whether messages are equal in every key, as logged; a missing key equals null."""
    return len(before) == len(after) and all(
        _arrays_as_lists(old.wire.get(key)) == _arrays_as_lists(new.wire.get(key))
        for old, new in zip(before, after, strict=True)
        if old.wire is not new.wire
        for key in {*old.wire, *new.wire}
    )


def _arrays_as_lists(value: Any) -> Any:
    """A value with its arrays as lists, at any depth."""
    if isinstance(value, np.ndarray):
        return _arrays_as_lists(value.tolist()) if value.dtype.kind == "O" else value.tolist()
    if isinstance(value, Mapping):
        return {key: _arrays_as_lists(entry) for key, entry in value.items()}
    return [_arrays_as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _same_entries(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind in "iufb" and new.dtype.kind in "iufb":
        floats = old.dtype.kind == "f" and new.dtype.kind == "f"
        return bool(np.array_equal(old, new, equal_nan=floats))
    return len(old) == len(new) and _comparable(old) == _comparable(new)


def _comparable(value: Any) -> Any:
    """A value to compare, with arrays as lists and NaN as None."""
    if isinstance(value, np.ndarray | list):
        return [_comparable(each) for each in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and value != value else value


_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class CallsOfConversation:
    """The calls of a joined conversation as their own rows hold them, in the order of its turns."""

    each: Sequence[Rollout]
    """The rollout of each row."""
    facts: Sequence[Mapping[str, Any]]
    """What else each row holds."""
    unread: tuple[str, ...]
    """Paths of values that were read only in part, in any of the rows."""

    @classmethod
    def of(cls, joined: CallsOfRollout, whole: Rollout, speakers: Speakers) -> CallsOfConversation:
        """The calls of a joined row, each read from its own row; RecordError if one cannot be read."""
        lines, rows, form = joined.raws, joined.whole, joined.format
        each: list[Rollout] = []
        facts: list[Mapping[str, Any]] = []
        unread: dict[str, None] = {}
        for number, at in zip(whole.stated.lines, whole.stated.calls_at, strict=True):
            line, row = lines[number], rows[number]
            rollouts = form.read(row, Place(*at))
            about = row_facts(row, rollouts, form.sources(row, rollouts))
            unread |= dict.fromkeys((*about.unread, *wrapper_keys(line)))
            facts += about.facts
            each += (with_speakers(rollout, speakers) for rollout in rollouts)
        return cls(each, facts, tuple(unread))

    def with_ids(
        self, whole: Rollout, refuse: Callable[[Place, str], None]
    ) -> tuple[CallsOfConversation, Rollout]:
        """The calls and the conversation without calls that lack ids; `refuse` gets the place and reason."""
        numbers: list[int] = []
        for k, own in enumerate(self.each):
            try:
                sampled_calls(own)
                numbers.append(k)
            except RecordError as error:
                refuse(own.place, str(error))
        rest = replace(whole, turns=tuple(whole.turns[k] for k in numbers))
        return replace(self, each=[self.each[k] for k in numbers], facts=[self.facts[k] for k in numbers]), rest

    def as_rows(self, whole: Rollout) -> tuple[list[ConvertedPart], list[str]]:
        """A training row for each unbroken run of calls, and the names of what is lost; RecordError as in
        `as_rows`.

        Each has the messages, tools and model of its last call, and what all the calls say that it trains.
        """
        row_parts, lost_in_rows = as_rows(whole)
        lost = [*self.unread, *(name for name in lost_in_rows if name not in (MESSAGES_LOST, TEXTS_LOST))]
        parts = []
        for part in row_parts:
            last = self.each[part.calls[-1]]
            row = replace(
                part.rollout,
                messages=_messages_of(last),
                tools=last.tools,
                template_kwargs=last.template_kwargs,
                stated=replace(part.rollout.stated, model=last.stated.model),
            )
            facts, rest = self.shared(part.calls)
            parts.append(replace(part, rollout=row, facts={**facts, **part.facts}))
            lost += rest
            texts = {message.text for message in row.messages}
            for own in (self.each[k] for k in part.calls):
                messages = _messages_of(own)
                if not same_wires(row.messages[: len(messages)], messages):
                    lost.append(MESSAGES_LOST)
                if own.turns[0].completion_text not in (None, *texts):
                    lost.append(TEXTS_LOST)
                lost += _lost_context(own, row)
        return parts, lost

    def as_calls(self, whole: Rollout, reserved: Set[str] | None) -> tuple[list[ConvertedPart], list[str]]:
        """A row that lists all calls, and the names of what is lost; RecordError as in `as_calls`.

        Its calls have a place for what only some of the rows say, except under names that are `reserved`; None: no
        place.
        """
        facts, lost = self.shared(range(len(self.each)))
        own: list[dict[str, Any]] = []
        if reserved is not None:
            facts = {
                name: value
                for name, value in facts.items()
                if all(name in about and _written_alike(about[name], value) for about in self.facts)
            }
            left = [{name: value for name, value in about.items() if name not in facts} for about in self.facts]
            own = [{name: value for name, value in about.items() if name not in reserved} for about in left]
            lost = [name for about in left for name in about if name in reserved]
        lost_in_calls: list[str] = []
        for rollout, turn in zip(self.each, whole.turns, strict=True):
            # The messages that were sent, and the answer if it is one of those of the whole.
            messages, index = turn.prompt_messages, turn.message_index
            if index is not None:
                messages = (*(whole.messages[:index] if messages is None else messages), whole.messages[index])
            if not same_wires(messages or (), _messages_of(rollout)):
                lost_in_calls.append(MESSAGES_LOST)
            lost_in_calls += _lost_context(rollout, whole)
        call_parts, lost_as_calls = as_calls(whole, facts)
        parts = [replace(part, facts={**facts, **part.facts}, of_calls=tuple(own)) for part in call_parts]
        return parts, [*self.unread, *lost_as_calls, *lost, *lost_in_calls]

    def shared(self, calls: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
        """The facts that the rows of these calls share, and the names of those that only some have or that differ.

        A reward that only the last row has counts as shared.
        """
        about = [self.facts[k] for k in calls]
        common: dict[str, Any] = {}
        lost: list[str] = []
        for name in dict.fromkeys(name for each in about for name in each):
            values = [each.get(name, _MISSING) for each in about]
            if name in REWARDS and all(value is _MISSING for value in values[:-1]):
                values = values[-1:]
            value = _common_value(values, name, lost)
            if value is not _MISSING:
                common[name] = value
        return common, lost


def _messages_of(rollout: Rollout) -> tuple[Message, ...]:
    """The messages of a rollout with one call, its answer included."""
    (turn,) = rollout.turns
    return rollout.messages or turn.prompt_messages or ()


def _lost_context(own: Rollout, whole: Rollout) -> Iterator[str]:
    """The names of what a new row says for all of its calls, but this call says differently."""
    if own.tools != whole.tools:
        yield "tools"
    if own.template_kwargs != whole.template_kwargs:
        yield "template arguments"
    if own.stated.model != whole.stated.model:
        yield "model"


def _common_value(values: Sequence[Any], path: str, lost: list[str]) -> Any:
    """What all values share, `_MISSING` if nothing; adds the paths of the rest to `lost`."""
    first = values[0]
    if all(value is not _MISSING and _written_alike(value, first) for value in values):
        return first
    if not all(isinstance(value, Mapping) for value in values):
        lost.append(path)
        return _MISSING
    common = {}
    for name in dict.fromkeys(name for value in values for name in value):
        value = _common_value([value.get(name, _MISSING) for value in values], f"{path}.{name}", lost)
        if value is not _MISSING:
            common[name] = value
    return common or _MISSING


def _written_alike(value: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1, 1.0 and true differ."""
    return value is other or dump_row({"": value}) == dump_row({"": other})
