"""Makes the view of a rollout: its sequences token by token, cut to a bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.reference import pieces_of
from tito_audit.evidence.roles import TURN_END, token_roles
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import Alignment, Column, ColumnRole, alignment_by_length, expand
from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import IdsFrom
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT
from tito_audit.record.token_extras import TokenExtras
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.model import REPORT_SIZE, ShownStretch, Swap, View, ViewSequence, ViewSize
from tito_audit.viewer.replacements import Replacement, SequenceKey, find_replacements, same_as

_MARGIN = 20
"""Tokens shown on each side of a finding or a swap."""
_GAP = 12
"""Fewer tokens than this are not left out: the note about them would take as much room."""
_FILL_ROUNDS = (32, 128, 512, 2048, 8192, 1 << 20)
"""Tokens shown from the start of each sequence, round by round while there is room."""


def choose_excerpts(
    lengths: Sequence[int],
    spots: Iterable[tuple[int, int, int, int]],
    fill: Sequence[tuple[int, int]],
    room: int,
) -> list[Mask]:
    """For each sequence a mask of the tokens to show, at most `room` in total.

    `spots` are the ranges of findings and swaps: (severity, sequence, start, end). Room goes first to the
    surroundings of every start, the most severe first; then to the rest of spots that are not very long and to the
    surroundings of every end; then to the sequences of `fill`, (sequence, start), which grow round by round.
    """
    excerpts = [np.zeros(length, np.bool_) for length in lengths]

    def show(sequence: int, start: int, end: int) -> None:
        nonlocal room
        if room > 0:
            part = excerpts[sequence][max(start, 0) : max(end, 0)]
            new = np.flatnonzero(~part)[:room]
            part[new] = True
            room -= len(new)

    ranked = sorted(spots, key=lambda spot: (-spot[0], *spot[1:3]))
    for _, sequence, start, _ in ranked:
        show(sequence, start - _MARGIN, start + _MARGIN)
    for _, sequence, start, end in ranked:
        if end - start <= 512:
            show(sequence, start, end)
        show(sequence, end - _MARGIN, end + _MARGIN)
    for far in _FILL_ROUNDS:
        for sequence, start in fill:
            show(sequence, start, start + far)
    for sequence, excerpt in enumerate(excerpts):
        for (_, end), (start, _) in pairwise(trained_runs(excerpt)):
            if start - end < _GAP:
                show(sequence, end, start)
    return excerpts


def touches(excerpt: Mask, start: int, end: int) -> bool:
    """Whether a range, or for an empty one a token beside it, is shown."""
    between = start == end
    return bool(excerpt[max(start - between, 0) : end + between].any())


MAX_SWAP = 512
"""Maximum canonical tokens shown of one swap."""
MAX_SWAPPED = 3_000
"""Maximum canonical tokens shown of all swaps of a rollout."""
MAX_PIECE = 200
"""Maximum characters, and bytes, shown of a token or a string of the log."""
CONTEXT = 8
"""Tokens already seen that are shown before what a prompt adds."""


@dataclass(frozen=True, slots=True)
class _ViewedSequence:
    key: SequenceKey
    ids: Ids
    new: int = 0
    """Position from which a prompt goes beyond what the previous call saw."""
    note: str = ""
    logprobs: Logprobs | None = None
    trained: Mask | None = None
    roles: Sequence[str] | None = None
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


def view_rollout(evidence: Evidence, findings: Sequence[Finding], size: ViewSize = REPORT_SIZE) -> View:
    """The prompts, completions and training row of a rollout, cut to `size`, with their swaps.

    `evidence` has to be explained (`check.explain`), for the codes of swaps. Room goes to
    the surroundings of findings and swaps, the most severe first, then to the starts of completions, of what
    prompts add, and of the row.
    """
    swaps = find_replacements(evidence, findings)
    about: list[tuple[int, SequenceKey, int, int]] = [
        (finding.severity, (hit.where, None if hit.where is Where.ROW else hit.turn), hit.start, hit.end)
        for finding in findings
        for hit in [finding.hit]
    ]
    about += [(swap.severity, key, swap.start, swap.end) for key, own in swaps.items() for swap in own]
    worst = {key: severity for severity, key, *_ in sorted(about, key=itemgetter(0))}
    every = list(_recorded_sequences(evidence))
    # Sequences with findings come first, then the row and completions.
    order = [Where.ROW, Where.COMPLETION, Where.PROMPT]
    ranked = sorted(every, key=lambda sequence: (-worst.get(sequence.key, -1), order.index(sequence.key[0])))
    chosen = {sequence.key for sequence in ranked[: size.sequences]}
    shown = [sequence for sequence in every if sequence.key in chosen]
    at = {seq.key: number for number, seq in enumerate(shown)}
    spots = [(severity, at[key], start, end) for severity, key, start, end in about if key in at]
    # Room that is left goes to completions first, then to what prompts add.
    first = [Where.COMPLETION, Where.PROMPT, Where.ROW]
    by_kind = sorted(range(len(shown)), key=lambda number: first.index(shown[number].key[0]))
    fill = [(number, max(shown[number].new - CONTEXT, 0)) for number in by_kind]
    excerpts = choose_excerpts([len(seq.ids) for seq in shown], spots, fill, size.tokens)
    texts = _TokenTexts(evidence.vocabulary)
    drawn = _choose_swaps([swaps.get(seq.key, []) for seq in shown], excerpts, texts)
    digest = hashlib.sha256()
    for sequence in every:
        digest.update(f"{sequence.key} {len(sequence.ids)}\n".encode())
        digest.update(np.ascontiguousarray(sequence.ids, np.int64).tobytes())
    sequences = []
    for seq, excerpt, swapped in zip(shown, excerpts, drawn, strict=True):
        stretches = []
        for start, end in trained_runs(excerpt):
            part = slice(start, end)
            stretch = ShownStretch(
                start,
                *texts.look_up(seq.ids[part]),
                None if seq.logprobs is None else _finite_or_none(seq.logprobs[part]),
                None if seq.trained is None else tuple(seq.trained[part].tolist()),
                None if seq.roles is None else tuple(seq.roles[part]),
                {_cut(name): _finite_or_none(values[part]) for name, values in seq.columns.items()},
            )
            stretches.append(stretch)
        same = "" if swapped else same_as(evidence, seq.key)
        sequences.append(ViewSequence(*seq.key, len(seq.ids), tuple(stretches), swapped, seq.note, same))
    roles = tuple(_cut(message.role) for message in evidence.rollout.messages)
    return View(roles, tuple(sequences), len(every) - len(shown), digest.hexdigest()[:16])


def _recorded_sequences(evidence: Evidence) -> Iterator[_ViewedSequence]:
    """Every recorded sequence, in the order of the calls and the training row last."""
    links = {link.turn: link for link in evidence.links}
    room = 200_000
    for number, turn in enumerate(evidence.rollout.turns):
        prompt = turn.prompt_ids
        if prompt is not None:
            roles = None
            if evidence.vocabulary is not None and len(prompt) <= room:
                room -= len(prompt)
                roles = token_roles(pieces_of(prompt, evidence.vocabulary), evidence.end_ids)
            # The position from which the prompt goes beyond what the previous call saw and sampled.
            new, note, link = 0, "", links.get(number)
            if link is not None and link.parent is not None:
                new, call = min(link.at, link.seen_at, len(prompt)), f"what turn {link.parent} saw and sampled"
                if link.kind in (LinkKind.RETRY, LinkKind.SIBLING):
                    note = link.detail
                elif link.kind is LinkKind.CONTINUES:
                    note = f"the first {new:,} tokens are {call}"
                else:
                    note = f"from token {new:,} on not {call}"
            yield _ViewedSequence((Where.PROMPT, number), prompt, new, note, roles=roles)
        if turn.completion_ids is not None:
            ended = f"ended by {_cut(turn.finish_reason)}" if turn.finish_reason else ""
            recovered = "ids looked up from token strings" if turn.ids_from is IdsFrom.RECOVERED else ""
            yield _ViewedSequence(
                (Where.COMPLETION, number),
                turn.completion_ids,
                note="; ".join(note for note in (ended, recovered) if note),
                logprobs=turn.completion_logprobs,
                roles=[TURN_END if i in evidence.end_ids else ASSISTANT for i in turn.completion_ids.tolist()],
                columns=_other_columns(turn.columns, turn.extras, len(turn.completion_ids), 0, None),
            )
    row = evidence.rollout.training_row
    if row is not None:
        # NaN for placeholders at tokens that were not sampled.
        scored, sampled = row.logprobs, row.loss_mask
        sampled = evidence.row.sampled if sampled is None and evidence.row is not None else sampled
        if scored is not None and row.sentinel is not None and sampled is not None:
            scored = np.where((scored == row.sentinel) & ~sampled, np.nan, scored)
        trained = "no loss mask" if row.loss_mask is None else f"{int(np.count_nonzero(row.loss_mask)):,} trained"
        yield _ViewedSequence(
            (Where.ROW, None),
            row.token_ids,
            note=trained,
            logprobs=scored,
            trained=row.loss_mask,
            roles=evidence.row.roles if evidence.row is not None else None,
            columns=_other_columns(row.columns, row.extras, len(row.token_ids), row.prompt_length, row.loss_mask),
        )


def _other_columns(
    columns: Sequence[Column], extras: TokenExtras, size: int, prompt: int | None, trained: Mask | None
) -> dict[str, NDArray[np.float64]]:
    """Other numbers recorded of each token, such as a trainer's logprobs, by name: float64 `[size]`.

    NaN where nothing is. At most eight columns; one that no alignment fits to the tokens is left out.
    """
    shown: dict[str, NDArray[np.float64]] = {}
    others = [column for column in columns if column.role is ColumnRole.OTHER]
    named = [(column.name, column.values, column.alignment) for column in others]
    for name, value in extras.credit.items():
        if isinstance(value, list | tuple | np.ndarray):
            length = alignment_by_length(len(value), full=size, prompt_length=prompt, trained=trained)
            named.append((name, np.asarray(value), length))
    for name, values, alignment in named:
        if name in shown or len(shown) == 8 or values.ndim != 1 or values.dtype.kind not in "fiu":
            continue
        fits = Alignment.FULL if alignment is Alignment.CALL else alignment
        try:
            numbers = (
                None
                if fits is None
                else expand(values.astype(np.float64), fits, full=size, prompt_length=prompt, trained=trained)
            )
        except ValueError:  # of another alignment, or of another length
            continue
        if numbers is not None and len(numbers) == size:
            shown[name] = numbers
    return shown


class _TokenTexts:
    """The pieces and bytes of token ids, looked up once per id."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, tuple[str, str]] = {}

    def look_up(self, ids: Ids) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        """The ids, their pieces and their bytes in hexadecimal; the last two are () without a vocabulary."""
        numbers = tuple(ids.tolist())
        if self._vocabulary is None:
            return numbers, (), ()
        for number in set(numbers) - self._known.keys():
            data = self._vocabulary.token_bytes(number)
            short = data[:MAX_PIECE].hex() + ("…" if len(data) > MAX_PIECE else "")
            self._known[number] = _cut(self._vocabulary.piece(number)), short
        both = [self._known[number] for number in numbers]
        return numbers, tuple(piece for piece, _ in both), tuple(data for _, data in both)


def _finite_or_none(values: NDArray[np.floating[Any]]) -> tuple[float | None, ...]:
    """The values as Python floats; None for those that are not finite."""
    pairs = zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    return tuple(value if finite else None for value, finite in pairs)


def _choose_swaps(
    replacements: Sequence[Sequence[Replacement]], excerpts: Sequence[Mask], texts: _TokenTexts
) -> list[tuple[Swap, ...]]:
    """The swaps of each sequence that touch its excerpt; the most severe get room for their tokens first."""
    ranked = sorted(
        (replacement.rank, number, replacement)
        for number, (own, excerpt) in enumerate(zip(replacements, excerpts, strict=True))
        for replacement in own
        if touches(excerpt, replacement.start, replacement.end)
    )
    out: list[list[Swap]] = [[] for _ in replacements]
    room = MAX_SWAPPED
    for _, number, replacement in ranked:
        ids = replacement.canonical[: min(MAX_SWAP, room)]
        room -= len(ids)
        out[number].append(
            Swap(
                replacement.start,
                replacement.end,
                *texts.look_up(ids),
                total=len(replacement.canonical),
                code=replacement.code,
                against=replacement.against,
                before=replacement.before,
                after=replacement.after,
            )
        )
    return [tuple(sorted(own, key=attrgetter("start", "end"))) for own in out]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PIECE else text[: MAX_PIECE - 1] + "…"
