"""The verdict on each template, which builders keep its tokens and what to do about the others, and a badge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from html import escape

from tito_audit.conformance.corpus import CORPUS
from tito_audit.conformance.matrix import DriftCell, TokenFate
from tito_audit.conformance.world import World
from tito_audit.templates.append_only import check_append_only
from tito_audit.templates.breaks import HistoryChange
from tito_audit.templates.facts import find_settings
from tito_audit.templates.verdict import format_flags
from tito_audit.terminal.words import listed

_CONVERSATIONS = {each.name: each for each in CORPUS}
_FOLLOWS = {
    "user": ("each user turn", "some user turns"),
    "tool": ("each result of a tool", "some results of tools"),
    "system": ("each system message", "some system messages"),
}
_TEMPLATE_CAUSES = frozenset(map(str, HistoryChange))


class TemplateFate(StrEnum):
    """What becomes of the sampled tokens of a template where ids are stored and joined."""

    KEPT = "tokens kept"
    FORKED = "forks"
    BROKEN = "not all kept"
    UNKNOWN = "not compared"


_COMPARED = (TokenFate.KEPT, TokenFate.FORKED, TokenFate.OFF_TEMPLATE, TokenFate.BROKEN, TokenFate.RAISES)
"""Outcomes of conversations that were compared."""


@dataclass(frozen=True, slots=True)
class DriftTrial:
    """One template, and what each builder does with its conversations."""

    name: str
    template_sha256: str
    tokenizer_digest: str
    """Of the tokenizer's files; "" for a stand-in."""
    cells: tuple[DriftCell, ...]
    argument: str = ""
    """The flags with which the template keeps usual conversations; "" if it needs none, or none help."""

    @classmethod
    def of(cls, world: World, cells: Iterable[DriftCell]) -> DriftTrial:
        """The trial of a template with these cells."""
        trial = cls(world.name, *world.digests, tuple(cells))
        if trial.fate in (TemplateFate.KEPT, TemplateFate.UNKNOWN):
            return trial
        better = find_settings(world.renderer, check_append_only(world.renderer))
        flags = next((format_flags(each.arguments) for each in better if not each.append.broken), "")
        return replace(trial, argument=flags)

    def cells_by(self, builder: str) -> list[DriftCell]:
        return [cell for cell in self.cells if cell.builder == builder]

    def score(self, builder: str) -> DriftScore:
        return DriftScore.of(self.cells_by(builder))

    @property
    def fate(self) -> TemplateFate:
        """What our gateway, the builder `splice`, does with its tokens."""
        score = self.score("splice")
        if not score.compared:
            return TemplateFate.UNKNOWN
        if score.safe < score.compared:
            return TemplateFate.BROKEN
        return TemplateFate.FORKED if score.forked else TemplateFate.KEPT

    @property
    def safe(self) -> list[str]:
        """The builders that keep in one training row every conversation that they take."""
        scores = {name: self.score(name) for name in {cell.builder: 0 for cell in self.cells}}
        return [name for name, score in scores.items() if score.compared and score.whole == score.compared]

    @property
    def verdict(self) -> str:
        """`safe with splice`, or where the gateway forks: at which turns, why, and what helps."""
        score, fate = self.score("splice"), self.fate
        if fate is TemplateFate.UNKNOWN:
            causes = Counter(cell.cause for cell in self.cells_by("splice"))
            return f"nothing to compare: {causes.most_common(1)[0][0]}"
        names = [f"{name} (results of tools)" if name == "trl" else name for name in self.safe]
        parts = [f"safe with {listed(names)}"] if names else []
        if fate is not TemplateFate.KEPT:
            what = [f"keeps {score}"] * (score.safe < score.compared)
            # At which turns it forks, by the role of the message that follows.
            forked, stayed = Counter[str](), Counter[str]()
            for cell in self.cells_by("splice"):
                conversation = _CONVERSATIONS[cell.conversation]
                nexts = [conversation.probe.messages[answer + 1].role for answer, _ in conversation.turns]
                if cell.outcome is TokenFate.FORKED and cell.turn is not None:
                    stayed.update(nexts[: cell.turn])
                    forked.update(nexts[cell.turn : cell.turn + 1])
                elif cell.outcome is TokenFate.KEPT:
                    stayed.update(nexts)
            places = [words[bool(stayed[role])] for role, words in _FOLLOWS.items() if forked[role]]
            what += [f"forks at {listed(places) if places else 'times'}"] * (score.forked > 0)
            # What the template does most often there, and in which line.
            lines: dict[str, list[int | None]] = {}
            for cell in self.cells_by("render"):
                if cell.cause in _TEMPLATE_CAUSES:
                    lines.setdefault(cell.cause, []).append(cell.line)
            most = sorted(lines, key=lambda cause: -len(lines[cause]))[:2]
            reasons = [c + (f" (line {line})" if (line := lines[c][0]) is not None else "") for c in most]
            why = f" because it {listed(reasons)}" if reasons else ""
            seek = "no argument helps: seek a variant with `template --training`"
            parts += [f"splice {', and '.join(what)}{why}", f"set {self.argument}" if self.argument else seek]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class DriftScore:
    """What a builder does with the conversations of a template."""

    whole: int
    """How many conversations keep their tokens in one training row."""
    forked: int
    compared: int

    @classmethod
    def of(cls, cells: Iterable[DriftCell]) -> DriftScore:
        """The score of these cells."""
        each = Counter(cell.outcome for cell in cells)
        return cls(each[TokenFate.KEPT], each[TokenFate.FORKED], sum(each[outcome] for outcome in _COMPARED))

    @property
    def safe(self) -> int:
        """How many conversations train only what was sampled: kept or forked."""
        return self.whole + self.forked

    def __str__(self) -> str:
        """`27 of 30`, with forks `20 + 7 of 30`; a dash where nothing was compared."""
        if not self.compared:
            return "–"
        return f"{self.whole}{f' + {self.forked}' if self.forked else ''} of {self.compared}"


_COLOURS = {
    TemplateFate.KEPT: "#2e7d32",
    TemplateFate.FORKED: "#9a6700",
    TemplateFate.BROKEN: "#b3261e",
    TemplateFate.UNKNOWN: "#5f6368",
}


def badge(table: Sequence[DriftTrial]) -> str:
    """An SVG for a README: the fate of one template's tokens, or how many of several templates keep them."""
    states = Counter(trial.fate for trial in table)
    worst = max(states, key=list(TemplateFate).index)
    score = DriftScore.of(cell for trial in table for cell in trial.cells_by("splice"))
    message = f"{worst} ({score})" if len(table) == 1 else f"{states[TemplateFate.KEPT]} of {len(table)} templates"
    label, colour = "token-in, token-out", _COLOURS[worst]
    left, right = (13 + round(6.6 * len(text)) for text in (label, message))
    texts = "".join(
        f'<text x="{at}" y="14">{escape(text)}</text>'
        for at, text in ((left / 2, label), (left + right / 2, message))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(f"{label}: {message}")}"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/><g fill="#fff" text-anchor="middle" '
        f'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )
