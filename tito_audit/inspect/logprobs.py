"""Which of several logprob columns is the sampler's, judged by names and by how far apart the values are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product

import numpy as np

from tito_audit.formats import LOGPROBS, STALE_COLUMNS, snake_case
from tito_audit.inspect.columns import Item, LogColumn, Look, NumberFacts, Numbers
from tito_audit.inspect.roles import Role, RoleGuess
from tito_audit.record.column import MaskEncoding, decode_mask

_FLOOR = -1000.0
"""Lower values are placeholders for a missing logprob."""
_FARTHER = 3.0
"""A reference model's values are at least so many times farther from the sampler's than a trainer's."""
_SAMPLER = re.compile(
    r"(?:^|_)(?:rollouts?|infer(?:ence)?|sampl(?:er|ed|ing|es?)|behaviou?r|behaviou?ral|generat(?:ion|ed|or)|gen"
    r"|vllm|sglang|engine|server|inf)(?:_|$)"
)
_TRAINER = re.compile(
    r"(?:^|_)(?:old|policy|actor|train(?:er|ing|ed)?|prox(?:imal)?|prev(?:ious)?|recomputed|rescored|current|cur|new|learner"
    r"|fsdp|megatron|deepspeed|hf|updated)(?:_|$)"
)
_REFERENCE = re.compile(
    r"(?:^|_)(?:ref|reference|base|sft|init|initial|teacher|distill\w*|critic|judge|draft)(?:_|$)"
)
_OTHER_QUANTITY = re.compile(
    r"(?:^|_)(?:top\d*|prompt|cum|cumulative|mean|avg|sum|total|ratio|kl|diff|delta|entrop\w*|values?|rewards?|returns?|advantages?|reject\w*|chosen)(?:_|$)"
)
_LOGPROB_NAME = re.compile(r"log_?p|(?:^|_)lps?(?:_|$)")


class Author(StrEnum):
    """Who computed logprobs, the likeliest to have sampled first."""

    SAMPLER = "sampler"
    UNKNOWN = "unknown"
    TRAINER = "trainer"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class LogprobColumn:
    """One of several columns of logprobs."""

    path: str
    author: Author
    taken: bool
    """Whether it was chosen as the sampler's."""
    difference: float | None = None
    """Mean absolute distance from the chosen column; None for that itself, or if they share no tokens."""
    everywhere: bool | None = None
    """Whether it has values at untrained tokens too, which samplers do not score; None without a mask."""


@dataclass(frozen=True, slots=True)
class LogprobChoice:
    """Which of the logprob columns of a scope was chosen as the sampler's."""

    scope: str
    columns: tuple[LogprobColumn, ...]
    """The chosen one comes first."""
    because: str
    sure: bool
    """Whether names or values settle the choice."""


def choose_sampler_logprobs(
    columns: Sequence[LogColumn],
    items: Sequence[Item],
    facts: Mapping[str, NumberFacts],
    roles: Mapping[str, RoleGuess],
    scope: str,
    read: str | None = None,
) -> LogprobChoice | None:
    """The choice among the logprob columns of a scope, of which a scan reads `read`; None without a choice."""
    candidates = [column for column in columns if is_token_logprobs(column, facts, roles)][:12]
    mask = next((column.path for column in columns if roles[column.path].role is Role.MASK), None)
    comparison = _LogprobComparison(candidates, items, mask, roles)
    if len(candidates) < 2:
        return None
    first = next((column for column in candidates if column.path == read), comparison.ranked[0])
    # Columns that score other tokens, or are in other rows, are no alternatives.
    candidates = [column for column in candidates if column is first or comparison.pairs(column, first)]
    if len(candidates) < 2:
        return None
    comparison = _LogprobComparison(candidates, items, mask, roles)
    chosen, because, sure = comparison.choose()
    other = next((column for column in candidates if column.path == read and column is not chosen), None)
    if other is not None:
        sure = comparison.mean_distance(chosen, other) == 0
        but = "; {} has the same values" if sure else ", but {} looks more like the sampler's"
        because, chosen = f"a scan reads it by its name{but.format(chosen.path)}", other
    listed = [chosen, *(column for column in candidates if column is not chosen)]
    described = tuple(
        LogprobColumn(
            column.path,
            guess_author(column.name),
            column is chosen,
            None if column is chosen else comparison.mean_distance(column, chosen),
            comparison.scores_untrained(column),
        )
        for column in listed
    )
    return LogprobChoice(scope, described, because, sure)


def is_token_logprobs(column: LogColumn, facts: Mapping[str, NumberFacts], roles: Mapping[str, RoleGuess]) -> bool:
    """Whether a column scores the tokens themselves, whoever computed it."""
    name, guess = snake_case(column.name), roles[column.path]
    if column.path not in facts or _OTHER_QUANTITY.search(name):
        return False
    if guess.role is Role.LOGPROBS:
        return True
    named = bool(_LOGPROB_NAME.search(name)) or guess_author(column.name) in (Author.TRAINER, Author.REFERENCE)
    fact = facts[column.path]
    return named and guess.role is Role.PER_TOKEN and fact.look is Look.LOGPROBS and not fact.constant


def guess_author(name: str) -> Author:
    """Who computed logprobs, judged by the name of their column."""
    words = snake_case(name)
    if _REFERENCE.search(words):
        return Author.REFERENCE
    if _SAMPLER.search(words):
        return Author.SAMPLER
    return Author.TRAINER if _TRAINER.search(words) or name in STALE_COLUMNS else Author.UNKNOWN


@dataclass(frozen=True, slots=True)
class _LogprobComparison:
    """Logprob columns of one scope, compared with each other."""

    columns: Sequence[LogColumn]
    items: Sequence[Item]
    mask: str | None
    roles: Mapping[str, RoleGuess]

    def choose(self) -> tuple[LogColumn, str, bool]:
        """The column that is most likely the sampler's, the reason, and whether that is sure."""
        ranked = self.ranked
        first, author = ranked[0], guess_author(ranked[0].name)
        if author in (Author.TRAINER, Author.REFERENCE):
            return first, "by their names all are a trainer's or another model's", False
        rivals = [c for c in ranked if guess_author(c.name) is author and self.mean_distance(c, first) != 0]
        if rivals:
            # Several columns have equally good names.
            alike = [first, *(c for c in rivals if c is not first)]
            inside = [column for column in alike if self.scores_untrained(column) is False]
            everywhere = [column for column in alike if self.scores_untrained(column)]
            if len(inside) == 1 and len(everywhere) == len(alike) - 1:
                return inside[0], "only it has no values at untrained tokens, which a sampler does not score", True
            names = "the names do not say whose they are"
            if author is Author.SAMPLER:
                names = "the names say that each is the sampler's"
            # Of three or more, one may be far from the others, which are close together.
            apart = {(a.path, b.path): self.mean_distance(a, b) for a, b in combinations(alike, 2)}
            for column in alike:
                own = [value for pair, value in apart.items() if column.path in pair and value is not None]
                rest = [value for pair, value in apart.items() if column.path not in pair and value is not None]
                if own and rest and min(own) > _FARTHER * max(rest):
                    near = next(other for other in alike if other is not column)
                    why = f"{names}; {column.path} is the farthest from the others, as a reference model's is"
                    return near, why, False
            return first, f"{names}, and the values do not decide it", False
        # A reference model that is closer to the sampler than the trainer is: the names are wrong.
        by = {author: [c for c in self.columns if guess_author(c.name) is author] for author in Author}
        for trainer, reference in product(by[Author.TRAINER], by[Author.REFERENCE]):
            away, close = self.mean_distance(first, trainer), self.mean_distance(first, reference)
            if away is not None and close is not None and away > _FARTHER * close:
                why = f"by its name, but {reference.path} is closer to it than {trainer.path}: are they swapped?"
                return first, why, False
        if author is Author.SAMPLER:
            return first, "the sampler's by its name", True
        if all(self.mean_distance(column, first) == 0 for column in ranked):
            return first, "all have the same values", True
        return first, "the others are a trainer's or another model's by their names", True

    @property
    def ranked(self) -> list[LogColumn]:
        """The columns by name, the likeliest sampler first."""
        return sorted(
            self.columns,
            key=lambda column: (
                list(Author).index(guess_author(column.name)),
                self.roles[column.path].role is not Role.LOGPROBS,
                LOGPROBS.index(column.name) if column.name in LOGPROBS else len(LOGPROBS),
                len(column.keys),
            ),
        )

    def mean_distance(self, column: LogColumn, other: LogColumn) -> float | None:
        """Mean absolute distance where both columns have values; 0 if they are equal, None if they share none."""
        apart = [np.abs(a - b) for a, b in self.pairs(column, other)]
        every = np.concatenate(apart) if apart else np.empty(0)
        if not len(every):
            return None
        return 0.0 if every.max() <= 1e-9 else float(every.mean())

    def pairs(self, column: LogColumn, other: LogColumn) -> list[tuple[Numbers, Numbers]]:
        """The values of both columns at the tokens that both score, an entry for each object."""
        pairs = []
        for item in self.items:
            a, b = self._trained_values(item, column.path), self._trained_values(item, other.path)
            if a is None or b is None or len(a) != len(b):
                a, b = item.lists.get(column.path), item.lists.get(other.path)
            if a is not None and b is not None and len(a) == len(b):
                a, b = a.astype(np.float64), b.astype(np.float64)
                both = _is_logprob(a) & _is_logprob(b)
                pairs.append((a[both], b[both]))
        return pairs

    def _trained_values(self, item: Item, path: str) -> Numbers | None:
        """A column's values at trained tokens; None if it does not line up with the mask."""
        values, trained = item.lists.get(path), self._trained_tokens(item)
        if values is None or trained is None:
            return None
        if len(values) == len(trained):
            return values[trained]
        return values if len(values) == int(trained.sum()) else None

    def _trained_tokens(self, item: Item) -> Numbers | None:
        """Which tokens the mask trains, `[N]` bool; None without a mask."""
        flags = item.lists.get(self.mask or "")
        if flags is None or not len(flags):
            return None
        labels = flags.dtype.kind != "b" and bool((flags == -100).any())
        return decode_mask(flags, MaskEncoding.LABELS if labels else MaskEncoding.BINARY)

    def scores_untrained(self, column: LogColumn) -> bool | None:
        """Whether a column has values at most untrained tokens; None if it never lines up with the mask."""
        outside = []
        for item in self.items:
            values, trained = item.lists.get(column.path), self._trained_tokens(item)
            if values is not None and trained is not None and len(values) == len(trained):
                outside.append(_is_logprob(values.astype(np.float64))[~trained])
        every = np.concatenate(outside) if outside else np.empty(0)
        return bool(every.mean() > 0.5) if len(every) else None


def _is_logprob(values: Numbers) -> Numbers:
    """Which values are logprobs rather than placeholders, `[N]` bool."""
    with np.errstate(invalid="ignore"):
        real: Numbers = (values < 0) & (values > _FLOOR) & (values != -100)
    return real
