"""The smallest set of edits that makes a chat template keep history as it was sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations
from time import monotonic

from tito_audit.errors import SetupError
from tito_audit.render.renderer import Renderer
from tito_audit.templates.probes import CORE, PROBES, Probe
from tito_audit.templates.training.edits import Edit, Kind, apply_edits, plain_newlines, possible_edits
from tito_audit.templates.training.proof import PARSED, Judged, Original, alone, judge, rendered

_MOST_EDITS = 6
_MOST_SETS = 80
"""How many useful sets of edits are tried."""
_MOST_FOR_SPACES = 24
"""The same once only whitespace differs from what was sampled."""
_PAIRED = 16
"""How many edits are tried in pairs if none does anything alone."""
SECONDS = 45.0
"""How long a search may take."""

_Set = tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class OfLog:
    """What was proved on the conversations of a log."""

    firsts: int
    """How many first prompts were compared: all of them are byte for byte what they were."""
    before: Judged
    after: Judged


@dataclass(frozen=True, slots=True)
class Variant:
    """A chat template with edits, and what they do for its history."""

    source: str
    """The template as it was, with plain newlines."""
    edits: tuple[Edit, ...]
    before: Judged
    after: Judged
    firsts: int
    """How many first prompts were compared: all of them are byte for byte what they were."""
    arguments: tuple[str, ...]
    """The arguments that they were compared with, each value that the template tells apart."""
    of_log: OfLog | None = None
    rejected: tuple[tuple[Edit, str], ...] = ()
    """Edits that keep more of the history, each with the reason against it."""

    @property
    def text(self) -> str:
        """The template with the edits."""
        return apply_edits(self.source, self.edits)

    @property
    def keeps_history(self) -> bool:
        """Whether every answer that a model samples is still there in the next prompt, at least without tools; and
        in the log."""
        of_log = self.of_log is None or not self.of_log.after.lost
        return bool(self.after.kept) and not self.after.lost_without_tools and of_log


def find_variant(renderer: Renderer, log: Sequence[Probe] = (), seconds: float = SECONDS) -> Variant:
    """The variant of a renderer's template that keeps the most of its history, proved on every probe and on these
    conversations of a log."""
    source = plain_newlines(renderer.template(False).source)
    original = Original(alone(renderer, source, "the template"), log)
    search = _Search(original, source, monotonic() + seconds)
    edits = search.run()
    both = [search.renderer(one) or original.renderer for one in ((), edits)]
    before, after = (judge(one, PROBES) for one in both)
    of_log = None
    if log:
        of_log = OfLog(original.firsts_of_log, *(judge(one, log, spaces=False) for one in both))
    arguments = tuple(f"{name}={value!r}" for given in original.arguments for name, value in given.items())
    return Variant(source, edits, before, after, original.firsts, arguments, of_log, search.rejected())


class _Search:
    """Tries edits of a template one by one, then combines the useful ones."""

    def __init__(self, original: Original, source: str, deadline: float) -> None:
        self._original = original
        self._source = source
        self._deadline = deadline
        self._now = judge(original.renderer, CORE)
        self._best: tuple[_Set, Judged] = (), self._now
        self._rejected: dict[Edit, tuple[int, str]] = {}
        self._renderers: dict[frozenset[Edit], Renderer | None] = {}
        self._proofs: dict[frozenset[Edit], bool] = {}
        self._judged: dict[frozenset[Edit], Judged | None] = {}
        self._watched = self._now.faulty(original.renderer)

    def run(self) -> _Set:
        """The edits that keep the most of the history."""
        edits = possible_edits(self._source) if self._now.faults else []
        # Where answers are written first: what is found there changes nothing else.
        for pool in ([one for one in edits if one.in_answer], edits):
            useful = [(one,) for one in pool if self._is_useful((one,))]
            self._combine(useful)
            if self._best[1].lost_without_tools:
                self._combine([*useful, *(pair for pair in self._pairs(pool) if self._is_useful(pair))])
            now = self._best[1]
            if not now.lost_without_tools and (self._best[0] or not now.faults):
                break
        return self._needed(*self._best)

    def renderer(self, edits: _Set) -> Renderer | None:
        """A renderer with these edits; None if the result is not a template."""
        key = frozenset(edits)
        if key not in self._renderers:
            self._renderers[key] = self._made(edits)
        return self._renderers[key]

    def _made(self, edits: _Set) -> Renderer | None:
        if not edits:
            return self._original.renderer
        try:
            return alone(self._original.renderer, apply_edits(self._source, edits), "the edited template")
        except SetupError:
            return None

    def rejected(self) -> tuple[tuple[Edit, str], ...]:
        """The edits that would have kept more but changed something that must stay; the best first."""
        ranked = sorted(self._rejected.items(), key=lambda one: (-one[1][0], one[0].kind))
        return tuple((edit, why) for edit, (_, why) in ranked[:3])

    def _combine(self, useful: Sequence[_Set]) -> None:
        """Try sets of what is useful, those with the fewest faults first."""
        tried: set[frozenset[Edit]] = set()
        ahead: list[tuple[int, int, int, _Set]] = [(self._now.faults, 0, 0, ())]
        while ahead and self._best[1].faults:
            if len(tried) >= (_MOST_SETS if self._best[1].lost else _MOST_FOR_SPACES):
                break
            *_, found = heappop(ahead)
            for more in _added(found, useful):
                if frozenset(more) in tried or monotonic() > self._deadline:
                    continue
                tried.add(frozenset(more))
                judged = self._tried(more)
                if judged is None or not self._is_proved(more, judged):
                    continue
                outside = sum(not edit.in_answer for edit in more)
                heappush(ahead, (judged.faults, outside, len(tried), more))
                if judged.faults < self._best[1].faults:
                    self._best = more, judged

    def _pairs(self, pool: Iterable[Edit]) -> Iterator[_Set]:
        """Pairs of conditions, for templates where one alone does harm."""
        kinds = (Kind.BY_PLACE, Kind.DROP_CUT, Kind.BY_THOUGHT)
        likely = [edit for edit in pool if edit.kind in kinds and self._touches((edit,))]
        return (pair for pair in combinations(likely[:_PAIRED], 2) if not pair[0].overlaps(pair[1]))

    def _tried(self, edits: _Set) -> Judged | None:
        """What becomes of answers with these edits; None if the result is not a template, or loses what was
        kept.
        """
        key = frozenset(edits)
        if key not in self._judged:
            variant = self.renderer(edits)
            if variant is None or monotonic() > self._deadline:
                return None
            judged = judge(variant, CORE)
            spoiled = judged.lost | judged.trimmed | judged.unsampled
            self._judged[key] = judged if self._now.kept.isdisjoint(spoiled) else None
        return self._judged[key]

    def _is_useful(self, edits: _Set) -> bool:
        """Whether these edits do something to history, and to nothing else."""
        if not self._touches(edits):
            return False
        judged, variant = self._tried(edits), self.renderer(edits)
        if judged is None or variant is None:
            return False
        same, changed = self._original.compare(variant, CORE)
        if judged.faults >= self._now.faults and not (same and changed):
            return False
        return self._is_proved(edits, judged)

    def _touches(self, edits: _Set) -> bool:
        """Whether these edits change any prompt that lacks what was sampled: far cheaper than whether they fix
        it.
        """
        if monotonic() > self._deadline or (variant := self.renderer(edits)) is None:
            return False
        return any(rendered(variant, one) != text for one, text in self._watched)

    def _is_proved(self, edits: _Set, judged: Judged) -> bool:
        """Whether everything but history is unchanged."""
        key = frozenset(edits)
        if key not in self._proofs:
            why = self._objection(edits)
            gain = self._now.faults - judged.faults
            if why and gain > 0 and len(edits) == 1:
                self._rejected.setdefault(edits[-1], (gain, why))
            self._proofs[key] = not why
        return self._proofs[key]

    def _objection(self, edits: _Set) -> str:
        """What changed that has to stay; "" if nothing did."""
        variant = self.renderer(edits)
        why = ""
        if variant is None:
            why = "it is not a template"
        elif not self._original.writes_same(variant):
            why = "first prompts change"
        elif not all(self._original.compare(variant, probes)[0] for probes in (CORE, PARSED, PROBES)):
            why = "an answer, or what follows one, changes"
        elif not self._original.writes_same(variant, all_of_them=True):
            why = "first prompts with some argument change"
        elif self._original.same_in_log(variant) < self._original.firsts_of_log:
            why = "first prompts of the log change"
        return why

    def _needed(self, found: _Set, now: Judged) -> _Set:
        """The edits without those that others made needless."""
        for edit in found:
            fewer = tuple(one for one in found if one != edit)
            judged = self._tried(fewer)
            if judged is not None and judged.faults <= now.faults and self._is_proved(fewer, judged):
                found = fewer
        return found


def _added(found: _Set, useful: Sequence[_Set]) -> Iterator[_Set]:
    """A set of edits with one more of those that are useful."""
    for more in useful:
        whole = (*found, *more)
        if len(whole) <= _MOST_EDITS and not any(a.overlaps(b) for a, b in combinations(whole, 2)):
            yield whole
