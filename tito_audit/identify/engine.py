"""identify: which tokenizer, template and settings wrote the ids of a log, and how certain that is.

The tests of a tokenizer are coarse, so that no fault of a row is mistaken for a misfit: whether logged texts are
found in the decoded ids, whether encoding the decoded text reproduces the ids, whether the ids are in the
vocabulary, and whether the log spells a control token of the template in pieces. Measured on real logs of three
models with seven tokenizers: the right tokenizer finds at least 99 % of the texts and 98 % of the ids, a wrong one
up to 18 % of the texts and 91 % of the ids. In between there is no verdict.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from typing import TypeAlias

import numpy as np

from tito_audit.errors import EncodeError, RenderError, SetupError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding
from tito_audit.record.message import as_messages
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.runs import trained_runs
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.terminal.words import listed, many, percent
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.explain import explain_way, why_unsure
from tito_audit.ways.observations import Observation, Part, observe_rollouts, pick_for_search
from tito_audit.ways.recorded_values import PROBE, read_date_near
from tito_audit.ways.search import SEARCHED, ConfirmedWay, find_ways, pick_confirming
from tito_audit.ways.way import CLOCK, OWN_TEMPLATE, Explanation, NamedTemplate, Way
from tito_audit.ways.writer import Writer

_TEXT = 8
"""Characters that a text needs to be looked for."""
_LOOKED = 200
"""Characters of a text that are looked for."""
_DECODED = 1 << 16
"""Ids of a row that are decoded at the most."""
_ENCODED = 2_048
"""Ids of a sequence whose text is encoded again at the most."""
_REAL = 12
"""A sequence with fewer distinct ids is a placeholder."""
_FOUND = 0.2
"""Texts count against the tokenizer if no larger share of them is found."""
_LEAST, _LEAST_ALONE = 24, 512
"""Ids needed for a verdict on the round trip, with texts in the log and without."""
_OUTSIDE_ROWS, _OUTSIDE_SHARE = 4, 0.8
"""Rows needed to prove a misfit, and the share of them with ids past the end of the vocabulary."""
_IN_PIECES = 4
"""How often the rows, two at least, must spell a token of the template in pieces."""

TestableRows: TypeAlias = Sequence[tuple[Rollout, list[Ids]]]
"""Rollouts, each with its id sequences."""


@dataclass(slots=True)
class _FitCounts:
    """What rows show about a tokenizer."""

    rows: int = 0
    ids: int = 0
    outside: int = 0
    """Ids that are not in its vocabulary."""
    rows_outside: int = 0
    """Rows with ids past the end of the vocabulary."""
    past_end: set[int] = field(default_factory=set)
    texts: int = 0
    texts_found: int = 0
    decoded: list[str] = field(default_factory=list)
    """The decoded text of each row."""


def select_testable(rollouts: Sequence[Rollout]) -> TestableRows:
    """The rollouts with real ids, and these: the last call's, else the training row's, else the completions'."""
    rows: list[tuple[Rollout, list[Ids]]] = []
    for rollout in rollouts:
        if rollout.turns and (last := rollout.turns[-1].seen_ids) is not None:
            sequences = [last]  # the row of a rollout with calls may hold wrong ids
        elif rollout.training_row is not None:
            sequences = [rollout.training_row.token_ids]
        else:
            sequences = [turn.completion_ids for turn in rollout.turns if turn.completion_ids is not None]
        ids = [sequence[:_DECODED] for sequence in sequences if _are_real(sequence)]
        if ids and not rollout.stated.dummy_tokens:
            rows.append((rollout, ids))
    return rows


def tokenizer_misfit(rows: TestableRows, reference: Reference) -> str | None:
    """Why the tokenizer cannot have written these rows; None if it can."""
    seen = _count_fit(rows, reference.tokenizer)
    words = _describe_counts(seen)
    enough = seen.rows >= _OUTSIDE_ROWS and len(seen.past_end) > 1
    if enough and seen.rows_outside >= _OUTSIDE_SHARE * seen.rows:
        words = words[-1:] if _finds_texts(seen) else words  # texts that are found do not count against it
        return f"{listed(words)}, in {seen.rows_outside:,} of {many(seen.rows, 'row')}"
    same = None if _finds_texts(seen) else _low_roundtrip_share(rows, seen, reference)
    if same is not None:
        return listed([*words, f"encoding that text again gives {percent(same)} of the ids back"])
    # A token of the template that the rows only hold spelled in pieces proves a misfit.
    vocabulary, renderer = reference.vocabulary, reference.renderer
    recorded = {token_id for _, all_ids in rows for ids in all_ids for token_id in ids.tolist()}
    if renderer is None or not recorded & vocabulary.special_ids:  # the rows hold no control tokens at all
        return None
    source = "".join(template.source for template in renderer.templates.values())
    for token in sorted(vocabulary.added_ids - recorded):
        piece = vocabulary.piece(token)
        counts = [text.count(piece) for text in seen.decoded] if len(piece) > 1 and piece in source else []
        if sum(counts) >= _IN_PIECES and sum(map(bool, counts)) > 1:
            return (
                f"'{piece}', which the chat template writes and the tokenizer has as one token, occurs "
                f"{sum(counts):,} times in {many(sum(map(bool, counts)), 'row')}, each time in pieces"
            )
    return None


def find_misfits_by_text(rows: TestableRows, tokenizers: Sequence[Tokenizer]) -> list[str | None]:
    """For each tokenizer why it cannot have written the rows, if one of the others decodes 90 % of their texts.

    This needs vocabularies only: encoders of clear misfits are never loaded.
    """
    fits = [_count_fit(rows, tokenizer) for tokenizer in tokenizers]
    if not any(fit.texts > _IN_PIECES and fit.texts_found >= 0.9 * fit.texts for fit in fits):
        return [None] * len(fits)
    return [listed(_describe_counts(fit)) if fit.texts_found <= _FOUND * fit.texts else None for fit in fits]


def count_unknown_ids(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> int:
    """How many recorded ids are not in the vocabulary."""
    is_known = tokenizer.vocabulary.known
    sequences = (ids for _, all_ids in select_testable(rollouts) for ids in all_ids)
    return sum(int(np.count_nonzero(~is_known(ids))) for ids in sequences)


def _describe_counts(seen: _FitCounts) -> list[str]:
    words = []
    if seen.texts:
        texts = f"{many(seen.texts, 'logged text')} {'is' if seen.texts == 1 else 'are'}"
        words.append(f"{seen.texts_found:,} of {texts} found in what the ids decode to")
    if seen.outside:
        words.append(f"{percent(seen.outside / seen.ids)} of the ids lie outside the vocabulary")
    return words


def _finds_texts(seen: _FitCounts) -> bool:
    return seen.texts > 1 and seen.texts_found > _FOUND * seen.texts


def _low_roundtrip_share(tested: TestableRows, seen: _FitCounts, reference: Reference) -> float | None:
    """The share of ids that encoding their text reproduces, if too small for the right tokenizer; else None."""
    alone = seen.texts < 2
    ids = [sequence for rollout, all_ids in tested for sequence in (unsampled_ids(rollout) if alone else all_ids)]
    if sum(map(len, ids)) < (_LEAST_ALONE if alone else _LEAST):
        return None
    if alone and reference.renderer is not None:
        # A row that holds the template's generation prompt speaks for the tokenizer.
        question = as_messages([{"role": "user", "content": "?!"}], "messages")
        with suppress(RenderError):
            opener = reference.renderer.render(question, add_generation_prompt=True).rpartition("?!")[2].strip()
            if len(opener) > _TEXT and any(opener in text for text in seen.decoded):
                return None
    same = roundtrip_share(ids, reference)
    # Together with texts that are not found, a smaller loss proves a misfit.
    return same if same <= (0.91 if alone else 0.95) else None


def _count_fit(tested: TestableRows, tokenizer: Tokenizer) -> _FitCounts:
    """What rows show about a tokenizer, by its vocabulary alone."""
    seen, vocabulary = _FitCounts(), tokenizer.vocabulary
    for rollout, all_ids in tested:
        text = "\n".join(vocabulary.text(ids) for ids in all_ids)
        unknown = np.concatenate([ids[~vocabulary.known(ids)] for ids in all_ids])
        past = unknown[unknown >= vocabulary.size]
        seen.rows += 1
        seen.ids += sum(map(len, all_ids))
        seen.outside += len(unknown)
        seen.rows_outside += len(past) > 0
        seen.past_end |= set(past[:_REAL].tolist())
        seen.decoded.append(text)
        plain = _normalize(text)
        stated = [message.text for message in rollout.messages]
        for turn in rollout.turns:
            stated += [words for words in (turn.completion_text, turn.prompt_text) if words]
        for logged in map(_normalize, stated[:64]):
            if len(logged) < _TEXT:
                continue
            seen.texts += 1
            # Its beginning or its middle, as a template may cut or rewrite either.
            start = max((len(logged) - _LOOKED) // 2, 0)
            seen.texts_found += logged[:_LOOKED] in plain or logged[start : start + _LOOKED] in plain
    return seen


def unsampled_ids(rollout: Rollout) -> Iterator[Ids]:
    """The ids that nothing sampled, so a tokenizer wrote them; the whole row if it has no mask."""
    row = rollout.training_row
    prompts = [turn.prompt_ids for turn in rollout.turns[-1:] if turn.prompt_ids is not None]
    if row is None or prompts:
        yield from filter(_are_real, prompts)
    elif row.loss_mask is None:
        yield from filter(_are_real, [row.token_ids])
    else:
        yield from filter(_are_real, (row.token_ids[start:end] for start, end in trained_runs(~row.loss_mask)))


def _are_real(ids: Ids) -> bool:
    """Whether ids are no placeholders: many different ones, which do not just count up."""
    first = ids[:_ENCODED]
    return len(set(first.tolist())) >= _REAL and not (np.diff(first) == 1).all()


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def roundtrip_share(ids: Sequence[Ids], reference: Reference) -> float:
    """The share of ids that encoding their text again reproduces, in any order; of the first _ENCODED each."""
    same = number = 0
    for sequence in ids:
        recorded = sequence[:_ENCODED]
        again = reference.encode(reference.decode(recorded))
        common = Counter(recorded.tolist()) & Counter(again.tolist())
        same += common.total()
        number += max(len(recorded), len(again))
    return same / max(number, 1)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tokenizer with the templates to try for it."""

    tokenizer: Tokenizer
    templates: tuple[NamedTemplate, ...] = (OWN_TEMPLATE,)


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """How many prompts, turns and tokens an explanation writes exactly, each `of_` all there are."""

    prompts: int = 0
    """First prompts of rollouts."""
    of_prompts: int = 0
    turns: int = 0
    """Later prompts, and training rows without prompt boundaries, which count if only their answers differ."""
    of_turns: int = 0
    tokens: int = 0
    of_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Prompts that the best explanation does not write exactly, for one cause."""

    cause: str
    """A rule code with its cause, or why no text could be written."""
    number: int
    place: Place
    """Where the first is, with `turn`."""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """A control token that ends sampled turns."""

    token_id: int
    piece: str
    turns: int
    followed_by: str | None = None
    """The text between it and the next control token in later prompts; None if no later prompt shows it."""


@dataclass(frozen=True, slots=True)
class RankedExplanation:
    """An explanation, and how much of the confirming rows it writes."""

    explanation: Explanation
    share: WrittenShare
    equal: tuple[Explanation, ...] = ()
    """Others that write the same in all these rows."""
    undetermined: tuple[str, ...] = ()
    """Template arguments that change nothing in these rows; also `tool_arguments`, if its forms change nothing."""


class MissingInput(StrEnum):
    """Why there is no explanation at all."""

    NO_IDS = "no token ids"
    NO_MESSAGES = "no messages"
    NO_TOKENIZER = "no tokenizer fits"
    NO_TEMPLATE = "no chat template"


@dataclass(frozen=True, slots=True)
class TokenizerFit:
    """Whether a tokenizer can have written the ids of a log."""

    tokenizer: str
    fits: bool
    because: str = ""
    """Why not."""
    same: float = 0.0
    """The share of unsampled ids that re-encoding their text reproduces; 0 if not measured."""


@dataclass(frozen=True, slots=True)
class Identification:
    """What explains the recorded ids of a log."""

    found: tuple[RankedExplanation, ...] = ()
    """The best first."""
    sure: bool = False
    """Whether the first is certain: it writes nearly all prompts outside the search, and nothing else does."""
    unsure_because: str = ""
    left: tuple[Unexplained, ...] = ()
    """What the first explanation does not write, by cause, the most frequent first."""
    endings: tuple[Ending, ...] = ()
    tokenizers: tuple[TokenizerFit, ...] = ()
    """Every candidate, in the order given."""
    lack: MissingInput | None = None
    rows_searched: int = 0
    rows_confirmed: int = 0

    @property
    def best(self) -> RankedExplanation | None:
        """The explanation that writes the most."""
        return self.found[0] if self.found else None


Audit: TypeAlias = Callable[[Rollout, Tokenizer, Renderer], Iterable[Finding]]
"""Audits one rollout with a tokenizer and a renderer."""

_TESTED = 16
"""Rollouts that decide whether a tokenizer fits."""
_SECONDS, _CHARACTERS = 2.0, 8 * 1024 * 1024
"""Limits of one rendering."""


def identify(
    rollouts: Sequence[Rollout], candidates: Sequence[Candidate], *, audit: Audit | None = None
) -> Identification:
    """What explains the recorded ids of these rollouts, a few hundred of a log with its first ones.

    `audit` names the causes of what the best explanation does not write.
    """
    rows = select_testable(rollouts[: 4 * _TESTED])[:_TESTED]
    if not rows:
        return Identification(lack=MissingInput.NO_IDS)
    tokenizers = [candidate.tokenizer for candidate in candidates]
    fits: list[TokenizerFit] = []
    for tokenizer, misfit in zip(tokenizers, find_misfits_by_text(rows, tokenizers), strict=True):
        same = 0.0
        if misfit is None:
            renderer = None
            with suppress(SetupError):
                renderer = make_renderer(tokenizer, time_limit=_SECONDS, size_limit=_CHARACTERS)
            reference = Reference(tokenizer, renderer)
            try:
                misfit = tokenizer_misfit(rows, reference)
                if misfit is None:
                    unsampled = [ids for rollout, _ in rows for ids in unsampled_ids(rollout)]
                    same = roundtrip_share(unsampled, reference)
            except EncodeError as error:
                misfit = str(error).split("\n")[0]
        fits.append(TokenizerFit(tokenizer.name, misfit is None, misfit or "", same))
    fitting = [candidate for candidate, fit in zip(candidates, fits, strict=True) if fit.fits]
    fitted = Identification(tokenizers=tuple(fits))
    if not fitting:
        return replace(fitted, lack=MissingInput.NO_TOKENIZER)
    seen = observe_rollouts(rollouts)
    ends = find_endings(rollouts, Reference(fitting[0].tokenizer, None))
    if not seen:
        return replace(fitted, lack=MissingInput.NO_MESSAGES, endings=ends)
    searched = pick_for_search(seen, SEARCHED)
    rest = pick_confirming(seen, searched)
    confirmed_ways: list[ConfirmedWay] = []
    for candidate in fitting:
        for template in candidate.templates:
            try:
                renderer = template.renderer(candidate.tokenizer, time_limit=_SECONDS, size_limit=_CHARACTERS)
            except SetupError:
                continue
            writer = Writer(candidate.tokenizer, renderer)
            confirmed_ways += find_ways(writer, template, Way(), searched, rest)
    if not confirmed_ways:
        return replace(fitted, lack=MissingInput.NO_TEMPLATE, endings=ends)
    return _rank_explanations(fitted, confirmed_ways, searched, rest, rollouts, audit)


def _rank_explanations(
    so_far: Identification,
    confirmed_ways: list[ConfirmedWay],
    searched: Sequence[Observation],
    rest: Sequence[Observation],
    rollouts: Sequence[Rollout],
    audit: Audit | None,
) -> Identification:
    """The confirmed ways ranked and compared, and what the best does not write."""
    unknown = {way.name: count_unknown_ids(rollouts, way.writer.tokenizer) for way in confirmed_ways}
    ranked = sorted(confirmed_ways, key=lambda way: (*way.rank(rest), -unknown[way.name]), reverse=True)
    best = ranked[0]
    because, ends = why_unsure(ranked, rest), find_endings(rollouts, Reference(best.writer.tokenizer, None))
    if not best.written:
        left = _find_unexplained(best, None, rest, rollouts, None)
        return replace(so_far, unsure_because=because, endings=ends, left=left)
    tool_calls = (call for rollout in rollouts for message in rollout.messages for call in message.tool_calls)
    calls = any(isinstance(call.arguments, str) for call in tool_calls)
    listed: list[RankedExplanation] = []
    counted: set[frozenset[int]] = set()
    for way in ranked:
        if way.written and way.written not in counted:
            counted.add(way.written)
            same = [other for other in ranked if other is not way and other.written == way.written]
            equal_ways, undetermined = find_equal_ways(way, rest, calls_tools=calls)
            equal = [explain_way(other, way.writer, way.template, rest) for other in equal_ways]
            equal += [explain_way(other.way, other.writer, other.template, rest) for other in same]
            own, share = explain_way(way.way, way.writer, way.template, rest), count_written(way.written, rest)
            others = tuple(other for other in equal if other != own)
            listed.append(RankedExplanation(own, share, others, tuple(undetermined)))
    return replace(
        so_far,
        found=tuple(listed),
        sure=not because,
        unsure_because=because,
        left=_find_unexplained(best, listed[0].explanation, rest, rollouts, audit),
        endings=ends,
        rows_searched=len(searched),
        rows_confirmed=len(rest),
    )


def _find_unexplained(
    best: ConfirmedWay,
    explanation: Explanation | None,
    rest: Sequence[Observation],
    rollouts: Sequence[Rollout],
    audit: Audit | None,
) -> tuple[Unexplained, ...]:
    """The prompts that the best way does not write, by cause, the most frequent first.

    Causes are those of the audit with the explanation; without any, that the template refuses the messages, or
    whether text or tokens differ.
    """
    writer, way = best.writer, best.way
    missing = [observation for at, observation in enumerate(rest) if at not in best.written]
    causes: list[tuple[str, Place, int | None]] = []
    if missing and audit is not None and explanation is not None:
        same_date = explanation.renderer(writer.tokenizer)
        dates: dict[Place, datetime | None] = {}
        if CLOCK in way.varies:
            ways = ((observation.place, writer.resolve(way, observation)) for observation in rest)
            dates = {place: own.clock for place, own in ways if own is not None}
        places = {observation.place for observation in missing}
        for rollout in [each for each in rollouts if each.place in places][:48]:
            date = dates.get(rollout.place)
            renderer = same_date if date is None else replace(same_date, clock=Clock(date))
            for finding in audit(rollout, writer.tokenizer, renderer):
                causes.append((f"{finding.code} {finding.hit.cause}".rstrip(), finding.place, finding.hit.turn))
    for observation in missing if not causes else ():
        cause = "the same text in other tokens" if writer.writes_text(way, observation) else "another text"
        if writer.writes_around_answers(way, observation):
            cause += ", in answers"
        refusal = writer.refusal(way, observation) if writer.rendered_text(way, observation) is None else None
        if refusal is not None:
            cause = f"the template refuses the messages: {refusal}"
        causes.append((cause, observation.place, observation.turn))
    first = {cause: (place, turn) for cause, place, turn in reversed(causes)}
    numbers = Counter(cause for cause, _, _ in causes)
    return tuple(Unexplained(cause, number, *first[cause]) for cause, number in numbers.most_common())


def count_written(written: frozenset[int], seen: Sequence[Observation]) -> WrittenShare:
    """How many of the prompts, turns and tokens are written exactly."""
    first = {at for at, observation in enumerate(seen) if observation.is_first}
    # A START shares its ids with the WHOLE of its row, which counts them.
    sizes = [0 if observation.part is Part.START else len(observation.ids) for observation in seen]
    tokens = sum(sizes[at] for at in written)
    later = len(written - first), len(seen) - len(first)
    return WrittenShare(len(first & written), len(first), *later, tokens, sum(sizes))


def find_equal_ways(
    best: ConfirmedWay, seen: Sequence[Observation], *, calls_tools: bool
) -> tuple[list[Way], list[str]]:
    """Ways with one other argument or date that write the same prompts, and the arguments that make no difference.

    With `calls_tools`, the form of tool call arguments counts as an argument.
    """
    writer, way = best.writer, best.way
    few = pick_for_search([seen[at] for at in sorted(best.written)], 24)
    dated: list[Way] = []  # the same date as an argument instead of the clock's, and vice versa
    for argument in writer.arguments.arguments:
        format_, value = argument.clock_format, dict(way.args).get(argument.name)
        if format_ is not None and way.clock is not None and value is None:
            dated.append(replace(way, clock=None).with_arg(argument.name, way.clock.strftime(format_)))
        elif format_ is not None and isinstance(value, str):
            date = read_date_near(PROBE(format_), value)
            if date is not None:
                dated.append(replace(way.without_arg(argument.name), clock=date))
    equal = [other for other in dated if other != way and _write_alike(writer, way, other, few)]
    undetermined: list[str] = []
    forms: tuple[ToolArguments, ...] = ("auto", "object", "string")
    others = [replace(way, tool_arguments=form) for form in forms if form != way.tool_arguments]
    same = [other for other in others if _write_alike(writer, way, other, few)]
    if calls_tools and len(same) == len(others):
        undetermined.append("tool_arguments")
    elif calls_tools:
        equal += [other for other in same if other.tool_arguments == "auto"]
    for argument in writer.arguments.arguments:
        if argument.name in way.varies:
            continue
        others = [way.with_arg(argument.name, value) for value in argument.values]
        others = [other for other in (way.without_arg(argument.name), *others) if other != way]
        same = [other for other in others if _write_alike(writer, way, other, few)]
        if others and len(same) == len(others) and argument.name not in dict(way.args):
            undetermined.append(argument.name)
        else:
            equal += same
    return equal, undetermined


def _write_alike(writer: Writer, way: Way, other: Way, seen: Sequence[Observation]) -> bool:
    return bool(seen) and all(writer.writes_alike(way, other, observation) for observation in seen)


_CUT_OFF = frozenset(("length", "max_tokens", "abort", "error"))


def find_endings(rollouts: Iterable[Rollout], reference: Reference) -> tuple[Ending, ...]:
    """The control tokens that end sampled turns, the most frequent first."""
    ends, vocabulary = reference.end_ids(), reference.vocabulary
    turns: Counter[int] = Counter()
    after: dict[int, Counter[str]] = {}
    for rollout in rollouts:
        # The ids of each turn that was not cut off, and those after it in the next prompt or the row, if known
        sampled: list[tuple[Ids, Ids | None]] = []
        for turn, later in zip_longest(rollout.turns, rollout.turns[1:]):
            ids, seen = turn.completion_ids, turn.seen_ids
            if ids is None or not len(ids) or turn.finish_reason in _CUT_OFF:
                continue
            following = later.prompt_ids if later is not None else None
            if following is not None:
                goes_on = seen is not None and len(following) > len(seen) and starts_with(following, seen)
                following = following[len(seen) :] if goes_on and seen is not None else None
            sampled.append((ids, following))
        row = rollout.training_row
        if not rollout.turns and row is not None and row.loss_mask is not None:
            runs = trained_runs(row.loss_mask)
            sampled = [(row.token_ids[start:end], row.token_ids[end:]) for start, end in runs]
        for answer, rest in sampled:
            last = int(answer[-1])
            if last not in ends:
                continue
            turns[last] += 1
            if rest is not None and len(rest):  # the text before the next control token
                rest = rest[:32]
                control = np.flatnonzero(vocabulary.control(rest))
                gap = vocabulary.text(rest[: int(control[0])] if len(control) else rest)
                after.setdefault(last, Counter())[gap] += 1
    return tuple(
        Ending(
            token, vocabulary.piece(token), number, after[token].most_common(1)[0][0] if token in after else None
        )
        for token, number in turns.most_common(6)
    )
